//! A model in tract.

use super::{Loaded, bfloat16, external};
use crate::element::{Data, ElementType};
use crate::error::{Error, Result};
use crate::header::Header;
use crate::info::{Dim, TensorInfo};
use crate::interrupt::Interrupt;
use crate::model::OnNode;
use crate::options::Options;
use crate::value::{Value, unknown};
use half::f16;
use moh_operators::DOMAIN;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use tract_onnx::pb::tensor_proto::DataType;
use tract_onnx::pb::tensor_shape_proto::dimension;
use tract_onnx::pb::{AttributeProto, GraphProto, ModelProto, ValueInfoProto, type_proto};
use tract_onnx::prelude::*;
use tract_onnx::tract_core::internal::{EvalContext, OpState};
use tract_onnx::tract_core::ops::cast::cast;
use tract_onnx::tract_core::plan::eval;
use tract_onnx::tract_hir::internal::{TractErrorContext, TypedSimpleState, bail, ensure};

pub(crate) const NAME: &str = "tract";

/// A model ready to run, with its memory between runs.
struct Plan {
    runnable: Arc<TypedRunnableModel>,
    state: Option<TypedSimpleState>,
    threads: moh_tract::Pool,
}

/// Computes one node.
trait Eval:
    for<'a, 'b, 'c> FnMut(
    &'a EvalContext<'a>,
    Option<&'b mut (dyn OpState + 'static)>,
    &'c TypedNode,
    TVec<TValue>,
) -> TractResult<TVec<TValue>>
{
}

impl<F> Eval for F where
    F: for<'a, 'b, 'c> FnMut(
        &'a EvalContext<'a>,
        Option<&'b mut (dyn OpState + 'static)>,
        &'c TypedNode,
        TVec<TValue>,
    ) -> TractResult<TVec<TValue>>
{
}

impl Plan {
    fn run(&mut self, inputs: TVec<TValue>, eval: impl Eval) -> TractResult<TVec<TValue>> {
        // Not put back after an error or a panic, which leave values in it.
        let mut state = self.state.take().map_or_else(|| self.runnable.spawn(), Ok)?;
        let outputs = self.threads.run(|| state.run_plan_with_eval(inputs, eval))?;
        self.state = Some(state);
        Ok(outputs)
    }
}

pub(crate) struct TractModel {
    path: PathBuf,
    plan: Plan,
    outputs: Vec<String>,
}

impl TractModel {
    /// Loads and optimises the model; its dimensions stay symbolic.
    pub(crate) fn load(path: &Path, header: &Header, options: &Options) -> Result<Loaded<TractModel>> {
        let unsupported = |reason: &str| Error::Unsupported { path: path.to_owned(), reason: reason.to_owned() };
        if options.profile.is_some() {
            return Err(unsupported("only onnxruntime writes profiles"));
        }
        if options.without_custom_ops && header.opset(DOMAIN).is_some() {
            return Err(unsupported("tract runs the ai.moh operators or nothing: it ignores the bodies in the model"));
        }
        let refused_setting = |e: moh_operators::Error| Error::Setting { reason: e.to_string() };
        moh_tract::instruction_set().map_err(refused_setting)?;
        moh_tract::checked_precision().map_err(refused_setting)?;
        let mut proto =
            guard(|| tract_onnx::onnx().proto_model_for_path(path)).map_err(|reason| refused(path, reason))?;
        if proto.graph.as_ref().is_some_and(bfloat16::is_in) {
            return Err(bfloat16::refusal(path));
        }
        let ports = proto.graph.as_ref().map_or_else(|| Ok(Ports::default()), |graph| ports(path, graph));
        let plan = guard(|| prepare(path, &mut proto, options.threads)).map_err(|reason| refused(path, reason))?;
        let (inputs, outputs) = ports?;
        let metadata: BTreeMap<String, String> =
            proto.metadata_props.into_iter().map(|prop| (prop.key, prop.value)).collect();
        let names = outputs.iter().map(|output| output.name.clone()).collect();
        let model = TractModel { path: path.to_owned(), plan, outputs: names };
        Ok(Loaded { model, inputs, outputs, metadata, notices: Vec::new() })
    }

    /// Runs the model on values in the order of its inputs.
    pub(crate) fn run(&mut self, inputs: Vec<Value>) -> Result<Vec<Value>> {
        self.run_with(inputs, eval)
    }
}

