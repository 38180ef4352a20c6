//! What tract cannot do is an error that says why.

use crate::support::onnx::{DataType, Graph};
use crate::support::write;
use moh_runtime::{Error, Model, Options, RuntimeChoice, Tensor};

fn tract() -> Options {
    Options { runtime: RuntimeChoice::Tract, threads: Some(1), ..Options::default() }
}

fn numbers(values: &[i64]) -> Tensor {
    Tensor::new([values.len()], values.to_vec()).unwrap()
}

/// tract panics where an integer is divided by 0.
#[test]
fn a_panic_in_a_run_is_an_error_and_the_model_runs_on() {
    let mut graph = Graph::new();
    graph.input("x", DataType::Int64, &["n"]);
    graph.input("y", DataType::Int64, &["n"]);
    graph.node("Div", &["x", "y"], "quotient", &[]);
    graph.output("quotient", DataType::Int64, &["n"]);
    let (_folder, path) = write(&graph);
    let mut model = Model::load(&path, &tract()).unwrap();
    for _ in 0..2 {
        match model.run([("x", numbers(&[6, 7]).into()), ("y", numbers(&[2, 0]).into())]) {
            Err(Error::Run { path: found, runtime: "tract", reason }) => {
                assert_eq!(found, path);
                assert!(reason.contains("divide by zero"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        let outputs = model.run([("x", numbers(&[6, 7]).into()), ("y", numbers(&[2, 7]).into())]).unwrap();
        assert_eq!(outputs[0].as_slice::<i64>().unwrap(), [3, 1]);
    }
}

/// tract computes what is constant when the model is loaded.
#[test]
fn a_panic_while_loading_is_an_error() {
    let mut graph = Graph::new();
    graph.input("x", DataType::Int64, &["n"]);
    graph.ints("seven", &[7]);
    graph.ints("zero", &[0]);
    graph.node("Div", &["seven", "zero"], "quotient", &[]);
    graph.node("Add", &["x", "quotient"], "y", &[]);
    graph.output("y", DataType::Int64, &["n"]);
    let (_folder, path) = write(&graph);
    match Model::load(&path, &tract()) {
        Err(Error::Load { path: found, runtime: "tract", reason }) => {
            assert_eq!(found, path);
            assert!(reason.contains("divide by zero"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn bfloat16_is_named_with_the_runtime_that_has_it() {
    let mut graph = Graph::new();
    graph.input("x", DataType::Float, &["n"]);
    graph.node("Cast", &["x"], "narrow", &[("to", i64::from(DataType::Bfloat16 as i32))]);
    graph.cast_to_float("narrow", "y");
    graph.output("y", DataType::Float, &["n"]);
    let (_folder, path) = write(&graph);
    match Model::load(&path, &tract()) {
        Err(Error::Load { reason, .. }) => {
            assert_eq!(reason, "narrow converts to bfloat16, which tract does not have; onnxruntime does");
        }
        other => panic!("{other:?}"),
    }
}
