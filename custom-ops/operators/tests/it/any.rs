//! Properties of every operator: attributes belong to one operator, zeros replace optional inputs, sizes follow from a
//! weight.

use moh_conformance::head_linear::{COMBINE, PROJECTION, each};
use moh_conformance::{
    Buffer, Call, aggregated_attention, cache, examples, head_linear, linear, routed_attention, routed_mlp,
    top_k_router,
};
use moh_operators::routed_mlp::Activation;
use moh_operators::{
    Attributes, DType, Definition, DepthwiseConv, Error, LayerNorm, LinearActivationNBits, LinearNBits, OPERATORS,
    Operator, RoutedCombine, RoutedCombineNBits, RoutedMlp, RoutedMlpNBits, RoutedProjection, RoutedProjectionNBits,
    Tensor, Variant, problem_of, routed_projection,
};

/// A call of every operator with all inputs, each size different.
fn calls() -> Vec<Call> {
    let router = top_k_router::plain();
    let cached = &cache::attentions(DType::F32)[2];
    let heads = |case: head_linear::Case| {
        head_linear::Case { batch: 2, q_len: 3, heads: 4, block: 5, width: 7, bias: true, ..case }.call()
    };
    let dense =
        |then| linear::Case { rows: 6, width: 5, out_width: 7, bias: true, then, dtype: DType::F32, seed: 1 }.call();
    let mut calls = vec![
        routed_attention::Case { bias: Some(([true; 4], routed_attention::Mask::Finite)), ..Default::default() }
            .draw()
            .call(),
        heads(PROJECTION),
        heads(COMBINE),
        routed_mlp::Case { width: 5, hidden: 4, out_width: 6, activation: Activation::SwiGlu, ..routed_mlp::CASE }
            .call(),
        aggregated_attention::PLAIN.call(),
        router.call_with(&router.numbers()),
        cache::updates(DType::F32)[0].call(),
        cached.call(&cached.draw()),
        dense(linear::Then::SharedGate(3)),
        dense(linear::Then::Activation(Activation::GeluTanh)),
    ];
    // The last example with all inputs.
    let complete = |operator: &'static Operator| {
        let all = examples(operator, DType::F32).into_iter().filter(|call| call.inputs.len() == operator.inputs.len());
        all.last().unwrap()
    };
    let quantised = [RoutedProjectionNBits::OPERATOR, RoutedCombineNBits::OPERATOR, RoutedMlpNBits::OPERATOR];
    calls.extend(quantised.map(complete));
    calls.extend([LinearNBits::OPERATOR, LinearActivationNBits::OPERATOR].map(complete));
    calls.extend([LayerNorm::OPERATOR, DepthwiseConv::OPERATOR].map(complete));
    assert_eq!(calls.len(), OPERATORS.len());
    calls
}

fn partial(shape: &[usize]) -> Vec<Option<usize>> {
    shape.iter().map(|&dim| Some(dim)).collect()
}

#[test]
fn attributes_of_another_operator_are_refused() {
    // The same struct with the same values, but of another operator.
    let set = routed_projection::Attributes { num_heads: 4, weight_layout: moh_operators::WeightLayout::OutIn };
    let projection = Attributes::new::<RoutedProjection>(set).unwrap();
    let combine = Attributes::new::<RoutedCombine>(set).unwrap();
    assert_eq!(projection, projection.clone());
    assert_ne!(projection, combine);
    assert_eq!(projection.get::<RoutedProjection>(), Ok(&set));
    let refused = Error::Operator { expected: "RoutedCombine", found: "RoutedProjection" };
    assert_eq!(projection.get::<RoutedCombine>(), Err(refused.clone()));
    assert_eq!(problem_of::<RoutedCombine>(&projection, std::iter::empty()), Err(refused));
}

