//! Depthwise convolution, channels last.

use crate::activation::activate;
use crate::host::Host;
use crate::isa::vectorize;
use crate::isa::{Isa, Job, array};
use crate::settings::forced_isa;
use crate::workers::{Shared, share};
use moh_operators::Element;
use moh_operators::Error;
use moh_operators::routed_mlp::Activation;
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
    /// The function of the sums, if there is one. SwiGLU, which has two columns for each output, is taken for SiLU.
    pub activation: Option<Activation>,
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
        vectorize(forced_isa(), Images { layer: self, x, image, output, size, host })
    }

    /// As [`Depthwise::run`], on a given instruction set.
    pub(crate) fn run_on<I: Isa, T: Element>(
        &self,
        isa: I,
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
            isa.vectorize(Line { layer: self, x, width, y: y * self.strides[0], taps, output, count: size[1] });
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

/// All images.
struct Images<'a, T> {
    layer: &'a Depthwise,
    x: &'a [T],
    image: [usize; 3],
    output: &'a mut [T],
    size: [usize; 2],
    host: &'a dyn Host,
}

impl<T: Element> Job for Images<'_, T> {
    type Output = Result<(), Error>;

    fn run<I: Isa>(self, isa: I) -> Result<(), Error> {
        self.layer.run_on(isa, self.x, self.image, self.output, self.size, self.host)
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
/// Channels of which a row is computed before those after them: pixels are read again by their neighbours' kernels, and are then still in the
/// first cache.
const CHANNELS: usize = 256;

impl<T: Element> Job for Line<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let layer = self.layer;
        let all = 0..layer.kernel[1];
        // Three columns side by side: the commonest kernels. The others read a pixel again for each column.
        let three = all == (0..3) && layer.strides[1] == 1 && layer.dilations[1] == 1;
        let channels = layer.bias.len();
        for start in (0..channels).step_by(CHANNELS) {
            let of = start..(start + CHANNELS).min(channels);
            let mut pixel = 0;
            while pixel < self.count {
                let inside = |pixel: usize| pixel < self.count && layer.taps(1, pixel, self.width) == all;
                // If the kernels of the first and the last pixel are inside the image, so are those between them.
                if inside(pixel) && inside(pixel + PIXELS - 1) {
                    match three {
                        true => self.pixels::<I, PIXELS, 3>(isa, pixel, all.clone(), of.clone()),
                        false => self.pixels::<I, PIXELS, 0>(isa, pixel, all.clone(), of.clone()),
                    }
                    pixel += PIXELS;
                } else {
                    self.pixels::<I, 1, 0>(isa, pixel, layer.taps(1, pixel, self.width), of.clone());
                    pixel += 1;
                }
            }
        }
    }
}

impl<T: Element> Line<'_, T> {
    /// Computes `G` outputs from `first` on, using the kernel columns `taps`: `S` of them, all neighbours, if it is not 0.
    #[inline(always)]
    fn pixels<I: Isa, const G: usize, const S: usize>(
        &self,
        isa: I,
        first: usize,
        taps: Range<usize>,
        of: Range<usize>,
    ) {
        match self.layer.activation {
            None => self.channels::<I, G, S>(isa, first, taps, of, |x| x),
            // A loop for each function.
            Some(Activation::Gelu) => {
                self.channels::<I, G, S>(isa, first, taps, of, |x| activate(isa, Activation::Gelu, x))
            }
            Some(function) => self.channels::<I, G, S>(isa, first, taps, of, |x| activate(isa, function, x)),
        }
    }

    #[inline(always)]
    fn channels<I: Isa, const G: usize, const S: usize>(
        &self,
        isa: I,
        first: usize,
        taps: Range<usize>,
        of: Range<usize>,
        function: impl Fn(I::V) -> I::V,
    ) {
        let (layer, channels) = (self.layer, self.layer.bias.len());
        let [step_y, step_x] = layer.dilations;
        // Without columns there is nothing to point at either.
        let rows = if taps.is_empty() { 0 } else { self.taps.len() };
        let row = self.taps.start;
        let top = (self.y + row * step_y).wrapping_sub(layer.pads[0]);
        let left = (first * layer.strides[1] + taps.start * step_x).wrapping_sub(layer.pads[1]);
        // Never dereferenced if there are no rows.
        let x = self.x.as_ptr().wrapping_add(top.wrapping_mul(self.width).wrapping_add(left).wrapping_mul(channels));
        let weight = layer.weight.as_ptr().wrapping_add((row * layer.kernel[1] + taps.start) * channels);
        let columns = taps.len();
        for channel in of.step_by(I::LANES) {
            let n = (channels - channel).min(I::LANES);
            // SAFETY: channel + n <= channels; the taps are those inside the image, and the output has the pixels.
            unsafe {
                let mut sums = [isa.widen_part(layer.bias.as_ptr().add(channel), n); G];
                for row in 0..rows {
                    let x = x.add(row * step_y * self.width * channels + channel);
                    let weight = weight.add(row * layer.kernel[1] * channels + channel);
                    if S > 0 {
                        let weights: [I::V; S] = array(|column| isa.widen_part(weight.add(column * channels), n));
                        // Each pixel is read once.
                        for pixel in 0..G + S - 1 {
                            let x = x.add(pixel * channels);
                            let value = isa.widen_part(x, n);
                            if pixel >= S - 1 {
                                // Of the next pixels: too many places at once for the processor to read ahead by itself.
                                isa.prefetch(x.wrapping_add(G * channels).cast());
                            }
                            for column in 0..S {
                                if pixel >= column && pixel - column < G {
                                    sums[pixel - column] = isa.fma(value, weights[column], sums[pixel - column]);
                                }
                            }
                        }
                        continue;
                    }
                    for column in 0..columns {
                        let weight = isa.widen_part(weight.add(column * channels), n);
                        for g in 0..G {
                            let x = x.add((g * layer.strides[1] + column * step_x) * channels);
                            sums[g] = isa.fma(isa.widen_part(x, n), weight, sums[g]);
                        }
                    }
                }
                for g in 0..G {
                    let output = self.output.add((first + g) * channels + channel);
                    isa.narrow_part(output, function(sums[g]), n);
                }
            }
        }
    }
}
