//! Instruction sets for products of 8-bit integers: a file and a row of [`each_byte_dot`] each.
//!
//! A [`ByteDot`] value is a token that exists only if the processor has the features, so its methods may use them.

use crate::isa::{Isa, MAX_LANES, MatrixUnit, array};

/// All instruction sets, best first: module and token type.
macro_rules! each_byte_dot {
    ($callback:ident) => {
        $callback! {
            #[cfg(target_arch = "x86_64")]
            avx512vnni::Avx512Vnni,
            #[cfg(target_arch = "x86_64")]
            avxvnni::AvxVnni,
            #[cfg(target_arch = "x86_64")]
            avx2::Avx2Dot,
            #[cfg(target_arch = "aarch64")]
            neondot::NeonDot,
            #[cfg(target_arch = "aarch64")]
            neon::NeonMultiply,
            #[cfg(all())]
            portable::PortableDot,
        }
    };
}

/// What [`ByteDot::nibble`], and [`ByteDot::byte`], subtract: sums of numbers around 0 round less.
pub(crate) const FLOAT_SUBTRACTED: [u8; 2] = [8, 128];

/// What is subtracted from weights of 8 bits that are narrow: from 64 to 191. The others' differ by up to 255, and the sum of two products
/// with activations does not fit into 16 bits.
pub(crate) const NARROW_SUBTRACTED: u8 = 64;

