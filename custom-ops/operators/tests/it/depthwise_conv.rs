//! DepthwiseConv: attributes, and shapes with what they imply.

use moh_operators::depthwise_conv::{Attributes as DepthwiseConvAttributes, Problem, Then};
use moh_operators::{Attributes, DepthwiseConv, Error, problem_of};

fn attributes(channels: usize) -> Result<Attributes, Error> {
    Attributes::new::<DepthwiseConv>(DepthwiseConvAttributes { channels, activation: Then::Silu })
}

fn problem(shapes: &[Option<&[usize]>]) -> Result<Problem, Error> {
    let attributes = attributes(8).unwrap();
    attributes.operator().output_shape(&attributes, shapes)?;
    problem_of::<DepthwiseConv>(&attributes, shapes.iter().copied())
}

#[test]
fn sizes_follow_from_shapes() {
    let found = problem(&[Some(&[2, 6, 7, 8]), Some(&[8, 1, 3, 5]), Some(&[8])]).unwrap();
    let expected = Problem { images: [2, 6, 7], channels: 8, kernel: [3, 5], then: Then::Silu };
    assert_eq!(found, expected);
}

#[test]
fn shape_error_names_the_wrong_input() {
    let x: Option<&[usize]> = Some(&[2, 6, 7, 8]);
    let weight: Option<&[usize]> = Some(&[8, 1, 3, 3]);
    let odd = "DepthwiseConv: input weight: expected shape (channels = 8, 1, rows, columns), the last two odd, found";
    let images = "DepthwiseConv: input x: expected shape (batch, height, width, channels = 8), found";
    let cases: [(&[Option<&[usize]>], String); 6] = [
        (&[Some(&[2, 42, 8]), weight], format!("{images} (2, 42, 8)")),
        (&[Some(&[2, 8, 6, 7]), weight], format!("{images} (2, 8, 6, 7)")),
        (&[x, Some(&[9, 1, 3, 3])], format!("{odd} (9, 1, 3, 3)")),
        (&[x, Some(&[8, 8, 3, 3])], format!("{odd} (8, 8, 3, 3)")),
        (&[x, Some(&[8, 1, 3, 4])], format!("{odd} (8, 1, 3, 4)")),
        (&[x, weight, Some(&[1])], "DepthwiseConv: input bias: expected shape (channels = 8), found (1)".to_owned()),
    ];
    for (shapes, message) in cases {
        assert_eq!(problem(shapes).unwrap_err().to_string(), message);
    }
}

#[test]
fn attributes_are_checked() {
    let message = attributes(0).unwrap_err().to_string();
    assert_eq!(message, "DepthwiseConv: attribute channels: expected a number from 1 to 1048576, found 0");
    let functions: Vec<bool> = Then::ALL.iter().map(|then| then.activation().is_some()).collect();
    assert_eq!(functions, [true, true, true, true, false]);
}
