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
fn a_cast_to_bfloat16_is_named_with_the_runtime_that_has_it() {
    let mut graph = Graph::new();
    graph.input("x", DataType::Float, &["n"]);
    graph.node("Cast", &["x"], "narrow", &[("to", i64::from(DataType::Bfloat16 as i32))]);
    graph.cast_to_float("narrow", "y");
    graph.output("y", DataType::Float, &["n"]);
    let (_folder, path) = write(&graph);
    match Model::load(&path, &tract()) {
        Err(Error::Load { reason, .. }) => {
            assert_eq!(
                reason,
                "narrow converts to bfloat16, which tract does not have: run the model in onnxruntime, or export it \
                 without `--attention-type bf16`"
            );
        }
        other => panic!("{other:?}"),
    }
}

/// `y = x + weight`, with the weight in a file of that location.
fn with_data(location: &str) -> Graph {
    let mut graph = Graph::new();
    graph.input("x", DataType::Float, &["2"]);
    graph.external_floats("weight", 2, location);
    graph.node("Add", &["x", "weight"], "y", &[]);
    graph.output("y", DataType::Float, &["2"]);
    graph
}

/// Weights of branches are where those of the model may be.
#[test]
fn data_of_a_branch_is_inside_the_folder() {
    let branch = |location: &str, output: &str| {
        let mut graph = Graph::new();
        graph.external_floats("weight", 2, location);
        graph.node("Identity", &["weight"], output, &[]);
        graph.output(output, DataType::Float, &["2"]);
        graph
    };
    for [then, other] in [["../data", "data"], ["data", "../data"]] {
        let mut graph = Graph::new();
        graph.input("condition", DataType::Bool, &[]);
        graph.branches("condition", "y", [branch(then, "a"), branch(other, "b")]);
        graph.output("y", DataType::Float, &["2"]);
        let (folder, path) = write(&graph);
        std::fs::write(folder.path().join("data"), bytes([1.0, 2.0])).unwrap();
        let error = Model::load(&path, &tract()).unwrap_err().to_string();
        assert!(error.contains("\"../data\": expected a path inside the model's folder"), "{error}");
    }
}

fn bytes(numbers: [f32; 2]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// As in the cache of Hugging Face's hub: a folder of links to blobs.
#[cfg(unix)]
#[test]
fn data_may_be_a_link_into_the_folder_that_the_model_is_a_link_into() {
    let cache = tempfile::tempdir().unwrap();
    let [blobs, snapshot, elsewhere] = ["blobs", "snapshot", "elsewhere"].map(|name| cache.path().join(name));
    for folder in [&blobs, &snapshot, &elsewhere] {
        std::fs::create_dir(folder).unwrap();
    }
    std::fs::write(blobs.join("aaaa"), with_data("model.onnx_data").encode()).unwrap();
    std::fs::write(blobs.join("bbbb"), bytes([1.0, 2.0])).unwrap();
    std::os::unix::fs::symlink("../blobs/aaaa", snapshot.join("model.onnx")).unwrap();
    std::os::unix::fs::symlink("../blobs/bbbb", snapshot.join("model.onnx_data")).unwrap();
    let run = || -> Result<Vec<f32>, Error> {
        let mut model = Model::load(&snapshot, &tract())?;
        let x = Tensor::new([2], vec![0.5f32, 0.5]).unwrap();
        Ok(model.run([("x", x.into())])?[0].as_slice::<f32>()?.to_vec())
    };
    assert_eq!(run().unwrap(), [1.5, 2.5]);
    // A link to somewhere else would let a model read any file.
    std::fs::write(elsewhere.join("cccc"), bytes([3.0, 4.0])).unwrap();
    std::fs::remove_file(snapshot.join("model.onnx_data")).unwrap();
    std::os::unix::fs::symlink("../elsewhere/cccc", snapshot.join("model.onnx_data")).unwrap();
    let error = run().unwrap_err().to_string();
    assert!(error.contains("its data file \"model.onnx_data\" is a link to"), "{error}");
    std::fs::remove_file(snapshot.join("model.onnx_data")).unwrap();
    let error = run().unwrap_err().to_string();
    assert!(error.contains("model.onnx_data is missing: copy it together with the model"), "{error}");
}

#[test]
fn data_stays_in_the_models_folder() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("model");
    std::fs::create_dir(&inside).unwrap();
    std::fs::write(folder.path().join("secret"), bytes([1.0, 2.0])).unwrap();
    let absolute = folder.path().join("secret");
    for location in ["../secret", absolute.to_str().unwrap()] {
        std::fs::write(inside.join("model.onnx"), with_data(location).encode()).unwrap();
        let error = Model::load(&inside, &tract()).unwrap_err().to_string();
        assert!(error.contains("expected a path inside the model's folder"), "{error}");
    }
}
