//! Calls of an operator's own examples with random inputs. Every registered operator has them.

use crate::{Call, Random};
use moh_operators::{DType, ElementType, Operator};

/// The examples of `operator` with element type `dtype`. About a third of the float32 inputs' elements are 0, because
/// most of these inputs are gates; int64 inputs are positions from 0 to 5.
pub fn examples(operator: &'static Operator, dtype: DType) -> Vec<Call> {
    let examples = operator.examples().unwrap_or_else(|error| panic!("{error}"));
    let call = |(seed, example): (usize, moh_operators::Example<_>)| {
        let (mut random, mut call) = (Random(seed as u64), Call::new(example.attributes, dtype));
        for (operand, shape) in operator.inputs.iter().zip(&example.shapes) {
            let len = shape.iter().product();
            match operand.ty {
                ElementType::T => call.input(shape, &(0..len).map(|_| random.signed()).collect::<Vec<_>>()),
                ElementType::Float32 => {
                    let gate = |_| if random.bits() % 3 == 0 { 0.0 } else { random.signed() };
                    call.gates(shape, &(0..len).map(gate).collect::<Vec<_>>());
                }
                ElementType::Uint8 => {
                    call.bytes(shape, &(0..len).map(|_| random.bits() as u8).collect::<Vec<_>>());
                }
                ElementType::Int64 => {
                    call.integers(shape, &(0..len).map(|_| (random.bits() % 6) as i64).collect::<Vec<_>>());
                }
            }
        }
        call
    };
    examples.into_iter().enumerate().map(call).collect()
}
