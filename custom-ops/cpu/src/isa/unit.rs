//! Matrix units: they multiply blocks of bfloat16 faster than f32 vectors do.

use super::Isa;

/// Rows of a tile, and f32 elements per row.
pub(crate) const TILE: usize = 16;
/// Bytes of a tile row. Rows of a tile are contiguous.
pub(crate) const ROW_BYTES: usize = TILE * size_of::<f32>();
pub(crate) const TILE_BYTES: usize = TILE * ROW_BYTES;

/// Two factors and their product in f32. Each element of a factor is split into bf16 terms, largest first. Strides and
/// steps are in bytes.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct TileProduct {
    /// Rows of 16 pairs along the inner dimension: two tiles of 16 rows each; tiles for consecutive blocks of 32 inner
    /// indices are contiguous.
    pub(crate) a: [*const f32; 2],
    /// Rows of pairs: row p has inner indices 2p and 2p + 1 of 32 columns.
    pub(crate) b: *const f32,
    pub(crate) b_stride: usize,
    /// Distance between consecutive blocks of 32 inner indices of `b`.
    pub(crate) b_step: usize,
    /// bf16 terms per element: 1, 2 or 3. With 3, six of the nine products are kept; the others are below the last bit
    /// of f32.
    pub(crate) terms: usize,
    /// Distance between consecutive terms of `a`, and of `b`.
    pub(crate) term_strides: [usize; 2],
    /// Number of blocks of 32 inner indices.
    pub(crate) steps: usize,
    /// Pairs that are not 0 in the last block, at least: they come first, and the unit may leave the others out.
    pub(crate) last: usize,
    /// 16 rows of 32 columns for each matrix of `a`.
    pub(crate) c: [*mut f32; 2],
    pub(crate) c_stride: usize,
    /// Whether the product is added to `c`; otherwise it overwrites `c`.
    pub(crate) add: bool,
    /// What to read ahead meanwhile.
    pub(crate) ahead: Lines,
}

/// Two factors in digits of base 256, largest first, and the sums of their products: integers of 32 bits. Strides and steps are in bytes.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct DigitProduct {
    /// Rows of 64 inner indices: two tiles of 16 rows each; tiles for consecutive blocks of 64 inner indices are contiguous.
    pub(crate) a: [*const f32; 2],
    /// Rows of four inner indices, those of four neighbours of `a`, of 32 columns.
    pub(crate) b: *const f32,
    pub(crate) b_stride: usize,
    /// Distance between consecutive blocks of 64 inner indices of `b`.
    pub(crate) b_step: usize,
    /// Distance between consecutive digits of `a`, and of `b`.
    pub(crate) digit_strides: [usize; 2],
    /// Number of blocks of 64 inner indices.
    pub(crate) steps: usize,
    /// Digits of a number: 2 or 3.
    pub(crate) digits: usize,
    /// For every place, 32 rows of 32 columns: products of digits i and j are added up in place i + j. There are as many places as digits;
    /// others, those of three or one of the products, are left out.
    pub(crate) c: *mut i32,
    /// What to read ahead meanwhile.
    pub(crate) ahead: Lines,
}

/// Rows of memory to prefetch, some in each step. They may be anywhere: they are never dereferenced.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct Lines {
    pub(crate) start: *const u8,
    /// Bytes between rows.
    pub(crate) stride: usize,
    /// Bytes of a row.
    pub(crate) bytes: usize,
    /// Rows in each step.
    pub(crate) rows: usize,
}

impl Lines {
    pub(crate) const NONE: Lines = Lines { start: std::ptr::null(), stride: 0, bytes: 0, rows: 0 };

    /// Prefetches the rows of a step.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) fn fetch(&self, step: usize) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        const LINE: usize = 64;
        for row in step * self.rows..(step + 1) * self.rows {
            let start = self.start.wrapping_add(row * self.stride);
            for offset in (0..self.bytes).step_by(LINE) {
                // SAFETY: a prefetch may be of any address.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(offset).cast()) }
            }
        }
    }
}

/// A matrix unit's token; exists only if the processor has it.
pub(crate) trait Unit: Copy + Send + Sync + 'static {
    /// The vector instruction set that its kernels use for everything else.
    type Vectors: Isa;
    /// The unit, prepared for one thread.
    type Multiplier: Multiply;
    /// The name by which users select kernels.
    const NAME: &'static str;
    /// Maximum number of bf16 terms per f32 factor for which the unit is faster than f32 vectors (three terms mean six
    /// products). A unit for which it is more than one multiplies digits as well.
    const MOST_TERMS: usize;

    /// The token, if the processor has the unit.
    fn detect() -> Option<Self>;
    /// Whether automatic selection may pick it if supported.
    fn is_fast() -> bool;
    /// Prepares the unit for this thread.
    fn start(self) -> Self::Multiplier;
    /// Whether products of one term take less time than the vectors' products of bytes.
    fn beats_bytes() -> bool {
        false
    }
}

/// A matrix unit, prepared for one thread.
pub(crate) trait Multiply {
    /// Computes the products of both matrices of `a` with `b`, or only of the first.
    ///
    /// # Safety
    /// All pointers of `product` are valid: the factors' for reading `steps` blocks of at most [`Unit::MOST_TERMS`]
    /// terms, `c` for reading and writing.
    unsafe fn multiply<const BOTH: bool>(&self, product: &TileProduct);

    /// Computes the products of both matrices of `a` with `b`, or only of the first. Nothing is computed by a unit whose
    /// [`Unit::MOST_TERMS`] is 1.
    ///
    /// # Safety
    /// All pointers of `product` are valid: the factors' for reading `steps` blocks of all digits, `c` for writing.
    unsafe fn multiply_digits<const BOTH: bool>(&self, _product: &DigitProduct) {}
}
