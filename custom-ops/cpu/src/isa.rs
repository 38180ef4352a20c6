//! Vector instructions: kernels are generic over [`Isa`], and one file a processor family implements it.
//!
//! A new set of instructions is a file here and a row of [`each_isa`], or of [`each_unit`].
//!
//! An [`Isa`] value is a token: it exists only where the processor has the features, so its methods may use them.

#[cfg(test)]
mod tests;
pub(crate) mod unit;

use moh_operators::Element;
use unit::Unit;

/// Every set of vector instructions, best first: its module and its token.
macro_rules! each_isa {
    ($callback:ident) => {
        $callback! {
            #[cfg(target_arch = "x86_64")]
            avx512::Avx512,
            #[cfg(target_arch = "x86_64")]
            avx2::Avx2,
            #[cfg(target_arch = "aarch64")]
            neon::Neon,
            #[cfg(all())]
            portable::Portable,
        }
    };
}
pub(crate) use each_isa;

/// Every matrix unit, best first. Before the vectors that it works beside.
macro_rules! each_unit {
    ($callback:ident) => {
        $callback! {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            amx::Amx,
            #[cfg(target_arch = "x86_64")]
            dot::Dot,
        }
    };
}
pub(crate) use each_unit;

macro_rules! modules {
    ($(#[$cfg:meta] $module:ident::$token:ident,)*) => { $(#[$cfg] pub(crate) mod $module;)* };
}
each_isa!(modules);
each_unit!(modules);

macro_rules! matrix_unit {
    ($(#[$cfg:meta] $module:ident::$token:ident,)*) => {
        /// A unit that multiplies blocks of bfloat16 faster than vectors of f32 do. Exists only where the processor has it.
        #[derive(Debug, Clone, Copy)]
        pub(crate) enum MatrixUnit {
            $(#[$cfg] $token($module::$token),)*
        }

        /// A unit at work for this thread.
        pub(crate) enum Multiplier {
            $(#[$cfg] $token(<$module::$token as Unit>::Multiplier),)*
        }

        impl MatrixUnit {
            /// See [`Unit::MOST_TERMS`].
            pub(crate) fn most_terms(self) -> usize {
                match self {
                    $(#[$cfg] MatrixUnit::$token(_) => $module::$token::MOST_TERMS,)*
                }
            }

            pub(crate) fn start(self) -> Multiplier {
                match self {
                    $(#[$cfg] MatrixUnit::$token(unit) => Multiplier::$token(unit.start()),)*
                }
            }
        }

        impl Multiplier {
            /// The products of both of `a` with `b`, or of the first one.
            ///
            /// # Safety
            /// As [`unit::Multiply::multiply`].
            #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
            pub(crate) unsafe fn multiply<const BOTH: bool>(&self, product: &unit::TileProduct) {
                match *self {
                    $(#[$cfg] Multiplier::$token(ref multiplier) => {
                        // SAFETY: the caller's contract.
                        unsafe { unit::Multiply::multiply::<BOTH>(multiplier, product) }
                    })*
                }
            }
        }

        $(
            #[$cfg]
            impl From<$module::$token> for MatrixUnit {
                fn from(unit: $module::$token) -> MatrixUnit {
                    MatrixUnit::$token(unit)
                }
            }
        )*
    };
}
each_unit!(matrix_unit);

/// What a kernel is compiled for: vectors, and perhaps a matrix unit beside them.
pub(crate) trait Target {
    /// The vectors.
    type Vectors: Isa;
    /// Name that users choose kernels by.
    const NAME: &'static str;
    /// Whether it is a matrix unit: kernels that have no use for one are those of the vectors alone.
    const HAS_UNIT: bool;
    /// The tokens, where the processor has the features.
    fn detect() -> Option<(Self::Vectors, Option<MatrixUnit>)>;
    /// Whether automatic selection may pick it where it is supported.
    fn is_automatic() -> bool;
}

impl<I: Isa> Target for I {
    type Vectors = I;
    const NAME: &'static str = <I as Isa>::NAME;
    const HAS_UNIT: bool = false;
    fn detect() -> Option<(I, Option<MatrixUnit>)> {
        Some((<I as Isa>::detect()?, None))
    }
    fn is_automatic() -> bool {
        true
    }
}

/// Kernels that use a unit.
pub(crate) struct WithUnit<U>(std::marker::PhantomData<U>);

impl<U: Unit + Into<MatrixUnit>> Target for WithUnit<U> {
    type Vectors = U::Vectors;
    const NAME: &'static str = U::NAME;
    const HAS_UNIT: bool = true;
    fn detect() -> Option<(U::Vectors, Option<MatrixUnit>)> {
        Some((<U::Vectors as Isa>::detect()?, Some(U::detect()?.into())))
    }
    fn is_automatic() -> bool {
        U::is_fast()
    }
}

/// The vectors that work beside the matrix unit of that name.
pub(crate) fn vectors_beside(unit: &str) -> Option<&'static str> {
    macro_rules! find {
        ($(#[$cfg:meta] $module:ident::$token:ident,)*) => {
            $(
                #[$cfg]
                if unit == <$module::$token as Unit>::NAME {
                    return Some(<<$module::$token as Unit>::Vectors as Isa>::NAME);
                }
            )*
        };
    }
    each_unit!(find);
    let _ = unit;
    None
}

/// Runs `job` on the best vectors, or on those that go by the name `forced`; on portable ones, if there are none such.
pub(crate) fn vectorize<J: Job>(forced: Option<&str>, job: J) -> J::Output {
    let wanted = |name: &str| forced.is_none_or(|forced| vectors_beside(forced).unwrap_or(forced) == name);
    macro_rules! first {
        ($(#[$cfg:meta] $module:ident::$token:ident,)*) => {
            $(
                #[$cfg]
                if wanted(<$module::$token as Isa>::NAME)
                    && let Some(isa) = <$module::$token as Isa>::detect()
                {
                    return isa.vectorize(job);
                }
            )*
        };
    }
    each_isa!(first);
    portable::Portable.vectorize(job)
}

/// Vectors of f32, and how many registers a kernel may count on.
///
/// `max` returns its second operand where the first is NaN. `exp2` is for arguments <= 0: below -126 it may give 0,
/// for -inf it does, and NaN stays NaN.
pub(crate) trait Isa: Copy + Send + Sync + 'static {
    /// A vector of [`Isa::LANES`] f32.
    type V: Copy;
    /// Lanes of a vector: a power of two, 16 at most.
    const LANES: usize;
    /// Vectors in a row of the register tile, [`MAX_TILE`] at most.
    const TILE: usize;
    /// Rows of the register tile: 4, 6 or 8.
    const GROUP: usize;
    /// Vector registers.
    const REGISTERS: usize;
    /// Name that users choose kernels by.
    const NAME: &'static str;

    /// The token, where the processor has the features.
    fn detect() -> Option<Self>;
    /// Runs `job`, compiled with the features.
    fn vectorize<J: Job>(self, job: J) -> J::Output;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// Reads a vector.
    ///
    /// # Safety
    /// `ptr` is valid for reading `LANES` floats.
    unsafe fn load(self, ptr: *const f32) -> Self::V;
    /// Writes a vector.
    ///
    /// # Safety
    /// `ptr` is valid for writing `LANES` floats.
    unsafe fn store(self, ptr: *mut f32, x: Self::V);
    /// `a + b`
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger one, `b` where `a` is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `x` where `a < b`, else -inf.
    fn keep_less(self, a: Self::V, b: Self::V, x: Self::V) -> Self::V;
    /// `x`, and 0 instead of -inf.
    fn finite_max(self, x: Self::V) -> Self::V;
    /// 2 to the power of `x <= 0`.
    fn exp2(self, x: Self::V) -> Self::V;
    /// The sum of the lanes.
    fn sum(self, x: Self::V) -> f32;

    /// Asks for the cache line of `ptr`, which may be any address, because it will be read soon.
    #[inline(always)]
    fn prefetch(self, _ptr: *const u8) {}

    /// Reads `LANES` elements as f32.
    ///
    /// # Safety
    /// `ptr` is valid for reading `LANES` elements.
    unsafe fn widen<T: Element>(self, ptr: *const T) -> Self::V;
    /// Writes `LANES` elements, rounded to nearest.
    ///
    /// # Safety
    /// `ptr` is valid for writing `LANES` elements.
    unsafe fn narrow<T: Element>(self, ptr: *mut T, x: Self::V);

    /// Reads `n` elements; the other lanes are 0.
    ///
    /// # Safety
    /// `n <= LANES`, and `ptr` is valid for reading `n` elements.
    #[inline(always)]
    unsafe fn widen_part<T: Element>(self, ptr: *const T, n: usize) -> Self::V {
        let mut buffer = [T::from_f32(0.0); MAX_LANES];
        // SAFETY: the caller's contract; the buffer holds MAX_LANES >= LANES elements.
        unsafe {
            std::ptr::copy_nonoverlapping(ptr, buffer.as_mut_ptr(), n);
            self.widen(buffer.as_ptr())
        }
    }

    /// Writes the first `n` lanes.
    ///
    /// # Safety
    /// `n <= LANES`, and `ptr` is valid for writing `n` elements.
    #[inline(always)]
    unsafe fn narrow_part<T: Element>(self, ptr: *mut T, x: Self::V, n: usize) {
        let mut buffer = [T::from_f32(0.0); MAX_LANES];
        // SAFETY: the caller's contract; the buffer holds MAX_LANES >= LANES elements.
        unsafe {
            self.narrow(buffer.as_mut_ptr(), x);
            std::ptr::copy_nonoverlapping(buffer.as_ptr(), ptr, n);
        }
    }

    /// Rounds both to bf16, ties away from zero: each lane holds the bits of `a`'s below those of `b`'s.
    #[inline(always)]
    fn pair(self, a: Self::V, b: Self::V) -> Self::V {
        let (mut low, mut high) = ([0.0f32; MAX_LANES], [0.0f32; MAX_LANES]);
        // SAFETY: the arrays hold MAX_LANES floats.
        unsafe {
            self.store(low.as_mut_ptr(), a);
            self.store(high.as_mut_ptr(), b);
            for (low, high) in low.iter_mut().zip(&high) {
                let rounded = |x: f32| x.to_bits().wrapping_add(0x8000);
                *low = f32::from_bits(rounded(*low) >> 16 | rounded(*high) & 0xffff_0000);
            }
            self.load(low.as_ptr())
        }
    }

    /// The upper halves of both, which are bf16 rounded towards zero, as [`Isa::pair`] puts them together.
    #[inline(always)]
    fn halves(self, a: Self::V, b: Self::V) -> Self::V {
        let (mut low, mut high) = ([0.0f32; MAX_LANES], [0.0f32; MAX_LANES]);
        // SAFETY: the arrays hold MAX_LANES floats.
        unsafe {
            self.store(low.as_mut_ptr(), a);
            self.store(high.as_mut_ptr(), b);
            for (low, high) in low.iter_mut().zip(&high) {
                *low = f32::from_bits(low.to_bits() >> 16 | high.to_bits() & 0xffff_0000);
            }
            self.load(low.as_ptr())
        }
    }

    /// What rounding to bf16 towards zero takes away: exact where `x` is finite, else NaN.
    #[inline(always)]
    fn rest(self, x: Self::V) -> Self::V {
        let mut upper = [0.0f32; MAX_LANES];
        // SAFETY: the array holds MAX_LANES floats.
        unsafe {
            self.store(upper.as_mut_ptr(), x);
            for x in &mut upper {
                *x = f32::from_bits(x.to_bits() & 0xffff_0000);
            }
            self.sub(x, self.load(upper.as_ptr()))
        }
    }

    /// Exchanges rows and columns of the first `LANES` vectors.
    fn transpose(self, rows: &mut [Self::V; MAX_LANES]);

    /// Lane i is the sum of the lanes of row i, for the first `LANES` vectors; the order of additions is the same for all.
    #[inline(always)]
    fn sums(self, mut rows: [Self::V; MAX_LANES]) -> Self::V {
        self.transpose(&mut rows);
        let mut half = Self::LANES / 2;
        while half > 0 {
            for i in 0..half {
                rows[i] = self.add(rows[i], rows[i + half]);
            }
            half /= 2;
        }
        rows[0]
    }
}

/// The most lanes of any [`Isa`].
pub(crate) const MAX_LANES: usize = 16;
/// The most vectors in a register tile's row of any [`Isa`].
pub(crate) const MAX_TILE: usize = 3;

/// Code to be compiled once for every [`Isa`]. Only what is `#[inline(always)]` inside `run` gets the features.
pub(crate) trait Job {
    /// The result.
    type Output;
    /// The code; implementations are `#[inline(always)]`.
    fn run<I: Isa>(self, isa: I) -> Self::Output;
}

/// 2^f on [0, 1], relative error below 1.5e-7 in f32 and exact at 0: minimax with the constant fixed, lowest power first.
pub(crate) const EXP2: [f32; 6] = [1.0, 0.693_151_3, 0.240_164_44, 0.055_799_913, 0.009_017_031, 0.001_867_13];

/// Where an [`Isa`] that builds the power of two from its exponent field cuts off: rounds down to -127, whose field is 0.
pub(crate) const EXP2_FLOOR: f32 = -126.99;

/// The polynomial of [`EXP2`].
#[inline(always)]
pub(crate) fn exp2_fraction<I: Isa>(isa: I, f: I::V) -> I::V {
    let mut p = isa.splat(EXP2[5]);
    for &c in EXP2[..5].iter().rev() {
        p = isa.fma(p, f, isa.splat(c));
    }
    p
}
