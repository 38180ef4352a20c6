//! What multiplies blocks of bfloat16 faster than vectors of f32 do.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::amx::{Amx, Tiles};
#[cfg(target_arch = "x86_64")]
use super::dot::Dot;

/// Rows of a tile, and numbers of f32 in its row.
pub(crate) const TILE: usize = 16;

/// Two factors of bf16 and their product of f32. Strides and steps are in bytes.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct TileProduct {
    /// Rows of pairs along the inner index: two tiles of 16 rows.
    pub(crate) a: [*const f32; 2],
    pub(crate) a_stride: usize,
    /// Rows of pairs: row p holds inner indices 2p and 2p + 1 of 32 columns.
    pub(crate) b: *const f32,
    pub(crate) b_stride: usize,
    /// From 32 inner indices of `b` to the next.
    pub(crate) b_step: usize,
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
    /// The products of both of `a` with `b`.
    ///
    /// # Safety
    /// All addresses named are valid: for reading `steps` blocks of the factors, for reading and writing `c`.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    pub(crate) unsafe fn pair(&self, product: &TileProduct) {
        match *self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Multiplier::Amx(ref tiles) => {
                // SAFETY: the caller's contract.
                unsafe { tiles.pair(product) }
            }
            #[cfg(target_arch = "x86_64")]
            Multiplier::Dot(dot) => {
                // SAFETY: the caller's contract.
                unsafe { dot.product(product, 2) }
            }
        }
    }

    /// The product of the first of `a` with `b`.
    ///
    /// # Safety
    /// As [`Multiplier::pair`].
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    pub(crate) unsafe fn single(&self, product: &TileProduct) {
        match *self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Multiplier::Amx(ref tiles) => {
                // SAFETY: the caller's contract.
                unsafe { tiles.single(product) }
            }
            #[cfg(target_arch = "x86_64")]
            Multiplier::Dot(dot) => {
                // SAFETY: the caller's contract.
                unsafe { dot.product(product, 1) }
            }
        }
    }
}
