//! Cases of RoutedAttention, their data, and how far a kernel may be from the reference.

use crate::data::{Buffer, Random, kernels_of};
use moh_kernels::cpu::{Kernel, Work};
use moh_kernels::schema::{ROUTED_ATTENTION, Value};
use moh_kernels::{Attributes, DType, Data, DataMut, Error, Host, Tensor, Threads, tolerance};

/// How far an output may be from the reference, whose inputs are already rounded to the type.
///
/// Scores and sums are float32 in every type: with values below 1 and scores of a few units, 24 bits of mantissa leave
/// less than 1e-5. The output's own rounding comes on top: half a unit in the last of 11 or 8 bits.
pub(crate) fn allowed(dtype: DType, expected: f64) -> f64 {
    let rounding = match dtype {
        DType::F32 => 0.0,
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
    };
    1e-5 + rounding * expected.abs()
}

/// Which heads the tokens use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Gates {
    /// None, with zeros of both signs.
    Off,
    /// All, with weights of both signs.
    On,
    /// Each with this probability.
    Random(f64),
    /// Exactly so many a token.
    TopK(usize),
}

/// What the bias holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Mask {
    /// Finite numbers.
    Finite,
    /// Some -inf.
    Some,
    /// Only -inf for some queries, some -inf for the others.
    WholeRows,
}

/// A call of RoutedAttention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) batch: usize,
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) kv_num_heads: usize,
    pub(crate) group_size: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) cache_layout: bool,
    pub(crate) is_causal: bool,
    pub(crate) dtype: DType,
    pub(crate) gates: Gates,
    /// Which of (batch, head, query, key) the bias has, and what is in it.
    pub(crate) bias: Option<([bool; 4], Mask)>,
    pub(crate) seed: u64,
}

impl Default for Case {
    fn default() -> Case {
        Case {
            batch: 1,
            q_len: 1,
            kv_len: 1,
            kv_num_heads: 1,
            group_size: 1,
            head_dim: 8,
            value_dim: 8,
            cache_layout: false,
            is_causal: false,
            dtype: DType::F32,
            gates: Gates::On,
            bias: None,
            seed: 1,
        }
    }
}

/// A case with its numbers, before they are rounded to the type.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) case: Case,
    pub(crate) query: Vec<f32>,
    pub(crate) key: Vec<f32>,
    pub(crate) value: Vec<f32>,
    pub(crate) gates: Vec<f32>,
    pub(crate) bias: Option<(Vec<usize>, Vec<f32>)>,
}

/// A call's tensors, rounded to its type.
struct Tensors {
    shapes: Vec<Vec<usize>>,
    data: Vec<Buffer>,
}

impl Tensors {
    fn inputs(&self) -> Vec<Option<Tensor<'_>>> {
        let pairs = self.shapes.iter().zip(&self.data);
        pairs.map(|(shape, framed)| Some(Tensor { shape, data: inside(framed.data()) })).collect()
    }
}

/// NaN on either side of a tensor: what a kernel reads there spoils its results, and what it writes there is found.
const FRAME: usize = 64;

fn framed(dtype: DType, numbers: &[f32]) -> Buffer {
    let frame = [f32::NAN; FRAME];
    Buffer::new(dtype, &[&frame, numbers, &frame].concat())
}

