//! WebP.

use super::{Decoded, Reason, TRUNCATED, check_size};
use image_webp::WebPDecoder;
use std::io::Cursor;

pub(super) fn decode(bytes: &[u8]) -> Result<Decoded, Reason> {
    // The decoder makes up what is missing of some files. The size in the header is that of what follows it.
    let size = bytes.get(4..8).and_then(|size| size.try_into().ok()).map(u32::from_le_bytes);
    if size.is_none_or(|size| (bytes.len() as u64) < 8 + u64::from(size)) {
        return Err(TRUNCATED.into());
    }
    let mut decoder = WebPDecoder::new(Cursor::new(bytes))?;
    let (width, height) = decoder.dimensions();
    let (width, height) = (width as usize, height as usize);
    check_size(width, height)?;
    let stored = if decoder.has_alpha() { 4 } else { 3 };
    let mut samples = vec![0; decoder.output_buffer_size().ok_or("it is too large")?];
    decoder.read_image(&mut samples)?;
    let exif = decoder.exif_metadata()?;
    Ok(Decoded { width, height, stored, samples, exif, adjustments: Vec::new() })
}
