//! RoutedProjection and RoutedCombine.

use moh_conformance::head_linear::{COMBINE, Case, PROJECTION, each};
use moh_conformance::{Buffer, Call};
use moh_operators::{
    Attributes, DType, Data, Definition, Error, Operator, RoutedCombine, RoutedProjection, Tensor, Value,
};

fn attributes(operator: &'static Operator, heads: i64, layout: i64) -> Result<Attributes, Error> {
    Attributes::read(operator, |def| Some(Value::Int(if def.name == "num_heads" { heads } else { layout })))
}

fn error(case: Case, change: impl FnOnce(&mut Call)) -> Error {
    let mut call = case.call();
    change(&mut call);
    case.operator.reference(&call.attributes, &call.tensors()).unwrap_err()
}

#[test]
fn attributes_out_of_range_are_refused() {
    for case in [PROJECTION, COMBINE] {
        for (name, heads, layout) in [
            ("num_heads", 0, 0),
            ("num_heads", -1, 0),
            ("num_heads", i64::MAX, 0),
            ("weight_layout", 3, 2),
            ("weight_layout", 3, -1),
        ] {
            match attributes(case.operator, heads, layout) {
                Err(Error::Attribute { attribute, .. }) => assert_eq!(attribute, name),
                other => panic!("{name}: {other:?}"),
            }
        }
        for missing in ["num_heads", "weight_layout"] {
            let read = Attributes::read(case.operator, |def| (def.name != missing).then_some(Value::Int(1)));
            assert!(matches!(read, Err(Error::Attribute { attribute, .. }) if attribute == missing), "{missing}");
        }
    }
}

#[test]
fn shape_error_names_the_wrong_input() {
    let base = Case { batch: 2, q_len: 3, heads: 3, block: 4, width: 5, bias: true, ..PROJECTION };
    for case in each(base) {
        let wide = if case.is_projection() { 5 } else { 12 };
        let valid = case.call().inputs;
        let (weight, out) = (valid[1].0.clone(), valid[3].0[0]);
        let mut wrong: Vec<(usize, Vec<usize>, usize)> = vec![
            (0, vec![2, 3], 0),
            (0, vec![2, 3, 0], 0),
            (0, vec![2, 3, wide, 1], 0),
            (1, weight[1..].to_vec(), 1),
            (1, [&[1], &weight[..]].concat(), 1),
            (2, vec![2, 3, 4], 2),
            (2, vec![1, 3, 3], 2),
            (2, vec![2, 4, 3], 2),
            (2, vec![6, 3], 2),
            (3, vec![out + 1], 3),
            (3, vec![1, out], 3),
            (3, vec![1], 3),
        ];
        for axis in 0..weight.len() {
            for size in [0, weight[axis] + 1] {
                let mut shape = weight.clone();
                shape[axis] = size;
                // Another output width agrees with the weight, so the error is reported for the bias.
                let free = match (case.is_projection(), case.per_head) {
                    (true, false) => None,
                    (false, false) => Some(0),
                    (_, true) => Some(2),
                };
                let reported = if free == Some(axis) && size > 0 { 3 } else { 1 };
                wrong.push((1, shape, reported));
            }
        }
        for (i, shape, reported) in wrong {
            let name = case.operator.inputs[reported].name;
            let found = error(case, |call| call.inputs[i].0 = shape.clone());
            match &found {
                Error::Shape { input, .. } => assert_eq!(*input, name, "{case:?} {shape:?}: {found}"),
                other => panic!("{case:?} {name} {shape:?}: {other}"),
            }
        }
    }
}

#[test]
fn wrong_input_count_type_or_length_is_refused() {
    for case in each(Case { q_len: 2, bias: true, ..PROJECTION }) {
        let name = |i: usize| case.operator.inputs[i].name;
        for n in [0, 2] {
            let found = error(case, |call| call.inputs.truncate(n));
            assert!(matches!(found, Error::InputCount { found, .. } if found == n), "{found}");
        }
        let found = error(case, |call| call.input(&[1], &[1.0]));
        assert!(matches!(found, Error::InputCount { found: 5, .. }), "{found}");
        for i in 0..4 {
            let half = |call: &mut Call| {
                let numbers = vec![0.5; call.inputs[i].0.iter().product()];
                call.inputs[i].1 = Buffer::new(DType::F16, &numbers);
            };
            // x defines T, so a wrong type there is reported for the weight.
            let expected = name(if i == 0 { 1 } else { i });
            let found = error(case, half);
            assert!(matches!(found, Error::Type { input, .. } if input == expected), "{found}");
            let short = |call: &mut Call| {
                let numbers = vec![0.5; call.inputs[i].0.iter().product::<usize>() - 1];
                call.inputs[i].1 = Buffer::new(DType::F32, &numbers);
            };
            let found = error(case, short);
            assert!(matches!(found, Error::Length { tensor, .. } if tensor == name(i)), "{found}");
        }
        // T is a floating-point type: integers of a known type are refused, whether or not all agree.
        for ty in [DType::U8, DType::I64] {
            let integers = |call: &mut Call| {
                for (shape, buffer) in &mut call.inputs {
                    *buffer = Buffer::new(ty, &vec![1.0; shape.iter().product()]);
                }
            };
            let found = error(case, integers);
            assert!(matches!(found, Error::Type { input: "x", found, .. } if found == ty), "{found}");
        }
    }
}

#[test]
fn sizes_that_overflow_memory_are_refused() {
    for operator in [RoutedProjection::OPERATOR, RoutedCombine::OPERATOR] {
        let shapes = [vec![1 << 40, 1 << 40, 4], vec![4, 4], vec![1 << 40, 1 << 40, 4]];
        let inputs: Vec<_> = shapes.iter().map(|shape| Some(Tensor { shape, data: Data::F32(&[]) })).collect();
        let result = operator.reference(&attributes(operator, 4, 0).unwrap(), &inputs);
        assert!(matches!(result, Err(Error::Shape { .. })), "{result:?}");
    }
}
