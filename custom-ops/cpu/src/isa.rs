//! Vector instruction sets. Kernels are generic over [`Isa`], which one file per instruction set implements.
//!
//! A new instruction set is a file here and a row of [`each_isa`]; a new matrix unit, a row of [`each_unit`].
//!
//! An [`Isa`] value is a token that exists only if the processor has the features, so its methods may use them.

#[cfg(test)]
mod tests;
pub(crate) mod unit;

use moh_operators::Element;
use std::mem::MaybeUninit;
use unit::Unit;

/// All vector instruction sets, best first: module and token type.
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

/// All matrix units, best first. They are preferred to the vector instruction sets that they are combined with.
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
        /// A matrix unit: multiplies blocks of bfloat16 faster than f32 vectors do. Exists only if the processor has
        /// it.
        #[derive(Debug, Clone, Copy)]
        pub(crate) enum MatrixUnit {
            $(#[$cfg] $token($module::$token),)*
        }

        /// A matrix unit, prepared for use by this thread.
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

            /// See [`Unit::beats_bytes`].
            pub(crate) fn beats_bytes(self) -> bool {
                match self {
                    $(#[$cfg] MatrixUnit::$token(_) => $module::$token::beats_bytes(),)*
                }
            }

            pub(crate) fn start(self) -> Multiplier {
                match self {
                    $(#[$cfg] MatrixUnit::$token(unit) => Multiplier::$token(unit.start()),)*
                }
            }
        }

        impl Multiplier {
            /// Computes the products of both matrices of `a` with `b`, or only of the first.
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

            /// Computes the products of both matrices of `a` with `b`, or only of the first.
            ///
            /// # Safety
            /// As [`unit::Multiply::multiply_digits`].
            #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
            pub(crate) unsafe fn multiply_digits<const BOTH: bool>(&self, product: &unit::DigitProduct) {
                match *self {
                    $(#[$cfg] Multiplier::$token(ref multiplier) => {
                        // SAFETY: the caller's contract.
                        unsafe { unit::Multiply::multiply_digits::<BOTH>(multiplier, product) }
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

/// What a kernel is compiled for: a vector instruction set, optionally with a matrix unit.
pub(crate) trait Target {
    /// The vector instruction set.
    type Vectors: Isa;
    /// The name by which users select kernels.
    const NAME: &'static str;
    /// The tokens, if the processor has the features.
    fn detect() -> Option<(Self::Vectors, Option<MatrixUnit>)>;
    /// Whether automatic selection may pick it if supported.
    fn is_automatic() -> bool;
}

impl<I: Isa> Target for I {
    type Vectors = I;
    const NAME: &'static str = <I as Isa>::NAME;
    fn detect() -> Option<(I, Option<MatrixUnit>)> {
        Some((<I as Isa>::detect()?, None))
    }
    fn is_automatic() -> bool {
        true
    }
}

/// The target of kernels that use a matrix unit.
pub(crate) struct WithUnit<U>(std::marker::PhantomData<U>);

impl<U: Unit + Into<MatrixUnit>> Target for WithUnit<U> {
    type Vectors = U::Vectors;
    const NAME: &'static str = U::NAME;
    fn detect() -> Option<(U::Vectors, Option<MatrixUnit>)> {
        Some((<U::Vectors as Isa>::detect()?, Some(U::detect()?.into())))
    }
    fn is_automatic() -> bool {
        U::is_fast()
    }
}

/// Name of the vector instruction set that is combined with the matrix unit `unit`.
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

/// The matrix unit named `forced`; without a name, the best one that automatic selection may pick.
pub(crate) fn matrix_unit(forced: Option<&str>) -> Option<MatrixUnit> {
    macro_rules! first {
        ($(#[$cfg:meta] $module:ident::$token:ident,)*) => {
            $(
                #[$cfg]
                if forced.map_or_else($module::$token::is_fast, |forced| forced == $module::$token::NAME)
                    && let Some(unit) = <$module::$token as Unit>::detect()
                {
                    return Some(unit.into());
                }
            )*
        };
    }
    each_unit!(first);
    let _ = forced;
    None
}

/// Runs `job` with the best vector instruction set, or with the one named `forced`; if there is none, with the
/// portable one.
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

/// Operations on f32 vectors, and the number of registers.
///
/// `max` returns its second operand if the first is NaN. `exp2` is for arguments <= 0; below -126 it may return 0, for
/// -inf it returns 0, and NaN stays NaN.
pub(crate) trait Isa: Copy + Send + Sync + 'static {
    /// A vector of [`Isa::LANES`] f32.
    type V: Copy;
    /// Lanes per vector: a power of two, at most 16.
    const LANES: usize;
    /// Vectors per row of the register tile, at most [`MAX_TILE`].
    const TILE: usize;
    /// Rows of the register tile: 4, 6 or 8.
    const GROUP: usize;
    /// Number of vector registers.
    const REGISTERS: usize;
    /// The name by which users select kernels.
    const NAME: &'static str;

    /// The token, if the processor has the features.
    fn detect() -> Option<Self>;
    /// Runs `job`, compiled with the features of the instruction set.
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
    /// `a / b` for `b` from 1 to infinity, or a NaN; off by two units in the last place at most unless `b` is more than 2^126.
    #[inline(always)]
    fn quotient(self, a: Self::V, b: Self::V) -> Self::V {
        self.div(a, b)
    }
    /// `a * b + c`
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of both; `b` if `a` is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `x` where `a < b`, else -inf, lane by lane.
    fn keep_less(self, a: Self::V, b: Self::V, x: Self::V) -> Self::V;
    /// `x`, with 0 in place of -inf.
    fn finite_max(self, x: Self::V) -> Self::V;
    /// 2 to the power of `x`, at most [`EXP2_MOST`]; infinity already from 127.5 on, or only from 128 on.
    fn exp2(self, x: Self::V) -> Self::V;
    /// The sum of the lanes.
    fn sum(self, x: Self::V) -> f32;

    /// Prefetches the cache line of `ptr`, which may be any address.
    #[inline(always)]
    fn prefetch(self, _ptr: *const u8) {}
    /// The same for a line that is going to be written, as near as possible.
    #[inline(always)]
    fn prefetch_output(self, _ptr: *const u8) {}

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
        if n == Self::LANES {
            // SAFETY: the caller's contract.
            return unsafe { self.widen(ptr) };
        }
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
        if n == Self::LANES {
            // SAFETY: the caller's contract.
            return unsafe { self.narrow(ptr, x) };
        }
        let mut buffer = [T::from_f32(0.0); MAX_LANES];
        // SAFETY: the caller's contract; the buffer holds MAX_LANES >= LANES elements.
        unsafe {
            self.narrow(buffer.as_mut_ptr(), x);
            std::ptr::copy_nonoverlapping(buffer.as_ptr(), ptr, n);
        }
    }

    /// Rounds both to bf16, ties away from zero, and interleaves: each 32-bit lane holds `a`'s value in its low half
    /// and `b`'s in its high half.
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

    /// As [`Isa::pair`], but rounded towards zero: the upper 16 bits of both.
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

    /// What [`Isa::pair`] has interleaved.
    #[inline(always)]
    fn unpair(self, x: Self::V) -> [Self::V; 2] {
        let mut lanes = [0.0f32; MAX_LANES];
        // SAFETY: the arrays hold MAX_LANES floats.
        unsafe {
            self.store(lanes.as_mut_ptr(), x);
            [16, 0].map(|up| {
                let halves = lanes.map(|pair| f32::from_bits(pair.to_bits() << up & 0xffff_0000));
                self.load(halves.as_ptr())
            })
        }
    }

    /// The difference between `x` and its rounding to bf16 towards zero: exact if `x` is finite, else NaN.
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

    /// `x`, with 0 in place of the first `n` lanes.
    #[inline(always)]
    fn without_first(self, x: Self::V, n: usize) -> Self::V {
        let mut lanes = [0.0f32; MAX_LANES];
        // SAFETY: the array holds MAX_LANES floats.
        unsafe {
            self.store(lanes.as_mut_ptr(), x);
            lanes[..n.min(MAX_LANES)].fill(0.0);
            self.load(lanes.as_ptr())
        }
    }

    /// The number of larger magnitude, without its sign; NaN has the largest of all.
    #[inline(always)]
    fn larger_magnitude(self, a: Self::V, b: Self::V) -> Self::V {
        let (mut left, mut right) = ([0.0f32; MAX_LANES], [0.0f32; MAX_LANES]);
        // SAFETY: the arrays hold MAX_LANES floats.
        unsafe {
            self.store(left.as_mut_ptr(), a);
            self.store(right.as_mut_ptr(), b);
            for (left, right) in left.iter_mut().zip(&right) {
                *left = f32::from_bits(left.abs().to_bits().max(right.abs().to_bits()));
            }
            self.load(left.as_ptr())
        }
    }

    /// The vectors times `scale`, rounded to integers of at most [`LARGEST_OF_DIGITS`], as three digits of base 256, largest first, each of
    /// -128 to 127: byte i of a lane is that of vector i.
    #[inline(always)]
    fn digits(self, x: [Self::V; 4], scale: Self::V) -> [Self::V; 3] {
        const MIDDLE: u32 = 0x80_8080;
        let mut bits = [[0u32; MAX_LANES]; 3];
        for (byte, x) in x.into_iter().enumerate() {
            let mut scaled = [0.0f32; MAX_LANES];
            // SAFETY: the array holds MAX_LANES floats.
            unsafe { self.store(scaled.as_mut_ptr(), self.mul(x, scale)) }
            for (lane, x) in scaled.into_iter().enumerate() {
                let whole = (x.round_ties_even() as i32).cast_unsigned().wrapping_add(MIDDLE) ^ MIDDLE;
                for (digit, bits) in bits.iter_mut().enumerate() {
                    bits[lane] |= (whole >> (8 * (2 - digit)) & 0xff) << (8 * byte);
                }
            }
        }
        // SAFETY: the arrays hold MAX_LANES floats.
        bits.map(|bits| unsafe { self.load(bits.as_ptr().cast()) })
    }

    /// The integers of 32 bits that the lanes hold.
    #[inline(always)]
    fn widen_integers(self, x: Self::V) -> Self::V {
        let mut numbers = [0.0f32; MAX_LANES];
        // SAFETY: the array holds MAX_LANES floats.
        unsafe {
            self.store(numbers.as_mut_ptr(), x);
            for x in &mut numbers {
                *x = x.to_bits().cast_signed() as f32;
            }
            self.load(numbers.as_ptr())
        }
    }

    /// Transposes the matrix of the first `LANES` vectors.
    fn transpose(self, rows: &mut [Self::V; MAX_LANES]);

    /// Lane i is what `both` makes of the lanes of row i, for the first `LANES` vectors. The order is the same for all rows.
    #[inline(always)]
    fn across(self, mut rows: [Self::V; MAX_LANES], both: impl Fn(Self::V, Self::V) -> Self::V) -> Self::V {
        self.transpose(&mut rows);
        let mut half = Self::LANES / 2;
        while half > 0 {
            for i in 0..half {
                rows[i] = both(rows[i], rows[i + half]);
            }
            half /= 2;
        }
        rows[0]
    }

    /// Lane i is the sum of the lanes of row i, for the first `LANES` vectors.
    #[inline(always)]
    fn sums(self, rows: [Self::V; MAX_LANES]) -> Self::V {
        self.across(rows, |a, b| self.add(a, b))
    }
}

/// The largest integer of three digits of -128 to 127.
pub(crate) const LARGEST_OF_DIGITS: i32 = 0x7f_7f7f;
/// The maximum of [`Isa::LANES`].
pub(crate) const MAX_LANES: usize = 16;
/// The maximum of [`Isa::TILE`].
pub(crate) const MAX_TILE: usize = 3;

/// As [`std::array::from_fn`], of which the compiler sometimes makes a call: its vectors then go through memory, and it is compiled
/// without the features of the instruction set.
#[inline(always)]
pub(crate) fn array<T: Copy, const N: usize>(element: impl Fn(usize) -> T) -> [T; N] {
    let mut array = [MaybeUninit::<T>::uninit(); N];
    for (i, place) in array.iter_mut().enumerate() {
        place.write(element(i));
    }
    // SAFETY: each element was written.
    unsafe { array.as_ptr().cast::<[T; N]>().read() }
}

/// Code that is compiled for every [`Isa`]. Only `#[inline(always)]` functions called from `run` get the features.
pub(crate) trait Job {
    /// The result.
    type Output;
    /// The code; implementations are `#[inline(always)]`.
    fn run<I: Isa>(self, isa: I) -> Self::Output;
}

/// Polynomial of 2^f on [0, 1], lowest power first: relative error below 1.5e-7 in f32, exact at 0 (minimax with the
/// constant term fixed).
pub(crate) const EXP2: [f32; 6] = [1.0, 0.693_151_3, 0.240_164_44, 0.055_799_913, 0.009_017_031, 0.001_867_13];

/// The same on [-0.5, 0.5]: relative error below 1.8e-7.
pub(crate) const EXP2_NEAREST: [f32; 6] =
    [1.0, 0.693_146_94, 0.240_222_42, 0.055_507_336, 0.009_671_513, 0.001_326_472_7];

/// The greatest argument of [`Isa::exp2`], of which the result is infinity.
pub(crate) const EXP2_MOST: f32 = 128.25;

/// Lower bound of `exp2`'s argument in an [`Isa`] that builds the power of two in the exponent field: rounds to -127,
/// whose field is 0.
pub(crate) const EXP2_FLOOR: f32 = -126.99;

/// Added to a number, rounds it to the nearest integer, and leaves that plus 127, an exponent field, in the sum's lowest
/// bits.
pub(crate) const EXP2_ROUND: f32 = 12_582_912.0 + 127.0;

/// Evaluates a polynomial of 2^f.
#[inline(always)]
pub(crate) fn exp2_fraction<I: Isa>(isa: I, polynomial: &[f32; 6], f: I::V) -> I::V {
    let mut p = isa.splat(polynomial[5]);
    for &c in polynomial[..5].iter().rev() {
        p = isa.fma(p, f, isa.splat(c));
    }
    p
}
