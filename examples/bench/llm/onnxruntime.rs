//! A language model in onnxruntime, with its caches bound: a cache in place is one buffer, input and output at once.

use super::step::{Decoder, IN_PLACE, Step, integers, noise};
use anyhow::{Context, Result, bail, ensure};
use ort::environment::Environment;
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::{IoBinding, Session};
use ort::value::{Outlet, Tensor, TensorElementType, ValueType};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// As in moh-run: products with weights of `DequantizeLinear` compute in the type that the model says.
const FUSED_ACCURACY: (&str, &str) = ("session.qdq_matmulnbits_accuracy_level", "0");

/// One a process.
static ENVIRONMENT: OnceLock<Environment> = OnceLock::new();

fn environment() -> Result<&'static Environment> {
    if ENVIRONMENT.get().is_none() {
        let library = std::env::var("ORT_DYLIB_PATH").context("ORT_DYLIB_PATH names no onnxruntime library")?;
        let made = ort::init_from(&library).with_context(|| library.clone())?.build()?;
        let _ = ENVIRONMENT.set(made);
    }
    ENVIRONMENT.get().context("no environment")
}

/// A loaded model.
pub(super) struct OnnxRuntime {
    session: Session,
    /// Caches in place: past and present.
    caches: Vec<(String, String, Tensor<f32>)>,
    binding: Option<IoBinding>,
}

impl OnnxRuntime {
    /// Loads a model, with our operators' library where one is named. Caches in place have room for `capacity` tokens.
    pub(super) fn load(path: &Path, library: Option<&str>, threads: usize, capacity: usize) -> Result<OnnxRuntime> {
        let mut builder = Session::builder(environment()?)?;
        builder = builder.with_intra_threads(threads).map_err(ort::Error::<()>::from)?;
        let (entry, level) = FUSED_ACCURACY;
        builder = builder.with_config_entry(entry, level).map_err(ort::Error::<()>::from)?;
        if let Some(library) = library {
            let path = std::fs::canonicalize(library).with_context(|| library.to_owned())?;
            builder = builder.with_operator_library(path).map_err(ort::Error::<()>::from)?;
        }
        let session = builder.commit_from_file(path).with_context(|| path.display().to_string())?;
        let mut model = OnnxRuntime { session, caches: Vec::new(), binding: None };
        let in_place: Vec<(String, Vec<i64>)> = model
            .session
            .outputs()
            .iter()
            .filter(|output| is_in_place(output))
            .map(cache_port)
            .collect::<Result<_>>()?;
        for (present, dims) in in_place {
            let past = present.replace("present", "past_key_values");
            let buffer = model.cache(&past, &dims, capacity)?;
            model.caches.push((past, present, buffer));
        }
        Ok(model)
    }

    /// A cache of `length` tokens.
    fn cache(&self, name: &str, dims: &[i64], length: usize) -> Result<Tensor<f32>> {
        let &[_, kv_heads, _, dim] = dims else { bail!("{name}: expected 4 dimensions, found {dims:?}") };
        let mut tensor = Tensor::<f32>::new(self.session.allocator(), [1, kv_heads, length as i64, dim])?;
        if length > 0 {
            noise(tensor.extract_tensor_mut().1);
        }
        Ok(tensor)
    }
}

impl Decoder for OnnxRuntime {
    fn prepare(&mut self, step: Step) -> Result<()> {
        self.binding = None;
        let mut binding = self.session.create_binding()?;
        for input in self.session.inputs() {
            let name = input.name();
            if let Some((_, _, buffer)) = self.caches.iter().find(|(past, ..)| past == name) {
                binding.bind_input(name, buffer)?;
            } else if let Some((shape, numbers)) = integers(name, step) {
                binding.bind_input(name, &Tensor::from_array((shape, numbers))?)?;
            } else {
                let (_, dims) = cache_port(input)?;
                binding.bind_input(name, &self.cache(name, &dims, step.past)?)?;
            }
        }
        let host = MemoryInfo::new(AllocationDevice::CPU, 0, AllocatorType::Device, MemoryType::Default)?;
        for output in self.session.outputs() {
            match self.caches.iter_mut().find(|(_, present, _)| present == output.name()) {
                Some((_, present, buffer)) => binding.bind_output(present.as_str(), buffer)?,
                None => binding.bind_output_to_device(output.name(), &host)?,
            }
        }
        self.binding = Some(binding);
        Ok(())
    }

    fn run(&mut self) -> Result<Duration> {
        let binding = self.binding.as_ref().context("nothing to run")?;
        let start = Instant::now();
        let outputs = self.session.run_binding(binding)?;
        let time = start.elapsed();
        let logits = outputs.get("logits").context("the run gave no logits")?.try_extract_tensor::<f32>()?.1;
        ensure!(logits.last().is_some_and(|x| x.is_finite()), "a logit is not finite");
        Ok(time)
    }
}

fn dims_of(outlet: &Outlet) -> Result<(&[i64], Vec<&str>)> {
    match outlet.dtype() {
        ValueType::Tensor { ty: TensorElementType::Float32, shape, dimension_symbols } => {
            Ok((shape, dimension_symbols.iter().map(String::as_str).collect()))
        }
        other => bail!("{} is {other}: the benchmark runs models in f32", outlet.name()),
    }
}

fn cache_port(outlet: &Outlet) -> Result<(String, Vec<i64>)> {
    Ok((outlet.name().to_owned(), dims_of(outlet)?.0.to_vec()))
}

fn is_in_place(outlet: &Outlet) -> bool {
    dims_of(outlet).is_ok_and(|(_, symbols)| symbols.get(2) == Some(&IN_PLACE))
}
