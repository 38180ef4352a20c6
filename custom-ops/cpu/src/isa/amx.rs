//! x86-64 with AMX (tiles, bf16, int8): products of 16 x 32 by 32 x 16 blocks of bfloat16, accumulated in f32, and of 16 x 64 by 64 x 16
//! blocks of bytes, accumulated in integers of 32 bits.
//!
//! Each f32 is split into three bf16 terms of 8 bits each, exactly from about 2^-110 on: the unit takes terms and sums below 2^-126 as 0. Of the nine products of two factors' terms, six are
//! kept; the omitted ones are 2^-23 of the result on average and 2^-20 at most, comparable to f32 rounding. Six bf16
//! products take less time than f32 multiply-adds; six of digits, bytes of a number in fixed point, half of that.
//!
//! The compiler does not use tile registers, so they keep their contents between blocks of inline assembly.

#[cfg(test)]
pub(crate) mod emulator;
#[cfg(test)]
mod tests;

use super::avx512::Avx512;
use super::unit::{DigitProduct, Multiply, ROW_BYTES, TILE, TILE_BYTES, TileProduct, Unit};
use std::arch::asm;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Exists only if the processor has AMX and this process may use it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amx(());

/// Tile registers of 16 rows of 64 bytes, released on drop. They belong to the thread that made them.
pub(crate) struct Tiles(PhantomData<*const ()>);

impl Unit for Amx {
    type Vectors = Avx512;
    type Multiplier = Tiles;
    const NAME: &'static str = "amx";
    const MOST_TERMS: usize = 3;

    fn detect() -> Option<Amx> {
        #[cfg(test)]
        if emulator::is_on() {
            return Some(Amx(()));
        }
        is_there().then_some(Amx(()))
    }

    fn is_fast() -> bool {
        true
    }

    fn start(self) -> Tiles {
        #[repr(C, align(64))]
        struct Configuration([u8; 64]);
        let mut configuration = Configuration([0; 64]);
        configuration.0[0] = 1;
        for tile in 0..8 {
            configuration.0[16 + 2 * tile] = ROW_BYTES as u8;
            configuration.0[48 + tile] = TILE as u8;
        }
        // SAFETY: `self` proves that AMX may be used; the configuration is that of palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) configuration.0.as_ptr(), options(nostack)) }
        Tiles(PhantomData)
    }

    fn beats_bytes() -> bool {
        true
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: a `Tiles` exists only if AMX may be used.
        unsafe { asm!("tilerelease", options(nomem, nostack)) }
    }
}

/// The terms to load before each of the six products (`None`: already loaded), in an order with few loads.
const THREE_TERMS: [(Option<usize>, Option<usize>); 6] =
    [(Some(2), Some(0)), (Some(1), None), (None, Some(1)), (Some(0), None), (None, Some(0)), (None, Some(2))];

/// The result is accumulated in tiles 0 to 3; 4 and 5 hold blocks of the left factor, 6 and 7 of the right one.
impl Multiply for Tiles {
    #[inline]
    unsafe fn multiply<const BOTH: bool>(&self, p: &TileProduct) {
        // SAFETY: a `Tiles` exists only if AMX may be used, and its tiles are configured; the caller's contract.
        unsafe {
            self.begin::<BOTH>(p);
            let order: &[_] = match p.terms {
                1 => &[(Some(0), Some(0))],
                2 => &[(Some(1), Some(1)), (None, Some(0)), (Some(0), None), (None, Some(1))],
                _ => &THREE_TERMS,
            };
            for step in 0..p.steps {
                p.ahead.fetch(step);
                for &(a, b) in order {
                    if let Some(term) = a {
                        self.left::<BOTH>(p.a, step * TILE_BYTES + term * p.term_strides[0]);
                    }
                    if let Some(term) = b {
                        self.right(p.b.byte_add(step * p.b_step + term * p.term_strides[1]), p.b_stride);
                    }
                    self.add::<BOTH>();
                }
            }
            self.end::<BOTH>(p.c, p.c_stride);
        }
    }

    #[inline]
    unsafe fn multiply_digits<const BOTH: bool>(&self, p: &DigitProduct) {
        // SAFETY: as above.
        unsafe {
            for place in 0..p.digits {
                self.zero::<BOTH>();
                for step in 0..p.steps {
                    if place == 0 {
                        p.ahead.fetch(step);
                    }
                    for digit in 0..=place {
                        self.left::<BOTH>(p.a, step * TILE_BYTES + digit * p.digit_strides[0]);
                        let b = p.b.byte_add(step * p.b_step + (place - digit) * p.digit_strides[1]);
                        self.right(b, p.b_stride);
                        self.add_bytes::<BOTH>();
                    }
                }
                const STRIDE: usize = 2 * ROW_BYTES;
                let c = p.c.byte_add(place * 2 * TILE * STRIDE).cast::<f32>();
                self.end::<BOTH>([c, c.byte_add(TILE * STRIDE)], STRIDE);
            }
        }
    }
}

