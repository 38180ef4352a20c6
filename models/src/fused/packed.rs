//! Copies of tensors whose axes are in another order.

use super::rows::made;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};

/// The same numbers side by side in memory, in the order of the axes.
pub(crate) fn packed(x: &Tensor) -> Result<Tensor> {
    // Others are small.
    match x.is_contiguous() || x.dtype() != DType::F32 || !x.device().is_cpu() || x.elem_count() < 1 << 12 {
        true => x.contiguous(),
        false => x.apply_op1_no_bwd(&Pack),
    }
}

struct Pack;

/// Numbers of the last axis that are copied before the next ones of the axis that is side by side in the source.
const TILE: usize = 16;

impl CustomOp1 for Pack {
    fn name(&self) -> &'static str {
        "pack"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let CpuStorage::F32(x) = storage else { bail!("a tensor that is not in float32") };
        let x = &x[layout.start_offset()..];
        let (dims, strides) = (layout.dims(), layout.stride());
        let Some((&width, outer)) = dims.split_last() else { bail!("a tensor without axes") };
        let step = strides[outer.len()];
        // The axis along which the source lies side by side, and that rows are taken together of.
        let near = (0..outer.len()).rev().find(|&axis| strides[axis] == 1 && dims[axis] > 1).filter(|_| step > 1);
        let begin = |row: usize| {
            let mut rest = row;
            (0..outer.len()).rev().fold(0, |at, axis| {
                let i = rest % dims[axis];
                rest /= dims[axis];
                at + i * strides[axis]
            })
        };
        let count = layout.shape().elem_count();
        let out = match near {
            // Rows of the same block are next to each other in the output: (near, width).
            Some(near) if near + 1 == outer.len() => {
                let rows = dims[near];
                made(
                    count,
                    rows * width,
                    #[inline(always)]
                    |first, part| {
                        for (i, block) in part.chunks_mut(rows * width).enumerate() {
                            let from = &x[begin((first + i) * rows)..];
                            for top in (0..rows).step_by(TILE) {
                                for left in (0..width).step_by(TILE) {
                                    for row in top..rows.min(top + TILE) {
                                        let end = width.min(left + TILE);
                                        let to = &mut block[row * width + left..row * width + end];
                                        let from = from[left * step + row..].iter().step_by(step);
                                        to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
                                    }
                                }
                            }
                        }
                    },
                )
            }
            _ => made(
                count,
                width,
                #[inline(always)]
                |first, part| {
                    for (i, to) in part.chunks_mut(width).enumerate() {
                        let from = &x[begin(first + i)..];
                        match step {
                            1 => to.copy_from_slice(&from[..width]),
                            _ => to.iter_mut().enumerate().for_each(|(j, to)| *to = from[j * step]),
                        }
                    }
                },
            ),
        };
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn any_order_of_axes() {
        let x = Tensor::arange(0f32, 3.0 * 18.0 * 5.0 * 35.0, &Device::Cpu).unwrap().reshape((3, 18, 5, 35)).unwrap();
        for order in [[0, 1, 3, 2], [0, 2, 1, 3], [3, 2, 1, 0], [1, 0, 3, 2], [0, 3, 1, 2], [2, 3, 0, 1], [0, 2, 3, 1]]
        {
            let turned = x.permute(order).unwrap();
            for turned in [turned.clone(), turned.narrow(1, 1, 2).unwrap(), turned.narrow(3, 1, 2).unwrap()] {
                let flat = |x: Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                assert_eq!(flat(packed(&turned).unwrap()), flat(turned.contiguous().unwrap()), "{order:?}");
            }
        }
        let wide = Tensor::arange(0f32, 64.0, &Device::Cpu).unwrap().reshape((64, 1)).unwrap();
        let wide = wide.broadcast_as((2, 64, 64)).unwrap();
        assert_eq!(
            packed(&wide).unwrap().to_vec3::<f32>().unwrap(),
            wide.contiguous().unwrap().to_vec3::<f32>().unwrap()
        );
    }
}
