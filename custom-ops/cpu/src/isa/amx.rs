//! x86-64 with AMX (tiles, bf16): products of 16 x 32 by 32 x 16 blocks of bfloat16, accumulated in f32. With its int8 also
//! products of 16 x 64 by 64 x 16 blocks of bytes, accumulated in words of 32 bits.
//!
//! Each f32 is split exactly into three bf16 terms of 8 bits each. Of the nine products of two factors' terms, six are
//! kept; the omitted ones are 2^-23 of the result on average and 2^-20 at most, comparable to f32 rounding. Six bf16
//! products take less time than f32 multiply-adds.
//!
//! The compiler does not use tile registers, so they keep their contents between blocks of inline assembly.

#[cfg(test)]
pub(crate) mod emulator;
#[cfg(test)]
mod tests;

use super::avx512::Avx512;
use super::unit::{
    BYTE_COLUMNS, ByteProduct, ByteUnit, Lines, Multiply, MultiplyBytes, ROW_BYTES, TILE, TILE_BYTES, TileProduct, Unit,
};
use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Exists only if the processor has AMX and this process may use it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amx(());

/// Configured tile registers, released on drop. Belongs to the thread that made it.
struct Configured(PhantomData<*const ()>);

/// Tile registers of 16 rows of 64 bytes.
pub(crate) struct Tiles {
    _configured: Configured,
}

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
        Tiles { _configured: self.configure([(TILE, ROW_BYTES); 8]) }
    }

    fn multiplies_bytes(self) -> bool {
        self.bytes().is_some()
    }
}

impl Amx {
    /// Products of bytes, if the processor has AMX-INT8.
    pub(crate) fn bytes(self) -> Option<AmxBytes> {
        #[cfg(test)]
        if emulator::is_on() {
            return Some(AmxBytes(self));
        }
        const INT8: u32 = 1 << 25;
        static FOUND: OnceLock<bool> = OnceLock::new();
        let found = FOUND.get_or_init(|| std::arch::x86_64::__cpuid_count(7, 0).edx & INT8 != 0);
        found.then_some(AmxBytes(self))
    }

    /// Configures the tiles with rows of bytes.
    fn configure(self, shapes: [(usize, usize); 8]) -> Configured {
        #[repr(C, align(64))]
        struct Configuration([u8; 64]);
        let mut configuration = Configuration([0; 64]);
        configuration.0[0] = 1;
        for (tile, (rows, bytes)) in shapes.into_iter().enumerate() {
            configuration.0[16 + 2 * tile] = bytes as u8;
            configuration.0[48 + tile] = rows as u8;
        }
        // SAFETY: `self` proves that AMX may be used; the configuration is that of palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) configuration.0.as_ptr(), options(nostack)) }
        Configured(PhantomData)
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        // SAFETY: a `Configured` exists only if AMX may be used.
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
                fetch(&p.ahead, step);
                for &(a, b) in order {
                    if let Some(term) = a {
                        self.left::<BOTH>(p, step, term);
                    }
                    if let Some(term) = b {
                        self.right(p, step, term);
                    }
                    self.add::<BOTH>();
                }
            }
            self.end::<BOTH>(p);
        }
    }
}

/// Prefetches the lines of a step.
#[inline(always)]
fn fetch(ahead: &Lines, step: usize) {
    const LINE: usize = 64;
    for row in step * ahead.rows..(step + 1) * ahead.rows {
        let start = ahead.start.wrapping_add(row * ahead.stride);
        for offset in (0..ahead.bytes).step_by(LINE) {
            // SAFETY: a prefetch may be of any address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(offset).cast()) }
        }
    }
}

