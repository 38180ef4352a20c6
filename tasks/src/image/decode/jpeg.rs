//! JPEG.

use super::{Adjustment, Decoded, Reason, TRUNCATED, check_size};
use std::io::Cursor;
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

pub(super) fn decode(bytes: &[u8]) -> Result<Decoded, Reason> {
    // The decoder makes up what is missing.
    if !has_end(bytes) {
        return Err(TRUNCATED.into());
    }
    // CMYK is taken to be inverted, as Adobe's programs and Pillow do.
    let options = DecoderOptions::default().jpeg_set_out_colorspace(ColorSpace::RGB);
    // Their product is what is bounded.
    let most = usize::from(u16::MAX);
    let options = options.set_max_width(most).set_max_height(most);
    let mut decoder = JpegDecoder::new_with_options(Cursor::new(bytes), options);
    decoder.decode_headers()?;
    let info = decoder.info().ok_or("it has no header")?;
    let (width, height) = (usize::from(info.width), usize::from(info.height));
    check_size(width, height)?;
    let samples = decoder.decode()?;
    let adjustments = match decoder.input_colorspace() {
        Some(ColorSpace::CMYK | ColorSpace::YCCK) => vec![Adjustment::FromCmyk],
        _ => Vec::new(),
    };
    Ok(Decoded { width, height, stored: 3, samples, exif: info.exif_data, adjustments })
}

/// Whether the end-of-image marker is there (ITU-T T.81, B.1.1): not one of a thumbnail in another marker's segment.
fn has_end(bytes: &[u8]) -> bool {
    const END: u8 = 0xd9;
    let mut rest = bytes;
    while let Some(at) = rest.iter().position(|&byte| byte == 0xff) {
        rest = &rest[at + 1..];
        match *rest {
            [END, ..] => return true,
            // A fill byte, a byte 0xff of compressed data, or a marker without a segment.
            [0xff, ..] => {}
            [0 | 1 | 0xd0..=0xd8, ..] => rest = &rest[1..],
            [_, high, low, ..] => {
                let length = usize::from(u16::from_be_bytes([high, low]));
                let Some(after) = rest.get(1 + length..) else { return false };
                rest = after;
            }
            _ => return false,
        }
    }
    false
}