impl Tiles {
    #[inline(always)]
    unsafe fn begin<const BOTH: bool>(&self, p: &TileProduct) {
        // SAFETY: as in `multiply`.
        unsafe {
            if !p.add {
                return self.zero::<BOTH>();
            }
            asm!(
                "tileloadd tmm0, [{c} + {s}]", "tileloadd tmm1, [{c} + {s} + 64]",
                c = in(reg) p.c[0], s = in(reg) p.c_stride, options(nostack, readonly),
            );
            if BOTH {
                asm!(
                    "tileloadd tmm2, [{c} + {s}]", "tileloadd tmm3, [{c} + {s} + 64]",
                    c = in(reg) p.c[1], s = in(reg) p.c_stride, options(nostack, readonly),
                );
            }
        }
    }

    #[inline(always)]
    unsafe fn zero<const BOTH: bool>(&self) {
        // SAFETY: as in `multiply`.
        unsafe {
            asm!("tilezero tmm0", "tilezero tmm1", options(nomem, nostack));
            if BOTH {
                asm!("tilezero tmm2", "tilezero tmm3", options(nomem, nostack));
            }
        }
    }

    #[inline(always)]
    unsafe fn left<const BOTH: bool>(&self, a: [*const f32; 2], offset: usize) {
        // SAFETY: as in `multiply`.
        unsafe {
            asm!("tileloadd tmm4, [{a} + {s}]",
                a = in(reg) a[0].byte_add(offset), s = in(reg) ROW_BYTES, options(nostack, readonly));
            if BOTH {
                asm!("tileloadd tmm5, [{a} + {s}]",
                    a = in(reg) a[1].byte_add(offset), s = in(reg) ROW_BYTES, options(nostack, readonly));
            }
        }
    }

    #[inline(always)]
    unsafe fn right(&self, b: *const f32, stride: usize) {
        // SAFETY: as in `multiply`.
        unsafe {
            asm!("tileloadd tmm6, [{b} + {s}]", "tileloadd tmm7, [{b} + {s} + 64]",
                b = in(reg) b, s = in(reg) stride, options(nostack, readonly));
        }
    }

    #[inline(always)]
    unsafe fn add<const BOTH: bool>(&self) {
        // SAFETY: as in `multiply`.
        unsafe {
            asm!("tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm4, tmm7", options(nomem, nostack));
            if BOTH {
                asm!("tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7", options(nomem, nostack));
            }
        }
    }

    #[inline(always)]
    unsafe fn add_bytes<const BOTH: bool>(&self) {
        // SAFETY: as in `multiply`.
        unsafe {
            asm!("tdpbssd tmm0, tmm4, tmm6", "tdpbssd tmm1, tmm4, tmm7", options(nomem, nostack));
            if BOTH {
                asm!("tdpbssd tmm2, tmm5, tmm6", "tdpbssd tmm3, tmm5, tmm7", options(nomem, nostack));
            }
        }
    }

    #[inline(always)]
    unsafe fn end<const BOTH: bool>(&self, c: [*mut f32; 2], stride: usize) {
        // SAFETY: as in `multiply`.
        unsafe {
            asm!("tilestored [{c} + {s}], tmm0", "tilestored [{c} + {s} + 64], tmm1",
                c = in(reg) c[0], s = in(reg) stride, options(nostack));
            if BOTH {
                asm!("tilestored [{c} + {s}], tmm2", "tilestored [{c} + {s} + 64], tmm3",
                    c = in(reg) c[1], s = in(reg) stride, options(nostack));
            }
        }
    }
}

/// Whether AMX may be used.
fn is_there() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| processor_has_it() && system_permits_it())
}

/// Whether the processor has AMX-TILE, AMX-BF16 and AMX-INT8, and the operating system saves the tiles' state (Intel SDM volume
/// 1, chapter 18).
fn processor_has_it() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const BF16_TILE_AND_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    const TILE_STATE: u32 = 0b11 << 17;
    let leaf = |leaf| std::arch::x86_64::__cpuid_count(leaf, 0);
    if leaf(0).eax < 7 || leaf(1).ecx & OSXSAVE == 0 || leaf(7).edx & BF16_TILE_AND_INT8 != BF16_TILE_AND_INT8 {
        return false;
    }
    let states: u32;
    // SAFETY: OSXSAVE implies that XGETBV and register 0 exist.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") states, out("edx") _, options(nomem, nostack)) };
    states & TILE_STATE == TILE_STATE
}

/// Requests permission to use AMX: Linux saves the tiles' state, 8 KiB per thread, only for processes that ask for it
/// (<https://docs.kernel.org/arch/x86/xstate.html>).
fn system_permits_it() -> bool {
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XTILEDATA: usize = 18;
    let result: isize;
    // SAFETY: a system call that changes no memory of ours.
    unsafe {
        asm!(
            "syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") XTILEDATA,
            out("rcx") _, out("r11") _, options(nostack),
        );
    }
    result == 0
}
