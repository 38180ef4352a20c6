//! Weights on their way from file to file: one thread reads, one checks and converts, one writes.

use super::{Block, Converter, blocks};
use crate::error::Error;
use crate::graph::{Initializer, Source};
use moh_models::Weight;
use std::fs::File;
use std::io::Write;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

/// Blocks that are read before they are wanted.
const AHEAD: usize = 2;

/// Converted bytes that are handed to the writing thread, at least.
const HANDED: usize = 4 << 20;

/// Bytes after which what is written is sent to the disk. Left to itself the system collects gigabytes, and then makes the export
/// wait for all of them.
const SYNCED: u64 = 128 << 20;

/// Writes initializers to their offsets in `file`; returns its length.
pub(super) fn write(
    tensors: &[(u64, &Initializer)],
    file: File,
    progress: &dyn Fn(u64),
) -> Result<u64, Error> {
    std::thread::scope(|scope| {
        let (read, blocks) = sync_channel(AHEAD);
        let (spent, again) = channel();
        scope.spawn(move || read_all(tensors, &read, &again));
        let (full, wanted) = sync_channel(1);
        let (written, empty) = channel();
        let writer = scope.spawn(move || write_all(file, &wanted, &written));
        // One is filled while the other is written.
        let out = Slab { bytes: Vec::new(), end: 0, other: Some(Vec::new()), full, empty };
        let converted = convert_all(tensors, (&blocks, &spent), out, progress);
        // The reader ends because nobody takes its blocks.
        drop(blocks);
        match writer.join() {
            Ok(Ok(())) => converted,
            Ok(Err(reason)) => Err(Error::io("")(reason)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Reads the blocks of all tensors, into buffers that come back through `again`.
fn read_all(
    tensors: &[(u64, &Initializer)],
    to: &SyncSender<Result<(Block, Vec<u8>), Error>>,
    again: &Receiver<Vec<u8>>,
) {
    let weight_of = |init: &Initializer| match &init.source {
        Source::Weight { weight, .. } => Some(weight.clone()),
        Source::Bytes(_) => None,
    };
    let read = |weight: &Weight, block: Block| {
        let mut bytes = again.try_recv().unwrap_or_default();
        weight.read(block.elements.clone(), &mut bytes)?;
        Ok((block, bytes))
    };
    for (weight, init) in tensors.iter().filter_map(|(_, init)| Some((weight_of(init)?, init))) {
        for block in blocks(init) {
            let block = read(&weight, block);
            let failed = block.is_err();
            if to.send(block).is_err() || failed {
                return;
            }
        }
    }
}

/// Writes what comes, one after the other, and gives the buffers back.
fn write_all(mut file: File, from: &Receiver<Vec<u8>>, back: &Sender<Vec<u8>>) -> std::io::Result<()> {
    let mut unsynced = 0;
    let flusher = file.try_clone()?;
    std::thread::scope(|scope| {
        let (flush, flushes) = sync_channel::<()>(1);
        let flusher = scope.spawn(move || flushes.iter().try_for_each(|()| flusher.sync_data()));
        for bytes in from {
            file.write_all(&bytes)?;
            unsynced += bytes.len() as u64;
            if unsynced >= SYNCED {
                unsynced = 0;
                // While the last call lasts, the next one waits, and only that.
                let _ = flush.try_send(());
            }
            // Nobody waits for the last ones.
            let _ = back.send(bytes);
        }
        drop(flush);
        // The system reports a failure once only, and it may have been to this thread.
        flusher.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    file.sync_all()
}

/// What is converted and not yet handed to the writer.
struct Slab {
    bytes: Vec<u8>,
    /// Bytes of the file up to its end.
    end: u64,
    other: Option<Vec<u8>>,
    full: SyncSender<Vec<u8>>,
    empty: Receiver<Vec<u8>>,
}

/// The writer has failed, and says why itself.
struct Stopped;

impl Slab {
    /// Where in the file the next byte will be.
    fn position(&self) -> u64 {
        self.end + self.bytes.len() as u64
    }

    /// Hands the bytes over.
    fn flush(&mut self) -> Result<(), Stopped> {
        if self.bytes.is_empty() {
            return Ok(());
        }
        let mut next = match self.other.take() {
            Some(other) => other,
            None => self.empty.recv().map_err(|_| Stopped)?,
        };
        next.clear();
        let full = std::mem::replace(&mut self.bytes, next);
        self.end += full.len() as u64;
        self.full.send(full).map_err(|_| Stopped)
    }
}

fn convert_all(
    tensors: &[(u64, &Initializer)],
    (read, spent): (&Receiver<Result<(Block, Vec<u8>), Error>>, &Sender<Vec<u8>>),
    mut out: Slab,
    progress: &dyn Fn(u64),
) -> Result<u64, Error> {
    let mut converter = Converter::default();
    let stopped = |Stopped| Error::io("")(std::io::ErrorKind::BrokenPipe.into());
    for (offset, init) in tensors {
        let padding = (offset - out.position()) as usize;
        out.bytes.resize(out.bytes.len() + padding, 0);
        let count = blocks(init).len();
        if count == 0 {
            converter.constant(init, &mut out.bytes)?;
        }
        for _ in 0..count {
            let Ok(block) = read.recv() else {
                return Err(moh_models::Error::Internal("a weight that was not read").into());
            };
            let (block, bytes) = block?;
            // A band of a transposed matrix is handed over as a whole.
            if block.elements.start == 0 && block.columns.is_some() {
                out.flush().map_err(stopped)?;
            }
            converter.convert(init, &block, &bytes, &mut out.bytes)?;
            let _ = spent.send(bytes);
            if out.bytes.len() >= HANDED && block.columns.is_none() {
                out.flush().map_err(stopped)?;
            }
            progress(out.position());
        }
    }
    out.flush().map_err(stopped)?;
    Ok(out.end)
}
