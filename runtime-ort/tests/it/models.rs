//! Models in every runtime that is here.

use crate::support::onnx::{DataType, Graph};
use crate::support::{doubler, have_onnxruntime, runtimes, write};
use moh_runtime::{Dim, ElementType, Error, Interrupt, Model, Options, RuntimeChoice, Tensor, Value};
use std::time::Instant;

fn tract() -> Options {
    Options { runtime: RuntimeChoice::Tract, ..Options::default() }
}

fn ort() -> Options {
    Options { runtime: RuntimeChoice::Ort, ..Options::default() }
}

fn inputs(n: usize) -> Vec<(&'static str, Value)> {
    let x: Vec<f32> = (0..3 * n).map(|i| i as f32).collect();
    let mask = Tensor::new([n], (0..n as i64).collect()).unwrap();
    vec![("mask", mask.into()), ("x", Tensor::new([n, 3], x).unwrap().into())]
}

#[test]
fn a_model_says_what_it_takes_and_gives() {
    let (_folder, path) = doubler();
    for options in runtimes() {
        let model = Model::load(&path, &options).unwrap();
        let shown = |infos: &[moh_runtime::TensorInfo]| infos.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shown(model.inputs()), ["x float32 (n, 3)", "mask int64 (n)"]);
        assert_eq!(shown(model.outputs()), ["y float32 (n, 3)", "m int64 (n)"]);
        assert_eq!(model.inputs()[0].dims, [Dim::Symbol("n".to_owned()), Dim::Fixed(3)]);
        assert_eq!(model.metadata()["family"], "doubler");
        assert_eq!(model.path(), path);
        assert!(model.notices().is_empty(), "{:?}", model.notices());
    }
}

/// A server loads on one thread and runs on others.
#[test]
fn models_and_values_move_between_threads() {
    fn is_send<T: Send>(_: &T) {}
    let (_folder, path) = doubler();
    for options in runtimes() {
        let mut model = Model::load(&path, &options).unwrap();
        is_send(&model);
        let outputs = std::thread::spawn(move || model.run(inputs(1)).unwrap()).join().unwrap();
        assert_eq!(outputs[0].as_slice::<f32>().unwrap(), [0.0, 2.0, 4.0]);
    }
}

#[test]
fn a_folder_means_the_model_in_it() {
    let (folder, path) = doubler();
    assert_eq!(Model::load(folder.path(), &tract()).unwrap().path(), path);
}

/// The configuration above belongs to a model in a folder `onnx` or `1`, and to no other.
#[test]
fn files_lie_beside_the_model_or_above_a_folder_for_models() {
    let (folder, path) = doubler();
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    for (name, above) in [("onnx", true), ("1", true), ("other", false)] {
        let own = folder.path().join(name);
        std::fs::create_dir(&own).unwrap();
        std::fs::copy(&path, own.join("model.onnx")).unwrap();
        let files = || Model::load(own.join("model.onnx"), &tract()).unwrap().files_folder().to_owned();
        assert_eq!(files(), if above { folder.path() } else { &own }, "{name}");
        std::fs::write(own.join("config.json"), "{}").unwrap();
        assert_eq!(files(), own, "{name}");
    }
}

#[test]
fn inputs_go_by_name_and_may_change_size() {
    let (_folder, path) = doubler();
    for options in runtimes() {
        let mut model = Model::load(&path, &options).unwrap();
        for n in [1, 4, 0, 2] {
            let outputs = model.run(inputs(n)).unwrap();
            let doubled: Vec<f32> = (0..3 * n).map(|i| 2.0 * i as f32).collect();
            assert_eq!(outputs[0].to_tensor().unwrap(), Tensor::new([n, 3], doubled).unwrap());
            assert_eq!(outputs[1].as_slice::<i64>().unwrap(), (0..n as i64).collect::<Vec<i64>>());
            assert!(matches!(outputs[1].as_slice::<f32>(), Err(Error::ElementType { .. })));
        }
    }
}

#[test]
fn an_output_goes_back_in_even_to_another_runtime() {
    let (_folder, path) = doubler();
    let mut models: Vec<Model> = runtimes().iter().map(|options| Model::load(&path, options).unwrap()).collect();
    let mut value = inputs(2)[1].1.clone();
    for _ in 0..2 {
        for model in &mut models {
            let outputs = model.run([("x", value), ("mask", inputs(2)[0].1.clone())]).unwrap();
            value = outputs[0].clone();
        }
    }
    let factor = f32::from(1u8 << (2 * models.len()));
    let expected: Vec<f32> = (0..6).map(|i| factor * i as f32).collect();
    assert_eq!(value.as_slice::<f32>().unwrap(), expected);
}

