//! Depthwise convolution, channels last.

use crate::host::Host;
use crate::isa::vectorize;
use crate::isa::{Isa, Job};
use crate::settings::forced_isa;
use crate::workers::{Shared, share};
use moh_operators::Element;
use moh_operators::Error;
use std::ops::Range;

/// A depthwise convolution of images (batch, height, width, channels).
#[derive(Debug, Clone, PartialEq)]
pub struct Depthwise {
    /// Height and width of the kernel.
    pub kernel: [usize; 2],
    /// Stride of the kernel along height and width, at least 1.
    pub strides: [usize; 2],
    /// Dilation of the kernel along height and width, at least 1.
    pub dilations: [usize; 2],
    /// Zero-padding above and left of the image.
    pub pads: [usize; 2],
    /// (kernel height, kernel width, channels).
    pub weight: Vec<f32>,
    /// (channels).
    pub bias: Vec<f32>,
}

impl Depthwise {
    /// Convolves `x` (batch, height, width, channels) into `output` (batch, output height, output width, channels),
    /// with zero-padding.
    ///
    /// # Errors
    /// [`Error::Length`] if lengths and shapes do not agree.
    pub fn run<T: Element>(
        &self,
        x: &[T],
        image: [usize; 3],
        output: &mut [T],
        size: [usize; 2],
        host: &dyn Host,
    ) -> Result<(), Error> {
        let [batch, height, width] = image;
        let channels = self.bias.len();
        let lengths = [
            ("x", batch * height * width * channels, x.len()),
            ("weight", self.kernel[0] * self.kernel[1] * channels, self.weight.len()),
            ("output", batch * size[0] * size[1] * channels, output.len()),
        ];
        for (tensor, expected, found) in lengths {
            if expected != found {
                return Err(Error::Length { operator: "Depthwise", tensor, expected, found });
            }
        }
        let shared = Shared(output.as_mut_ptr());
        let line = |_: &mut (), item: usize| {
            let (image, y) = (item / size[0], item % size[0]);
            let x = &x[image * height * width * channels..][..height * width * channels];
            // SAFETY: a work item is one row of the output, whose length was checked.
            let output = unsafe { { shared }.0.add(item * size[1] * channels) };
            let taps = self.taps(0, y, height);
            vectorize(
                forced_isa(),
                Line { layer: self, x, width, y: y * self.strides[0], taps, output, count: size[1] },
            );
            0
        };
        share(host, batch * size[0], || Ok(()), line)?;
        Ok(())
    }

    /// The kernel's elements along `axis` that fall inside the image (of `length` pixels) for output pixel `output`.
    fn taps(&self, axis: usize, output: usize, length: usize) -> Range<usize> {
        let (start, pad, step) = (output * self.strides[axis], self.pads[axis], self.dilations[axis]);
        let first = pad.saturating_sub(start).div_ceil(step).min(self.kernel[axis]);
        let last = (length + pad).saturating_sub(start).div_ceil(step).clamp(first, self.kernel[axis]);
        first..last
    }
}

/// A row of the output, which is valid for writing.
struct Line<'a, T> {
    layer: &'a Depthwise,
    /// The input image.
    x: &'a [T],
    width: usize,
    /// The kernel's position in the zero-padded image.
    y: usize,
    /// The kernel rows inside the image.
    taps: Range<usize>,
    output: *mut T,
    /// Output pixels of the row.
    count: usize,
}

/// Output pixels that share loads of the kernel's elements.
const PIXELS: usize = 4;

impl<T: Element> Job for Line<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let layer = self.layer;
        let all = 0..layer.kernel[1];
        let mut pixel = 0;
        while pixel < self.count {
            let inside = |pixel: usize| pixel < self.count && layer.taps(1, pixel, self.width) == all;
            // If the kernels of the first and the last pixel are inside the image, so are those between them.
            if inside(pixel) && inside(pixel + PIXELS - 1) {
                self.pixels::<I, PIXELS>(isa, pixel, all.clone());
                pixel += PIXELS;
            } else {
                self.pixels::<I, 1>(isa, pixel, layer.taps(1, pixel, self.width));
                pixel += 1;
            }
        }
    }
}

impl<T: Element> Line<'_, T> {
    /// Computes `G` outputs from `first` on, using the kernel columns `taps`.
    #[inline(always)]
    fn pixels<I: Isa, const G: usize>(&self, isa: I, first: usize, taps: Range<usize>) {
        let (layer, channels) = (self.layer, self.layer.bias.len());
        let [step_y, step_x] = layer.dilations;
        let mut channel = 0;
        while channel < channels {
            let n = (channels - channel).min(I::LANES);
            // SAFETY: channel + n <= channels; the taps are those inside the image, and the output has the pixels.
            unsafe {
                let mut sums = [isa.widen_part(layer.bias.as_ptr().add(channel), n); G];
                for row in self.taps.clone() {
                    let y = self.y + row * step_y - layer.pads[0];
                    for column in taps.clone() {
                        let weight = layer.weight.as_ptr().add((row * layer.kernel[1] + column) * channels + channel);
                        let weight = isa.widen_part(weight, n);
                        for g in 0..G {
                            let x = (first + g) * layer.strides[1] + column * step_x - layer.pads[1];
                            let x = self.x.as_ptr().add((y * self.width + x) * channels + channel);
                            sums[g] = isa.fma(isa.widen_part(x, n), weight, sums[g]);
                        }
                    }
                }
                for g in 0..G {
                    let output = self.output.add((first + g) * channels + channel);
                    isa.narrow_part(output, sums[g], n);
                }
            }
            channel += n;
        }
    }
}
