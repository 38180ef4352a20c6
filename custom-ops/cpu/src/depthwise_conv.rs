//! DepthwiseConv on a CPU.

use crate::isa::Isa;
use crate::kernel::{self, CpuOperator, Work};
use crate::layers::Depthwise;
use moh_operators::depthwise_conv::{Inputs, Problem};
use moh_operators::{DepthwiseConv, Element, Error};

impl CpuOperator for DepthwiseConv {
    type Output<T: Element> = T;

    fn run<I: Isa, T: Element>(call: kernel::Call<'_, Self, I, T>) -> Result<Work, Error> {
        let kernel::Call { isa, problem, inputs: Inputs { x, weight, bias }, output, host, .. } = call;
        let &Problem { images, channels, kernel, then } = problem;
        let taps = kernel[0] * kernel[1];
        let mut by_tap = vec![0.0; weight.len()];
        for (channel, of_channel) in weight.chunks_exact(taps).enumerate() {
            for (tap, x) in of_channel.iter().enumerate() {
                by_tap[tap * channels + channel] = x.to_f32();
            }
        }
        let layer = Depthwise {
            kernel,
            strides: [1, 1],
            dilations: [1, 1],
            pads: kernel.map(|size| size / 2),
            weight: by_tap,
            bias: bias.map_or_else(|| vec![0.0; channels], |bias| bias.iter().map(|x| x.to_f32()).collect()),
            activation: then.activation(),
        };
        layer.run_on(isa, x, images, output, [images[1], images[2]], host)?;
        Ok(Work::default())
    }
}
