//! Selection of the kernel: the best one, or the one named by the environment variable.

use crate::support::{kernels_of, run};
use moh_conformance::Call;
use moh_conformance::routed_attention::Case;
use moh_conformance::{Buffer, top_k_router};
use moh_cpu::{ISA_VARIABLE, Input, Threads};
use moh_operators::{DataMut, Definition, Operator, RoutedAttention, TopKRouter};

const OPERATOR: &Operator = RoutedAttention::OPERATOR;

#[test]
fn best_kernel_is_default_and_kernels_can_be_named() {
    let best = moh_cpu::select(OPERATOR, None).unwrap();
    assert_eq!(best.isa, kernels_of(OPERATOR).find(|kernel| (kernel.automatic)()).unwrap().isa);
    for kernel in kernels_of(OPERATOR) {
        assert_eq!(moh_cpu::select(OPERATOR, Some(kernel.isa)).unwrap().isa, kernel.isa);
    }
    assert!(moh_cpu::select(OPERATOR, Some("abacus")).is_none());
}

/// 98 rows per KV head: 7 vectors of 16 lanes, 13 of 8, 25 of 4, or 4 tiles of a matrix unit's 32 rows.
fn call() -> Call {
    let case =
        Case { q_len: 49, kv_len: 4, kv_num_heads: 2, group_size: 2, head_dim: 5, value_dim: 4, ..Case::default() };
    case.draw().call()
}

/// Runs the call with the environment's instruction set. Runs only as a child process of the test below.
#[test]
#[ignore = "a child process of `environment_variable_selects_the_kernel`"]
fn child() {
    let call = call();
    let inputs: Vec<_> = call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
    match moh_cpu::run(&call.attributes, &inputs, DataMut::F32(&mut [0.0; 49 * 16]), &Threads::new(1)) {
        Ok(work) => println!("macs={}", work.macs),
        Err(error) => println!("error={error}"),
    }
}

/// Says which instruction set is used; as above, a child.
#[test]
#[ignore = "a child process of `the_instruction_set_is_known_before_the_first_call`"]
fn instruction_set() {
    match moh_cpu::instruction_set() {
        Ok(set) => println!("set={set}"),
        Err(error) => println!("set={error}"),
    }
}

#[test]
fn the_instruction_set_is_known_before_the_first_call() {
    let child = |isa: &str| {
        let text = with_isa("selection::instruction_set", isa);
        text.lines().find_map(|line| line.split_once("set=")).unwrap().1.to_owned()
    };
    let sets = moh_cpu::instruction_sets();
    for set in &sets {
        assert_eq!(child(set), *set);
    }
    assert_eq!(child(""), moh_cpu::select(OPERATOR, None).unwrap().isa);
    let expected = format!(
        "environment variable MOH_CPU_ISA: expected one that this processor has ({}), found \"abacus\"",
        sets.join(", ")
    );
    assert_eq!(child("abacus"), expected);
}

/// Runs an operator that does not use matrix units. Runs only as a child process of the test below.
#[test]
#[ignore = "a child process of `operator_without_matrix_unit_kernels_runs_on_vectors`"]
fn router() {
    let case = top_k_router::plain();
    let call = case.call_with(&case.numbers());
    let inputs: Vec<_> = call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
    let mut output = Buffer::unwritten(call.output_dtype(), call.expected().len());
    match moh_cpu::run(&call.attributes, &inputs, output.data_mut(), &Threads::new(1)) {
        Ok(_) => println!("done=1"),
        Err(error) => println!("error={error}"),
    }
}

/// The output of `test`, run as a child process with `isa` in the environment.
fn with_isa(test: &str, isa: &str) -> String {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", test, "--nocapture"])
        .env(ISA_VARIABLE, isa)
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// An instruction set that any operator has a kernel for can be selected for all operators.
#[test]
fn operator_without_matrix_unit_kernels_runs_on_vectors() {
    for kernel in kernels_of(OPERATOR) {
        let text = with_isa("selection::router", kernel.isa);
        assert!(text.contains("done=1"), "{}: {text}", kernel.isa);
    }
    let text = with_isa("selection::router", "abacus");
    assert!(text.contains(&format!("error={}: expected a kernel", TopKRouter::NAME)), "{text}");
}

#[test]
fn environment_variable_selects_the_kernel() {
    let child = |isa: &str| with_isa("selection::child", isa);
    fn macs(text: &str) -> Option<&str> {
        text.lines().find_map(|line| line.split_once("macs=")).map(|(_, macs)| macs)
    }
    // Rows are padded to whole vectors, so sets of different vector lengths differ in their work.
    let mut work = Vec::new();
    for kernel in kernels_of(OPERATOR) {
        let text = child(kernel.isa);
        let expected = run(&call(), kernel, 49 * 16, &Threads::new(1)).unwrap().1.macs.to_string();
        assert_eq!(macs(&text), Some(&expected[..]), "{kernel:?}: {text}");
        work.push(macs(&text).map(str::to_owned));
    }
    assert!(work.len() == 1 || work.first() != work.last(), "{work:?}");
    let best = kernels_of(OPERATOR).position(|kernel| (kernel.automatic)()).unwrap();
    assert_eq!(macs(&child("")), work[best].as_deref(), "the best by default");
    let text = child("abacus");
    assert!(text.contains("error=RoutedAttention: expected a kernel that this processor supports ("), "{text}");
    assert!(text.contains("portable), found abacus"), "{text}");
}
