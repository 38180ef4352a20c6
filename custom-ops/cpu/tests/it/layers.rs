//! Layers outside ai.moh, against scalar loops in f64.

use half::f16;
use moh_conformance::Random;
use moh_cpu::Threads;
use moh_cpu::layers::Depthwise;
use moh_operators::{DType, Element, Error, tolerance};

fn numbers(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count).map(|_| random.signed()).collect()
}

/// Output height and width without zero-padding below and right of the image.
fn size(layer: &Depthwise, image: [usize; 3]) -> [usize; 2] {
    [0, 1].map(|i| {
        let reach = (layer.kernel[i] - 1) * layer.dilations[i] + 1;
        (image[i + 1] + 2 * layer.pads[i]).checked_sub(reach).map_or(0, |n| n / layer.strides[i] + 1)
    })
}

fn expected(layer: &Depthwise, x: &[f64], image: [usize; 3], size: [usize; 2]) -> Vec<f64> {
    let channels = layer.bias.len();
    let mut output = Vec::new();
    for i in 0..image[0] * size[0] * size[1] * channels {
        let (channel, pixel) = (i % channels, i / channels);
        let (column, row, b) = (pixel % size[1], pixel / size[1] % size[0], pixel / size[1] / size[0]);
        let mut sum = f64::from(layer.bias[channel]);
        for ky in 0..layer.kernel[0] {
            for kx in 0..layer.kernel[1] {
                let y = (row * layer.strides[0] + ky * layer.dilations[0]).checked_sub(layer.pads[0]);
                let x_ = (column * layer.strides[1] + kx * layer.dilations[1]).checked_sub(layer.pads[1]);
                if let (Some(y), Some(x_)) = (y, x_)
                    && y < image[1]
                    && x_ < image[2]
                {
                    let weight = layer.weight[(ky * layer.kernel[1] + kx) * channels + channel];
                    sum += f64::from(weight) * x[((b * image[1] + y) * image[2] + x_) * channels + channel];
                }
            }
        }
        output.push(sum);
    }
    output
}

fn check<T: Element>(layer: &Depthwise, image: [usize; 3], threads: usize, random: &mut Random) {
    let channels = layer.bias.len();
    let x: Vec<T> = numbers(random, image.iter().product::<usize>() * channels).into_iter().map(T::from_f32).collect();
    let size = size(layer, image);
    let mut output = vec![T::from_f32(f32::NAN); image[0] * size[0] * size[1] * channels];
    layer.run(&x, image, &mut output, size, &Threads::new(threads)).unwrap();
    let x: Vec<f64> = x.into_iter().map(|x| f64::from(x.to_f32())).collect();
    for (i, (found, expected)) in output.iter().zip(expected(layer, &x, image, size)).enumerate() {
        let error = (f64::from(found.to_f32()) - expected).abs();
        assert!(error <= tolerance::operator_output(T::DTYPE), "{layer:?} {image:?}: element {i} is off by {error}");
    }
    assert!(T::DTYPE == DType::F32 || !output.is_empty());
}

#[test]
fn depthwise_convolution_equals_scalar_loops() {
    let mut random = Random(7);
    for case in 0..120 {
        let mut pick = |from: usize, to: usize| from + random.bits() as usize % (to - from);
        let kernel = [pick(1, 5), pick(1, 5)];
        let strides = [pick(1, 4), pick(1, 4)];
        let dilations = [pick(1, 3), pick(1, 3)];
        let pads = [pick(0, 4), pick(0, 4)];
        let image = [pick(1, 3), pick(8, 13), pick(8, 21)];
        let (channels, threads) = (pick(1, 40), pick(1, 4));
        let weight = numbers(&mut random, kernel[0] * kernel[1] * channels);
        let bias = numbers(&mut random, channels);
        let layer = Depthwise { kernel, strides, dilations, pads, weight, bias, activation: None };
        match case % 4 {
            0 => check::<f16>(&layer, image, threads, &mut random),
            _ => check::<f32>(&layer, image, threads, &mut random),
        }
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let layer = Depthwise {
        kernel: [1, 1],
        strides: [1, 1],
        dilations: [1, 1],
        pads: [0, 0],
        weight: vec![1.0; 2],
        bias: vec![0.0; 2],
        activation: None,
    };
    let error = layer.run(&[0.0f32; 7], [1, 2, 2], &mut [0.0; 8], [2, 2], &Threads::new(1)).unwrap_err();
    assert!(matches!(error, Error::Length { tensor: "x", expected: 8, found: 7, .. }), "{error}");
}