impl TractModel {
    /// As [`TractModel::run`], until it is broken off: an error then.
    pub(crate) fn run_until(&mut self, inputs: Vec<Value>, interrupt: &Interrupt) -> Result<Vec<Value>> {
        self.run_with(inputs, |context, state, node, inputs| {
            ensure!(!interrupt.is_interrupted(), "the run was broken off");
            eval(context, state, node, inputs)
        })
    }

    /// As [`TractModel::run`]; `on_node` gets every node's name, operator and time.
    pub(crate) fn run_timed(&mut self, inputs: Vec<Value>, on_node: &mut OnNode<'_>) -> Result<Vec<Value>> {
        self.run_with(inputs, |context, state, node, inputs| {
            let began = Instant::now();
            let outputs = eval(context, state, node, inputs);
            on_node(&node.name, &node.op.name(), began.elapsed());
            outputs
        })
    }

    fn run_with(&mut self, inputs: Vec<Value>, eval: impl Eval) -> Result<Vec<Value>> {
        let failed = |reason| Error::Run { path: self.path.clone(), runtime: NAME, reason };
        let outputs = guard(|| self.plan.run(tract_values(inputs)?, eval)).map_err(failed)?;
        self.named(outputs)
    }

    fn named(&self, outputs: TVec<TValue>) -> Result<Vec<Value>> {
        self.outputs.iter().zip(outputs).map(|(name, value)| Value::from_tract(name, value)).collect()
    }
}

fn refused(path: &Path, reason: String) -> Error {
    Error::Load { path: path.to_owned(), runtime: NAME, reason }
}

/// tract panics on some malformed models and inputs; what it holds is dropped then, never used again.
fn guard<T>(work: impl FnOnce() -> TractResult<T>) -> std::result::Result<T, String> {
    crate::guard(work)?.map_err(|e| format!("{e:#}"))
}

fn prepare(path: &Path, proto: &mut ModelProto, threads: Option<usize>) -> TractResult<Plan> {
    let mut onnx = tract_onnx::onnx();
    moh_tract::register(&mut onnx);
    if let Some(graph) = &proto.graph {
        check_outputs(graph)?;
        check_types(graph)?;
    }
    let folder = external::resolve(path, proto)?;
    let folder = folder.to_str().context("the path of the model's folder is not valid UTF-8")?;
    moh_tract::prepare(proto)?;
    let parsed = onnx.parse(proto, Some(folder))?;
    // Weights in the message are not needed twice.
    proto.graph = None;
    ensure!(parsed.unresolved_inputs.is_empty(), "nothing computes {}", parsed.unresolved_inputs.join(", "));
    let model = moh_tract::optimize(with_plain_outputs(parsed.model.into_typed()?)?)?;
    let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let options = RunOptions { executor: Some(moh_tract::executor(threads)?), ..RunOptions::default() };
    let runnable = model.into_runnable_with_options(&options)?;
    Ok(Plan { runnable, state: None, threads: moh_tract::Pool::new(threads)? })
}

/// tract panics on an output that nothing computes.
fn check_outputs(graph: &GraphProto) -> TractResult<()> {
    let computed: HashSet<&str> = graph
        .node
        .iter()
        .flat_map(|node| node.output.iter().map(String::as_str))
        .chain(graph.input.iter().map(|input| input.name.as_str()))
        .chain(graph.initializer.iter().map(|tensor| tensor.name.as_str()))
        .collect();
    match graph.output.iter().find(|output| !computed.contains(output.name.as_str())) {
        Some(output) => bail!("nothing computes output {}", output.name),
        None => Ok(()),
    }
}

/// tract's own words for a conversion to bfloat16 do not say what is missing.
fn check_types(graph: &GraphProto) -> TractResult<()> {
    let narrows = |to: &AttributeProto| to.name == "to" && to.i == DataType::Bfloat16 as i64;
    match graph.node.iter().find(|node| node.op_type == "Cast" && node.attribute.iter().any(narrows)) {
        Some(node) => bail!(
            "{} converts to bfloat16, which tract does not have: run the model in onnxruntime, or export it without \
             `--attention-type bf16`",
            node.name
        ),
        None => Ok(()),
    }
}

/// Inputs and outputs.
type Ports = (Vec<TensorInfo>, Vec<TensorInfo>);

/// The outputs, and the inputs that a caller gives: those without an initializer.
fn ports(path: &Path, graph: &GraphProto) -> Result<Ports> {
    let constant: HashSet<&str> = graph.initializer.iter().map(|tensor| tensor.name.as_str()).collect();
    let given = graph.input.iter().filter(|input| !constant.contains(input.name.as_str()));
    let infos = given.map(|input| tensor_info(path, input)).collect::<Result<_>>()?;
    Ok((infos, graph.output.iter().map(|output| tensor_info(path, output)).collect::<Result<_>>()?))
}

