//! LayerNorm: attributes, and shapes with what they imply.

use moh_operators::layer_norm::{Attributes as LayerNormAttributes, Problem};
use moh_operators::{Attributes, Error, LayerNorm, problem_of};

fn attributes() -> Attributes {
    Attributes::new::<LayerNorm>(LayerNormAttributes { epsilon: 1e-5 }).unwrap()
}

fn problem(shapes: &[Option<&[usize]>]) -> Result<Problem, Error> {
    let attributes = attributes();
    attributes.operator().output_shape(&attributes, shapes)?;
    problem_of::<LayerNorm>(&attributes, shapes.iter().copied())
}

#[test]
fn rows_that_share_a_modulation() {
    let x: &[usize] = &[2, 3, 4, 8];
    let of =
        |scale: &[usize], shift: &[usize]| problem(&[Some(x), Some(&[8]), None, Some(scale), Some(shift)]).unwrap();
    let cases = [
        (of(&[2, 3, 4, 8], &[1, 1, 1, 8]), [1, 24]),
        (of(&[2, 1, 1, 8], &[2, 3, 1, 8]), [12, 4]),
        (problem(&[Some(x), Some(&[8])]).unwrap(), [1, 1]),
    ];
    for (problem, shared) in cases {
        assert_eq!((problem.rows, problem.width), (24, 8));
        assert_eq!([problem.rows_per_scale, problem.rows_per_shift], shared);
    }
    // Nothing is divided by the rows that there are not.
    let empty = problem(&[Some(&[0, 5, 8]), Some(&[8]), None, Some(&[0, 1, 8])]).unwrap();
    assert_eq!((empty.rows, empty.rows_per_scale), (0, 1));
}

#[test]
fn shape_error_names_the_wrong_input() {
    let x: Option<&[usize]> = Some(&[2, 5, 8]);
    let weight: Option<&[usize]> = Some(&[8]);
    let cases: [(&[Option<&[usize]>], &str); 6] = [
        (&[Some(&[2, 0]), weight], "LayerNorm: input x: expected shape (.., width), found (2, 0)"),
        (&[x, Some(&[9])], "LayerNorm: input weight: expected shape (width = 8), found (9)"),
        (&[x, weight, Some(&[1])], "LayerNorm: input bias: expected shape (width = 8), found (1)"),
        (
            &[x, weight, None, Some(&[3, 1, 8])],
            "LayerNorm: input scale: expected shape (2, 5, width = 8), where dimensions but the last may be 1 from one on, found (3, 1, 8)",
        ),
        (
            &[x, weight, None, Some(&[1, 5, 8])],
            "LayerNorm: input scale: expected shape (2, 5, width = 8), where dimensions but the last may be 1 from one on, found (1, 5, 8)",
        ),
        (
            &[x, weight, None, None, Some(&[2, 8])],
            "LayerNorm: input shift: expected shape (2, 5, width = 8), where dimensions but the last may be 1 from one on, found (2, 8)",
        ),
    ];
    for (shapes, message) in cases {
        assert_eq!(problem(shapes).unwrap_err().to_string(), message);
    }
}

#[test]
fn a_negative_epsilon_is_refused() {
    for epsilon in [-1e-9, -1.0] {
        let message = Attributes::new::<LayerNorm>(LayerNormAttributes { epsilon }).unwrap_err().to_string();
        assert_eq!(message, format!("LayerNorm: attribute epsilon: expected 0 or more, found {epsilon}"));
    }
    assert!(Attributes::new::<LayerNorm>(LayerNormAttributes { epsilon: 0.0 }).is_ok());
}
