//! Pictures into files.

use super::Picture;
use crate::error::{Error, Result};
use crate::files;
use png::{BitDepth, ColorType};
use std::path::Path;

impl Picture {
    /// Writes a PNG file: whole under its name, or not at all.
    ///
    /// # Errors
    /// [`Error::Write`], where `overwrite` is false also for a file that exists.
    pub fn write_png(&self, path: &Path, overwrite: bool) -> Result<()> {
        files::write_whole(path, &self.png_for(path)?, overwrite)
    }

    /// The bytes of a PNG file.
    ///
    /// # Errors
    /// [`Error::Write`] for a picture that is too large for one.
    pub fn png(&self) -> Result<Vec<u8>> {
        self.png_for(Path::new("PNG"))
    }

    fn png_for(&self, path: &Path) -> Result<Vec<u8>> {
        let failed = |e: png::EncodingError| Error::Write { path: path.to_owned(), source: std::io::Error::other(e) };
        self.encode_png().map_err(failed)
    }

    fn encode_png(&self) -> std::result::Result<Vec<u8>, png::EncodingError> {
        // A side beyond 32 bits becomes 0, which the encoder refuses.
        let side = |n: usize| u32::try_from(n).unwrap_or(0);
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, side(self.width), side(self.height));
        encoder.set_color(if self.channels == 1 { ColorType::Grayscale } else { ColorType::Rgb });
        encoder.set_depth(BitDepth::Eight);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&self.samples)?;
        writer.finish()?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("picture.png");
        for channels in [1, 3] {
            let samples = (0..35 * channels).map(|i| (i * 7 % 256) as u8).collect();
            let picture = Picture::new(5, 7, channels, samples).unwrap();
            picture.write_png(&path, true).unwrap();
            assert_eq!(Picture::open(&path).unwrap(), picture);
            assert!(matches!(picture.write_png(&path, false), Err(Error::Write { .. })));
        }
    }
}