impl Tiles {
    #[inline(always)]
    unsafe fn begin<const BOTH: bool>(&self, p: &TileProduct) {
        // SAFETY: as in `multiply`.
        unsafe {
            if !p.add {
                asm!("tilezero tmm0", "tilezero tmm1", options(nomem, nostack));
                if BOTH {
                    asm!("tilezero tmm2", "tilezero tmm3", options(nomem, nostack));
                }
                return;
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
    unsafe fn left<const BOTH: bool>(&self, p: &TileProduct, step: usize, term: usize) {
        let offset = step * TILE_BYTES + term * p.term_strides[0];
        // SAFETY: as in `multiply`.
        unsafe {
            asm!("tileloadd tmm4, [{a} + {s}]",
                a = in(reg) p.a[0].byte_add(offset), s = in(reg) ROW_BYTES, options(nostack, readonly));
            if BOTH {
                asm!("tileloadd tmm5, [{a} + {s}]",
                    a = in(reg) p.a[1].byte_add(offset), s = in(reg) ROW_BYTES, options(nostack, readonly));
            }
        }
    }

    #[inline(always)]
    unsafe fn right(&self, p: &TileProduct, step: usize, term: usize) {
        // SAFETY: as in `multiply`.
        unsafe {
            asm!("tileloadd tmm6, [{b} + {s}]", "tileloadd tmm7, [{b} + {s} + 64]",
                b = in(reg) p.b.byte_add(step * p.b_step + term * p.term_strides[1]), s = in(reg) p.b_stride,
                options(nostack, readonly));
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
    unsafe fn end<const BOTH: bool>(&self, p: &TileProduct) {
        // SAFETY: as in `multiply`.
        unsafe {
            asm!("tilestored [{c} + {s}], tmm0", "tilestored [{c} + {s} + 64], tmm1",
                c = in(reg) p.c[0], s = in(reg) p.c_stride, options(nostack));
            if BOTH {
                asm!("tilestored [{c} + {s}], tmm2", "tilestored [{c} + {s} + 64], tmm3",
                    c = in(reg) p.c[1], s = in(reg) p.c_stride, options(nostack));
            }
        }
    }
}

/// Exists only if the processor has AMX and AMX-INT8, and this process may use them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AmxBytes(Amx);

/// Tile registers for products of bytes.
pub(crate) struct ByteTiles {
    /// Inner indices of a tile.
    inner: usize,
    /// Tiles along the inner dimension.
    steps: usize,
    _configured: Configured,
}

impl ByteUnit for AmxBytes {
    type Multiplier = ByteTiles;

    fn start(self, inner: usize) -> ByteTiles {
        assert!(matches!(inner, 16 | 32) || inner.is_multiple_of(ROW_BYTES), "{inner} inner indices");
        let of_tile = inner.min(ROW_BYTES);
        let (sums, left, right) = ((TILE, ROW_BYTES), (TILE, of_tile), (of_tile / 4, ROW_BYTES));
        let configured = self.0.configure([sums, sums, sums, sums, left, left, right, right]);
        ByteTiles { inner: of_tile, steps: inner / of_tile, _configured: configured }
    }
}

/// The tiles have the same roles as in products of bfloat16.
impl MultiplyBytes for ByteTiles {
    #[inline(always)]
    unsafe fn multiply<const BOTH: bool, const SIGNED: bool>(&self, p: &ByteProduct) {
        const STRIDE: usize = BYTE_COLUMNS * size_of::<i32>();
        // SAFETY: a `ByteTiles` exists only if AMX-INT8 may be used, and its tiles are configured; the caller's contract.
        unsafe {
            asm!("tilezero tmm0", "tilezero tmm1", options(nomem, nostack));
            if BOTH {
                asm!("tilezero tmm2", "tilezero tmm3", options(nomem, nostack));
            }
            for step in 0..self.steps {
                let (a, b) = (step * self.inner, step * self.inner / 4 * STRIDE);
                asm!("tileloadd tmm6, [{b} + {s}]", "tileloadd tmm7, [{b} + {s} + 64]", "tileloadd tmm4, [{a} + {t}]",
                    b = in(reg) p.b.add(b), s = in(reg) STRIDE, a = in(reg) p.a[0].add(a), t = in(reg) p.a_stride,
                    options(nostack, readonly));
                match SIGNED {
                    true => asm!("tdpbssd tmm0, tmm4, tmm6", "tdpbssd tmm1, tmm4, tmm7", options(nomem, nostack)),
                    false => asm!("tdpbsud tmm0, tmm4, tmm6", "tdpbsud tmm1, tmm4, tmm7", options(nomem, nostack)),
                }
                if BOTH {
                    asm!("tileloadd tmm5, [{a} + {t}]",
                        a = in(reg) p.a[1].add(a), t = in(reg) p.a_stride, options(nostack, readonly));
                    match SIGNED {
                        true => asm!("tdpbssd tmm2, tmm5, tmm6", "tdpbssd tmm3, tmm5, tmm7", options(nomem, nostack)),
                        false => asm!("tdpbsud tmm2, tmm5, tmm6", "tdpbsud tmm3, tmm5, tmm7", options(nomem, nostack)),
                    }
                }
            }
            asm!("tilestored [{c} + {s}], tmm0", "tilestored [{c} + {s} + 64], tmm1",
                c = in(reg) p.c, s = in(reg) STRIDE, options(nostack));
            if BOTH {
                asm!("tilestored [{c} + {s}], tmm2", "tilestored [{c} + {s} + 64], tmm3",
                    c = in(reg) p.c.add(TILE * BYTE_COLUMNS), s = in(reg) STRIDE, options(nostack));
            }
        }
    }
}

/// Whether AMX may be used.
fn is_there() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| processor_has_it() && system_permits_it())
}

/// Whether the processor has AMX-TILE and AMX-BF16, and the operating system saves the tiles' state (Intel SDM volume
/// 1, chapter 18).
fn processor_has_it() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
    const TILE_STATE: u32 = 0b11 << 17;
    let leaf = |leaf| std::arch::x86_64::__cpuid_count(leaf, 0);
    if leaf(0).eax < 7 || leaf(1).ecx & OSXSAVE == 0 || leaf(7).edx & BF16_AND_TILE != BF16_AND_TILE {
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
