//! What multiplies blocks of bfloat16 faster than vectors of f32 do.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::amx::{Amx, Tiles};
#[cfg(target_arch = "x86_64")]
use super::dot::Dot;

/// Rows of a tile, and numbers of f32 in its row.
pub(crate) const TILE: usize = 16;
/// Bytes of a tile's row, and of a tile whose rows lie one after the other.
pub(crate) const ROW_BYTES: usize = TILE * size_of::<f32>();
pub(crate) const TILE_BYTES: usize = TILE * ROW_BYTES;

/// Two factors and their product of f32. A number of a factor is the sum of as many of bf16 as the factor has planes, largest first.
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
    /// 1, 2 or 3. Of 3, the products of a third with a second or third are left out: they are below the last bit of f32.
    pub(crate) planes: usize,
    /// From one plane of `a`, and of `b`, to the next.
    pub(crate) plane_strides: [usize; 2],
    /// Blocks of 32 inner indices.
    pub(crate) steps: usize,
    /// 16 rows of 32 columns for each of `a`.
    pub(crate) c: [*mut f32; 2],
    pub(crate) c_stride: usize,
    /// Whether the product is added to what is there.
    pub(crate) add: bool,
}

/// Exists only where the processor has one.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MatrixUnit {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx(Amx),
    #[cfg(target_arch = "x86_64")]
    Dot(Dot),
}

/// A unit at work for this thread.
pub(crate) enum Multiplier {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx(Tiles),
    #[cfg(target_arch = "x86_64")]
    Dot(Dot),
}

impl MatrixUnit {
    /// The most planes of a factor with which it is faster than vectors of f32: three planes are six products.
    pub(crate) fn most_planes(self) -> usize {
        match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            MatrixUnit::Amx(_) => 3,
            #[cfg(target_arch = "x86_64")]
            MatrixUnit::Dot(_) => 1,
        }
    }

    pub(crate) fn start(self) -> Multiplier {
        match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            MatrixUnit::Amx(amx) => Multiplier::Amx(amx.tiles()),
            #[cfg(target_arch = "x86_64")]
            MatrixUnit::Dot(dot) => Multiplier::Dot(dot),
        }
    }
}

impl Multiplier {
    /// The products of both of `a` with `b`, or of the first one.
    ///
    /// # Safety
    /// All addresses named are valid: for reading `steps` blocks of the factors' planes, at most [`MatrixUnit::most_planes`], for reading
    /// and writing `c`.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    pub(crate) unsafe fn multiply<const BOTH: bool>(&self, product: &TileProduct) {
        match *self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Multiplier::Amx(ref tiles) => {
                // SAFETY: the caller's contract.
                unsafe { tiles.multiply::<BOTH>(product) }
            }
            #[cfg(target_arch = "x86_64")]
            Multiplier::Dot(dot) => {
                // SAFETY: the caller's contract.
                unsafe { dot.product(product, if BOTH { 2 } else { 1 }) }
            }
        }
    }
}
