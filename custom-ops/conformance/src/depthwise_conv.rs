//! Cases of DepthwiseConv.

use crate::{Call, Random};
use moh_operators::depthwise_conv::{Attributes as DepthwiseConvAttributes, Then};
use moh_operators::{Attributes, DType, DepthwiseConv};

/// A case.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Images, and their height and width.
    pub images: [usize; 3],
    /// Channels.
    pub channels: usize,
    /// Rows and columns of a kernel.
    pub kernel: [usize; 2],
    /// Whether there is a bias.
    pub bias: bool,
    /// What is done with the sums.
    pub then: Then,
    /// The element type T.
    pub dtype: DType,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// A case to start from.
pub const CASE: Case =
    Case { images: [2, 5, 7], channels: 20, kernel: [3, 3], bias: true, then: Then::Gelu, dtype: DType::F32, seed: 1 };

impl Case {
    /// The call with random inputs, scaled for outputs near 1.
    pub fn call(&self) -> Call {
        let Case { images, channels, kernel: [rows, columns], bias, then, dtype, seed } = *self;
        let mut random = Random(seed);
        let mut numbers = |count: usize, scale: f32| (0..count).map(|_| random.signed() * scale).collect::<Vec<_>>();
        let attributes =
            Attributes::new::<DepthwiseConv>(DepthwiseConvAttributes { channels, activation: then }).unwrap();
        let mut call = Call::new(attributes, dtype);
        let [batch, height, width] = images;
        let taps = rows * columns;
        call.terms = taps;
        call.input(&[batch, height, width, channels], &numbers(batch * height * width * channels, 1.0));
        call.input(&[channels, 1, rows, columns], &numbers(channels * taps, (3.0 / taps as f32).sqrt()));
        if bias {
            call.input(&[channels], &numbers(channels, 1.0));
        }
        call
    }
}
