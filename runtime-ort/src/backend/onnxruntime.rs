//! A model in onnxruntime.

mod device;

use super::Loaded;
use super::environment::environment;
use super::{bfloat16, external};
use crate::element::{Data, ElementType};
use crate::error::{Error, Result};
use crate::header::Header;
use crate::info::{Dim, TensorInfo};
use crate::interrupt::Interrupt;
use crate::locate::{self, Candidate, OPS_VARIABLE, Search};
use crate::options::{Notice, Options};
use crate::tensor::Tensor;
use crate::value::{Repr, Value, from_ort_type, to_ort_type, unknown};
use device::Binding;
use moh_operators::DOMAIN;
use ort::ErrorCode;
use ort::memory::Allocator;
use ort::session::builder::SessionBuilder;
use ort::session::{RunOptions, Session, SessionInputValue, SessionOutputs};
use ort::value::{DynTensor, Outlet, PrimitiveTensorElementType, TensorRef, ValueType};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub(crate) use device::cuda_provider;

pub(crate) const NAME: &str = "onnxruntime";

/// The entry of libmoh_ops for [`Options::pack_weights`].
const PACK_WEIGHTS: &str = "ai.moh.pack_weights";

/// onnxruntime's entry for [`Options::sleep_between_runs`].
const SLEEP: &str = "session.force_spinning_stop";

/// How products with weights of `DequantizeLinear` are computed once they are fused: in the type of the activations, as the model
/// says. onnxruntime's own choice rounds them to int8.
const FUSED_ACCURACY: (&str, &str) = ("session.qdq_matmulnbits_accuracy_level", "0");

pub(crate) struct OrtModel {
    path: PathBuf,
    session: Session,
    /// How to run on another device than the CPU, or in place.
    binding: Binding,
    on_cuda: bool,
}

impl OrtModel {
    /// Loads the model; a library that was found, not named, and fails becomes a notice.
    pub(crate) fn load(path: &Path, header: &Header, options: &Options) -> Result<Loaded<OrtModel>> {
        let environment = environment(options.ort_library.as_deref())?;
        let refused = |e: ort::Error| Error::Load { path: path.to_owned(), runtime: NAME, reason: e.to_string() };
        let mut builder = Session::builder(&environment).map_err(refused)?;
        builder = builder.with_config_entry(FUSED_ACCURACY.0, FUSED_ACCURACY.1).map_err(|e| refused(e.into()))?;
        if let Some(threads) = options.threads {
            builder = builder.with_intra_threads(threads.max(1)).map_err(|e| refused(e.into()))?;
        }
        if options.sleep_between_runs {
            builder = builder.with_config_entry(SLEEP, "1").map_err(|e| refused(e.into()))?;
        }
        if let Some(profile) = &options.profile {
            builder = builder.with_profiling(profile).map_err(|e| refused(e.into()))?;
        }
        let mut notices = Vec::new();
        let on_cuda;
        (builder, on_cuda) = device::choose(builder, options.device, &mut notices).map_err(refused)?;
        if !options.without_custom_ops && header.opset(DOMAIN).is_some() {
            if options.pack_weights {
                // The library reads it when it is registered.
                builder = builder.with_config_entry(PACK_WEIGHTS, "1").map_err(|e| refused(e.into()))?;
            }
            builder = with_operators(builder, options.ops_library.as_deref(), &mut notices)?;
        }
        let session = builder.commit_from_file(path).map_err(|e| match e.code() {
            // onnxruntime names the first node that has no kernel, and not what is behind it.
            ErrorCode::NotImplemented if !on_cuda && bfloat16::computes(path) => bfloat16::refusal(path),
            _ => match external::problem(path) {
                Some(reason) => Error::Load { path: path.to_owned(), runtime: NAME, reason },
                None => refused(e),
            },
        })?;

        let info = |outlets: &[Outlet]| -> Result<Vec<TensorInfo>> {
            outlets.iter().map(|outlet| tensor_info(path, outlet)).collect()
        };
        let (inputs, outputs) = (info(session.inputs())?, info(session.outputs())?);
        let metadata = metadata(&session).map_err(refused)?;
        let binding = if on_cuda { Binding::cuda(&inputs, &outputs) } else { Binding::host(&inputs, &outputs) };
        let model = OrtModel { path: path.to_owned(), session, binding: binding.map_err(refused)?, on_cuda };
        Ok(Loaded { model, inputs, outputs, metadata, notices })
    }