fn inside(data: Data<'_>) -> Data<'_> {
    let range = FRAME..data.len() - FRAME;
    match data {
        Data::F32(x) => Data::F32(&x[range]),
        Data::F16(x) => Data::F16(&x[range]),
        Data::BF16(x) => Data::BF16(&x[range]),
        Data::Packed(_) => unreachable!("no input is packed"),
    }
}

fn inside_mut(data: DataMut<'_>) -> DataMut<'_> {
    let range = FRAME..data.len() - FRAME;
    match data {
        DataMut::F32(x) => DataMut::F32(&mut x[range]),
        DataMut::F16(x) => DataMut::F16(&mut x[range]),
        DataMut::BF16(x) => DataMut::BF16(&mut x[range]),
    }
}

impl Case {
    pub(crate) fn num_heads(&self) -> usize {
        self.kv_num_heads * self.group_size
    }

    pub(crate) fn attributes(&self) -> Attributes {
        let (heads, kv_heads) = (self.num_heads() as i64, self.kv_num_heads as i64);
        // Larger than usual, so that the weights are far from equal.
        attributes(heads, kv_heads, 3.0 / (self.head_dim as f32).sqrt(), i64::from(self.is_causal))
    }

    /// The numbers of (batch, KV token, KV head, element) at their place in the layout.
    pub(crate) fn kv_index(&self, batch: usize, token: usize, kv_head: usize, dim: usize) -> usize {
        match self.cache_layout {
            true => ((batch * self.kv_num_heads + kv_head) * self.kv_len + token) * dim,
            false => ((batch * self.kv_len + token) * self.kv_num_heads + kv_head) * dim,
        }
    }

    /// Random numbers; NaN in every query, key and value that no selected head needs.
    pub(crate) fn call(self) -> Call {
        let mut random = Random(self.seed);
        let mut numbers = |n: usize| -> Vec<f32> { (0..n).map(|_| random.signed()).collect() };
        let (heads, tokens) = (self.num_heads(), self.batch * self.q_len);
        let mut query = numbers(tokens * heads * self.head_dim);
        let mut key = numbers(self.batch * self.kv_len * self.kv_num_heads * self.head_dim);
        let mut value = numbers(self.batch * self.kv_len * self.kv_num_heads * self.value_dim);
        let gates = self.draw_gates(&mut random);
        for (block, &gate) in gates.iter().enumerate() {
            if gate == 0.0 {
                query[block * self.head_dim..(block + 1) * self.head_dim].fill(f32::NAN);
            }
        }
        for batch in 0..self.batch {
            for kv_head in 0..self.kv_num_heads {
                let used = |token: usize| {
                    let first = ((batch * self.q_len + token) * self.kv_num_heads + kv_head) * self.group_size;
                    gates[first..first + self.group_size].iter().any(|&gate| gate != 0.0)
                };
                if !(0..self.q_len).any(used) {
                    for token in 0..self.kv_len {
                        let k = self.kv_index(batch, token, kv_head, self.head_dim);
                        key[k..k + self.head_dim].fill(f32::NAN);
                        let v = self.kv_index(batch, token, kv_head, self.value_dim);
                        value[v..v + self.value_dim].fill(f32::NAN);
                    }
                }
            }
        }
        let bias = self.bias.map(|(axes, mask)| self.draw_bias(axes, mask, &mut random));
        Call { case: self, query, key, value, gates, bias }
    }

    fn draw_gates(&self, random: &mut Random) -> Vec<f32> {
        let heads = self.num_heads();
        let mut gates = Vec::new();
        for _ in 0..self.batch * self.q_len {
            let mut order: Vec<(u64, usize)> = (0..heads).map(|h| (random.bits(), h)).collect();
            order.sort_unstable();
            for h in 0..heads {
                let on = match self.gates {
                    Gates::Off => false,
                    Gates::On => true,
                    Gates::Random(p) => random.unit() < p,
                    Gates::TopK(k) => order.iter().take(k).any(|&(_, chosen)| chosen == h),
                };
                let sign = if random.bits() & 1 == 0 { 1.0 } else { -1.0 };
                let size = if on { 0.1 + random.unit() as f32 } else { 0.0 };
                gates.push(sign * size);
            }
        }
        gates
    }

    fn draw_bias(&self, axes: [bool; 4], mask: Mask, random: &mut Random) -> (Vec<usize>, Vec<f32>) {
        let full = [self.batch, self.num_heads(), self.q_len, self.kv_len];
        let shape: Vec<usize> = axes.iter().zip(full).map(|(&own, dim)| if own { dim } else { 1 }).collect();
        let row = shape[3].max(1);
        let rows = shape[..3].iter().product::<usize>();
        let mut bias = Vec::new();
        for _ in 0..rows {
            let whole = mask == Mask::WholeRows && random.unit() < 0.4;
            for _ in 0..row.min(shape[3]) {
                let off = whole || (mask != Mask::Finite && random.unit() < 0.3);
                bias.push(if off { f32::NEG_INFINITY } else { random.signed() });
            }
        }
        // Leading axes of length 1 may be left out.
        let skip = shape.iter().take_while(|&&dim| dim == 1).count().min((self.seed % 5) as usize);
        (shape[skip..].to_vec(), bias)
    }
}

impl Call {
    fn tensors(&self) -> Tensors {
        let (case, dtype) = (self.case, self.case.dtype);
        let (heads, kv_heads) = (case.num_heads(), case.kv_num_heads);
        let kv_shape = |dim: usize| match case.cache_layout {
            true => vec![case.batch, kv_heads, case.kv_len, dim],
            false => vec![case.batch, case.kv_len, kv_heads * dim],
        };
        let mut tensors = Tensors {
            shapes: vec![
                vec![case.batch, case.q_len, heads * case.head_dim],
                kv_shape(case.head_dim),
                kv_shape(case.value_dim),
                vec![case.batch, case.q_len, heads],
            ],
            data: [&self.query, &self.key, &self.value].map(|x| framed(dtype, x)).into(),
        };
        tensors.data.push(framed(DType::F32, &self.gates));
        if let Some((shape, bias)) = &self.bias {
            tensors.shapes.push(shape.clone());
            tensors.data.push(framed(dtype, bias));
        }
        tensors
    }

    /// What the reference makes of it.
    pub(crate) fn expected(&self) -> Vec<f64> {
        (ROUTED_ATTENTION.reference)(&self.case.attributes(), &self.tensors().inputs())
    }

    /// What `kernel` makes of it, on an output full of NaN.
    pub(crate) fn run(&self, kernel: &Kernel, host: &dyn Host) -> Result<(Vec<f64>, Work), Error> {
        let case = self.case;
        let len = case.batch * case.q_len * case.num_heads() * case.value_dim;
        let mut output = framed(case.dtype, &vec![f32::NAN; len]);
        let work = kernel.run(&case.attributes(), &self.tensors().inputs(), inside_mut(output.data_mut()), host)?;
        let frame = (0..FRAME).chain(FRAME + len..2 * FRAME + len);
        assert!(frame.into_iter().all(|i| output.data().at(i).is_nan()), "{kernel:?} {case:?} wrote beyond its output");
        Ok(((FRAME..FRAME + len).map(|i| output.data().at(i)).collect(), work))
    }

    /// Panics where `kernel` differs from the reference's `expected`.
    pub(crate) fn check(&self, expected: &[f64], kernel: &Kernel, host: &dyn Host) -> Work {
        let case = self.case;
        let (found, work) = self.run(kernel, host).unwrap_or_else(|error| panic!("{kernel:?} {case:?}: {error}"));
        assert_eq!(found.len(), expected.len(), "{kernel:?} {case:?}");
        let unit = match kernel.isa {
            "amx" | "avx512bf16" if case.dtype == DType::BF16 => tolerance::MATRIX_UNIT_BF16,
            _ => 0.0,
        };
        let largest = f64::from(self.value.iter().fold(0f32, |largest, x| largest.max(x.abs())));
        for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            let (block, d) = (i / case.value_dim, i % case.value_dim);
            let weights = unit * largest * f64::from(self.gates[block].abs());
            let close = (found - expected).abs() <= allowed(case.dtype, expected) + weights;
            let (token, head) = (block / case.num_heads(), block % case.num_heads());
            assert!(
                close || (found.is_nan() && expected.is_nan()),
                "{kernel:?} {case:?}: token {token}, head {head}, element {d}: expected {expected}, found {found}"
            );
            if self.gates[block] == 0.0 {
                assert_eq!(found, 0.0, "{kernel:?} {case:?}: token {token} does not use head {head}");
            }
        }
        work
    }

    /// The inputs, for those who run them elsewhere: the tests on a GPU.
    #[allow(dead_code)]
    pub(crate) fn with_inputs<R>(&self, run: impl FnOnce(&[Option<Tensor<'_>>]) -> R) -> R {
        run(&self.tensors().inputs())
    }

    /// [`Call::check`] for every kernel that this processor supports.
    pub(crate) fn check_kernels(&self, threads: std::ops::RangeInclusive<usize>) -> Vec<(&'static Kernel, Work)> {
        let expected = self.expected();
        let hosts = || threads.clone().map(Threads::new);
        let checked = |kernel| hosts().map(|host| (kernel, self.check(&expected, kernel, &host))).collect::<Vec<_>>();
        kernels().flat_map(checked).collect()
    }
}

/// The kernels that this processor supports.
pub(crate) fn kernels() -> impl Iterator<Item = &'static Kernel> {
    kernels_of(&ROUTED_ATTENTION)
}

/// RoutedAttention's attributes.
pub(crate) fn attributes(num_heads: i64, kv_num_heads: i64, scale: f32, is_causal: i64) -> Attributes {
    Attributes::read(&ROUTED_ATTENTION, |def| match def.name {
        "num_heads" => Some(Value::Int(num_heads)),
        "kv_num_heads" => Some(Value::Int(kv_num_heads)),
        "scale" => Some(Value::Float(scale)),
        "is_causal" => Some(Value::Int(is_causal)),
        _ => None,
    })
    .unwrap_or_else(|error| panic!("{error}"))
}
