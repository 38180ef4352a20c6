//! Weights in memory that the system has from a file: onnxruntime maps external data.
//!
//! Such a tensor costs no memory while nobody reads it, so a packed copy is the only one.

use std::ffi::c_void;

/// Whether [`in_file`] can tell.
pub(crate) fn can_tell() -> bool {
    static PROBE: u8 = 0;
    system::entries((&raw const PROBE).addr(), 1).is_some()
}

/// Whether a tensor of so many bytes lies in pages of a file that nobody has written to. What is shared with other processes counts as a file.
///
/// # Safety
/// The bytes are valid for reading.
pub(crate) unsafe fn in_file(start: *const c_void, bytes: usize) -> bool {
    if bytes == 0 {
        return false;
    }
    // Only a page that has been read is there.
    // SAFETY: the caller's contract.
    let _: u8 = unsafe { start.cast::<u8>().read_volatile() };
    system::entries(start.addr(), 1).is_some_and(|entries| entries.iter().all(system::is_of_file))
}

/// Gives back the memory of a tensor of so many bytes if it is a file's, all of it: it is read from the file again when somebody needs it.
///
/// # Safety
/// The bytes are valid for reading, and nobody writes to them.
pub(crate) unsafe fn give_back(start: *const c_void, bytes: usize) {
    // SAFETY: the caller's contract.
    unsafe { system::give_back(start.addr(), bytes) }
}

/// How many pages that have bytes of a tensor are in the process's memory.
#[cfg(all(test, target_os = "linux"))]
pub(crate) fn resident(start: *const c_void, bytes: usize) -> Option<usize> {
    Some(system::entries(start.addr(), bytes)?.iter().filter(|&entry| system::is_present(entry)).count())
}

#[cfg(target_os = "linux")]
mod system {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    /// Bits of an entry: <https://docs.kernel.org/admin-guide/mm/pagemap.html>.
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_FILE: u64 = 1 << 61;

    fn page() -> Option<usize> {
        // SAFETY: it only asks.
        usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok().filter(|size| size.is_power_of_two())
    }

    /// What the system says of the pages that have these bytes.
    pub(super) fn entries(start: usize, bytes: usize) -> Option<Vec<u64>> {
        const LEN: usize = size_of::<u64>();
        let page = page()?;
        let pages = start / page..start.checked_add(bytes)?.div_ceil(page);
        let mut entries = vec![0u8; pages.len() * LEN];
        let file = File::open("/proc/self/pagemap").ok()?;
        file.read_exact_at(&mut entries, (pages.start * LEN) as u64).ok()?;
        Some(entries.as_chunks().0.iter().map(|entry| u64::from_ne_bytes(*entry)).collect())
    }

    pub(super) fn is_of_file(entry: &u64) -> bool {
        entry & (PRESENT | SWAPPED | OF_FILE) == PRESENT | OF_FILE
    }

    #[cfg(test)]
    pub(super) fn is_present(entry: &u64) -> bool {
        entry & PRESENT != 0
    }

    /// A page that was written to is this process's own: it would be lost.
    fn is_own(entry: &u64) -> bool {
        entry & SWAPPED != 0 || entry & (PRESENT | OF_FILE) == PRESENT
    }

    pub(super) unsafe fn give_back(start: usize, bytes: usize) {
        let Some(page) = page() else { return };
        let (first, end) = (start.next_multiple_of(page), (start + bytes) / page * page);
        if first < end && entries(first, end - first).is_some_and(|entries| !entries.iter().any(is_own)) {
            // A wish: it may stay where it is.
            // SAFETY: pages of the tensor alone, all of a file and none written to, so that their contents do not change.
            unsafe { libc::madvise(first as *mut libc::c_void, end - first, libc::MADV_DONTNEED) };
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub(super) fn entries(_: usize, _: usize) -> Option<Vec<u64>> {
        None
    }

    pub(super) fn is_of_file(_: &u64) -> bool {
        false
    }

    pub(super) unsafe fn give_back(_: usize, _: usize) {}
}
