//! Several pictures as one.

use moh_tasks::Result;
use moh_tasks::image::{Filter, Picture};

/// Black pixels between pictures.
const GAP: usize = 2;

/// Pixels of so many pictures in a row, or in a column, of `side` pixels each, with the border.
pub(super) fn side(pictures: usize, side: usize) -> usize {
    pictures * (side + GAP) + GAP
}

/// The pictures, which have one size, row by row in so many columns, every pixel `scale` times as wide and high. What is
/// left of the last row is black; one picture has no border.
pub(super) fn grid(pictures: &[Picture], columns: usize, scale: usize) -> Result<Picture> {
    let enlarged: Vec<Picture> =
        pictures.iter().map(|p| p.resized(p.width() * scale, p.height() * scale, Filter::Nearest)).collect();
    let [first, _, ..] = enlarged.as_slice() else {
        return enlarged.into_iter().next().map_or_else(|| Picture::new(0, 0, 1, Vec::new()), Ok);
    };
    let (width, height, channels) = (first.width(), first.height(), first.channels());
    let rows = enlarged.len().div_ceil(columns);
    let (total_width, total_height) = (side(columns, width), side(rows, height));
    let mut samples = vec![0; total_width * total_height * channels];
    for (i, picture) in enlarged.iter().enumerate() {
        let (left, top) = (GAP + i % columns * (width + GAP), GAP + i / columns * (height + GAP));
        for (y, row) in picture.samples().chunks(width * channels).enumerate() {
            let start = ((top + y) * total_width + left) * channels;
            samples[start..start + row.len()].copy_from_slice(row);
        }
    }
    Picture::new(total_width, total_height, channels, samples)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn pictures_stand_in_rows_with_a_border() {
        let dot = |sample| Picture::new(1, 1, 1, vec![sample]).unwrap();
        let found = grid(&[dot(1), dot(2), dot(3)], 2, 1).unwrap();
        assert_eq!((found.width(), found.height()), (8, 8));
        let at = |x: usize, y: usize| found.samples()[y * 8 + x];
        assert_eq!([at(2, 2), at(5, 2), at(2, 5), at(5, 5)], [1, 2, 3, 0]);
        assert_eq!(found.samples().iter().filter(|&&sample| sample > 0).count(), 3);
    }

    #[test]
    fn pictures_with_colours_stand_where_those_without_do() {
        let dot = |sample: u8| Picture::new(1, 1, 3, vec![sample, sample + 1, sample + 2]).unwrap();
        let found = grid(&[dot(1), dot(11)], 2, 1).unwrap();
        let at = |x: usize| &found.samples()[(2 * 8 + x) * 3..][..3];
        assert_eq!([at(2), at(5)], [[1, 2, 3], [11, 12, 13]]);
        assert_eq!(found.samples().iter().filter(|&&sample| sample > 0).count(), 6);
    }

    #[test]
    fn one_picture_is_only_enlarged() {
        let picture = Picture::new(2, 1, 1, vec![4, 9]).unwrap();
        assert_eq!(grid(&[picture], 1, 2).unwrap(), Picture::new(4, 2, 1, vec![4, 4, 9, 9, 4, 4, 9, 9]).unwrap());
    }
}
