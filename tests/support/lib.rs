//! Shared helpers of the workspace tests: fixtures, the ways to run a model, and the table of their errors.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use candle_core::Device;
use moh_export::passes::{self, Gates, ShowGates, WriteBodies};
use moh_export::{AttentionStyle, DEFAULT_OPSET, ElementType, Options as Export, Part, Quantize, quantize, record};
use moh_models::eager::Eager;
use moh_models::families::Inputs;
use moh_models::{Checkpoint, Model};
use moh_operators::GATES;
use moh_runtime::{Options, RuntimeChoice, Tensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// A folder of golden data.
pub fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(case)
}

/// A trained checkpoint.
pub fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/checkpoints").join(name)
}

/// The custom-operator library that cargo built with these tests.
///
/// That is the one beside the test, because this crate depends on moh-ops. The one in the folder above, beside the programs, is from
/// the last `cargo build`: `cargo test` does not renew it.
pub fn ops_library() -> PathBuf {
    let name = format!("{}moh_ops{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let library = std::env::current_exe().unwrap().with_file_name(name);
    assert!(library.is_file(), "{} is not there: cargo test builds it for moh's tests", library.display());
    library
}

/// Whether onnxruntime can be tested here; says so where not, and fails where `MOH_REQUIRE_ORT` is set.
pub fn have_onnxruntime() -> bool {
    static FOUND: OnceLock<Result<(), String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let target = tempfile::tempdir().unwrap();
        let model = export(&golden("dit-tiny-75"), target.path(), &Export { verify: Some(false), ..Export::default() });
        let options = Options { runtime: RuntimeChoice::Ort, without_custom_ops: true, ..Options::default() };
        moh_runtime::Model::load(&model, &options).map(drop).map_err(|reason| reason.to_string())
    });
    if let Err(reason) = found {
        assert!(std::env::var_os("MOH_REQUIRE_ORT").is_none(), "MOH_REQUIRE_ORT is set, but: {reason}");
        eprintln!("SKIPPED onnxruntime: {reason}\nci/fetch-onnxruntime.sh fetches it; name it in ORT_DYLIB_PATH");
    }
    found.is_ok()
}

/// Something that runs a model.
pub trait Runner {
    /// Outputs by name.
    fn run(&mut self, inputs: &Tensors) -> Tensors;
    /// Input names, types and shapes that matter to a caller: (name, fixed dimensions, 0 where symbolic).
    fn caches(&self) -> Vec<(String, usize, usize)>;
}

/// A model in candle.
pub struct Candle {
    model: Model,
    eager: Eager,
}

impl Candle {
    /// Loads a checkpoint, or a part of it.
    pub fn load(folder: &Path, part: Option<Part>) -> Candle {
        let mut checkpoint = Checkpoint::open(folder, None).unwrap();
        if let Some(part) = part {
            checkpoint.configure("part", part.name());
        }
        Candle::of(&checkpoint)
    }

    /// A checkpoint's model.
    pub fn of(checkpoint: &Checkpoint) -> Candle {
        Candle { model: Model::load(checkpoint, None).unwrap(), eager: Eager::new().with_taps() }
    }

    /// The same with weights as they are quantised in an export in f32.
    pub fn quantized(folder: &Path, how: &Quantize) -> Candle {
        let Candle { model, eager } = Candle::load(folder, None);
        let options = record::Options { dtype: ElementType::F32, opset: DEFAULT_OPSET, ir_version: 10 };
        let mut graph = record::record(&model, options).unwrap();
        let quantization = quantize::apply(&mut graph, how).unwrap();
        Candle { model, eager: eager.reading(Box::new(move |weight| quantization.read(weight))) }
    }
}

fn to_candle(tensor: &Tensor) -> candle_core::Tensor {
    let shape = tensor.shape();
    match tensor.as_slice::<i64>() {
        Some(data) => candle_core::Tensor::from_slice(data, shape, &Device::Cpu).unwrap(),
        None => candle_core::Tensor::from_slice(&tensor.data().to_f32().unwrap(), shape, &Device::Cpu).unwrap(),
    }
}