    /// Runs the model on values in the order of its inputs, until it is broken off.
    pub(crate) fn run(&mut self, inputs: &[Value], interrupt: Option<&Interrupt>) -> Result<Vec<Value>> {
        let path = &self.path;
        let failed = |e: ort::Error| Error::Run { path: path.clone(), runtime: NAME, reason: e.to_string() };
        let options = interrupt.map(Interrupt::options).transpose().map_err(failed)?;
        if interrupt.is_some_and(Interrupt::is_interrupted) {
            return Err(Error::Interrupted { path: path.clone() });
        }
        if self.on_cuda {
            let values = inputs.iter().map(|value| owned(value).map(Some)).collect::<Result<Vec<_>>>()?;
            let outputs = self.binding.run(&mut self.session, &values, &mut [], options).map_err(failed)?;
            return outputs.into_iter().map(|(name, value)| Value::from_ort(name, value)).collect();
        }
        let copies = inputs.iter().map(host_copy).collect::<Result<Vec<Option<Tensor>>>>()?;
        let values = inputs.iter().zip(&copies).map(|(value, copy)| borrow(value, copy.as_ref()));
        let values = values.collect::<ort::Result<Vec<SessionInputValue<'_>>>>().map_err(failed)?;
        let outputs = run_with(&mut self.session, &values, options).map_err(failed)?;
        outputs.into_iter().map(|(name, value)| Value::from_ort(name, value)).collect()
    }

    /// As [`OrtModel::run`]; each output of `shared`, (input, output), is written where its input is, if that is onnxruntime's and
    /// nobody else holds it.
    pub(crate) fn run_in_place(&mut self, mut inputs: Vec<Value>, shared: &[(usize, usize)]) -> Result<Vec<Value>> {
        let path = &self.path;
        let failed = |e: ort::Error| Error::Run { path: path.clone(), runtime: NAME, reason: e.to_string() };
        let mut is_shared = vec![false; inputs.len()];
        for &(input, _) in shared {
            is_shared[input] = inputs[input].only_ort().is_some();
        }
        if !is_shared.contains(&true) {
            return self.run(&inputs, None);
        }
        let (mut given, mut in_place) = (Vec::with_capacity(inputs.len()), Vec::with_capacity(shared.len()));
        for (i, value) in inputs.iter_mut().enumerate() {
            if is_shared[i] {
                let pair = shared.iter().find(|(input, _)| *input == i).zip(value.only_ort());
                in_place.extend(pair.map(|(&(input, output), value)| (input, output, value)));
                given.push(None);
            } else {
                given.push(Some(owned(value)?));
            }
        }
        let outputs = self.binding.run(&mut self.session, &given, &mut in_place, None).map_err(failed)?;
        outputs.into_iter().map(|(name, value)| Value::from_ort(name, value)).collect()
    }

    /// Zeros in memory of onnxruntime's own: ort binds no output to other memory.
    pub(crate) fn zeros(&self, ty: ElementType, shape: Vec<usize>) -> Result<Value> {
        let failed = |e: ort::Error| Error::Run {
            path: self.path.clone(),
            runtime: NAME,
            reason: format!("no memory for zeros of shape {shape:?}: {e}"),
        };
        let bytes = shape.iter().try_fold(ty.size(), |n, &d| n.checked_mul(d)).filter(|&n| isize::try_from(n).is_ok());
        // Of an empty tensor there is nothing to write to; one on a GPU is made by the first run.
        if self.on_cuda || bytes.is_none_or(|bytes| bytes == 0) {
            return Tensor::zeros(ty, shape).map(Value::from);
        }
        // It fills what is in ordinary memory with zeros.
        let made = DynTensor::new(&Allocator::default(), to_ort_type(ty), shape.clone()).map_err(failed)?;
        Value::from_ort("zeros", made.into_dyn())
    }

    /// Ends the profile and gives its path.
    pub(crate) fn end_profiling(&mut self) -> Result<PathBuf> {
        let path = &self.path;
        let failed = |e: ort::Error| Error::Run { path: path.clone(), runtime: NAME, reason: e.to_string() };
        self.session.end_profiling().map(PathBuf::from).map_err(failed)
    }
}

fn run_with<'s>(
    session: &'s mut Session,
    values: &[SessionInputValue<'_>],
    options: Option<&'s RunOptions>,
) -> ort::Result<SessionOutputs<'s>> {
    match options {
        Some(options) => session.run_with_options(values, options),
        None => session.run(values),
    }
}

