//! Arrays that the compiler vectorises for the target's baseline; runs on any processor.

use super::{ByteDot, DotJob, Never};
use crate::isa::portable::{F32x4, Portable};
use crate::isa::{Isa, MAX_LANES};

/// Always available.
#[derive(Clone, Copy)]
pub(crate) struct PortableDot;

const LANES: usize = Portable::LANES;

type Words = [u32; LANES];

#[inline(always)]
fn dot(sum: Words, w: Words, x: Words) -> Words {
    std::array::from_fn(|i| {
        let (w, x) = (w[i].to_le_bytes(), x[i].to_le_bytes());
        (0..4).fold(sum[i], |sum, j| sum.wrapping_add_signed(i32::from(w[j]) * i32::from(x[j].cast_signed())))
    })
}

#[inline(always)]
fn floats(x: [f32; LANES]) -> F32x4 {
    // SAFETY: the array holds a vector.
    unsafe { Portable.load(x.as_ptr()) }
}

impl ByteDot for PortableDot {
    type Vectors = Portable;
    type W = Words;
    type Parts = Never;
    const NAME: &'static str = "portable";
    const SUBTRACTED: [u8; 2] = [0, 0];

    fn detect() -> Option<PortableDot> {
        Some(PortableDot)
    }
    fn vectors(self) -> Portable {
        Portable
    }
    fn vectorize<J: DotJob>(self, job: J) -> J::Output {
        job.run(self)
    }

    #[inline(always)]
    fn zero(self) -> Words {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn load(self, ptr: *const u8) -> Words {
        // SAFETY: the caller's contract.
        unsafe { ptr.cast::<[[u8; 4]; LANES]>().read() }.map(u32::from_le_bytes)
    }
    #[inline(always)]
    unsafe fn broadcast(self, ptr: *const u8) -> Words {
        // SAFETY: the caller's contract.
        [u32::from_le_bytes(unsafe { ptr.cast::<[u8; 4]>().read() }); LANES]
    }
    #[inline(always)]
    fn as_floats(self, words: Words) -> F32x4 {
        floats(words.map(f32::from_bits))
    }
    #[inline(always)]
    fn as_words(self, x: F32x4) -> Words {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: the array holds a vector.
        unsafe { Portable.store(lanes.as_mut_ptr(), x) };
        lanes.map(f32::to_bits)
    }

    #[inline(always)]
    fn low(self, words: Words) -> Words {
        words.map(|word| word & 0x0f0f_0f0f)
    }
    #[inline(always)]
    fn high(self, words: Words) -> Words {
        words.map(|word| word >> 4 & 0x0f0f_0f0f)
    }
    #[inline(always)]
    fn dot4(self, sum: Words, w: Words, x: Words) -> Words {
        dot(sum, w, x)
    }
    #[inline(always)]
    fn dot8(self, sum: Words, w: Words, x: Words) -> Words {
        dot(sum, w, x)
    }
    #[inline(always)]
    fn to_float(self, words: Words) -> F32x4 {
        floats(words.map(|word| word.cast_signed() as f32))
    }
    #[inline(always)]
    fn nibble<const INDEX: usize>(self, words: Words) -> F32x4 {
        floats(words.map(|word| (word >> (4 * INDEX) & 0xf) as f32 - 8.0))
    }
    #[inline(always)]
    fn byte<const INDEX: usize>(self, words: Words) -> F32x4 {
        floats(words.map(|word| (word >> (8 * INDEX) & 0xff) as f32 - 128.0))
    }

    #[inline(always)]
    fn indices(self, lanes: &[u32; MAX_LANES]) -> Words {
        std::array::from_fn(|i| lanes[i])
    }
    #[inline(always)]
    fn spread(self, x: F32x4, indices: Words) -> F32x4 {
        let x = self.as_words(x);
        self.as_floats(indices.map(|lane| x[lane as usize % LANES]))
    }
}