/// tract computes shapes with symbols, which a caller must not see.
#[test]
fn a_shape_comes_out_as_numbers() {
    let mut graph = Graph::new();
    graph.input("x", DataType::Float, &["n", "3"]);
    graph.node("Shape", &["x"], "y", &[]);
    graph.output("y", DataType::Int64, &["2"]);
    let (_folder, path) = write(&graph);
    for options in runtimes() {
        let mut model = Model::load(&path, &options).unwrap();
        let x = Tensor::zeros(ElementType::F32, [5, 3]).unwrap();
        let outputs = model.run([("x", x.into())]).unwrap();
        assert_eq!(outputs[0].as_slice::<i64>().unwrap(), [5, 3]);
    }
}

#[test]
fn wrong_inputs_are_refused_before_the_runtime_sees_them() {
    let (_folder, path) = doubler();
    for options in runtimes() {
        let mut model = Model::load(&path, &options).unwrap();
        let half = Tensor::zeros(ElementType::F16, [1, 3]).unwrap();
        let error = model.run([("x", Value::from(half)), ("y", inputs(1)[0].1.clone())]).unwrap_err();
        let message = error.to_string();
        assert!(matches!(error, Error::Inputs { .. }));
        for expected in ["unexpected input y", "x: expected element type float32, found float16", "missing input mask"]
        {
            assert!(message.contains(expected), "{message}");
        }
        assert!(model.run(inputs(1)).is_ok(), "the model still runs");
    }
}

#[test]
fn files_that_are_no_models_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let (_good_folder, good) = doubler();
    let good = std::fs::read(good).unwrap();
    for options in runtimes() {
        let load = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            Model::load(&path, &options).map(drop).unwrap_err()
        };
        assert!(matches!(load(b""), Error::Malformed { .. }));
        assert!(matches!(load(b"{\"not\": \"a model\"}"), Error::Malformed { .. }));
        for len in (1..good.len() / 2).step_by(7) {
            assert!(matches!(load(&good[..len]), Error::Malformed { .. } | Error::Load { .. }), "{len} bytes");
        }
    }
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(Model::load(&path, &tract()), Err(Error::NotFound { .. })));
    assert!(matches!(Model::load(folder.path(), &tract()), Err(Error::NotFound { .. })));
}

/// A model that reads or gives what nothing computes.
#[test]
fn incomplete_graphs_are_errors() {
    let mut dangling = Graph::new();
    dangling.input("x", DataType::Float, &["n"]);
    dangling.output("y", DataType::Float, &["n"]);
    let mut unfed = Graph::new();
    unfed.node("Identity", &["nothing"], "y", &[]);
    unfed.output("y", DataType::Float, &["n"]);
    let mut unknown = Graph::new();
    unknown.input("x", DataType::Float, &["n"]);
    unknown.node("NoSuchOperator", &["x"], "y", &[]);
    unknown.output("y", DataType::Float, &["n"]);
    for graph in [dangling, unfed, unknown] {
        let (_folder, path) = write(&graph);
        for options in runtimes() {
            assert!(matches!(Model::load(&path, &options), Err(Error::Load { .. })), "{:?}", options.runtime);
        }
    }
}

#[test]
fn newer_operators_are_refused_by_version() {
    let mut graph = Graph::new();
    graph.import("ai.moh", 3);
    graph.input("x", DataType::Float, &["n"]);
    graph.node("Identity", &["x"], "y", &[]);
    graph.output("y", DataType::Float, &["n"]);
    let (_folder, path) = write(&graph);
    for options in runtimes() {
        let message = Model::load(&path, &options).unwrap_err().to_string();
        assert!(message.contains("version 3 of the ai.moh operators"), "{message}");
    }
}

/// Imports the ai.moh operators and uses none.
fn importer() -> (tempfile::TempDir, std::path::PathBuf) {
    let mut graph = Graph::new();
    graph.import("ai.moh", 1);
    graph.input("x", DataType::Float, &["n"]);
    graph.node("Identity", &["x"], "y", &[]);
    graph.output("y", DataType::Float, &["n"]);
    write(&graph)
}

#[test]
fn what_a_runtime_cannot_do_is_an_error_not_ignored() {
    let (_folder, path) = importer();
    let without = Options { without_custom_ops: true, ..tract() };
    assert!(matches!(Model::load(&path, &without), Err(Error::Unsupported { .. })));
    let profiled = Options { profile: Some("profile".into()), ..tract() };
    assert!(matches!(Model::load(&path, &profiled), Err(Error::Unsupported { .. })));
    let mut model = Model::load(&path, &tract()).unwrap();
    assert!(matches!(model.end_profiling(), Err(Error::Unsupported { .. })));
}

