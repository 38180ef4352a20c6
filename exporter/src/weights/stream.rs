//! Weights on their way from file to file: two threads read and convert, one writes while another computes the digest.

use super::{Converter, parts};
use crate::background::{Buffer, Output};
use crate::error::Error;
use crate::graph::{Initializer, Source};
use crate::quantize::{Piece, Sides, Sink};

/// Bytes that are worth handing over.
const WORTH: usize = 4 << 20;

/// Puts initializers at their offsets.
pub(super) fn write(tensors: &[(u64, &Initializer)], out: &mut Output, progress: &dyn Fn(u64)) -> Result<(), Error> {
    let mut converter = Converter::default();
    // Of the quantised matrix whose integers were written last.
    let mut sides = Sides::default();
    for (offset, init) in tensors {
        let padding = (offset - out.length()) as usize;
        out.part.grow(padding).fill(0);
        match &init.source {
            Source::Bytes(bytes) => out.part.put(bytes),
            Source::Weight { .. } => {}
            Source::Quantized { matrix, order, piece } => match piece {
                Piece::Data => sides = order.write(matrix, &mut Told { out, progress })?,
                Piece::Scales => out.part.put(&std::mem::take(&mut sides.scales)),
                Piece::ZeroPoints => out.part.put(&std::mem::take(&mut sides.zero_points)),
            },
        }
        for part in parts(init) {
            let bytes = part.bytes(init);
            if bytes >= WORTH {
                out.hand_over()?;
            }
            converter.convert(init, &part, out.part.grow(bytes))?;
            if out.part.len() >= WORTH {
                out.hand_over()?;
            }
            progress(out.length());
        }
    }
    Ok(())
}

/// An output whose progress is told.
struct Told<'a> {
    out: &'a mut Output,
    progress: &'a dyn Fn(u64),
}

impl Sink for Told<'_> {
    fn part(&mut self) -> &mut Buffer {
        &mut self.out.part
    }

    fn made(&mut self) -> Result<(), Error> {
        if self.out.part.len() >= WORTH {
            self.out.hand_over()?;
        }
        (self.progress)(self.out.length());
        Ok(())
    }
}
