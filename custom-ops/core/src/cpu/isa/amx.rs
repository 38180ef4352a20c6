//! x86-64 with AMX (tiles, bf16): products of 16 x 32 by 32 x 16 blocks of bfloat16, summed in f32.
//!
//! The compiler knows nothing of tile registers and never uses them, so that they keep their contents from one block of
//! assembly to the next.

use super::matrix_unit::{TILE, TileProduct};
use std::arch::asm;
use std::sync::OnceLock;

/// Exists only where the processor has AMX and this process may use it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amx(());

/// Tiles while it lives: all eight have 16 rows of 64 bytes. Belongs to the thread that made it.
pub(crate) struct Tiles(std::marker::PhantomData<*const ()>);

impl Amx {
    pub(crate) fn detect() -> Option<Amx> {
        static FOUND: OnceLock<bool> = OnceLock::new();
        FOUND.get_or_init(|| processor_has_it() && system_permits_it()).then_some(Amx(()))
    }

    /// Prepares this thread's tiles.
    pub(crate) fn tiles(self) -> Tiles {
        #[repr(C, align(64))]
        struct Configuration([u8; 64]);
        let mut configuration = Configuration([0; 64]);
        configuration.0[0] = 1;
        for tile in 0..8 {
            configuration.0[16 + 2 * tile] = 64;
            configuration.0[48 + tile] = TILE as u8;
        }
        // SAFETY: `self` is the proof that AMX may be used; the configuration is that of palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) configuration.0.as_ptr(), options(nostack)) }
        Tiles(std::marker::PhantomData)
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: a `Tiles` exists only where AMX may be used.
        unsafe { asm!("tilerelease", options(nomem, nostack)) }
    }
}

impl Tiles {
    /// The product of both of `a` with `b`.
    ///
    /// # Safety
    /// All addresses named in `p` are valid: for reading `steps` blocks of the factors, for reading and writing `c`.
    #[inline]
    pub(crate) unsafe fn pair(&self, p: &TileProduct) {
        // SAFETY: a `Tiles` exists only where AMX may be used, and its tiles are configured; the caller's contract.
        unsafe {
            if p.add {
                asm!(
                    "tileloadd tmm0, [{c} + {s}]", "tileloadd tmm1, [{c} + {s} + 64]",
                    "tileloadd tmm2, [{d} + {s}]", "tileloadd tmm3, [{d} + {s} + 64]",
                    c = in(reg) p.c[0], d = in(reg) p.c[1], s = in(reg) p.c_stride, options(nostack),
                );
            } else {
                asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nomem, nostack));
            }
            if p.steps > 0 {
                asm!(
                    "2:",
                    "tileloadd tmm4, [{a} + {sa}]",
                    "tileloadd tmm6, [{b} + {sb}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{b} + {sb} + 64]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{e} + {sa}]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {a}, 64",
                    "add {e}, 64",
                    "add {b}, {step}",
                    "dec {n}",
                    "jne 2b",
                    a = inout(reg) p.a[0] => _, e = inout(reg) p.a[1] => _, b = inout(reg) p.b => _,
                    sa = in(reg) p.a_stride, sb = in(reg) p.b_stride, step = in(reg) p.b_step,
                    n = inout(reg) p.steps => _, options(nostack),
                );
            }
            asm!(
                "tilestored [{c} + {s}], tmm0", "tilestored [{c} + {s} + 64], tmm1",
                "tilestored [{d} + {s}], tmm2", "tilestored [{d} + {s} + 64], tmm3",
                c = in(reg) p.c[0], d = in(reg) p.c[1], s = in(reg) p.c_stride, options(nostack),
            );
        }
    }

    /// The product of the first of `a` with `b`.
    ///
    /// # Safety
    /// As [`Tiles::pair`].
    #[inline]
    pub(crate) unsafe fn single(&self, p: &TileProduct) {
        // SAFETY: a `Tiles` exists only where AMX may be used, and its tiles are configured; the caller's contract.
        unsafe {
            if p.add {
                asm!(
                    "tileloadd tmm0, [{c} + {s}]", "tileloadd tmm1, [{c} + {s} + 64]",
                    c = in(reg) p.c[0], s = in(reg) p.c_stride, options(nostack),
                );
            } else {
                asm!("tilezero tmm0", "tilezero tmm1", options(nomem, nostack));
            }
            if p.steps > 0 {
                asm!(
                    "2:",
                    "tileloadd tmm4, [{a} + {sa}]",
                    "tileloadd tmm6, [{b} + {sb}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{b} + {sb} + 64]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "add {a}, 64",
                    "add {b}, {step}",
                    "dec {n}",
                    "jne 2b",
                    a = inout(reg) p.a[0] => _, b = inout(reg) p.b => _,
                    sa = in(reg) p.a_stride, sb = in(reg) p.b_stride, step = in(reg) p.b_step,
                    n = inout(reg) p.steps => _, options(nostack),
                );
            }
            asm!(
                "tilestored [{c} + {s}], tmm0", "tilestored [{c} + {s} + 64], tmm1",
                c = in(reg) p.c[0], s = in(reg) p.c_stride, options(nostack),
            );
        }
    }
}

/// AMX-TILE and AMX-BF16, and an operating system that saves the tiles' state (Intel SDM volume 1, chapter 18).
fn processor_has_it() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
    const TILE_STATE: u32 = 0b11 << 17;
    let leaf = |leaf| std::arch::x86_64::__cpuid_count(leaf, 0);
    if leaf(0).eax < 7 || leaf(1).ecx & OSXSAVE == 0 || leaf(7).edx & BF16_AND_TILE != BF16_AND_TILE {
        return false;
    }
    let states: u32;
    // SAFETY: with OSXSAVE there is XGETBV, and register 0.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") states, out("edx") _, options(nomem, nostack)) };
    states & TILE_STATE == TILE_STATE
}

/// Linux saves the tiles' state, 8 KiB a thread, only for processes that ask for it
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