fn from_candle(tensor: &candle_core::Tensor) -> Tensor {
    let flat = tensor.flatten_all().unwrap();
    match flat.dtype() {
        candle_core::DType::I64 | candle_core::DType::U8 => {
            let flat = flat.to_dtype(candle_core::DType::I64).unwrap();
            Tensor::new(tensor.dims(), flat.to_vec1::<i64>().unwrap()).unwrap()
        }
        _ => Tensor::new(tensor.dims(), flat.to_vec1::<f32>().unwrap()).unwrap(),
    }
}

impl Runner for Candle {
    fn run(&mut self, inputs: &Tensors) -> Tensors {
        let inputs = inputs.iter().map(|(name, tensor)| (name.clone(), to_candle(tensor)));
        let outputs = self.model.forward(&mut self.eager, &Inputs::new(inputs)).unwrap();
        let names = self.model.outputs().into_iter().map(|port| port.name);
        let taps = self.eager.take_taps();
        let gates = taps.iter().filter(|(name, _)| name.starts_with(GATES));
        names
            .zip(outputs.iter().map(from_candle))
            .chain(gates.map(|(name, value)| (name.clone(), from_candle(value))))
            .collect()
    }

    fn caches(&self) -> Vec<(String, usize, usize)> {
        let fixed = |dim: &moh_models::families::PortDim| match dim {
            moh_models::families::PortDim::Fixed(n) => *n,
            _ => 0,
        };
        let past = self.model.inputs().into_iter().filter(|port| port.name.starts_with("past_key_values."));
        past.map(|port| (port.name.clone(), fixed(&port.dims[1]), fixed(&port.dims[3]))).collect()
    }
}

impl Runner for moh_runtime::Model {
    fn run(&mut self, inputs: &Tensors) -> Tensors {
        let known: Vec<String> = self.inputs().iter().map(|info| info.name.clone()).collect();
        let inputs = inputs.iter().filter(|(name, _)| known.contains(name));
        let inputs: Vec<_> = inputs.map(|(name, tensor)| (name.clone(), tensor.clone().into())).collect();
        let outputs = moh_runtime::Model::run(self, inputs).unwrap();
        let names: Vec<String> = self.outputs().iter().map(|info| info.name.clone()).collect();
        names.into_iter().zip(outputs.iter().map(|value| value.to_tensor().unwrap())).collect()
    }

    fn caches(&self) -> Vec<(String, usize, usize)> {
        let fixed = |dim: &moh_runtime::Dim| match dim {
            moh_runtime::Dim::Fixed(n) => *n,
            moh_runtime::Dim::Symbol(_) => 0,
        };
        let past = self.inputs().iter().filter(|info| info.name.starts_with("past_key_values."));
        past.map(|info| (info.name.clone(), fixed(&info.dims[1]), fixed(&info.dims[3]))).collect()
    }
}

/// What the passes do: how operators are written, and what becomes of the gates.
pub fn passes(attention: AttentionStyle, gates: Gates) -> passes::Options {
    passes::Options { bodies: WriteBodies { attention }, gates: ShowGates { gates }, ..passes::Options::default() }
}

/// Exports with the gates as outputs.
pub fn with_gates() -> Export {
    Export { passes: passes(AttentionStyle::Routed, Gates::Output), ..Export::default() }
}

/// Exports `folder` into `target` and returns the model's path.
pub fn export(folder: &Path, target: &Path, options: &Export) -> PathBuf {
    let output = target.join("model.onnx");
    moh_export::export(folder, &output, options).unwrap();
    output
}

/// How this process's onnxruntime runs with our library, without it, and how tract does.
pub fn runtimes() -> Vec<(&'static str, Options)> {
    let ort = Options { runtime: RuntimeChoice::Ort, ops_library: Some(ops_library()), ..Options::default() };
    let bare = Options { runtime: RuntimeChoice::Ort, without_custom_ops: true, ..Options::default() };
    let tract = Options { runtime: RuntimeChoice::Tract, ..Options::default() };
    let mut ways = vec![("tract", tract)];
    if have_onnxruntime() {
        ways.splice(0..0, [("onnxruntime + library", ort), ("onnxruntime", bare)]);
    }
    ways
}

