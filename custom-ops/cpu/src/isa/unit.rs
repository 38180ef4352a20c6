//! What a matrix unit is: it multiplies blocks of bfloat16 faster than vectors of f32 do.

use super::Isa;

/// Rows of a tile, and numbers of f32 in its row.
pub(crate) const TILE: usize = 16;
/// Bytes of a tile's row, and of a tile whose rows lie one after the other.
pub(crate) const ROW_BYTES: usize = TILE * size_of::<f32>();
pub(crate) const TILE_BYTES: usize = TILE * ROW_BYTES;

/// Two factors and their product in f32. Each number of a factor is split into bf16 terms, largest first.
/// Strides and steps are in bytes.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct TileProduct {
    /// Rows of 16 pairs along the inner index: two tiles of 16 rows, one after the other for each block of 32 inner indices.
    pub(crate) a: [*const f32; 2],
    /// Rows of pairs: row p holds inner indices 2p and 2p + 1 of 32 columns.
    pub(crate) b: *const f32,
    pub(crate) b_stride: usize,
    /// From 32 inner indices of `b` to the next.
    pub(crate) b_step: usize,
    /// bf16 terms of a number: 1, 2 or 3. With 3, six of the nine products are kept: the others are below the last bit of f32.
    pub(crate) terms: usize,
    /// From one term of `a`, and of `b`, to the next.
    pub(crate) term_strides: [usize; 2],
    /// Blocks of 32 inner indices.
    pub(crate) steps: usize,
    /// 16 rows of 32 columns for each of `a`.
    pub(crate) c: [*mut f32; 2],
    pub(crate) c_stride: usize,
    /// Whether the product is added to what is there.
    pub(crate) add: bool,
}

/// A matrix unit's token: exists only where the processor has it.
pub(crate) trait Unit: Copy + Send + Sync + 'static {
    /// The vectors that its kernels use for everything else.
    type Vectors: Isa;
    /// The unit at work for one thread.
    type Multiplier: Multiply;
    /// Name that users choose kernels by.
    const NAME: &'static str;
    /// The most bf16 terms of an f32 factor with which it is faster than vectors of f32: three terms are six products.
    const MOST_TERMS: usize;

    /// The token, where the processor has the unit.
    fn detect() -> Option<Self>;
    /// Whether automatic selection may pick it.
    fn is_fast() -> bool;
    /// Prepares it for this thread.
    fn start(self) -> Self::Multiplier;
}

/// A unit at work for one thread.
pub(crate) trait Multiply {
    /// The products of both of `a` with `b`, or of the first one.
    ///
    /// # Safety
    /// All addresses that `product` names are valid: for reading `steps` blocks of the factors' terms, at most
    /// [`Unit::MOST_TERMS`], for reading and writing `c`.
    unsafe fn multiply<const BOTH: bool>(&self, product: &TileProduct);
}
