//! What TransNeXt's attention computes from weights and sizes alone: relative biases, length scales, pooling.

use crate::error::{Error, Result};
use crate::fused::Table;
use candle_core::Tensor;
use std::sync::Arc;

/// The grid of a stage, and the bins that it is pooled into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grid {
    /// Tokens a side.
    pub(super) side: usize,
    /// Pooled tokens a side.
    pub(super) pooled: usize,
}

impl Grid {
    /// The indices that bin `i` of an adaptive average pooling covers.
    fn bin(self, i: usize) -> std::ops::Range<usize> {
        i * self.side / self.pooled..((i + 1) * self.side).div_ceil(self.pooled)
    }

    /// The mean index of bin `i`.
    fn centre(self, i: usize) -> f64 {
        let bin = self.bin(i);
        (bin.start + bin.end - 1) as f64 / 2.0
    }

    /// The averaging matrix, (pooled^2, side^2).
    pub(super) fn pooling_matrix(self) -> Vec<f32> {
        let mut matrix = vec![0.0; (self.pooled * self.side).pow(2)];
        for (row, weights) in matrix.chunks_mut(self.side * self.side).enumerate() {
            let (rows, columns) = (self.bin(row / self.pooled), self.bin(row % self.pooled));
            let share = 1.0 / (rows.len() * columns.len()) as f32;
            for y in rows {
                weights[y * self.side..][columns.clone()].fill(share);
            }
        }
        matrix
    }

    /// How many cells of a window around each token lie inside the grid, row-major.
    pub(super) fn window_cells(self, window: usize) -> Vec<usize> {
        let reach = window / 2;
        let inside = |i: usize| (i + reach).min(self.side - 1) + 1 - i.saturating_sub(reach);
        (0..self.side * self.side).map(|n| inside(n / self.side) * inside(n % self.side)).collect()
    }
}

/// The MLP that gives relative biases: two inputs, ReLU, a number a head.
pub(super) struct BiasMlp {
    /// (hidden, 2).
    pub(super) fc1_weight: Vec<f32>,
    /// (hidden).
    pub(super) fc1_bias: Vec<f32>,
    /// (heads, hidden).
    pub(super) fc2_weight: Vec<f32>,
    /// (heads).
    pub(super) fc2_bias: Vec<f32>,
}

impl BiasMlp {
    fn heads(&self) -> usize {
        self.fc2_bias.len()
    }

    /// The biases of one relative position, one a head.
    fn at(&self, y: f64, x: f64) -> Vec<f32> {
        let units = self.fc1_weight.chunks(2).zip(&self.fc1_bias);
        let hidden: Vec<f64> =
            units.map(|(w, b)| (f64::from(w[0]) * y + f64::from(w[1]) * x + f64::from(*b)).max(0.0)).collect();
        let heads = self.fc2_weight.chunks(hidden.len()).zip(&self.fc2_bias);
        heads
            .map(|(w, b)| (w.iter().zip(&hidden).map(|(w, h)| f64::from(*w) * h).sum::<f64>() + f64::from(*b)) as f32)
            .collect()
    }

    /// The biases between the tokens of a grid and its pooled tokens, (heads, side^2, pooled^2).
    ///
    /// `pretrained` is the grid's side at the resolution of pre-training, by which distances are measured.
    pub(super) fn table(&self, grid: Grid, pretrained: usize) -> Vec<f32> {
        let Relative { positions, index } = Relative::new(grid, pretrained);
        let biases: Vec<Vec<f32>> = positions.iter().map(|&[y, x]| self.at(y, x)).collect();
        (0..self.heads())
            .flat_map(|head| index.iter().map(|&at| biases[at as usize][head]).collect::<Vec<_>>())
            .collect()
    }
}

/// The relative positions of a grid's tokens and its pooled tokens.
struct Relative {
    /// The distinct ones: rows, columns.
    positions: Vec<[f64; 2]>,
    /// For each token and pooled token one of them, (side^2, pooled^2).
    index: Vec<u32>,
}