/// Operations on vectors of [`Isa::LANES`] words of 32 bits, which are also read as four bytes each.
pub(crate) trait ByteDot: Copy + Send + Sync + 'static {
    /// The floating-point vectors.
    type Vectors: Isa;
    /// A vector of words.
    type W: Copy;
    /// What [`ByteDot::parts`] returns: [`Never`] without words of 16 bits.
    type Parts: Words16<Self::W, <Self::Vectors as Isa>::V>;
    /// The name, for tests.
    #[cfg_attr(not(test), allow(dead_code))]
    const NAME: &'static str;
    /// What the products of weights of 4 bits, and of 8, subtract from each weight already: 0, or 8 and 128.
    const SUBTRACTED: [u8; 2];
    /// Vectors that [`ByteDot::store_rounded`] takes at most, a power of two.
    const AT_ONCE: usize = 2;

    /// The token, if the processor has the features.
    fn detect() -> Option<Self>;
    /// The floating-point vectors' token.
    fn vectors(self) -> Self::Vectors;
    /// Runs `job`, compiled with the features of the instruction set.
    fn vectorize<J: DotJob>(self, job: J) -> J::Output;

    /// 0 in every word.
    fn zero(self) -> Self::W;
    /// Reads a vector.
    ///
    /// # Safety
    /// `ptr` is valid for reading `4 * LANES` bytes.
    unsafe fn load(self, ptr: *const u8) -> Self::W;
    /// Reads the first `bytes` bytes; the others are 0.
    ///
    /// # Safety
    /// `ptr` is valid for reading `bytes <= 4 * LANES` bytes.
    #[inline(always)]
    unsafe fn load_part(self, ptr: *const u8, bytes: usize) -> Self::W {
        let mut buffer = [0u8; 4 * MAX_LANES];
        // SAFETY: the caller's contract; the buffer holds 4 * MAX_LANES >= 4 * LANES bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(ptr, buffer.as_mut_ptr(), bytes);
            self.load(buffer.as_ptr())
        }
    }
    /// The word at `ptr` in every word.
    ///
    /// # Safety
    /// `ptr` is valid for reading 4 bytes.
    unsafe fn broadcast(self, ptr: *const u8) -> Self::W;
    /// The same bits as floats.
    fn as_floats(self, words: Self::W) -> <Self::Vectors as Isa>::V;
    /// The same bits as words.
    fn as_words(self, floats: <Self::Vectors as Isa>::V) -> Self::W;

    /// The low half of each byte.
    fn low(self, words: Self::W) -> Self::W;
    /// The high half of each byte, shifted down.
    fn high(self, words: Self::W) -> Self::W;
    /// Adds to each word the sum of its four products of bytes, exactly: weights `w` from 0 to 15, less
    /// `SUBTRACTED[0]`, times signed `x` from -127 to 127.
    fn dot4(self, sum: Self::W, w: Self::W, x: Self::W) -> Self::W;
    /// The same for weights from 0 to 255, less `SUBTRACTED[1]`.
    fn dot8(self, sum: Self::W, w: Self::W, x: Self::W) -> Self::W;
    /// Words of 16 bits, if products of those take fewer instructions than [`ByteDot::dot4`] and [`ByteDot::dot8`].
    #[inline(always)]
    fn parts(self) -> Option<Self::Parts> {
        None
    }
    /// The sum of eight products in each word: [`ByteDot::dot4`] of the low halves of `w` with `even`, and of its high ones with `odd`.
    #[inline(always)]
    fn dot_halves(self, w: Self::W, even: Self::W, odd: Self::W) -> Self::W {
        self.dot4(self.dot4(self.zero(), self.low(w), even), self.high(w), odd)
    }
    /// The signed words as floats.
    fn to_float(self, words: Self::W) -> <Self::Vectors as Isa>::V;
    /// Bits `4 * INDEX ..` of each word, less `FLOAT_SUBTRACTED[0]`.
    fn nibble<const INDEX: usize>(self, words: Self::W) -> <Self::Vectors as Isa>::V;
    /// Bits `8 * INDEX ..` of each word, less `FLOAT_SUBTRACTED[1]`.
    fn byte<const INDEX: usize>(self, words: Self::W) -> <Self::Vectors as Isa>::V;

    /// Rounds every lane, whose magnitude is at most 127, to the nearest integer, half to even, and writes the integers as bytes. The lanes
    /// of what it returns have the integers' sum.
    ///
    /// # Safety
    /// `output` is valid for writing `N * LANES` bytes; `N` is a power of two, at most [`ByteDot::AT_ONCE`].
    #[inline(always)]
    unsafe fn store_rounded<const N: usize>(
        self,
        x: [<Self::Vectors as Isa>::V; N],
        output: *mut u8,
    ) -> <Self::Vectors as Isa>::V {
        let (bytes, sum) = rounded(self.vectors(), x);
        // SAFETY: the caller's contract.
        unsafe { self.store_bytes(bytes, output) }
        sum
    }
    /// The same, but writes the integers of lanes of even index to `even`, the others to `odd`.
    ///
    /// # Safety
    /// Both are valid for writing `N * LANES / 2` bytes; `N` is a power of two, at most [`ByteDot::AT_ONCE`].
    #[inline(always)]
    unsafe fn store_rounded_apart<const N: usize>(
        self,
        x: [<Self::Vectors as Isa>::V; N],
        even: *mut u8,
        odd: *mut u8,
    ) -> <Self::Vectors as Isa>::V {
        let (bytes, sum) = rounded(self.vectors(), x);
        // SAFETY: the caller's contract.
        unsafe { self.store_bytes_apart(bytes, even, odd) }
        sum
    }
    /// Writes the low byte of every lane of one or two vectors.
    ///
    /// # Safety
    /// `output` is valid for writing `N * LANES` bytes.
    #[inline(always)]
    unsafe fn store_bytes<const N: usize>(self, x: [<Self::Vectors as Isa>::V; N], output: *mut u8) {
        let mut lanes = [0.0f32; MAX_LANES];
        for (i, &x) in x.iter().enumerate() {
            // SAFETY: the array holds a vector; the caller's contract.
            unsafe {
                self.vectors().store(lanes.as_mut_ptr(), x);
                for lane in 0..Self::Vectors::LANES {
                    output.add(i * Self::Vectors::LANES + lane).write(lanes[lane].to_bits() as u8);
                }
            }
        }
    }
    /// Writes the low byte of every lane of even index to `even`, of the others to `odd`.
    ///
    /// # Safety
    /// Both are valid for writing `N * LANES / 2` bytes.
    #[inline(always)]
    unsafe fn store_bytes_apart<const N: usize>(self, x: [<Self::Vectors as Isa>::V; N], even: *mut u8, odd: *mut u8) {
        let mut lanes = [0.0f32; MAX_LANES];
        for (i, &x) in x.iter().enumerate() {
            // SAFETY: the array holds a vector; the caller's contract.
            unsafe {
                self.vectors().store(lanes.as_mut_ptr(), x);
                for lane in 0..Self::Vectors::LANES / 2 {
                    let place = i * Self::Vectors::LANES / 2 + lane;
                    even.add(place).write(lanes[2 * lane].to_bits() as u8);
                    odd.add(place).write(lanes[2 * lane + 1].to_bits() as u8);
                }
            }
        }
    }

    /// The argument of [`ByteDot::spread`] for these lanes.
    fn indices(self, lanes: &[u32; MAX_LANES]) -> Self::W;
    /// Lane i is lane `indices[i]` of `x`.
    fn spread(self, x: <Self::Vectors as Isa>::V, indices: Self::W) -> <Self::Vectors as Isa>::V;

    /// Lane i is bits `4 * i ..` of `bits`.
    #[inline(always)]
    fn nibbles(self, bits: u64) -> <Self::Vectors as Isa>::V {
        self.bytes(&std::array::from_fn(|lane| (bits >> (4 * lane)) as u8 & 15))
    }
    /// Lane i is byte i.
    #[inline(always)]
    fn bytes(self, bytes: &[u8; MAX_LANES]) -> <Self::Vectors as Isa>::V {
        let lanes = bytes.map(f32::from);
        // SAFETY: the array holds MAX_LANES floats.
        unsafe { self.vectors().load(lanes.as_ptr()) }
    }
}

