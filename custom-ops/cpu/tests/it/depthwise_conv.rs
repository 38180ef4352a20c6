//! DepthwiseConv: every CPU kernel that this processor supports, against the f64 reference.

use crate::support::{self, kernels_of};
use moh_conformance::depthwise_conv::{CASE, Case};
use moh_conformance::{Buffer, Call};
use moh_cpu::Threads;
use moh_operators::depthwise_conv::Then;
use moh_operators::{DType, Definition, DepthwiseConv};
use proptest::prelude::*;

prop_compose! {
    fn cases()(
        batch in 0usize..3,
        // Smaller than a kernel, and up to several of the groups of pixels that are computed together.
        height in 1usize..8,
        width in 1usize..15,
        // Up to, at and beyond vectors and the 256 channels that are computed before the next.
        channels in prop_oneof![6 => 1usize..40, 1 => 120usize..140, 1 => 250usize..270, 1 => 510usize..530],
        kernel in prop::sample::select(&[[3, 3], [1, 1], [5, 3], [3, 5], [1, 7]][..]),
        bias in any::<bool>(),
        then in prop::sample::select(Then::ALL),
        dtype in prop_oneof![3 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::BF16)],
        seed in any::<u64>(),
    ) -> Case {
        Case { images: [batch, height, width], channels, kernel, bias, then, dtype, seed }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equals_the_reference(case in cases()) {
        println!("{case:?}");
        support::check(&case.call(), &[1, 3], |_| false);
    }
}

/// What is not finite reaches the pixels whose kernels cover it, and no other channel.
#[test]
fn numbers_that_are_not_finite_stay_where_kernels_reach() {
    let [_, height, width] = CASE.images;
    let at =
        |image: usize, y: usize, x: usize, channel: usize| ((image * height + y) * width + x) * CASE.channels + channel;
    let mut call: Call = Case { then: Then::Nothing, ..CASE }.call();
    let mut numbers: Vec<f32> = call.inputs[0].1.values(&"x").iter().map(|&x| x as f32).collect();
    numbers[at(1, 2, 3, 17)] = f32::NAN;
    numbers[at(0, 4, 6, 0)] = f32::NAN;
    call.inputs[0].1 = Buffer::new(DType::F32, &numbers);
    let mut reached = Vec::new();
    for (image, y, x, channel) in [(1, 2, 3, 17), (0, 4, 6, 0)] {
        for (y, x) in (y - 1..=y + 1).flat_map(|y| (x - 1..=x + 1).map(move |x| (y, x))) {
            if y < height && x < width {
                reached.push(at(image, y, x, channel));
            }
        }
    }
    for kernel in kernels_of(DepthwiseConv::OPERATOR) {
        let (found, _) = support::run(&call, kernel, numbers.len(), &Threads::new(2)).unwrap();
        for (i, found) in found.iter().enumerate() {
            assert_eq!(found.is_nan(), reached.contains(&i), "{kernel:?}: element {i}");
        }
    }
}