#[test]
fn a_named_library_that_is_unusable_is_an_error() {
    let (folder, path) = importer();
    let text = folder.path().join("libonnxruntime.so");
    std::fs::write(&text, "no library").unwrap();
    for library in [&text, &folder.path().join("missing.so")] {
        for runtime in [RuntimeChoice::Ort, RuntimeChoice::Auto] {
            let named = Options { runtime, ort_library: Some(library.clone()), ..Options::default() };
            assert!(matches!(Model::load(&path, &named), Err(Error::OrtLibrary { .. })), "{}", library.display());
        }
        if have_onnxruntime() {
            let named = Options { ops_library: Some(library.clone()), ..ort() };
            let error = Model::load(&path, &named).unwrap_err();
            assert!(error.to_string().contains(&*library.to_string_lossy()), "{error}");
        }
    }
}

#[test]
fn a_profile_is_written_where_it_was_asked_for() {
    if !have_onnxruntime() {
        return;
    }
    let (folder, path) = doubler();
    let options = Options { profile: Some(folder.path().join("profile")), ..ort() };
    let mut model = Model::load(&path, &options).unwrap();
    model.run(inputs(2)).unwrap();
    let profile = model.end_profiling().unwrap();
    assert!(profile.starts_with(folder.path()), "{}", profile.display());
    assert!(std::fs::read_to_string(&profile).unwrap().contains("\"Add\""));
    assert!(matches!(model.end_profiling(), Err(Error::Unsupported { .. })), "there is one profile");
}

/// No CPU runtime adds numbers in bfloat16.
#[test]
fn a_model_in_bfloat16_is_refused_with_the_same_advice_everywhere() {
    let mut graph = Graph::new();
    graph.input("x", DataType::Bfloat16, &["2"]);
    graph.bfloat16("weight", &[0x3f80, 0x4000]);
    graph.node("Add", &["x", "weight"], "y", &[]);
    graph.output("y", DataType::Bfloat16, &["2"]);
    let (_folder, path) = write(&graph);
    for options in runtimes() {
        let message = Model::load(&path, &options).unwrap_err().to_string();
        let expected = "bfloat16 models do not run on CPUs; export with --dtype f32 or f16";
        assert!(message.ends_with(expected), "{:?}: {message}", options.runtime);
    }
}

/// A chain of products: `y` = `x` to the power of `count` + 1.
fn chain(count: usize) -> Graph {
    let mut graph = Graph::new();
    graph.input("x", DataType::Float, &["n", "n"]);
    for i in 0..count {
        let input = if i == 0 { "x".to_owned() } else { format!("y{}", i - 1) };
        let output = if i + 1 == count { "y".to_owned() } else { format!("y{i}") };
        graph.node("MatMul", &[&input, "x"], &output, &[]);
    }
    graph.output("y", DataType::Float, &["n", "n"]);
    graph
}

#[test]
fn a_run_is_broken_off_between_two_operators_and_the_model_runs_on() {
    const N: usize = 512;
    let (_folder, path) = write(&chain(60));
    let identity: Vec<f32> = (0..N * N).map(|i| if i % (N + 1) == 0 { 1.0 } else { 0.0 }).collect();
    let x = || vec![("x".to_owned(), Tensor::new([N, N], identity.clone()).unwrap().into())];
    for options in runtimes() {
        let mut model = Model::load(&path, &options).unwrap();
        let began = Instant::now();
        assert_eq!(model.run(x()).unwrap()[0].as_slice::<f32>().unwrap(), identity);
        let whole = began.elapsed();
        let interrupt = Interrupt::default();
        let other = interrupt.clone();
        let breaker = std::thread::spawn(move || {
            std::thread::sleep(whole / 10);
            other.interrupt();
        });
        let found = model.run_until(x(), &interrupt);
        assert!(matches!(found, Err(Error::Interrupted { .. })), "{:?}: {found:?}", options.runtime);
        breaker.join().unwrap();
        // A run that begins with it does not even begin; another one is not concerned.
        assert!(matches!(model.run_until(x(), &interrupt), Err(Error::Interrupted { .. })));
        let outputs = model.run_until(x(), &Interrupt::default()).unwrap();
        assert_eq!(outputs[0].as_slice::<f32>().unwrap(), identity);
    }
}

#[test]
fn zeros_are_zeros_and_can_be_written_to() {
    let (_folder, path) = doubler();
    for options in runtimes() {
        let model = Model::load(&path, &options).unwrap();
        for shape in [vec![3, 100], vec![0, 7], vec![]] {
            let len: usize = shape.iter().product();
            let mut zeros = model.zeros(ElementType::F32, shape.clone()).unwrap();
            assert_eq!((zeros.shape(), zeros.as_slice::<f32>().unwrap()), (&*shape, &*vec![0.0; len]));
            if len > 0 {
                zeros.write(&[(len - 1, moh_runtime::Data::F32(&[2.0]))]).unwrap();
                assert_eq!(zeros.as_slice::<f32>().unwrap()[len - 1], 2.0);
            }
        }
        assert!(matches!(model.zeros(ElementType::F32, [usize::MAX, 2]), Err(Error::Length { .. })));
    }
}
