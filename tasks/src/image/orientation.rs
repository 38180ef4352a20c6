//! Which way up a picture is: cameras write pixels as the sensor has them, and in EXIF how they were held.

use super::Picture;

/// Where the picture's first row and column are (EXIF 3.0, tag 274): 1 to 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Orientation(u8);

impl Orientation {
    pub(super) const UPRIGHT: Orientation = Orientation(1);

    /// The number that EXIF has.
    pub(super) fn number(self) -> u8 {
        self.0
    }

    /// What EXIF data says, which are a TIFF file without a picture; upright where they say nothing, or what is no orientation.
    pub(super) fn of_exif(exif: &[u8]) -> Orientation {
        read(exif).filter(|number| (1..=8).contains(number)).map_or(Orientation::UPRIGHT, Orientation)
    }

    /// The picture, upright.
    pub(super) fn apply(self, picture: Picture) -> Picture {
        let (width, height) = (picture.width, picture.height);
        let (right, bottom) = (width - 1, height - 1);
        // Where the new picture's pixel at column x and row y comes from.
        let from: fn(usize, usize, usize, usize) -> (usize, usize) = match self.0 {
            2 => |x, y, right, _| (right - x, y),
            3 => |x, y, right, bottom| (right - x, bottom - y),
            4 => |x, y, _, bottom| (x, bottom - y),
            5 => |x, y, _, _| (y, x),
            6 => |x, y, _, bottom| (y, bottom - x),
            7 => |x, y, right, bottom| (right - y, bottom - x),
            8 => |x, y, right, _| (right - y, x),
            _ => return picture,
        };
        let (new_width, new_height) = if self.0 < 5 { (width, height) } else { (height, width) };
        let mut samples = Vec::with_capacity(picture.samples.len());
        for (x, y) in (0..new_height).flat_map(|y| (0..new_width).map(move |x| (x, y))) {
            let (x, y) = from(x, y, right, bottom);
            let start = (y * width + x) * picture.channels;
            samples.extend_from_slice(&picture.samples[start..start + picture.channels]);
        }
        Picture { width: new_width, height: new_height, samples, ..picture }
    }
}

fn read(exif: &[u8]) -> Option<u8> {
    const TAG: u16 = 274;
    const SHORT: u16 = 3;
    const ENTRY: usize = 12;
    // JPEG has this before the data, and some programs write it in other formats.
    let exif = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
    let big = match exif.get(..4)? {
        b"MM\0*" => true,
        b"II*\0" => false,
        _ => return None,
    };
    let short = |at: usize| {
        let bytes = exif.get(at..at.checked_add(2)?)?.try_into().ok()?;
        Some(if big { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) })
    };
    let long = |at: usize| {
        let bytes = exif.get(at..at + 4)?.try_into().ok()?;
        Some(if big { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
    };
    let directory = usize::try_from(long(4)?).ok()?;
    let entries = (0..usize::from(short(directory)?)).map(|i| directory + 2 + ENTRY * i);
    let entry = entries.take_while(|&at| short(at).is_some()).find(|&at| short(at) == Some(TAG))?;
    match short(entry + 2)? {
        SHORT => u8::try_from(short(entry + 8)?).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// EXIF of one entry.
    fn exif(big: bool, tag: u16, ty: u16, value: u16) -> Vec<u8> {
        let short = |x: u16| if big { x.to_be_bytes() } else { x.to_le_bytes() };
        let long = |x: u32| if big { x.to_be_bytes() } else { x.to_le_bytes() };
        let start: &[u8] = if big { b"MM\0*" } else { b"II*\0" };
        let entry = [&short(tag)[..], &short(ty), &long(1), &short(value), &[0, 0], &long(0)].concat();
        [start, &long(8), &short(1), &entry].concat()
    }

    #[test]
    fn the_tag_is_read_in_both_byte_orders() {
        for (big, value) in [false, true].into_iter().flat_map(|big| (1..=8).map(move |value| (big, value))) {
            let data = exif(big, 274, 3, value);
            assert_eq!(Orientation::of_exif(&data).number(), value as u8);
            assert_eq!(Orientation::of_exif(&[b"Exif\0\0", &data[..]].concat()).number(), value as u8);
        }
        for other in [exif(true, 274, 3, 0), exif(true, 274, 3, 9), exif(true, 275, 3, 6), exif(true, 274, 2, 6)] {
            assert_eq!(Orientation::of_exif(&other), Orientation::UPRIGHT);
        }
    }

    #[test]
    fn damaged_data_says_nothing_and_does_not_panic() {
        let data = exif(false, 274, 3, 6);
        for len in 0..data.len() {
            let _ = Orientation::of_exif(&data[..len]);
        }
        for (i, byte) in (0..data.len()).flat_map(|i| [0, 1, 0x7f, 0x80, 0xff].map(|byte| (i, byte))) {
            let mut damaged = data.clone();
            damaged[i] = byte;
            let _ = Orientation::of_exif(&damaged);
        }
    }
}
