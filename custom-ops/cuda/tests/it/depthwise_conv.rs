//! The CUDA kernels of DepthwiseConv against the f64 reference, on a GPU or on the emulator.

use crate::device::on_device;
use moh_conformance::depthwise_conv::{CASE, Case};
use moh_operators::DType;
use moh_operators::depthwise_conv::Then;

/// Images smaller than a kernel, ends of rows inside a thread's pixels, several blocks; channels in chunks and alone.
#[test]
fn all_sizes() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (i, channels) in [1, 7, 8, 40, 64, 130].into_iter().enumerate() {
                let then = Then::ALL[i % Then::ALL.len()];
                for (images, kernel) in
                    [([2, 5, 7], [3, 3]), ([1, 1, 1], [3, 3]), ([3, 4, 9], [1, 5]), ([0, 4, 4], [3, 1])]
                {
                    let case = Case { images, channels, kernel, then, bias: i % 2 == 0, dtype, ..CASE };
                    println!("{case:?}");
                    device.check(&case.call(), |_| false);
                }
            }
        }
    });
}