/// Every way to run a checkpoint: candle, and its exports, routed (also with weights packed once, and with dense layers beside
/// attention) and portable where that can be, in every runtime.
pub fn ways(folder: &Path, target: &Path, export_options: &Export) -> Vec<(String, Box<dyn Runner>)> {
    let routed = export(folder, &target.join("routed"), export_options);
    let mut portable_options = export_options.clone();
    portable_options.passes.bodies.attention = AttentionStyle::Portable;
    let mut dense_options = export_options.clone();
    dense_options.passes.heads.style = Some(moh_export::HeadStyle::Dense);
    let dense = export(folder, &target.join("dense"), &dense_options);
    // A cache in place is never written as standard operators.
    let in_place = export_options.cache == Some(moh_export::Cache::InPlace);
    let portable = (!in_place).then(|| export(folder, &target.join("portable"), &portable_options));
    let mut checkpoint = Checkpoint::open(folder, None).unwrap();
    if let Some(part) = export_options.part {
        checkpoint.configure("part", part.name());
    }
    if let Some(cache) = export_options.cache {
        cache.put(&mut checkpoint);
    }
    let mut ways: Vec<(String, Box<dyn Runner>)> = vec![("candle".to_owned(), Box::new(Candle::of(&checkpoint)))];
    for (name, options) in runtimes() {
        ways.push((name.to_owned(), Box::new(moh_runtime::Model::load(&routed, &options).unwrap())));
        ways.push((
            format!("{name}, dense head layers"),
            Box::new(moh_runtime::Model::load(&dense, &options).unwrap()),
        ));
        if name == "onnxruntime + library" {
            let packed = moh_runtime::Options { pack_weights: true, ..options };
            let model = moh_runtime::Model::load(&routed, &packed).unwrap();
            ways.push((format!("{name}, weights packed"), Box::new(model)));
        } else if let Some(portable) = &portable {
            let model = moh_runtime::Model::load(portable, &options).unwrap();
            ways.push((format!("{name}, portable export"), Box::new(model)));
        }
    }
    ways
}

/// Reads a .safetensors file; bytes come as int64.
pub fn read_tensors(path: &Path) -> Tensors {
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    tensors.iter().map(|(name, tensor)| (name.clone(), from_candle(tensor))).collect()
}

/// The elements as f32.
pub fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.data().to_f32().expect("floating-point numbers")
}

/// The largest difference; infinite where shapes differ or one is NaN.
pub fn max_abs(found: &Tensor, expected: &Tensor) -> f32 {
    if found.shape() != expected.shape() {
        return f32::INFINITY;
    }
    let differences = floats(found).into_iter().zip(floats(expected)).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |max, d| if d.is_nan() { f32::INFINITY } else { max.max(d) })
}

/// The gates of every layer: largest error, and how many select other heads.
pub fn gate_errors(outputs: &Tensors, reference: &Tensors) -> (f32, usize) {
    let names: Vec<&String> = reference.keys().filter(|name| name.starts_with(GATES)).collect();
    assert!(!names.is_empty());
    names.into_iter().fold((0.0, 0), |(error, other), name| {
        let (found, expected) = (&outputs[name], &reference[name]);
        let pairs = floats(found).into_iter().zip(floats(expected));
        let differing = pairs.filter(|(a, b)| (*a == 0.0) != (*b == 0.0)).count();
        (error.max(max_abs(found, expected)), other + differing)
    })
}

/// A table of errors, printed when it is complete; any figure above its tolerance fails the test then.
pub struct Table {
    title: String,
    rows: Vec<(String, String, f64, f64)>,
}

impl Table {
    /// An empty table.
    pub fn new(title: &str) -> Table {
        Table { title: title.to_owned(), rows: Vec::new() }
    }

