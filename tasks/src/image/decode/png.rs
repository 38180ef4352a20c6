//! PNG.

use super::{Adjustment, Decoded, Reason, TRUNCATED, check_size};
use png::{BitDepth, ColorType, DecodingError, Transformations};
use std::io::{Cursor, ErrorKind};

pub(super) fn decode(bytes: &[u8]) -> Result<Decoded, Reason> {
    let mut decoder = png::Decoder::new(Cursor::new(bytes));
    decoder.set_transformations(Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(reason)?;
    let (width, height) = (reader.info().width as usize, reader.info().height as usize);
    check_size(width, height)?;
    let mut samples = vec![0; reader.output_buffer_size().ok_or("it is too large")?];
    let frame = reader.next_frame(&mut samples).map_err(reason)?;
    samples.truncate(frame.buffer_size());
    // EXIF may be behind the picture.
    reader.finish().map_err(reason)?;
    let stored = match frame.color_type {
        ColorType::Grayscale => 1,
        ColorType::GrayscaleAlpha => 2,
        ColorType::Rgb => 3,
        ColorType::Rgba => 4,
        ColorType::Indexed => return Err("its palette was not applied".into()),
    };
    let info = reader.info();
    let adjustments = if info.bit_depth == BitDepth::Sixteen { vec![Adjustment::From16Bits] } else { Vec::new() };
    let exif = info.exif_metadata.as_ref().map(|exif| exif.to_vec());
    Ok(Decoded { width, height, stored, samples, exif, adjustments })
}

fn reason(error: DecodingError) -> Reason {
    match error {
        DecodingError::IoError(e) if e.kind() == ErrorKind::UnexpectedEof => TRUNCATED.into(),
        other => other.into(),
    }
}
