//! Weights on their way from file to file: one thread reads, two check and convert, one writes while another computes the digest.

use super::{Block, Converter, blocks};
use crate::background::{Buffer, Output};
use crate::error::Error;
use crate::graph::{Initializer, Source};
use crate::quantize::{Piece, Sides, Sink};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

/// Blocks that are read before they are wanted.
const AHEAD: usize = 2;

/// Bytes that are worth handing over.
const PART: usize = 4 << 20;

/// A block and its elements, or why it could not be read.
type Read = Result<(Block, Vec<u8>), Error>;

/// Puts initializers at their offsets.
pub(super) fn write(tensors: &[(u64, &Initializer)], out: &mut Output, progress: &dyn Fn(u64)) -> Result<(), Error> {
    std::thread::scope(|scope| {
        let (to, read) = sync_channel(AHEAD);
        let (spent, again) = channel();
        scope.spawn(move || read_all(tensors, &to, &again));
        // Where this fails, the reader ends because nobody takes what it reads.
        convert_all(tensors, read, &spent, out, progress)
    })
}

/// Reads the blocks of all tensors, into buffers that come back through `again`.
fn read_all(tensors: &[(u64, &Initializer)], to: &SyncSender<Read>, again: &Receiver<Vec<u8>>) {
    for (_, init) in tensors {
        let Source::Weight { weight, .. } = &init.source else { continue };
        for block in blocks(init) {
            let mut bytes = again.try_recv().unwrap_or_default();
            let read = weight.read(block.elements.clone(), &mut bytes);
            let failed = read.is_err();
            let read = read.map(|()| (block, bytes)).map_err(Error::from);
            if to.send(read).is_err() || failed {
                return;
            }
        }
    }
}

fn convert_all(
    tensors: &[(u64, &Initializer)],
    read: Receiver<Read>,
    spent: &Sender<Vec<u8>>,
    out: &mut Output,
    progress: &dyn Fn(u64),
) -> Result<(), Error> {
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
        for _ in blocks(init) {
            let read = read.recv().map_err(|_| moh_models::Error::Internal("a weight that was not read"))?;
            let (block, bytes) = read?;
            if block.begins_band() {
                // A band is a part of its own.
                out.hand_over()?;
            }
            converter.convert(init, &block, &bytes, block.place(init, &mut out.part))?;
            let _ = spent.send(bytes);
            if out.part.len() >= PART && block.columns.is_none() {
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
        if self.out.part.len() >= PART {
            self.out.hand_over()?;
        }
        (self.progress)(self.out.length());
        Ok(())
    }
}