fn tensor_info(path: &Path, info: &ValueInfoProto) -> Result<TensorInfo> {
    let name = info.name.clone();
    let Some(type_proto::Value::TensorType(tensor)) = info.r#type.as_ref().and_then(|ty| ty.value.as_ref()) else {
        return Err(refused(path, format!("{name} has no tensor type")));
    };
    let found = DataType::try_from(tensor.elem_type);
    let element_type = found.ok().and_then(element_type).ok_or_else(|| unknown(&name, format!("{found:?}")))?;
    let dims = tensor.shape.iter().flat_map(|shape| &shape.dim).map(|dim| match &dim.value {
        Some(dimension::Value::DimValue(size)) => usize::try_from(*size).map_or(Dim::Symbol(String::new()), Dim::Fixed),
        Some(dimension::Value::DimParam(symbol)) => Dim::Symbol(symbol.clone()),
        None => Dim::Symbol(String::new()),
    });
    Ok(TensorInfo { name, element_type, dims: dims.collect() })
}

fn element_type(ty: DataType) -> Option<ElementType> {
    match ty {
        DataType::Float => Some(ElementType::F32),
        DataType::Float16 => Some(ElementType::F16),
        DataType::Bfloat16 => Some(ElementType::BF16),
        DataType::Double => Some(ElementType::F64),
        DataType::Int64 => Some(ElementType::I64),
        DataType::Int32 => Some(ElementType::I32),
        DataType::Uint8 => Some(ElementType::U8),
        DataType::Bool => Some(ElementType::Bool),
        _ => None,
    }
}

/// Zeros in memory of tract's own.
pub(crate) fn zeros(ty: ElementType, shape: Vec<usize>) -> Result<Value> {
    let Some(_) = shape.iter().try_fold(ty.size(), |n, &d| n.checked_mul(d)).filter(|&n| n <= isize::MAX as usize)
    else {
        return Err(Error::Length { shape, expected: usize::MAX, found: 0 });
    };
    let ty = match ty {
        ElementType::F32 => f32::datum_type(),
        ElementType::F16 => f16::datum_type(),
        ElementType::F64 => f64::datum_type(),
        ElementType::I64 => i64::datum_type(),
        ElementType::I32 => i32::datum_type(),
        ElementType::U8 => u8::datum_type(),
        ElementType::Bool => bool::datum_type(),
        ElementType::BF16 => return Err(unknown("zeros", "bfloat16, which tract does not have".to_owned())),
    };
    let made = Tensor::zero_dt(ty, &shape);
    Value::from_tract("zeros", made.map_err(|e| unknown("zeros", format!("{e:#}")))?.into_tvalue())
}

/// tract computes with symbols in place of some int64 numbers: outputs are to be numbers.
fn with_plain_outputs(mut model: TypedModel) -> TractResult<TypedModel> {
    let mut outputs = model.outputs.clone();
    for outlet in &mut outputs {
        if model.outlet_fact(*outlet)?.datum_type == TDim::datum_type() {
            let name = format!("{}.numbers", model.node(outlet.node).name);
            *outlet = model.wire_node(name, cast(i64::datum_type()), &[*outlet])?[0];
        }
    }
    model.select_output_outlets(&outputs)?;
    Ok(model)
}

/// Gives up the values, so that tract may write to those that nobody else holds.
fn tract_values(values: Vec<Value>) -> TractResult<TVec<TValue>> {
    values.into_iter().map(tract_value).collect()
}

fn tract_value(value: Value) -> TractResult<TValue> {
    let value = match value.into_tract() {
        Ok(value) => return Ok(value),
        Err(value) => value,
    };
    let shape = value.shape();
    let tensor = match value.data()? {
        Data::F32(x) => Tensor::from_shape(shape, x)?,
        Data::F16(x) => Tensor::from_shape(shape, x)?,
        Data::F64(x) => Tensor::from_shape(shape, x)?,
        Data::I64(x) => Tensor::from_shape(shape, x)?,
        Data::I32(x) => Tensor::from_shape(shape, x)?,
        Data::U8(x) => Tensor::from_shape(shape, x)?,
        Data::Bool(x) => Tensor::from_shape(shape, x)?,
        Data::BF16(_) => bail!("tract has no bfloat16"),
    };
    Ok(tensor.into_tvalue())
}
