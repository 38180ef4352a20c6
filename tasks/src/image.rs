//! Pictures: read from PNG, JPEG and WebP files, brought to a size, written as PNG.

mod decode;
mod encode;
mod orientation;
mod resize;

pub use decode::Adjustment;
pub use resize::Filter;

use crate::error::{Error, Result};

/// A picture of 8 bits a sample, gray (one channel) or red, green and blue (three).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    width: usize,
    height: usize,
    channels: usize,
    samples: Vec<u8>,
}

impl Picture {
    /// A picture of `samples` in rows from the top, pixels from the left, the channels of a pixel side by side.
    ///
    /// # Errors
    /// [`Error::Picture`] where they do not fill `height` rows of `width` pixels, or where there are none.
    pub fn new(width: usize, height: usize, channels: usize, samples: Vec<u8>) -> Result<Picture> {
        let expected =
            [height, width, channels].iter().try_fold(1usize, |n, &d| n.checked_mul(d)).unwrap_or(usize::MAX);
        match expected == samples.len() && expected > 0 && matches!(channels, 1 | 3) {
            true => Ok(Picture { width, height, channels, samples }),
            false => Err(Error::Picture { width, height, channels, found: samples.len() }),
        }
    }

    /// Pixels of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// 1 for gray, 3 for colours.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The samples, as [`Picture::new`] takes them.
    pub fn samples(&self) -> &[u8] {
        &self.samples
    }

    /// The middle `width` by `height` pixels; an odd border is larger at the right and at the bottom. A side that is longer
    /// than the picture's is cut to it.
    pub fn cropped(&self, width: usize, height: usize) -> Picture {
        let (width, height) = (width.clamp(1, self.width), height.clamp(1, self.height));
        let (left, top) = ((self.width - width) / 2, (self.height - height) / 2);
        let rows = self.samples.chunks(self.width * self.channels).skip(top).take(height);
        let samples = rows.flat_map(|row| &row[left * self.channels..(left + width) * self.channels]);
        Picture { width, height, channels: self.channels, samples: samples.copied().collect() }
    }

    /// Black around it where it is smaller. What cannot be the same on both sides is more above and to the left, as in transformers.
    pub fn padded(&self, width: usize, height: usize) -> Picture {
        let (width, height) = (width.max(self.width), height.max(self.height));
        let (left, top) = ((width - self.width).div_ceil(2), (height - self.height).div_ceil(2));
        let mut samples = vec![0; width * height * self.channels];
        let rows = samples.chunks_mut(width * self.channels).skip(top);
        for (row, seen) in rows.zip(self.samples.chunks(self.width * self.channels)) {
            row[left * self.channels..][..seen.len()].copy_from_slice(seen);
        }
        Picture { width, height, channels: self.channels, samples }
    }

    /// Gray: the luma of ITU-R 601 where there are colours.
    pub fn to_gray(&self) -> Picture {
        let luma = |pixel: &[u8]| match *pixel {
            [r, g, b] => ((u32::from(r) * 299 + u32::from(g) * 587 + u32::from(b) * 114 + 500) / 1000) as u8,
            _ => pixel[0],
        };
        let samples = self.samples.chunks(self.channels).map(luma).collect();
        Picture { channels: 1, samples, ..*self }
    }

    /// One channel's samples, row by row; a gray picture has the same in every channel.
    pub fn plane(&self, channel: usize) -> impl Iterator<Item = u8> + '_ {
        let channel = channel.min(self.channels - 1);
        self.samples.iter().skip(channel).step_by(self.channels).copied()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn samples_fill_the_picture() {
        assert!(Picture::new(2, 3, 3, vec![0; 18]).is_ok());
        for (width, height, channels, len) in [(2, 3, 3, 17), (2, 3, 2, 12), (0, 3, 1, 0), (usize::MAX, 3, 1, 3)] {
            assert!(Picture::new(width, height, channels, vec![0; len]).is_err(), "{width} {height} {channels}");
        }
    }

    #[test]
    fn the_middle_is_cut_out() {
        let picture = Picture::new(4, 3, 1, (0..12).collect()).unwrap();
        assert_eq!(picture.cropped(2, 1), Picture::new(2, 1, 1, vec![5, 6]).unwrap());
        assert_eq!(picture.cropped(3, 2), Picture::new(3, 2, 1, vec![0, 1, 2, 4, 5, 6]).unwrap());
        assert_eq!(picture.cropped(9, 9), picture);
        let colours = Picture::new(3, 1, 3, (0..9).collect()).unwrap();
        assert_eq!(colours.cropped(1, 1), Picture::new(1, 1, 3, vec![3, 4, 5]).unwrap());
    }

    #[test]
    fn gray_is_luma_and_planes_are_channels() {
        let picture = Picture::new(4, 1, 3, vec![255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9]).unwrap();
        let gray = picture.to_gray();
        assert_eq!(gray.samples(), [76, 150, 29, 9]);
        assert_eq!(picture.plane(1).collect::<Vec<u8>>(), [0, 255, 0, 9]);
        assert_eq!(gray.plane(2).collect::<Vec<u8>>(), [76, 150, 29, 9]);
        assert_eq!(gray.to_gray(), gray);
    }
}