impl Relative {
    fn new(grid: Grid, pretrained: usize) -> Relative {
        let unit = 8.0 / (pretrained as f64 - 1.0);
        let coordinate = |q: usize, k: usize| {
            let distance = (q as f64 - grid.centre(k)) * unit;
            distance.signum() * (distance.abs() + 1.0).log2() / 3.0
        };
        // Many pairs have the same distance: each distinct pair of distances goes through the MLP once.
        let mut distinct: Vec<f64> = Vec::new();
        let mut index = Vec::with_capacity(grid.side * grid.pooled);
        for q in 0..grid.side {
            for k in 0..grid.pooled {
                // signum of 0.0 is 1, times the logarithm of 1: 0 either way.
                let value = coordinate(q, k);
                let at = distinct.iter().position(|d| *d == value).unwrap_or(distinct.len());
                if at == distinct.len() {
                    distinct.push(value);
                }
                index.push(at);
            }
        }
        let count = distinct.len();
        let positions = (0..count * count).map(|i| [distinct[i / count], distinct[i % count]]).collect();
        let mut of_pairs = Vec::with_capacity((grid.side * grid.pooled).pow(2));
        for (qy, qx) in pairs(grid.side) {
            for (ky, kx) in pairs(grid.pooled) {
                let (y, x) = (index[qy * grid.pooled + ky], index[qx * grid.pooled + kx]);
                of_pairs.push((y * count + x) as u32);
            }
        }
        Relative { positions, index: of_pairs }
    }
}

/// What [`BiasMlp::table`] computes, in candle: `weights` are the MLP's, in the order of its fields.
///
/// # Errors
/// What candle fails with.
pub(super) fn bias_table(weights: &[Tensor], grid: Grid, pretrained: usize) -> Result<Tensor> {
    let [fc1_weight, fc1_bias, fc2_weight, fc2_bias] = weights else {
        return Err(Error::Internal("an MLP of four tensors"));
    };
    let Relative { positions, index } = Relative::new(grid, pretrained);
    let positions: Vec<[f32; 2]> = positions.iter().map(|position| position.map(|at| at as f32)).collect();
    if fc1_weight.device().is_cpu() {
        let table = Table { positions: Arc::new(positions), index: Arc::new(index) };
        let fc1 = Tensor::cat(&[fc1_weight, &fc1_bias.unsqueeze(1)?], 1)?;
        return Ok(fc1.apply_op2(&Tensor::cat(&[fc2_weight, &fc2_bias.unsqueeze(1)?], 1)?, table)?);
    }
    composed_table(weights, &positions, index)
}

/// The same in candle's own operations, for any device.
fn composed_table(weights: &[Tensor], positions: &[[f32; 2]], index: Vec<u32>) -> Result<Tensor> {
    let [fc1_weight, fc1_bias, fc2_weight, fc2_bias] = weights else {
        return Err(Error::Internal("an MLP of four tensors"));
    };
    let device = fc1_weight.device();
    let positions = Tensor::from_slice(positions.as_flattened(), (positions.len(), 2), device)?;
    let hidden = positions.matmul(&fc1_weight.t()?)?.broadcast_add(fc1_bias)?.relu()?;
    let biases = hidden.matmul(&fc2_weight.t()?)?.broadcast_add(fc2_bias)?;
    let pairs = index.len();
    Ok(biases.index_select(&Tensor::from_vec(index, pairs, device)?, 0)?.t()?.contiguous()?)
}

/// [`softplus`] of every number times every one of `factors`, (factors, numbers), in candle.
///
/// # Errors
/// What candle fails with.
pub(super) fn scaled_softplus(x: &Tensor, factors: &[f32]) -> Result<Tensor> {
    let x = x.flatten_all()?;
    let softplus = (x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?)?;
    let factors = Tensor::from_slice(factors, (factors.len(), 1), x.device())?;
    Ok(factors.broadcast_mul(&softplus)?)
}

fn pairs(side: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..side * side).map(move |i| (i / side, i % side))
}

