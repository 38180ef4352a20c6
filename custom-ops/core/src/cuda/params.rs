//! The kernels' parameters, as `cuda/params.h` declares them.

/// A kernel's only parameter.
///
/// # Safety
/// The type is `#[repr(C)]`, and has the layout of the struct of the same name in `cuda/params.h`.
pub unsafe trait Params: Copy {}

/// A TMA descriptor, `CUtensorMap`; made by [`super::Driver::tensor_map_encode_tiled`].
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub struct TensorMap(pub [u64; 16]);
