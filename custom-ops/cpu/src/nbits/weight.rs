//! A view of a weight in blocks of 4 or 8 bits.

use super::isa::{ByteDot, Engine, NARROW_SUBTRACTED};
use crate::host::Host;
use crate::isa::{Isa, MAX_LANES};
use half::{bf16, f16};
use moh_operators::{Element, Error, Float};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// What becomes of the activations before they are multiplied: the attribute `accuracy_level`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// They stay in floating point (`accuracy_level` 0).
    Float,
    /// They are quantised to 8 bits, with the scale max |x| / 127 of each row and block (`accuracy_level` 4).
    Int8,
}

impl Level {
    /// The level that permits 8-bit activations, or does not.
    pub(crate) fn of_int8(permitted: bool) -> Level {
        if permitted { Level::Int8 } else { Level::Float }
    }

    /// The level of an attribute `accuracy_level`, as `com.microsoft.MatMulNBits` defines it: 4 permits 8 bits, the others ask for more.
    pub fn of(accuracy_level: i64) -> Level {
        match accuracy_level {
            4 => Level::Int8,
            _ => Level::Float,
        }
    }
}

/// Rows with which a weight is multiplied, at least, for it to be read before to see whether it is narrow.
const NARROW_ROWS: usize = 64;

/// Whether all values are from [`NARROW_SUBTRACTED`] to 127 more. Of a weight that uses the whole range, little is read.
fn is_narrow(data: &[u8], host: &dyn Host) -> bool {
    /// Bytes of a work item, and of a step that may end it.
    const PART: usize = 1 << 18;
    const STEP: usize = 1 << 12;
    let beyond = AtomicBool::new(false);
    host.parallel_for(data.len().div_ceil(PART), &|part| {
        for values in data[part * PART..].chunks(STEP).take(PART / STEP) {
            if beyond.load(Ordering::Relaxed) {
                return;
            }
            if values.iter().fold(0, |all, value| all | value.wrapping_sub(NARROW_SUBTRACTED)) > 127 {
                beyond.store(true, Ordering::Relaxed);
            }
        }
    });
    !beyond.into_inner()
}

/// How the values along the inner dimension are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Format {
    /// Bits of a value, 4 or 8.
    pub(crate) bits: usize,
    /// Values of a block, which divides `k`.
    pub(crate) block: usize,
    /// Length of the inner dimension.
    pub(crate) k: usize,
    /// Whether the values of a weight of 8 bits are known to differ by no more than 7 bits hold, from 64 to 191: see [`NBits::narrowed`].
    pub(super) narrow: bool,
}

impl Format {
    /// Blocks of a column.
    pub(super) fn blocks(&self) -> usize {
        self.k / self.block
    }

    /// Bytes of a block's values.
    pub(super) fn block_bytes(&self) -> usize {
        self.block * self.bits / 8
    }

    /// Bytes of a column's values.
    pub(super) fn row_bytes(&self) -> usize {
        self.k / 8 * self.bits
    }

    /// Bytes of a column's zero points.
    pub(super) fn zero_bytes(&self) -> usize {
        (self.blocks() * self.bits).div_ceil(8)
    }

    /// The zero point of weights without zero points.
    pub(super) fn default_zero(&self) -> u8 {
        1 << (self.bits - 1)
    }
}

