//! A large file that a thread of its own writes, while the next part of it is made.

use crate::error::Error;
use moh_runtime::Digest;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

/// Bytes after which what is written is sent to the disk. Left to itself the system collects gigabytes, and then makes the
/// program wait for all of them.
const SYNCED: u64 = 128 << 20;

/// Bytes that the system is given at a time: measured. Less, and it keeps the file in small pages; more, and where memory is full of
/// cached files, making room for large pages takes longer than to copy them.
const PIECE: usize = 256 << 10;

/// Bytes that are put one after the other. It keeps its memory when it is emptied, and is zeroed only where it grows.
#[derive(Default)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    length: usize,
}

impl Buffer {
    /// Number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Room for `count` more bytes, which hold anything.
    pub(crate) fn grow(&mut self, count: usize) -> &mut [u8] {
        let start = self.length;
        self.length += count;
        if self.bytes.len() < self.length {
            self.bytes.resize(self.length, 0);
        }
        &mut self.bytes[start..self.length]
    }

    /// The last `count` bytes.
    pub(crate) fn last(&mut self, count: usize) -> &mut [u8] {
        &mut self.bytes[self.length - count..self.length]
    }

    /// Adds bytes.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.grow(bytes.len()).copy_from_slice(bytes);
    }

    /// The bytes.
    pub(crate) fn filled(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// The bytes, without the buffer.
    pub(crate) fn into_bytes(mut self) -> Vec<u8> {
        self.bytes.truncate(self.length);
        self.bytes
    }
}

/// The end of a file that is being written. It holds two buffers, as large as the largest part that was made: one is filled while
/// the other is written.
pub(crate) struct Output {
    /// The part in the making: what was not yet handed over.
    pub(crate) part: Buffer,
    /// Bytes before it.
    before: u64,
    full: SyncSender<Buffer>,
    empty: Receiver<Buffer>,
}

impl Output {
    /// Bytes of the file that are made.
    pub(crate) fn length(&self) -> u64 {
        self.before + self.part.len() as u64
    }

    /// Hands the part over, and begins another one.
    ///
    /// # Errors
    /// [`Error::Io`] where writing has failed; [`write`] says why.
    pub(crate) fn hand_over(&mut self) -> Result<(), Error> {
        if self.part.len() == 0 {
            return Ok(());
        }
        let stopped = || Error::io("")(ErrorKind::BrokenPipe.into());
        let mut next = self.empty.recv().map_err(|_| stopped())?;
        next.length = 0;
        self.before = self.length();
        self.full.send(std::mem::replace(&mut self.part, next)).map_err(|_| stopped())
    }
}

/// Makes the file `path` of what `make` puts into its end, adds it to `digest`, and syncs it. Returns its length.
///
/// # Errors
/// [`Error::Io`], and those of `make`.
pub(crate) fn write(
    path: &Path,
    digest: Option<&mut Digest>,
    make: impl FnOnce(&mut Output) -> Result<(), Error>,
) -> Result<u64, Error> {
    let file = File::create(path).map_err(Error::io(path))?;
    std::thread::scope(|scope| {
        let (full, parts) = sync_channel(1);
        let (written, empty) = channel();
        // The other buffer.
        let _ = written.send(Buffer::default());
        let writer = scope.spawn(move || write_all(file, digest, &parts, &written));
        let mut output = Output { part: Buffer::default(), before: 0, full, empty };
        let made = make(&mut output).and_then(|()| output.hand_over());
        let length = output.length();
        drop(output);
        match writer.join() {
            Ok(Ok(())) => made.map(|()| length),
            Ok(Err(reason)) => Err(Error::io(path)(reason)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Writes what comes, one after the other, and gives the buffers back.
fn write_all(
    mut file: File,
    mut digest: Option<&mut Digest>,
    parts: &Receiver<Buffer>,
    back: &Sender<Buffer>,
) -> std::io::Result<()> {
    let mut unsynced = 0;
    let synced = file.try_clone()?;
    std::thread::scope(|scope| {
        let (sync, calls) = sync_channel::<()>(1);
        let syncing = scope.spawn(move || calls.iter().try_for_each(|()| synced.sync_data()));
        for part in parts {
            std::thread::scope(|scope| {
                if let Some(digest) = digest.as_deref_mut() {
                    scope.spawn(|| digest.add(part.filled()));
                }
                part.filled().chunks(PIECE).try_for_each(|piece| file.write_all(piece))
            })?;
            unsynced += part.len() as u64;
            if unsynced >= SYNCED {
                unsynced = 0;
                // It goes on while more is written. One call that waits for it to end is enough.
                let _ = sync.try_send(());
            }
            // Nobody waits for the last ones.
            let _ = back.send(part);
        }
        drop(sync);
        // The system tells of a failure once only, and that may have been here.
        syncing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    file.sync_all()
}
