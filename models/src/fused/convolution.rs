//! Convolutions: as one matrix product of windows, and channel by channel.

use super::rows::{each, sum};
use super::{numbers, of1, of2};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

/// The windows that (out, in, rows, columns) kernels see in `x` (batch, in, rows, columns): their product with a kernel is a convolution.
pub(crate) fn windows(x: &Tensor, kernel: &Tensor, padding: usize, stride: usize) -> Result<Windows> {
    let (_, channels, rows, columns) = x.dims4()?;
    let (_, _, kernel_rows, kernel_columns) = kernel.dims4()?;
    Ok(Windows { channels, size: [rows, columns], kernel: [kernel_rows, kernel_columns], padding, stride })
}

/// The windows of a picture, one a row: (batch * places, channels * kernel rows * kernel columns).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Windows {
    channels: usize,
    size: [usize; 2],
    kernel: [usize; 2],
    padding: usize,
    stride: usize,
}

impl Windows {
    /// Rows and columns of places.
    pub(crate) fn places(&self) -> [usize; 2] {
        [0, 1].map(|axis| (self.size[axis] + 2 * self.padding - self.kernel[axis]) / self.stride + 1)
    }

    fn width(&self) -> usize {
        self.channels * self.kernel[0] * self.kernel[1]
    }

    /// Calls `f` with the index in a row of `place` and that in its picture, for what lies inside the picture.
    #[inline(always)]
    fn inside(&self, place: usize, mut f: impl FnMut(usize, usize)) {
        let [rows, columns] = self.size;
        let across = self.places()[1];
        let (top, left) = (place / across * self.stride, place % across * self.stride);
        for channel in 0..self.channels {
            for i in 0..self.kernel[0] {
                let y = (top + i).wrapping_sub(self.padding);
                if y >= rows {
                    continue;
                }
                for j in 0..self.kernel[1] {
                    let x = (left + j).wrapping_sub(self.padding);
                    if x < columns {
                        f((channel * self.kernel[0] + i) * self.kernel[1] + j, (channel * rows + y) * columns + x);
                    }
                }
            }
        }
    }
}

impl CustomOp1 for Windows {
    fn name(&self) -> &'static str {
        "windows"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = numbers(s1, l1)?;
        let (picture, width) = (self.channels * self.size[0] * self.size[1], self.width());
        let places: usize = self.places().iter().product();
        let batch = x.len() / picture.max(1);
        let mut out = vec![0f32; batch * places * width];
        each(
            &mut out,
            width,
            #[inline(always)]
            |first, part| {
                for (i, out) in part.chunks_mut(width).enumerate() {
                    let (batch, place) = ((first + i) / places, (first + i) % places);
                    let x = &x[batch * picture..][..picture];
                    self.inside(place, |to, from| out[to] = x[from]);
                }
            },
        );
        Ok((CpuStorage::F32(out), Shape::from((batch * places, width))))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let (picture, width) = (self.channels * self.size[0] * self.size[1], self.width());
        let places: usize = self.places().iter().product();
        let found = of1("windows-backward", x.shape(), gradient, |gradient, out| {
            out.par_chunks_mut(picture).enumerate().for_each(|(batch, out)| {
                for place in 0..places {
                    let row = &gradient[(batch * places + place) * width..][..width];
                    self.inside(place, |from, to| out[to] += row[from]);
                }
            });
        })?;
        Ok(Some(found))
    }
}

/// Cross-correlation of each channel of (batch, channels, rows, columns) with its own kernel, (channels, 1, k, k), k odd, with zeros
/// around that keep the size.
pub(crate) fn depthwise(x: &Tensor, kernel: &Tensor) -> Result<Depthwise> {
    let (_, channels, rows, columns) = x.dims4()?;
    let side = kernel.dim(2)?;
    if kernel.dims() != [channels, 1, side, side] || side % 2 == 0 {
        bail!("a depthwise kernel {:?} for {channels} channels", kernel.dims());
    }
    Ok(Depthwise { channels, rows, columns, side })
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Depthwise {
    channels: usize,
    rows: usize,
    columns: usize,
    side: usize,
}

impl Depthwise {
    /// Calls `f` for every row of a place's plane and every number of the kernel with that number's index, and the ranges of `wide` and
    /// `narrow` that lie over each other when the kernel is there.
    #[inline(always)]
    fn overlaps(&self, mut f: impl FnMut(usize, std::ops::Range<usize>, std::ops::Range<usize>)) {
        let reach = self.side / 2;
        for i in 0..self.side {
            for j in 0..self.side {
                // Row y reads row y + i - reach, columns are alike.
                let (begin, end) =
                    (reach.saturating_sub(j), self.columns.min((self.columns + reach).saturating_sub(j)));
                if begin >= end {
                    continue;
                }
                for y in reach.saturating_sub(i)..self.rows.min((self.rows + reach).saturating_sub(i)) {
                    let (to, from) = (y * self.columns, (y + i - reach) * self.columns);
                    f(i * self.side + j, to + begin..to + end, from + begin + j - reach..from + end + j - reach);
                }
            }
        }
    }
}

impl CustomOp2 for Depthwise {
    fn name(&self) -> &'static str {
        "depthwise"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, kernel) = (numbers(s1, l1)?, numbers(s2, l2)?);
        let (plane, cells) = (self.rows * self.columns, self.side * self.side);
        let mut out = vec![0f32; x.len()];
        each(
            &mut out,
            plane,
            #[inline(always)]
            |first, part| {
                for (i, out) in part.chunks_mut(plane).enumerate() {
                    let x = &x[(first + i) * plane..][..plane];
                    let kernel = &kernel[(first + i) % self.channels * cells..][..cells];
                    self.overlaps(|cell, to, from| {
                        out[to].iter_mut().zip(&x[from]).for_each(|(out, x)| *out += kernel[cell] * x);
                    });
                }
            },
        );
        Ok((CpuStorage::F32(out), l1.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        kernel: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (plane, cells, channels) = (self.rows * self.columns, self.side * self.side, self.channels);
        let of_x = of2("depthwise-backward", x.shape(), (gradient, kernel), |gradient, kernel, out| {
            each(
                out,
                plane,
                #[inline(always)]
                |first, part| {
                    for (i, out) in part.chunks_mut(plane).enumerate() {
                        let g = &gradient[(first + i) * plane..][..plane];
                        let kernel = &kernel[(first + i) % channels * cells..][..cells];
                        self.overlaps(|cell, from, to| {
                            out[to].iter_mut().zip(&g[from]).for_each(|(out, g)| *out += kernel[cell] * g);
                        });
                    }
                },
            );
        })?;
        let of_kernel = of2("depthwise-backward", kernel.shape(), (x, gradient), |x, gradient, out| {
            sum(
                x.len() / plane,
                plane,
                out,
                #[inline(always)]
                |first, end, sums| {
                    for at in first..end {
                        let (x, g) = (&x[at * plane..][..plane], &gradient[at * plane..][..plane]);
                        let sums = &mut sums[at % channels * cells..][..cells];
                        self.overlaps(|cell, of_g, of_x| sums[cell] += super::softmax::dot(&g[of_g], &x[of_x]));
                    }
                },
            );
        })?;
        Ok((Some(of_x), Some(of_kernel)))
    }
}