fn with_operators(builder: SessionBuilder, option: Option<&Path>, notices: &mut Vec<Notice>) -> Result<SessionBuilder> {
    match locate::operators(option) {
        Search::Named(Candidate { path, found }) => {
            let named = |reason: &str| format!("{found}: {reason}");
            let library = path
                .canonicalize()
                .map_err(|e| Error::OpsLibrary { path: path.clone(), reason: named(&e.to_string()) })?;
            builder.with_operator_library(library).map_err(|e| Error::OpsLibrary { path, reason: named(e.message()) })
        }
        Search::Candidates(candidates) => {
            let Some(Candidate { path, .. }) = candidates.into_iter().next() else {
                let name = locate::operators_name();
                let reason = format!("{name} is not beside this program: copy it there, or name it in {OPS_VARIABLE}");
                notices.push(Notice::NoCustomOps { reason });
                return Ok(builder);
            };
            builder.with_operator_library(&path).or_else(|e| match e.code() {
                // The library is in order and refuses a setting: to run without its kernels would hide the mistake.
                ErrorCode::InvalidArgument => Err(Error::OpsLibrary { path, reason: e.message().to_owned() }),
                _ => {
                    notices.push(Notice::NoCustomOps { reason: format!("{}: {}", path.display(), e.message()) });
                    Ok(e.recover())
                }
            })
        }
    }
}

fn metadata(session: &Session) -> ort::Result<BTreeMap<String, String>> {
    let metadata = session.metadata()?;
    let keys = metadata.custom_keys()?;
    Ok(keys.into_iter().filter_map(|key| metadata.custom(&key).map(|value| (key, value))).collect())
}

fn tensor_info(path: &Path, outlet: &Outlet) -> Result<TensorInfo> {
    let name = outlet.name().to_owned();
    let ValueType::Tensor { ty, shape, dimension_symbols } = outlet.dtype() else {
        let reason = format!("{name} is {}, only tensors are supported", outlet.dtype());
        return Err(Error::Unsupported { path: path.to_owned(), reason });
    };
    let element_type = from_ort_type(*ty).ok_or_else(|| unknown(&name, ty.to_string()))?;
    let symbols = dimension_symbols.iter().map(String::as_str).chain(std::iter::repeat(""));
    let dim = |(&size, symbol): (&i64, &str)| usize::try_from(size).map_or(Dim::Symbol(symbol.to_owned()), Dim::Fixed);
    let dims = shape.iter().zip(symbols).map(dim).collect();
    Ok(TensorInfo { name, element_type, dims })
}

/// A value to bind: what is not onnxruntime's is copied. (ort copies a borrowed tensor when it is bound, and waits for itself.)
fn owned(value: &Value) -> Result<SessionInputValue<'_>> {
    fn of<T>(shape: &[usize], data: &[T]) -> ort::Result<SessionInputValue<'static>>
    where
        T: PrimitiveTensorElementType + std::fmt::Debug + Clone + 'static,
    {
        ort::value::Tensor::from_array((shape.to_vec(), data.to_vec())).map(SessionInputValue::from)
    }
    let shape = value.shape();
    if let Repr::Ort(value) = value.repr() {
        return Ok(SessionInputValue::from(&value.value));
    }
    let made = match value.data()? {
        Data::F32(x) => of(shape, x),
        Data::F16(x) => of(shape, x),
        Data::BF16(x) => of(shape, x),
        Data::F64(x) => of(shape, x),
        Data::I64(x) => of(shape, x),
        Data::I32(x) => of(shape, x),
        Data::U8(x) => of(shape, x),
        Data::Bool(x) => of(shape, x),
    };
    made.map_err(|e| unknown("value", e.message().to_owned()))
}

/// A copy for values that another runtime keeps.
fn host_copy(value: &Value) -> Result<Option<Tensor>> {
    match value.repr() {
        Repr::Host(_) | Repr::Ort(_) => Ok(None),
        Repr::Tract(_) => value.to_tensor().map(Some),
    }
}

fn borrow<'v>(value: &'v Value, copy: Option<&'v Tensor>) -> ort::Result<SessionInputValue<'v>> {
    match (copy, value.repr()) {
        (None, Repr::Ort(value)) => Ok(SessionInputValue::from(&value.value)),
        (None, Repr::Host(tensor)) => view(tensor),
        (Some(tensor), _) => view(tensor),
        (None, Repr::Tract(_)) => Err(ort::Error::new("a value of another runtime was not copied")),
    }
}

fn view(tensor: &Tensor) -> ort::Result<SessionInputValue<'_>> {
    fn of<'v, T>(shape: &[usize], data: &'v [T]) -> ort::Result<SessionInputValue<'v>>
    where
        T: PrimitiveTensorElementType + std::fmt::Debug + Clone + 'static,
    {
        TensorRef::from_array_view((shape.to_vec(), data)).map(SessionInputValue::from)
    }
    let shape = tensor.shape();
    match tensor.data() {
        Data::F32(x) => of(shape, x),
        Data::F16(x) => of(shape, x),
        Data::BF16(x) => of(shape, x),
        Data::F64(x) => of(shape, x),
        Data::I64(x) => of(shape, x),
        Data::I32(x) => of(shape, x),
        Data::U8(x) => of(shape, x),
        Data::Bool(x) => of(shape, x),
    }
}
