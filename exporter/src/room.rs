//! Room on the disk, asked for before anything is written.

use crate::error::Error;
use std::path::Path;

/// Checks that `needed` bytes fit into the file system of `folder`, for an output that goes to `path`. What the system does not
/// tell is no error: writing will show it.
///
/// # Errors
/// [`Error::Room`].
pub(crate) fn check(folder: &Path, path: &Path, needed: u64) -> Result<(), Error> {
    match available(folder) {
        Some(available) if available < needed => Err(Error::Room { path: path.to_owned(), needed, available }),
        _ => Ok(()),
    }
}

/// Bytes that this user may write there.
#[cfg(unix)]
fn available(folder: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(folder).ok()?;
    // Some network file systems tell of no block at all.
    (found.f_blocks > 0).then(|| found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(not(unix))]
fn available(_folder: &Path) -> Option<u64> {
    None
}