/// Lanes whose low bytes are `x`, rounded to the nearest integers, half to even, and these integers' sum. Magnitudes are at most 2^21.
#[inline(always)]
pub(crate) fn rounded<I: Isa, const N: usize>(isa: I, x: [I::V; N]) -> ([I::V; N], I::V) {
    /// Added to an integer, gives a float whose low bits are the integer. The sum is rounded to nearest even.
    const MAGIC: f32 = 12_582_912.0;
    let magic = isa.splat(MAGIC);
    let integers: [I::V; N] = array(|i| isa.add(x[i], magic));
    let mut sum = isa.splat(0.0);
    for integers in integers {
        sum = isa.add(sum, isa.sub(integers, magic));
    }
    (integers, sum)
}

/// Words of 16 bits, two in one of 32, with sums of products of 4-bit weights, or with 8-bit weights and activations.
pub(crate) trait Words16<W, V>: Copy {
    /// The products of [`ByteDot::dot4`], in sums of two.
    fn multiply4(self, w: W, x: W) -> W;
    /// Adds them to the sum of others: at most eight together end in [`Words16::add`].
    fn add4(self, part: W, products: W) -> W;
    /// Adds the sums of 16 bits in `part` to those of 32 bits.
    fn add(self, sum: W, part: W) -> W;

    /// The first two bytes of each word and the last two, each weight less `SUBTRACTED[1]`.
    fn widen(self, words: W) -> [W; 2];
    /// Subtracts [`NARROW_SUBTRACTED`] from each byte.
    fn narrow(self, words: W) -> W;
    /// The sum of the four products of bytes in each word: weights `w` from 0 to 127 times signed `x` from -127 to 127.
    fn multiply_narrow(self, w: W, x: W) -> W;
    /// The sum of the products of each word's two integers.
    fn multiply2(self, w: W, x: W) -> W;
    /// Adds them to the sum of others.
    fn add2(self, sum: W, products: W) -> W;
    /// Writes the low 16 bits of every lane of one or two vectors.
    ///
    /// # Safety
    /// `output` is valid for writing `2 * N * LANES` bytes.
    unsafe fn store_low<const N: usize>(self, x: [V; N], output: *mut u8);
}

/// The token of what an instruction set lacks: there is none.
#[derive(Clone, Copy)]
pub(crate) enum Never {}