/// The blocks' scales, in their own type: kernels are compiled once for all types, as these numbers are few.
#[derive(Debug, Clone, Copy)]
pub(super) enum Scales<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl<'a> Scales<'a> {
    fn of<T: Element>(scales: &'a [T]) -> Scales<'a> {
        let (start, len) = (scales.as_ptr(), scales.len());
        // SAFETY: T is the type that it says.
        unsafe {
            match T::FLOAT {
                Float::F32 => Scales::F32(std::slice::from_raw_parts(start.cast(), len)),
                Float::F16 => Scales::F16(std::slice::from_raw_parts(start.cast(), len)),
                Float::BF16 => Scales::BF16(std::slice::from_raw_parts(start.cast(), len)),
            }
        }
    }

    /// One of them.
    pub(super) fn at(&self, i: usize) -> f32 {
        match self {
            Scales::F32(scales) => scales[i],
            Scales::F16(scales) => scales[i].to_f32(),
            Scales::BF16(scales) => scales[i].to_f32(),
        }
    }

    /// Whether they are read as they lie by [`Scales::floats`].
    pub(super) fn is_f32(self) -> bool {
        matches!(self, Scales::F32(_))
    }

    /// `n` of them as f32: where they lie, or in `buffer`.
    ///
    /// # Safety
    /// There are so many from number `i` on. Unless they are f32, the buffer has room for whole vectors of them.
    #[inline(always)]
    pub(super) unsafe fn floats<I: Isa>(self, isa: I, i: usize, n: usize, buffer: *mut f32) -> *const f32 {
        // SAFETY: the caller's contract.
        unsafe {
            if let Scales::F32(scales) = self {
                return scales.as_ptr().add(i);
            }
            for at in (0..n).step_by(I::LANES) {
                isa.store(buffer.add(at), self.part(isa, i + at, (n - at).min(I::LANES)));
            }
            buffer
        }
    }

    /// `n` of them, at most LANES.
    ///
    /// # Safety
    /// There are so many from number `i` on.
    #[inline(always)]
    pub(super) unsafe fn part<I: Isa>(&self, isa: I, i: usize, n: usize) -> I::V {
        // SAFETY: the caller's contract.
        unsafe {
            match self {
                Scales::F32(scales) => isa.widen_part(scales.as_ptr().add(i), n),
                Scales::F16(scales) => isa.widen_part(scales.as_ptr().add(i), n),
                Scales::BF16(scales) => isa.widen_part(scales.as_ptr().add(i), n),
            }
        }
    }

    /// Where number `i` would be, for prefetching.
    #[inline(always)]
    pub(super) fn place(&self, i: usize) -> *const u8 {
        match self {
            Scales::F32(scales) => scales.as_ptr().wrapping_add(i).cast(),
            Scales::F16(scales) => scales.as_ptr().wrapping_add(i).cast(),
            Scales::BF16(scales) => scales.as_ptr().wrapping_add(i).cast(),
        }
    }
}

/// A weight of `n` output columns over an inner dimension `k`, in blocks of values along `k`, in the layout of
/// `com.microsoft.MatMulNBits`. A value is `(q - zero_point) * scale`.
#[derive(Debug, Clone, Copy)]
pub struct NBits<'a> {
    pub(crate) format: Format,
    /// Output columns.
    pub(super) n: usize,
    pub(super) data: &'a [u8],
    pub(super) scales: Scales<'a>,
    pub(super) zero_points: Option<&'a [u8]>,
}

