//! The compiled GPU images: one [`Module`] per file in `kernels/`.

/// Machine code and PTX of one `kernels/*.cu`.
#[derive(Debug, Clone, Copy)]
pub struct Module {
    name: &'static str,
    image: &'static [u8],
}

impl Module {
    /// Whether the image is empty, because kernels were not compiled.
    pub fn is_empty(&self) -> bool {
        self.image.is_empty()
    }

    /// The file's name without `.cu`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The fat binary, which contains its length.
    pub(crate) fn image(&self) -> &'static [u8] {
        self.image
    }
}

/// The driver reads images in place and needs them aligned.
#[repr(align(64))]
struct Aligned<B: ?Sized>(B);

include!(concat!(env!("OUT_DIR"), "/modules.rs"));