/// ln(1 + e^x).
pub(super) fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_that_overlap() {
        let grid = Grid { side: 5, pooled: 2 };
        assert_eq!([grid.bin(0), grid.bin(1)], [0..3, 2..5]);
        assert_eq!([grid.centre(0), grid.centre(1)], [1.0, 3.0]);
        let matrix = grid.pooling_matrix();
        assert!(matrix.chunks(25).all(|row| (row.iter().sum::<f32>() - 1.0).abs() < 1e-6));
        assert_eq!(matrix[25 + 2], 1.0 / 9.0, "row 0, column 2 belongs to the upper right bin too");
    }

    #[test]
    fn windows_at_the_border() {
        let grid = Grid { side: 3, pooled: 1 };
        assert_eq!(grid.window_cells(3), [4, 6, 4, 6, 9, 6, 4, 6, 4]);
        assert_eq!(grid.window_cells(5), [9; 9]);
        assert_eq!(grid.window_cells(1), [1; 9]);
    }

    #[test]
    fn softplus_has_no_overflow() {
        assert_eq!(softplus(200.0), 200.0);
        assert!(softplus(-200.0) < 1e-30 && (softplus(0.0) - std::f32::consts::LN_2).abs() < 1e-7);
    }

    /// The tables that are trained and those that are exported.
    #[test]
    #[allow(clippy::unwrap_used)]
    fn candle_computes_the_same() {
        let (hidden, heads) = (5, 3);
        let numbers =
            |n: usize, seed: usize| (0..n).map(|i| ((i * 7 + seed) % 11) as f32 / 5.0 - 1.0).collect::<Vec<f32>>();
        let mlp = BiasMlp {
            fc1_weight: numbers(2 * hidden, 1),
            // No hidden unit is exactly 0, where candle's gradient of ReLU is 1, and ours 0, as PyTorch's.
            fc1_bias: numbers(hidden, 2).into_iter().map(|bias| bias + 0.01).collect(),
            fc2_weight: numbers(heads * hidden, 3),
            fc2_bias: numbers(heads, 4),
        };
        let tensor =
            |values: &[f32], shape: &[usize]| Tensor::from_slice(values, shape, &candle_core::Device::Cpu).unwrap();
        let weights = [
            tensor(&mlp.fc1_weight, &[hidden, 2]),
            tensor(&mlp.fc1_bias, &[hidden]),
            tensor(&mlp.fc2_weight, &[heads, hidden]),
            tensor(&mlp.fc2_bias, &[heads]),
        ];
        let grid = Grid { side: 4, pooled: 2 };
        let found = bias_table(&weights, grid, 4).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let expected = mlp.table(grid, 4);
        assert_eq!(found.len(), expected.len());
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5));
        let vars = weights.map(|weight| candle_core::Var::from_tensor(&weight).unwrap());
        let inputs: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        let Relative { positions, index } = Relative::new(grid, 4);
        let positions: Vec<[f32; 2]> = positions.iter().map(|position| position.map(|at| at as f32)).collect();
        let factors = tensor(&numbers(heads * index.len(), 5), &[heads, index.len()]);
        let gradients = |table: Tensor| (table * &factors).unwrap().sum_all().unwrap().backward().unwrap();
        let found = gradients(bias_table(&inputs, grid, 4).unwrap());
        let expected = gradients(composed_table(&inputs, &positions, index).unwrap());
        for var in &vars {
            let [a, b] =
                [&found, &expected].map(|of| of.get(var).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap());
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4 * b.abs().max(1.0)), "{a:?} {b:?}");
        }
        let scaled = scaled_softplus(&tensor(&[-3.0, 0.5], &[2, 1, 1]), &[1.0, 2.0]).unwrap().to_vec2::<f32>().unwrap();
        let expected = [[softplus(-3.0), softplus(0.5)], [2.0 * softplus(-3.0), 2.0 * softplus(0.5)]];
        assert!(scaled.iter().flatten().zip(expected.iter().flatten()).all(|(a, b)| (a - b).abs() < 1e-6));
    }
}