    /// Adds a figure, and what it may be at most.
    pub fn add(&mut self, way: &str, what: &str, error: impl Into<f64>, tolerance: impl Into<f64>) {
        self.rows.push((way.to_owned(), what.to_owned(), error.into(), tolerance.into()));
    }

    /// Prints the table and checks it.
    pub fn finish(self) {
        println!("\n{}\n{:<34} {:<34} {:>9} {:>9}", self.title, "path", "what", "max abs", "at most");
        for (way, what, error, tolerance) in &self.rows {
            println!("{way:<34} {what:<34} {error:>9.1e} {tolerance:>9.1e}");
        }
        let bad: Vec<_> =
            self.rows.iter().filter(|(_, _, error, tolerance)| error.is_nan() || error > tolerance).collect();
        assert!(bad.is_empty(), "{}: beyond tolerance: {bad:?}", self.title);
        assert!(!self.rows.is_empty());
    }
}

/// Greedy decoding with a KV cache, from prompts that may be left-padded: ids and the logits that each was taken from.
pub fn greedy(
    runner: &mut dyn Runner,
    ids: &Tensor,
    mask: &Tensor,
    steps: usize,
) -> (Vec<Vec<i64>>, Vec<Vec<Vec<f32>>>) {
    greedy_in(runner, ids, mask, steps, 0)
}

/// As [`greedy`], in caches with room for `capacity` tokens, which hold NaN at first.
pub fn greedy_in(
    runner: &mut dyn Runner,
    ids: &Tensor,
    mask: &Tensor,
    steps: usize,
    capacity: usize,
) -> (Vec<Vec<i64>>, Vec<Vec<Vec<f32>>>) {
    let (batch, length) = (ids.shape()[0], ids.shape()[1]);
    let mut mask: Vec<Vec<i64>> = mask.as_slice::<i64>().unwrap().chunks(length).map(<[i64]>::to_vec).collect();
    let mut new: Vec<Vec<i64>> = ids.as_slice::<i64>().unwrap().chunks(length).map(<[i64]>::to_vec).collect();
    let mut all = new.clone();
    let mut logits = vec![Vec::new(); batch];
    let empty = |(name, heads, dim): (String, usize, usize)| {
        (name, Tensor::new(vec![batch, heads, capacity, dim], vec![f32::NAN; batch * heads * capacity * dim]).unwrap())
    };
    let mut cache: Tensors = runner.caches().into_iter().map(empty).collect();
    for _ in 0..steps {
        let fed = new[0].len();
        let positions = |row: &Vec<i64>| {
            let all = row.iter().scan(0, |seen, &m| {
                *seen += m;
                Some(if m == 0 { 1 } else { *seen - 1 })
            });
            all.skip(row.len() - fed).collect::<Vec<i64>>()
        };
        let matrix = |rows: &[Vec<i64>]| Tensor::new(vec![batch, rows[0].len()], rows.concat()).unwrap();
        let mut inputs = cache.clone();
        inputs.insert("input_ids".to_owned(), matrix(&new));
        inputs.insert("attention_mask".to_owned(), matrix(&mask));
        inputs.insert("position_ids".to_owned(), matrix(&mask.iter().map(positions).collect::<Vec<_>>()));
        let outputs = runner.run(&inputs);
        let scores = floats(&outputs["logits"]);
        let vocabulary = scores.len() / batch / fed;
        for row in 0..batch {
            let last = &scores[(row * fed + fed - 1) * vocabulary..][..vocabulary];
            let best = (0..vocabulary).fold(0, |best, i| if last[i] > last[best] { i } else { best }) as i64;
            new[row] = vec![best];
            all[row].push(best);
            mask[row].push(1);
            logits[row].push(last.to_vec());
        }
        let present = outputs.into_iter().filter(|(name, _)| name.starts_with("present."));
        cache = present.map(|(name, value)| (name.replacen("present", "past_key_values", 1), value)).collect();
    }
    (all, logits)
}
