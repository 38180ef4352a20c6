//! Quantised matrices in function bodies.

use crate::operator::{BodyValue, Builder};

/// Writes the nodes that dequantise matrices, with `bits` as the operator's attribute. Computes in float32, in which all
/// values are exact: runtimes that know no arithmetic of uint8 can run it.
pub(crate) struct Dequantise {
    /// 2^bits.
    radix: String,
    /// What the values of a byte are divided by: 1, or 1 and 16.
    divisors: String,
    /// -1, as a list.
    last: String,
}

/// The inputs of a quantised matrix.
pub(crate) struct Quantised {
    pub(crate) weight: &'static str,
    pub(crate) scales: &'static str,
    pub(crate) zero_points: Option<&'static str>,
    /// Dimensions before the blocks: (rows), or (experts, rows).
    pub(crate) leading: usize,
}

impl Dequantise {
    pub(crate) fn new(b: &mut Builder, bits: &'static str) -> Dequantise {
        let bits = b.int_attribute(bits, "bits_scalar");
        let (first, end) = (b.int(0, "first_bit"), b.int(8, "bits_of_a_byte"));
        let shifts = b.node("Range", &[&first, &end, &bits], "shifts");
        let (shifts, bits) = (b.cast_f32(&shifts, "shifts_f32"), b.cast_f32(&bits, "bits_f32"));
        let two = b.float(2.0, "radix_base");
        Dequantise {
            radix: b.node("Pow", &[&two, &bits], "radix"),
            divisors: b.node("Pow", &[&two, &shifts], "divisors"),
            last: b.ints(&[-1], "last_axis_of_bytes"),
        }
    }

    /// The values of packed bytes (.., n), `leading` dimensions before the last one, as (.., n * 8 / bits).
    fn unpack(&self, b: &mut Builder, bytes: &str, leading: usize) -> String {
        let name = |part: &str| format!("{bytes}_{part}");
        let column = b.node("Unsqueeze", &[bytes, &self.last], &name("column"));
        let column = b.cast_f32(&column, &name("f32"));
        let shifted = b.node("Div", &[&column, &self.divisors], &name("divided"));
        let shifted = b.node("Floor", &[&shifted], &name("shifted"));
        let above = b.node("Div", &[&shifted, &self.radix], &name("above_divided"));
        let above = b.node("Floor", &[&above], &name("above"));
        let above = b.node("Mul", &[&above, &self.radix], &name("above_shifted"));
        let values = b.node("Sub", &[&shifted, &above], &name("halves"));
        self.joined(b, &values, leading, &name("values"))
    }

    /// Joins the dimensions from `leading` on.
    fn joined(&self, b: &mut Builder, x: &str, leading: usize, output: &str) -> String {
        let shape: Vec<i64> = std::iter::repeat_n(0, leading).chain([-1]).collect();
        let shape = b.ints(&shape, &format!("{output}_shape"));
        b.node("Reshape", &[x, &shape], output)
    }

    /// The matrix (.., rows, k) in float32.
    pub(crate) fn matrix(&self, b: &mut Builder, q: &Quantised) -> String {
        let &Quantised { weight, scales, zero_points, leading } = q;
        let name = |part: &str| format!("{weight}_{part}");
        let values = self.unpack(b, weight, leading + 1);
        let zero = match zero_points {
            Some(packed) => {
                let zero = self.unpack(b, packed, leading);
                // The last byte may have a half to spare.
                let start = b.ints(&[0], &name("first_block"));
                let end = b.with("Shape", &[scales], &name("blocks"), &[("start", BodyValue::Int(-1))]);
                let zero = b.node("Slice", &[&zero, &start, &end, &self.last], &name("zero_points"));
                b.node("Unsqueeze", &[&zero, &self.last], &name("zero_point_column"))
            }
            None => {
                let two = b.float(2.0, &name("two"));
                b.node("Div", &[&self.radix, &two], &name("zero_point"))
            }
        };
        let centred = b.node("Sub", &[&values, &zero], &name("centred"));
        let scales = b.cast_f32(scales, &name("scales_f32"));
        let scales = b.node("Unsqueeze", &[&scales, &self.last], &name("scale_column"));
        let scaled = b.node("Mul", &[&centred, &scales], &name("scaled"));
        self.joined(b, &scaled, leading, &name("dequantised"))
    }
}