impl<'a> NBits<'a> {
    /// Describes a weight.
    ///
    /// - `data`: (n, k / block, block * bits / 8); of 4 bits, the value of even index is in the low half of its byte.
    /// - `scales`: (n, k / block).
    /// - `zero_points`: (n, ceil(k / block * bits / 8)), packed as `data`. Absent, they are 8 or 128.
    ///
    /// # Errors
    /// [`Error::Attribute`] for a number of bits, a block or an inner dimension that there cannot be, and
    /// [`Error::Length`] for a slice of the wrong length; both name `operator`.
    pub fn new<T: Element>(
        operator: &'static str,
        bits: usize,
        block: usize,
        [n, k]: [usize; 2],
        data: &'a [u8],
        scales: &'a [T],
        zero_points: Option<&'a [u8]>,
    ) -> Result<NBits<'a>, Error> {
        let attribute = |attribute, expected: &str, found: usize| Error::Attribute {
            operator,
            attribute,
            expected: expected.to_owned(),
            found: found.to_string(),
        };
        if !matches!(bits, 4 | 8) {
            return Err(attribute("bits", "4 or 8", bits));
        }
        if !matches!(block, 16 | 32 | 64 | 128 | 256) {
            return Err(attribute("block_size", "16, 32, 64, 128 or 256", block));
        }
        if !k.is_multiple_of(block) {
            let expected = format!("a divisor of the inner dimension, {k}");
            return Err(attribute("block_size", &expected, block));
        }
        let weight = NBits {
            format: Format { bits, block, k, narrow: false },
            n,
            data,
            scales: Scales::of(scales),
            zero_points,
        };
        let lengths = [
            ("weight", n.saturating_mul(weight.format.row_bytes()), data.len()),
            ("scales", n.saturating_mul(weight.format.blocks()), scales.len()),
            ("zero_points", n.saturating_mul(weight.format.zero_bytes()), zero_points.map_or(0, <[u8]>::len)),
        ];
        for (tensor, expected, found) in lengths {
            if expected != found && (tensor != "zero_points" || zero_points.is_some()) {
                return Err(Error::Length { operator, tensor, expected, found });
            }
        }
        Ok(weight)
    }

    /// The same weight, known to be narrow where products of `rows` rows gain by it and it is so, for which all of it is read.
    pub(crate) fn narrowed(self, engine: Engine, level: Level, rows: usize, host: &dyn Host) -> NBits<'a> {
        let gains = self.format.bits == 8 && level == Level::Int8 && rows >= NARROW_ROWS && engine.widens_bytes();
        let narrow = gains && is_narrow(self.data, host);
        NBits { format: Format { narrow, ..self.format }, ..self }
    }

    /// The number of output columns.
    pub fn columns(&self) -> usize {
        self.n
    }

    /// The length of the inner dimension.
    pub fn inner(&self) -> usize {
        self.format.k
    }

    /// The zero point of `block` of column `n`.
    #[inline(always)]
    pub(super) fn zero_point(&self, n: usize, block: usize) -> u8 {
        match (self.zero_points, self.format.bits) {
            (None, _) => self.format.default_zero(),
            (Some(zeros), 4) => zeros[n * self.format.zero_bytes() + block / 2] >> (4 * (block % 2)) & 15,
            (Some(zeros), _) => zeros[n * self.format.zero_bytes() + block],
        }
    }

    /// The zero points of LANES blocks of column `n` from `block` on, less `subtracted`; lanes after the last block are
    /// undefined. There are zero points.
    #[inline(always)]
    pub(super) fn zeros<D: ByteDot>(&self, dot: D, n: usize, block: usize, subtracted: f32) -> <D::Vectors as Isa>::V {
        let isa = dot.vectors();
        let zeros = self.zero_points.unwrap_or(&[]);
        let zeros = &zeros[n * self.format.zero_bytes() + block * self.format.bits / 8..];
        // Whole arrays are read where there are enough bytes: a copy of variable length is a call.
        let zeros = match zeros.first_chunk::<MAX_LANES>() {
            Some(zeros) => *zeros,
            None => {
                let mut part = [0; MAX_LANES];
                part[..zeros.len()].copy_from_slice(zeros);
                part
            }
        };
        let zeros = match self.format.bits {
            4 => dot.nibbles((u128::from_le_bytes(zeros) >> (4 * (block % 2))) as u64),
            _ => dot.bytes(&zeros),
        };
        isa.sub(zeros, isa.splat(subtracted))
    }

    /// The scales of a vector of columns, for each of some blocks; and scales times zero points, less `subtracted`, or 0 without zero
    /// points. Vectors are written `stride` floats apart.
    ///
    /// # Safety
    /// The weight has the columns that `column` names for each lane, and the blocks; `scales` and `zeros` are valid for writing.
    #[inline(always)]
    pub(super) unsafe fn of_columns<D: ByteDot>(
        &self,
        dot: D,
        column: &impl Fn(usize) -> usize,
        blocks: &Range<usize>,
        subtracted: f32,
        stride: usize,
        [scales, zeros]: [*mut f32; 2],
    ) {
        let (isa, lanes) = (dot.vectors(), D::Vectors::LANES);
        // SAFETY: the caller's contract.
        unsafe {
            for group in blocks.clone().step_by(lanes) {
                let count = (blocks.end - group).min(lanes);
                let (mut of_group, mut products) = ([isa.splat(0.0); MAX_LANES], [isa.splat(0.0); MAX_LANES]);
                for lane in 0..lanes {
                    of_group[lane] = self.scales.part(isa, column(lane) * self.format.blocks() + group, count);
                    if self.zero_points.is_some() {
                        products[lane] = isa.mul(of_group[lane], self.zeros(dot, column(lane), group, subtracted));
                    }
                }
                isa.transpose(&mut of_group);
                isa.transpose(&mut products);
                for i in 0..count {
                    let place = (group - blocks.start + i) * stride;
                    isa.store(scales.add(place), of_group[i]);
                    isa.store(zeros.add(place), products[i]);
                }
            }
        }
    }
}
