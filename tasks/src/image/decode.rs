//! Pictures out of files.

mod jpeg;
mod png;
mod webp;

use super::Picture;
use super::orientation::Orientation;
use crate::error::{Error, Result};
use std::fmt;
use std::path::Path;

/// Why bytes are no picture: a decoder's error, or words.
type Reason = Box<dyn std::error::Error + Send + Sync>;

type Begins = fn(&[u8]) -> bool;
type Decode = fn(&[u8]) -> std::result::Result<Decoded, Reason>;

/// Formats that are read: how files begin, and what reads them.
const FORMATS: [(Begins, Decode); 3] = [
    (|bytes| bytes.starts_with(b"\x89PNG\r\n\x1a\n"), png::decode),
    (|bytes| bytes.starts_with(b"\xff\xd8\xff"), jpeg::decode),
    (|bytes| bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP"), webp::decode),
];

/// Formats that people have pictures in and that are not read: where in a file which bytes tell them.
const OTHERS: [(usize, &[u8], &str); 14] = [
    (0, b"GIF8", "a GIF"),
    (0, b"BM", "a BMP"),
    (0, b"II*\0", "a TIFF"),
    (0, b"MM\0*", "a TIFF"),
    (4, b"ftypavi", "an AVIF"),
    (4, b"ftyphei", "a HEIC"),
    (4, b"ftypmif1", "a HEIC"),
    (4, b"jP  ", "a JPEG 2000"),
    (4, b"JXL ", "a JPEG XL"),
    (0, b"\xff\x0a", "a JPEG XL"),
    (0, b"8BPS", "a Photoshop"),
    (0, b"%PDF", "a PDF"),
    (0, b"<svg", "an SVG"),
    (0, b"<?xml", "an XML"),
];

/// A bound for what a small file may claim to unpack to.
const MOST_PIXELS: usize = 1 << 27;
/// What a file that ends early is told to be.
const TRUNCATED: &str = "the file is truncated";

/// What was done to a file's picture before the model's own preprocessing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Adjustment {
    /// Turned or mirrored, as its EXIF orientation (2 to 8) says.
    Oriented(u8),
    /// Transparent pixels were put over white.
    OverWhite,
    /// 16 bits a sample were cut to 8.
    From16Bits,
    /// Cyan, magenta, yellow and black became red, green and blue, without a colour profile.
    FromCmyk,
}

impl fmt::Display for Adjustment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Adjustment::Oriented(number) => write!(f, "turned as its EXIF orientation {number} says"),
            Adjustment::OverWhite => f.write_str("transparent pixels put over white"),
            Adjustment::From16Bits => f.write_str("16 bits a sample cut to 8"),
            Adjustment::FromCmyk => f.write_str("CMYK converted to RGB"),
        }
    }
}

/// What a decoder gives.
struct Decoded {
    width: usize,
    height: usize,
    /// Samples of a pixel: 1 gray, 2 gray and alpha, 3 colours, 4 colours and alpha.
    stored: usize,
    samples: Vec<u8>,
    exif: Option<Vec<u8>>,
    adjustments: Vec<Adjustment>,
}

impl Picture {
    /// Reads a PNG, JPEG or WebP file as viewers show it: turned as EXIF says, transparency over white, 8 bits a sample, the first picture
    /// of an animation. Colour profiles are not applied, as in the pipelines that models are commonly trained with.
    ///
    /// # Errors
    /// [`Error::NotFound`] or [`Error::Read`] for the file, [`Error::Malformed`] where it holds no such picture, or not all of it.
    pub fn open(path: &Path) -> Result<Picture> {
        Picture::open_told(path).map(|(picture, _)| picture)
    }

    /// As [`Picture::open`]; also tells what was done to the picture.
    ///
    /// # Errors
    /// As [`Picture::open`].
    pub fn open_told(path: &Path) -> Result<(Picture, Vec<Adjustment>)> {
        let bytes = std::fs::read(path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::NotFound { path: path.to_owned(), what: "image" },
            _ => Error::Read { path: path.to_owned(), source },
        })?;
        decode(&bytes).map_err(|reason| Error::malformed(path, "a PNG, JPEG or WebP image", reason))
    }
}

fn decode(bytes: &[u8]) -> std::result::Result<(Picture, Vec<Adjustment>), Reason> {
    match FORMATS.iter().find(|(begins, _)| begins(bytes)) {
        Some((_, decode)) => decode(bytes)?.finish(),
        None => Err(other(bytes).into()),
    }
}

/// What a file is that begins like none of [`FORMATS`].
fn other(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "the file is empty".to_owned();
    }
    let begins = |(at, magic, _): &&(usize, &[u8], &str)| bytes.get(*at..at + magic.len()) == Some(*magic);
    match OTHERS.iter().find(begins) {
        Some((_, _, name)) => format!("it is {name} file: convert it to one of them"),
        None => "it begins like none of them".to_owned(),
    }
}

fn check_size(width: usize, height: usize) -> std::result::Result<(), Reason> {
    match width.checked_mul(height) {
        Some(1..=MOST_PIXELS) => Ok(()),
        _ => Err(format!("expected 1 to {MOST_PIXELS} pixels, found {width} x {height}").into()),
    }
}

impl Decoded {
    fn finish(mut self) -> std::result::Result<(Picture, Vec<Adjustment>), Reason> {
        if let 2 | 4 = self.stored {
            if self.samples.chunks_exact(self.stored).any(|pixel| pixel[self.stored - 1] != u8::MAX) {
                self.adjustments.push(Adjustment::OverWhite);
            }
            self.samples = over_white(&self.samples, self.stored);
            self.stored -= 1;
        }
        let picture = Picture::new(self.width, self.height, self.stored, self.samples)?;
        let orientation = self.exif.map_or(Orientation::UPRIGHT, |exif| Orientation::of_exif(&exif));
        if orientation != Orientation::UPRIGHT {
            self.adjustments.push(Adjustment::Oriented(orientation.number()));
        }
        Ok((orientation.apply(picture), self.adjustments))
    }
}

/// Pixels of `stored` samples, the last of which is alpha, over white.
fn over_white(samples: &[u8], stored: usize) -> Vec<u8> {
    let white = u32::from(u8::MAX);
    let pixel = |pixel: &[u8]| {
        let alpha = u32::from(pixel[stored - 1]);
        let over = move |&sample: &u8| (u32::from(sample) * alpha + white * (white - alpha) + white / 2) / white;
        pixel[..stored - 1].iter().map(move |sample| over(sample) as u8).collect::<Vec<u8>>()
    };
    samples.chunks_exact(stored).flat_map(pixel).collect()
}

#[cfg(test)]
mod tests;
