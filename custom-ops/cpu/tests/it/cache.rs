//! CacheUpdate and RoutedCachedAttention: every CPU kernel that this processor supports, against the f64 reference.

use crate::support::{check, kernels_of, run};
use moh_conformance::cache::{Attention, Update, attentions, updates};
use moh_conformance::{Buffer, routed_attention::Case};
use moh_cpu::{Input, Threads};
use moh_operators::{CacheUpdate, DType, Definition, Error, RoutedAttention, RoutedCachedAttention, tolerance};

#[test]
fn new_tokens_are_written_at_each_sequences_length() {
    for update in DType::ALL.into_iter().flat_map(updates) {
        check(&update.call(), &[1, 3], |_| true);
    }
}

/// The cache is the output: what is not new must not be touched.
#[test]
fn a_cache_in_place_changes_where_new_tokens_go() {
    for update in DType::ALL.into_iter().flat_map(updates).filter(|update| update.capacity >= update.total) {
        let call = update.call();
        let (shape, _) = &call.inputs[0];
        for kernel in kernels_of(CacheUpdate::OPERATOR) {
            let (_, mut cache) = call.inputs[0].clone();
            let mut inputs: Vec<Option<Input<'_>>> =
                call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
            inputs[0] = Some(Input::InPlace(shape, call.dtype));
            kernel.run(&call.attributes, &inputs, cache.data_mut(), &Threads::new(2)).unwrap();
            assert_eq!(cache.values(kernel), call.expected(), "{kernel:?} {update:?}");
        }
    }
}

#[test]
fn in_place_is_refused_where_the_output_has_another_shape_or_the_operator_does_not_know_it() {
    let update = &updates(DType::F32)[2];
    let (call, length) = (update.call(), update.capacity.max(update.total));
    let mut output = Buffer::unwritten(DType::F32, 3 * 3 * length * 5);
    let refused = |inputs: &[Option<Input<'_>>], output: &mut Buffer| {
        moh_cpu::run(&call.attributes, inputs, output.data_mut(), &Threads::new(1))
    };
    let mut inputs: Vec<_> = call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
    inputs[0] = Some(Input::InPlace(&call.inputs[0].0, DType::F32));
    assert!(matches!(refused(&inputs, &mut output), Err(Error::Shape { input: "past", .. })));
    let mut inputs: Vec<_> = call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
    inputs[1] = Some(Input::InPlace(&call.inputs[1].0, DType::F32));
    assert!(matches!(refused(&inputs, &mut output), Err(Error::Shape { input: "update", .. })));
}

#[test]
fn queries_see_their_own_sequences_tokens() {
    for attention in DType::ALL.into_iter().flat_map(attentions) {
        let numbers = attention.draw();
        let call = attention.call(&numbers);
        let expected = call.expected();
        for kernel in kernels_of(RoutedCachedAttention::OPERATOR) {
            let rounding = match kernel.isa {
                "amx" | "avx512bf16" if call.dtype == DType::BF16 => tolerance::MATRIX_UNIT_BF16,
                _ => 0.0,
            };
            for threads in 1..=3 {
                let (found, _) = run(&call, kernel, expected.len(), &Threads::new(threads)).unwrap();
                assert!(found.iter().all(|x| x.is_finite()), "{kernel:?} {attention:?} reads beyond its keys");
                numbers.compare(&(kernel, &attention.spans), &found, &expected, rounding);
            }
        }
    }
}

/// The work is that of RoutedAttention on the tokens alone, whatever the cache's capacity.
#[test]
fn work_follows_lengths_and_not_capacity() {
    for q_len in [1, 130] {
        let case = Case { q_len, kv_len: 200, kv_num_heads: 2, group_size: 2, ..Case::default() };
        let alone = Case { cache_layout: true, is_causal: true, ..case }.draw().call();
        let start = (case.kv_len - q_len) as i64;
        let attention = Attention { case: Case { kv_len: 5000, ..case }, spans: vec![(7, start + 7)] };
        let cached = attention.call(&attention.draw());
        let len = q_len * 4 * case.value_dim;
        let kernels = kernels_of(RoutedAttention::OPERATOR).zip(kernels_of(RoutedCachedAttention::OPERATOR));
        for (one, other) in kernels {
            assert_eq!(one.isa, other.isa);
            for threads in 1..=2 {
                let work = |call, kernel| run(call, kernel, len, &Threads::new(threads)).unwrap().1;
                assert_eq!(work(&cached, other), work(&alone, one), "{one:?} q_len {q_len}");
            }
        }
    }
}

#[test]
fn an_update_longer_than_the_cache_is_refused() {
    let update = Update { heads: 1, capacity: 3, total: 4, q_len: 5, dim: 2, start: vec![0], dtype: DType::F32 };
    let call = update.call();
    let found = call.operator().reference(&call.attributes, &call.tensors());
    assert!(matches!(found, Err(Error::Shape { input: "update", .. })), "{found:?}");
}
