//! Memory that a step frees and the next one takes again.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::{NonNull, null_mut};
use std::sync::{Mutex, PoisonError};

/// An allocator that keeps large blocks for later, in place of giving them back to the system.
///
/// Every step of a training allocates the same gigabytes as the one before. System allocators return blocks of that size when they are freed, and
/// the kernel then clears every page again. A program that trains opts in:
///
///     #[global_allocator]
///     static MEMORY: moh_train::Memory = moh_train::Memory::new();
///
/// It is for steps of equal shapes: blocks of each size stay, so where sizes change, memory grows to the sum of what was needed of each. Blocks
/// below 64 KiB are the system allocator's.
pub struct Memory {
    free: [Mutex<Blocks>; CLASSES],
}

/// Freed blocks of one size: each begins with the address of the next one.
struct Blocks(Option<NonNull<Block>>);

struct Block {
    next: Option<NonNull<Block>>,
}

// SAFETY: the blocks belong to nobody else, so any thread may take them.
unsafe impl Send for Blocks {}

/// log2 of the smallest block that is kept.
const SMALLEST: u32 = 16;
/// Sizes for each power of two.
const STEPS: usize = 8;
const CLASSES: usize = STEPS * 26;
/// Alignment of kept blocks: what vector instructions ask for.
const ALIGN: usize = 64;

/// The index and size of the smallest class that holds `layout`.
fn class(layout: Layout) -> Option<(usize, Layout)> {
    if layout.size() < 1 << SMALLEST || layout.align() > ALIGN {
        return None;
    }
    let power = layout.size().ilog2();
    let step = (1usize << power) / STEPS;
    // A size between two powers of two is rounded up to an eighth of the lower one.
    let parts = (layout.size() - (1 << power)).div_ceil(step);
    let index = (power - SMALLEST) as usize * STEPS + parts;
    let size = (1usize << power).checked_add(parts * step)?;
    (index < CLASSES).then_some((index, Layout::from_size_align(size, ALIGN).ok()?))
}

impl Memory {
    /// An allocator that keeps nothing yet.
    pub const fn new() -> Memory {
        Memory { free: [const { Mutex::new(Blocks(None)) }; CLASSES] }
    }

    fn take(&self, index: usize) -> Option<NonNull<Block>> {
        let mut blocks = self.free.get(index)?.lock().unwrap_or_else(PoisonError::into_inner);
        let first = blocks.0?;
        // SAFETY: `put` wrote a `Block` into every block of the list, and whoever takes one out of it removes it under the lock.
        blocks.0 = unsafe { first.as_ref().next };
        Some(first)
    }

    fn put(&self, index: usize, block: NonNull<Block>) {
        let Some(blocks) = self.free.get(index) else { return };
        let mut blocks = blocks.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the block was freed by its only user, is aligned to 64 bytes and has 64 KiB or more.
        unsafe { block.write(Block { next: blocks.0 }) };
        blocks.0 = Some(block);
    }
}

impl Default for Memory {
    fn default() -> Memory {
        Memory::new()
    }
}

// SAFETY: a block is given to one caller at a time, has the size and alignment of its class, which are at least those asked for, and stays
// what it was until it is freed. What is not kept is the system allocator's, which fulfils the contract; `class` depends on the layout alone, so
// a block returns to where it came from. Nothing here panics or unwinds, and what a lock may allocate on some systems is smaller than the smallest class.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some((index, whole)) = class(layout) else {
            // SAFETY: the caller's contract.
            return unsafe { System.alloc(layout) };
        };
        match self.take(index) {
            Some(block) => block.as_ptr().cast(),
            // SAFETY: the size of a class is not 0.
            None => unsafe { System.alloc(whole) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some((index, whole)) = class(layout) else {
            // SAFETY: the caller's contract.
            return unsafe { System.alloc_zeroed(layout) };
        };
        match self.take(index) {
            Some(block) => {
                let block: *mut u8 = block.as_ptr().cast();
                // SAFETY: the block has at least that many bytes, and is ours alone.
                unsafe { block.write_bytes(0, layout.size()) };
                block
            }
            // SAFETY: the size of a class is not 0.
            None => unsafe { System.alloc_zeroed(whole) },
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match class(layout) {
            // SAFETY: the caller's contract: `alloc` gave it for this layout, and so took it from the system allocator.
            None => unsafe { System.dealloc(block, layout) },
            Some((index, _)) => {
                if let Some(block) = NonNull::new(block.cast()) {
                    self.put(index, block);
                }
            }
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let Ok(wanted) = Layout::from_size_align(size, layout.align()) else { return null_mut() };
        match (class(layout), class(wanted)) {
            // SAFETY: the caller's contract.
            (None, None) => unsafe { System.realloc(block, layout, size) },
            (Some((from, _)), Some((to, _))) if from == to => block,
            _ => {
                // SAFETY: the caller's contract; `size` is not 0.
                let moved = unsafe { self.alloc(wanted) };
                if !moved.is_null() {
                    // SAFETY: both blocks have that many bytes, and are different ones.
                    unsafe { moved.copy_from_nonoverlapping(block, layout.size().min(size)) };
                    // SAFETY: the caller's contract.
                    unsafe { self.dealloc(block, layout) };
                }
                moved
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, 4).unwrap()
    }

    #[test]
    fn classes_hold_what_they_are_for() {
        assert!(class(layout(65_535)).is_none());
        let mut last = 0;
        for size in (65_536..4 << 20).step_by(777).chain([1 << 30, (1 << 30) + 1, 3 << 35]) {
            let (index, whole) = class(layout(size)).unwrap();
            assert!(whole.size() >= size && whole.size() <= size + size / STEPS + 1, "{size}: {whole:?}");
            assert!(index >= last && index < CLASSES);
            assert_eq!(class(layout(whole.size())).unwrap(), (index, whole), "{size}");
            last = index;
        }
        assert!(class(layout(1 << 50)).is_none());
    }

    #[test]
    fn blocks_come_back_and_are_zeroed() {
        let memory = Memory::new();
        let (small, large) = (layout(100_000), layout(300_000));
        // SAFETY: each block is used within its layout, and freed once with it.
        unsafe {
            let first = memory.alloc(small);
            first.write_bytes(7, 100_000);
            let other = memory.alloc(small);
            assert_ne!(first, other);
            memory.dealloc(first, small);
            assert_eq!(memory.alloc_zeroed(small), first);
            assert!(std::slice::from_raw_parts(first, 100_000).iter().all(|byte| *byte == 0));
            first.write_bytes(9, 100_000);
            let grown = memory.realloc(first, small, 300_000);
            assert!(std::slice::from_raw_parts(grown, 100_000).iter().all(|byte| *byte == 9));
            assert_eq!(memory.alloc(small), first, "it was freed");
            let shrunk = memory.realloc(grown, large, 10);
            assert!(std::slice::from_raw_parts(shrunk, 10).iter().all(|byte| *byte == 9));
            memory.dealloc(shrunk, layout(10));
        }
    }
}
