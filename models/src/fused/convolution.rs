//! Convolutions: as one matrix product of windows, and channel by channel.

use super::rows::{made, sum};
use super::{numbers, of1, of2};
use candle_core::{CpuStorage, CustomOp1, CustomOp3, Layout, Result, Shape, Tensor, bail};
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
        let out = made(
            batch * places * width,
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
        let found = of1("windows-backward", x.shape(), gradient, |gradient| {
            let mut out = vec![0f32; x.elem_count()];
            out.par_chunks_mut(picture).enumerate().for_each(|(batch, out)| {
                for place in 0..places {
                    let row = &gradient[(batch * places + place) * width..][..width];
                    self.inside(place, |from, to| out[to] += row[from]);
                }
            });
            out
        })?;
        Ok(Some(found))
    }
}

/// Cross-correlation of each channel of (batch, rows, columns, channels) with its own kernel, (channels, 1, k, k), k odd, with zeros
/// around that keep the size; plus a bias (channels).
pub(crate) fn depthwise(x: &Tensor, kernel: &Tensor) -> Result<Depthwise> {
    let (_, rows, columns, channels) = x.dims4()?;
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
    fn cells(&self) -> usize {
        self.side * self.side
    }

    /// (cells, channels) of (channels, cells).
    fn turned(&self, kernel: &[f32]) -> Vec<f32> {
        (0..self.cells()).flat_map(|cell| kernel.iter().skip(cell).step_by(self.cells()).copied()).collect()
    }

    /// Calls `f` with the kernel's cells that lie inside the picture when it is at `place`, a row of places and a column, and the channels
    /// under each in `x`.
    #[inline(always)]
    fn under<'a>(&self, (row, column): (usize, usize), x: &'a [f32], mut f: impl FnMut(usize, &'a [f32])) {
        let (batch, y, reach) = (row / self.rows, row % self.rows, self.side / 2);
        for i in 0..self.side {
            let y = (y + i).wrapping_sub(reach);
            for j in 0..self.side {
                let column = (column + j).wrapping_sub(reach);
                if y < self.rows && column < self.columns {
                    let at = (batch * self.rows + y) * self.columns + column;
                    f(i * self.side + j, &x[at * self.channels..][..self.channels]);
                }
            }
        }
    }

    /// The sum over the cells of `x` under a cell times the numbers that `of` gives for it, added to `begin` at every place.
    fn correlate<'a>(&self, x: &[f32], begin: Option<&[f32]>, of: impl Fn(usize) -> &'a [f32] + Sync) -> Vec<f32> {
        let row = self.columns * self.channels;
        made(
            x.len(),
            row,
            #[inline(always)]
            |first, part| {
                for (i, out) in part.chunks_mut(row).enumerate() {
                    for (column, out) in out.chunks_mut(self.channels).enumerate() {
                        begin.iter().for_each(|begin| out.copy_from_slice(begin));
                        self.under(
                            (first + i, column),
                            x,
                            #[inline(always)]
                            |cell, x| {
                                let numbers = x.iter().zip(of(cell));
                                out.iter_mut().zip(numbers).for_each(|(out, (x, kernel))| *out += kernel * x);
                            },
                        );
                    }
                }
            },
        )
    }
}

impl CustomOp3 for Depthwise {
    fn name(&self) -> &'static str {
        "depthwise"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, kernel, bias) = (numbers(s1, l1)?, self.turned(numbers(s2, l2)?), numbers(s3, l3)?);
        let out = self.correlate(x, Some(bias), |cell| &kernel[cell * self.channels..][..self.channels]);
        Ok((CpuStorage::F32(out), l1.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        kernel: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (cells, channels, row) = (self.cells(), self.channels, self.columns * self.channels);
        let of_x = of2("depthwise-backward", x.shape(), (gradient, kernel), |gradient, kernel| {
            let kernel = self.turned(kernel);
            // Where the kernel's cell lay on a place, the mirrored cell of a kernel around the place lies where the kernel was.
            self.correlate(gradient, None, |cell| &kernel[(cells - 1 - cell) * channels..][..channels])
        })?;
        // (cells and the bias, channels).
        let sums = of2("depthwise-backward", &Shape::from((cells + 1, channels)), (x, gradient), |x, gradient| {
            sum(
                x.len() / row.max(1),
                row,
                (cells + 1) * channels,
                #[inline(always)]
                |first, end, sums| {
                    let (of_kernel, of_bias) = sums.split_at_mut(cells * channels);
                    for at in first..end {
                        for (column, g) in gradient[at * row..][..row].chunks(channels).enumerate() {
                            self.under(
                                (at, column),
                                x,
                                #[inline(always)]
                                |cell, x| {
                                    let sums = &mut of_kernel[cell * channels..][..channels];
                                    sums.iter_mut().zip(x).zip(g).for_each(|((sum, x), g)| *sum += x * g);
                                },
                            );
                            of_bias.iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
                        }
                    }
                },
            )
        })?;
        let of_kernel = sums.narrow(0, 0, cells)?.t()?.contiguous()?.reshape(kernel.dims())?;
        Ok((Some(of_x), Some(of_kernel), Some(sums.get(cells)?.reshape(bias.dims())?)))
    }
}
