//! A table whose entries are an MLP's results for positions, many entries for each position: TransNeXt's relative biases.

use super::rows::{made_of, per_task, sum};
use super::softmax::dot;
use super::{numbers, packed};
use candle_core::{CpuStorage, CustomOp2, Device, Layout, Result, Shape, Storage, Tensor, bail};
use std::sync::Arc;

/// (heads, entries) from the MLP's layers with their biases as last columns, (hidden, 3) and (heads, hidden + 1): entry `i` of a head is
/// fc2(relu(fc1(y, x))) of the position `index[i]`.
#[derive(Clone)]
pub(crate) struct Table {
    /// y and x.
    pub(crate) positions: Arc<Vec<[f32; 2]>>,
    /// A position for each entry.
    pub(crate) index: Arc<Vec<u32>>,
}

/// The layers' numbers, with the columns of the first one after the other.
struct Mlp<'a> {
    fc1: Vec<f32>,
    fc2: &'a [f32],
    hidden: usize,
}

impl Mlp<'_> {
    fn of<'a>(fc1: &[f32], fc2: &'a [f32]) -> Mlp<'a> {
        let columns = (0..3).flat_map(|column| fc1.iter().skip(column).step_by(3).copied());
        Mlp { fc1: columns.collect(), fc2, hidden: fc1.len() / 3 }
    }

    fn heads(&self) -> usize {
        self.fc2.len() / (self.hidden + 1)
    }

    /// The hidden units of a position, and a last one that is 1.
    #[inline(always)]
    fn hidden(&self, [y, x]: [f32; 2], out: &mut [f32]) {
        let (of_y, rest) = self.fc1.split_at(self.hidden);
        let (of_x, bias) = rest.split_at(self.hidden);
        for (((out, of_y), of_x), bias) in out.iter_mut().zip(of_y).zip(of_x).zip(bias) {
            *out = (of_y * y + of_x * x + bias).max(0.0);
        }
        out[self.hidden] = 1.0;
    }
}

impl Table {
    fn gradients(&self, fc1: &[f32], fc2: &[f32], gradient: &[f32]) -> [Vec<f32>; 2] {
        let mlp = Mlp::of(fc1, fc2);
        let (hidden, heads, count) = (mlp.hidden, mlp.heads(), self.positions.len());
        // (heads, positions).
        let of_positions = made_of(heads * count, count, 1, |first, part| {
            let rows = gradient[first * self.index.len()..].chunks(self.index.len());
            for (out, gradient) in part.chunks_mut(count).zip(rows) {
                self.index.iter().zip(gradient).for_each(|(at, g)| out[*at as usize] += g);
            }
        });
        let mut sums = sum(
            count,
            hidden,
            3 * hidden + fc2.len(),
            #[inline(always)]
            |first, end, sums| {
                let (mut units, mut of_units) = (vec![0f32; hidden + 1], vec![0f32; hidden]);
                let (of_fc1, of_fc2) = sums.split_at_mut(3 * hidden);
                for at in first..end {
                    let position = self.positions[at];
                    mlp.hidden(position, &mut units);
                    of_units.fill(0.0);
                    let heads = fc2.chunks(hidden + 1).zip(of_fc2.chunks_mut(hidden + 1));
                    for (head, (weights, of_weights)) in heads.enumerate() {
                        let g = of_positions[head * count + at];
                        of_units.iter_mut().zip(weights).for_each(|(out, w)| *out += g * w);
                        of_weights.iter_mut().zip(&units).for_each(|(out, unit)| *out += g * unit);
                    }
                    of_units.iter_mut().zip(&units).for_each(|(g, unit)| *g = if *unit > 0.0 { *g } else { 0.0 });
                    for (sums, factor) in of_fc1.chunks_mut(hidden).zip([position[0], position[1], 1.0]) {
                        sums.iter_mut().zip(&of_units).for_each(|(sum, g)| *sum += factor * g);
                    }
                }
            },
        );
        let of_fc2 = sums.split_off(3 * hidden);
        let of_fc1 = (0..fc1.len()).map(|i| sums[i % 3 * hidden + i / 3]).collect();
        [of_fc1, of_fc2]
    }
}

impl CustomOp2 for Table {
    fn name(&self) -> &'static str {
        "table"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let mlp = Mlp::of(numbers(s1, l1)?, numbers(s2, l2)?);
        let (heads, row, entries) = (mlp.heads(), mlp.hidden + 1, self.index.len());
        // (positions, heads).
        let of_positions = made_of(
            self.positions.len() * heads,
            heads,
            per_task(row),
            #[inline(always)]
            |first, part| {
                let mut units = vec![0f32; row];
                for (out, position) in part.chunks_mut(heads).zip(&self.positions[first..]) {
                    mlp.hidden(*position, &mut units);
                    out.iter_mut().zip(mlp.fc2.chunks(row)).for_each(|(out, weights)| *out = dot(&units, weights));
                }
            },
        );
        let out = made_of(heads * entries, entries, 1, |first, part| {
            for (i, out) in part.chunks_mut(entries).enumerate() {
                out.iter_mut()
                    .zip(&*self.index)
                    .for_each(|(out, at)| *out = of_positions[*at as usize * heads + first + i]);
            }
        });
        Ok((CpuStorage::F32(out), Shape::from((heads, entries))))
    }

    fn bwd(
        &self,
        fc1: &Tensor,
        fc2: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let tensors = [packed(fc1)?, packed(fc2)?, packed(gradient)?];
        let guards = [0, 1, 2].map(|i| tensors[i].storage_and_layout());
        let mut slices = Vec::new();
        for (storage, layout) in &guards {
            let Storage::Cpu(storage) = &**storage else { bail!("a tensor that is not on the CPU") };
            slices.push(numbers(storage, layout)?);
        }
        let [of_fc1, of_fc2] = self.gradients(slices[0], slices[1], slices[2]);
        let of_fc1 = Tensor::from_vec(of_fc1, fc1.dims(), &Device::Cpu)?;
        Ok((Some(of_fc1), Some(Tensor::from_vec(of_fc2, fc2.dims(), &Device::Cpu)?)))
    }
}