impl<W, V> Words16<W, V> for Never {
    fn multiply4(self, _: W, _: W) -> W {
        match self {}
    }
    fn add4(self, _: W, _: W) -> W {
        match self {}
    }
    fn add(self, _: W, _: W) -> W {
        match self {}
    }
    fn widen(self, _: W) -> [W; 2] {
        match self {}
    }
    fn multiply_narrow(self, _: W, _: W) -> W {
        match self {}
    }
    fn narrow(self, _: W) -> W {
        match self {}
    }
    fn multiply2(self, _: W, _: W) -> W {
        match self {}
    }
    fn add2(self, _: W, _: W) -> W {
        match self {}
    }
    unsafe fn store_low<const N: usize>(self, _: [V; N], _: *mut u8) {
        match self {}
    }
}

/// Code that is compiled for every [`ByteDot`]. Only `#[inline(always)]` functions called from `run` get the features.
pub(crate) trait DotJob {
    /// The result.
    type Output;
    /// The code; implementations are `#[inline(always)]`.
    fn run<D: ByteDot>(self, dot: D) -> Self::Output;
}

macro_rules! modules {
    ($(#[$cfg:meta] $module:ident::$token:ident,)*) => { $(#[$cfg] mod $module;)* };
}
each_byte_dot!(modules);

macro_rules! engine {
    ($(#[$cfg:meta] $module:ident::$token:ident,)*) => {
        /// An instruction set that the processor has.
        #[derive(Clone, Copy)]
        enum Dots {
            $(#[$cfg] $token($module::$token),)*
        }

        impl Engine {
            /// Those that the processor has, with the matrix unit and without.
            #[cfg(test)]
            pub(crate) fn all(unit: Option<MatrixUnit>) -> Vec<Engine> {
                let mut all = Vec::new();
                $(
                    #[$cfg]
                    if let Some(token) = $module::$token::detect() {
                        let alone = Engine { dots: Dots::$token(token), unit: None };
                        let beside = Engine { unit, ..alone }.checked();
                        all.push(alone);
                        all.extend(beside.unit.is_some().then_some(beside));
                    }
                )*
                all
            }

            /// The best one that needs no more than `I`, and the matrix unit.
            pub(crate) fn of<I: Isa>(unit: Option<MatrixUnit>) -> Engine {
                $(
                    #[$cfg]
                    if fits::<I, $module::$token>() && let Some(token) = $module::$token::detect() {
                        return Engine { dots: Dots::$token(token), unit }.checked();
                    }
                )*
                Engine { dots: Dots::PortableDot(portable::PortableDot), unit: None }
            }

            /// Runs `job` on the vectors.
            pub(crate) fn run<J: DotJob>(self, job: J) -> J::Output {
                match self.dots {
                    $(#[$cfg] Dots::$token(token) => token.vectorize(job),)*
                }
            }

            /// The name of the vectors.
            #[cfg(test)]
            pub(crate) fn name(self) -> &'static str {
                match self.dots {
                    $(#[$cfg] Dots::$token(_) => $module::$token::NAME,)*
                }
            }

            /// Whether products of 8-bit weights with many rows are products of words of 16 bits.
            pub(crate) fn widens_bytes(self) -> bool {
                match self.dots {
                    $(#[$cfg] Dots::$token(token) => token.parts().is_some(),)*
                }
            }

            /// Words of a vector.
            pub(crate) fn lanes(self) -> usize {
                match self.dots {
                    $(#[$cfg] Dots::$token(_) => <$module::$token as ByteDot>::Vectors::LANES,)*
                }
            }
        }
    };
}
each_byte_dot!(engine);

/// What computes products: vectors, and perhaps a matrix unit.
#[derive(Clone, Copy)]
pub(crate) struct Engine {
    dots: Dots,
    /// For products of many rows whose activations may be rounded.
    unit: Option<MatrixUnit>,
}

impl Engine {
    /// The matrix unit.
    pub(crate) fn unit(self) -> Option<MatrixUnit> {
        self.unit
    }

    /// Without a matrix unit that takes longer than these vectors, or other vectors than these.
    fn checked(self) -> Engine {
        Engine { unit: self.unit.filter(|unit| unit.beats_bytes() && self.lanes() == MAX_LANES), ..self }
    }
}

/// Whether kernels that are compiled for `I` may use `D`: it has the same vectors or shorter ones.
fn fits<I: Isa, D: ByteDot>() -> bool {
    <D::Vectors as Isa>::NAME == I::NAME || D::Vectors::LANES < I::LANES
}
