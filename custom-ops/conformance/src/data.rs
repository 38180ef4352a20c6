//! Buffers of any element type, and a reproducible random generator.

use half::{bf16, f16};
use moh_operators::{DType, Data, DataMut, Element};

/// Elements before and after each tensor, NaN or an extreme integer: reading NaN makes results NaN, and writing is detected.
const FRAME: usize = 64;

/// Elements of one type between guard frames.
#[derive(Debug, Clone)]
pub struct Buffer(Elements);

#[derive(Debug, Clone)]
enum Elements {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    U8(Vec<u8>),
    I64(Vec<i64>),
}

impl Buffer {
    /// The numbers, rounded to `dtype`.
    pub fn new(dtype: DType, numbers: &[f32]) -> Buffer {
        fn framed<T: Element>(numbers: &[f32]) -> Vec<T> {
            let frame = std::iter::repeat_n(f32::NAN, FRAME);
            frame.clone().chain(numbers.iter().copied()).chain(frame).map(T::from_f32).collect()
        }
        fn integers<T: Copy>(numbers: &[f32], guard: T, integer: fn(f32) -> T) -> Vec<T> {
            let frame = std::iter::repeat_n(guard, FRAME);
            frame.clone().chain(numbers.iter().map(|&x| integer(x))).chain(frame).collect()
        }
        Buffer(match dtype {
            DType::F32 => Elements::F32(framed(numbers)),
            DType::F16 => Elements::F16(framed(numbers)),
            DType::BF16 => Elements::BF16(framed(numbers)),
            DType::U8 => Elements::U8(integers(numbers, u8::MAX, |x| x as u8)),
            DType::I64 => Elements::I64(integers(numbers, i64::MIN, |x| x as i64)),
        })
    }

    /// A buffer for an output, filled with NaN.
    pub fn unwritten(dtype: DType, len: usize) -> Buffer {
        Buffer::new(dtype, &vec![f32::NAN; len])
    }

    /// The elements.
    pub fn data(&self) -> Data<'_> {
        match &self.0 {
            Elements::F32(x) => Data::F32(&x[FRAME..x.len() - FRAME]),
            Elements::F16(x) => Data::F16(&x[FRAME..x.len() - FRAME]),
            Elements::BF16(x) => Data::BF16(&x[FRAME..x.len() - FRAME]),
            Elements::U8(x) => Data::U8(&x[FRAME..x.len() - FRAME]),
            Elements::I64(x) => Data::I64(&x[FRAME..x.len() - FRAME]),
        }
    }

    /// The elements, mutable.
    pub fn data_mut(&mut self) -> DataMut<'_> {
        match &mut self.0 {
            Elements::F32(x) => DataMut::F32(inside(x)),
            Elements::F16(x) => DataMut::F16(inside(x)),
            Elements::BF16(x) => DataMut::BF16(inside(x)),
            Elements::U8(x) => DataMut::U8(inside(x)),
            Elements::I64(x) => DataMut::I64(inside(x)),
        }
    }

    /// The elements, mutable. Panics if they are not float32.
    pub fn numbers_mut(&mut self) -> &mut [f32] {
        match &mut self.0 {
            Elements::F32(x) => inside(x),
            _ => panic!("expected float32"),
        }
    }

    /// The elements as f64. Panics if the guard frames were written to; `what` names the writer.
    pub fn values(&self, what: &dyn std::fmt::Debug) -> Vec<f64> {
        let (whole, len) = match &self.0 {
            Elements::F32(x) => (Data::F32(x), x.len()),
            Elements::F16(x) => (Data::F16(x), x.len()),
            Elements::BF16(x) => (Data::BF16(x), x.len()),
            Elements::U8(x) => (Data::U8(x), x.len()),
            Elements::I64(x) => (Data::I64(x), x.len()),
        };
        let intact = |i: usize| match &self.0 {
            Elements::U8(x) => x[i] == u8::MAX,
            Elements::I64(x) => x[i] == i64::MIN,
            _ => whole.at(i).is_nan(),
        };
        let mut frame = (0..FRAME).chain(len - FRAME..len);
        assert!(frame.all(intact), "{what:?} wrote beyond its output");
        (FRAME..len - FRAME).map(|i| whole.at(i)).collect()
    }
}

fn inside<T>(framed: &mut [T]) -> &mut [T] {
    let end = framed.len() - FRAME;
    &mut framed[FRAME..end]
}

/// The SplitMix64 generator, made from a seed.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// Uniform in 0..1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
    /// Uniform in -1..1.
    pub fn signed(&mut self) -> f32 {
        (self.unit() * 2.0 - 1.0) as f32
    }
}
