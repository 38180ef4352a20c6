//! Pictures out of files.

use super::Picture;
use crate::error::{Error, Result};
use png::{ColorType, Transformations};
use std::io::Cursor;
use std::path::Path;
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

/// Why bytes are no picture: a decoder's error, or words.
type Reason = Box<dyn std::error::Error + Send + Sync>;

const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";
const JPEG: &[u8] = b"\xff\xd8\xff";
/// A bound for what a small file may claim to unpack to.
const MOST_PIXELS: usize = 1 << 27;

impl Picture {
    /// Reads a PNG or JPEG file. Transparency is dropped, 16 bits become 8, and what a file says of orientation and colour
    /// profiles is not applied: as training pipelines commonly read pictures.
    ///
    /// # Errors
    /// [`Error::NotFound`] or [`Error::Read`] for the file, [`Error::Malformed`] where it holds no such picture.
    pub fn open(path: &Path) -> Result<Picture> {
        let bytes = std::fs::read(path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::NotFound { path: path.to_owned(), what: "image" },
            _ => Error::Read { path: path.to_owned(), source },
        })?;
        let decoded = match () {
            () if bytes.starts_with(PNG) => decode_png(&bytes),
            () if bytes.starts_with(JPEG) => decode_jpeg(&bytes),
            () => Err("it begins like neither".into()),
        };
        decoded.map_err(|reason| Error::malformed(path, "a PNG or JPEG image", reason))
    }
}

fn decode_png(bytes: &[u8]) -> std::result::Result<Picture, Reason> {
    let mut decoder = png::Decoder::new(Cursor::new(bytes));
    decoder.set_transformations(Transformations::normalize_to_color8());
    let mut reader = decoder.read_info()?;
    let (width, height) = (reader.info().width as usize, reader.info().height as usize);
    check_size(width, height)?;
    let mut samples = vec![0; reader.output_buffer_size().ok_or("it is too large")?];
    let frame = reader.next_frame(&mut samples)?;
    samples.truncate(frame.buffer_size());
    let (stored, channels) = match frame.color_type {
        ColorType::Grayscale => (1, 1),
        ColorType::GrayscaleAlpha => (2, 1),
        ColorType::Rgb => (3, 3),
        ColorType::Rgba => (4, 3),
        ColorType::Indexed => return Err("its palette was not applied".into()),
    };
    if stored != channels {
        samples = samples.chunks_exact(stored).flat_map(|pixel| &pixel[..channels]).copied().collect();
    }
    Ok(Picture::new(width, height, channels, samples)?)
}

fn decode_jpeg(bytes: &[u8]) -> std::result::Result<Picture, Reason> {
    let options = DecoderOptions::default().jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(Cursor::new(bytes), options);
    decoder.decode_headers()?;
    let info = decoder.info().ok_or("it has no header")?;
    let (width, height) = (usize::from(info.width), usize::from(info.height));
    check_size(width, height)?;
    let samples = decoder.decode()?;
    Ok(Picture::new(width, height, 3, samples)?)
}

fn check_size(width: usize, height: usize) -> std::result::Result<(), Reason> {
    match width.checked_mul(height) {
        Some(1..=MOST_PIXELS) => Ok(()),
        _ => Err(format!("expected 1 to {MOST_PIXELS} pixels, found {width} x {height}").into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use png::BitDepth;
    use std::error::Error as _;
    use std::path::PathBuf;

    fn write(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("picture");
        std::fs::write(&path, bytes).unwrap();
        (folder, path)
    }

    fn png(color: ColorType, depth: BitDepth, palette: &[u8], data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, 2, 1);
        encoder.set_color(color);
        encoder.set_depth(depth);
        if !palette.is_empty() {
            encoder.set_palette(palette.to_vec());
        }
        encoder.write_header().unwrap().write_image_data(data).unwrap();
        bytes
    }

    #[test]
    fn every_kind_of_png_is_gray_or_colours_of_8_bits() {
        let cases: [(Vec<u8>, usize, &[u8]); 6] = [
            (png(ColorType::Grayscale, BitDepth::Eight, &[], &[7, 9]), 1, &[7, 9]),
            (png(ColorType::Grayscale, BitDepth::One, &[], &[0b0100_0000]), 1, &[0, 255]),
            (png(ColorType::GrayscaleAlpha, BitDepth::Eight, &[], &[7, 0, 9, 255]), 1, &[7, 9]),
            (
                png(ColorType::Rgb, BitDepth::Sixteen, &[], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
                3,
                &[1, 3, 5, 7, 9, 11],
            ),
            (png(ColorType::Rgba, BitDepth::Eight, &[], &[1, 2, 3, 0, 4, 5, 6, 255]), 3, &[1, 2, 3, 4, 5, 6]),
            (png(ColorType::Indexed, BitDepth::Eight, &[1, 2, 3, 4, 5, 6], &[1, 0]), 3, &[4, 5, 6, 1, 2, 3]),
        ];
        for (bytes, channels, samples) in cases {
            let (_folder, path) = write(&bytes);
            assert_eq!(Picture::open(&path).unwrap(), Picture::new(2, 1, channels, samples.to_vec()).unwrap());
        }
    }

    fn data(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
    }

    #[test]
    fn a_jpeg_is_in_colours_even_where_it_is_gray() {
        let near = |found: &[u8], expected: [u8; 3]| found.iter().zip(expected).all(|(&a, b)| a.abs_diff(b) <= 3);
        let colours = Picture::open(&data("red-over-blue.jpg")).unwrap();
        assert_eq!((colours.width(), colours.height(), colours.channels()), (16, 16, 3));
        assert!(near(&colours.samples()[..3], [200, 40, 40]) && near(&colours.samples()[765..], [40, 40, 200]));
        let gray = Picture::open(&data("gray.jpg")).unwrap();
        assert!(near(&gray.samples()[..3], [200; 3]) && near(&gray.samples()[765..], [40; 3]));
    }

    #[test]
    fn other_files_are_refused() {
        let complete = png(ColorType::Grayscale, BitDepth::Eight, &[], &[7, 9]);
        for bytes in [&b""[..], b"GIF89a", PNG, &complete[..complete.len() - 20], b"\xff\xd8\xff\xe0broken"] {
            let (_folder, path) = write(bytes);
            let error = Picture::open(&path).unwrap_err();
            assert!(error.to_string().ends_with("picture: not a PNG or JPEG image"), "{error}");
            assert!(error.source().is_some_and(|reason| !reason.to_string().is_empty()), "{error:?}");
        }
        let message = Picture::open(Path::new("/nowhere.png")).unwrap_err().to_string();
        assert_eq!(message, "/nowhere.png: image not found");
    }
}