#[test]
fn missing_required_input_before_an_optional_one_is_refused() {
    for call in calls() {
        let operator = call.operator();
        for i in 0..operator.required_inputs() {
            let mut inputs = call.tensors();
            inputs[i] = None;
            let found = inputs.iter().flatten().count();
            match operator.reference(&call.attributes, &inputs) {
                Err(Error::InputCount { found: counted, .. }) => assert_eq!(counted, found, "{operator:?} {i}"),
                other => panic!("{operator:?} without {}: {other:?}", operator.inputs[i].name),
            }
        }
    }
}

/// Leaving out optional inputs equals passing `Operator::filler` in the shape that `Operator::zeros` returns.
#[test]
fn zeros_equal_absent_optional_inputs() {
    for call in calls() {
        let operator: &Operator = call.operator();
        let required = operator.required_inputs();
        let shapes: Vec<Vec<Option<usize>>> = call.inputs.iter().map(|(shape, _)| partial(shape)).collect();
        let known: Vec<_> = shapes[..required].iter().map(|shape| Some(&shape[..])).collect();
        let zeros: Option<Vec<Vec<usize>>> =
            (required..operator.inputs.len()).map(|i| operator.zeros(&call.attributes, &known, i)).collect();
        // These operators have no optional input that zeros can replace.
        let Some(zeros) = zeros.filter(|zeros| !zeros.is_empty()) else {
            assert_eq!(required, operator.inputs.len(), "{operator:?}");
            continue;
        };
        let constant = |(input, shape): (usize, &Vec<usize>)| {
            let dtype = operator.inputs[input].ty.dtype(DType::F32);
            let filler = operator.filler(&call.attributes, input);
            Buffer::new(dtype, &vec![filler.into(); shape.iter().product()])
        };
        let buffers: Vec<Buffer> = (required..).zip(&zeros).map(constant).collect();
        let mut inputs = call.tensors();
        inputs.truncate(required);
        let without = operator.reference(&call.attributes, &inputs).unwrap();
        inputs.extend(zeros.iter().zip(&buffers).map(|(shape, zeros)| Some(Tensor { shape, data: zeros.data() })));
        assert_eq!(operator.reference(&call.attributes, &inputs).unwrap(), without, "{operator:?}");
    }
}

#[test]
fn variants_share_a_body_only_if_compatible() {
    let plain = Variant::default();
    for other in
        [Variant { kind: 1, ..plain }, Variant { per_head: true, ..plain }, Variant { portable: true, ..plain }]
    {
        assert_eq!(plain.common(other), None);
        assert_eq!(other.common(plain), None);
        assert_eq!(other.common(other), Some(other));
    }
    // The common body has what either of the two needs.
    let (causal, more) = (Variant { causal: true, ..plain }, Variant { optional_inputs: 1, ..plain });
    for (one, other) in [(causal, more), (more, causal)] {
        assert_eq!(one.common(other), Some(Variant { causal: true, optional_inputs: 1, ..plain }));
    }
}

#[test]
fn sizes_follow_from_a_weights_shape() {
    let base = head_linear::Case { batch: 2, q_len: 3, heads: 4, block: 5, width: 7, ..PROJECTION };
    for case in each(base) {
        let call = case.call();
        let weight = &call.inputs[1].0;
        let found = match case.is_projection() {
            true => RoutedProjection::of_weight(call.attributes.get::<RoutedProjection>().unwrap(), weight),
            false => RoutedCombine::of_weight(call.attributes.get::<RoutedCombine>().unwrap(), weight),
        };
        let found = found.unwrap();
        assert_eq!((found.tokens, found.num_heads, found.width, found.block), (0, 4, 7, 5), "{case:?}");
        assert_eq!(found.per_head(), case.per_head);
    }
    let case =
        routed_mlp::Case { width: 5, hidden: 4, out_width: 6, activation: Activation::SwiGlu, ..routed_mlp::CASE };
    let call = case.call();
    let attributes = call.attributes.get::<RoutedMlp>().unwrap();
    let of = |input: usize| RoutedMlp::of_weight(attributes, input, &call.inputs[input].0).unwrap();
    assert_eq!((of(1).tokens, of(1).width, of(1).hidden), (0, 5, 4));
    assert_eq!((of(2).tokens, of(2).hidden, of(2).out_width), (0, 4, 6));
}
