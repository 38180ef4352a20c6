//! The vocabulary recorded as an ONNX graph: what a family's `forward` does in candle becomes nodes.

mod dims;

use crate::call;
use crate::graph::{Attribute, Dim, ElementType, Graph, Initializer, Node, Source, Value};
use moh_models::families::{Inputs, Model, Port, PortDim, Sizes};
use moh_models::ops::{Argument, Binary, Conv, Linear, ModelOperator, Ops, Reduce, Result, Tap, Type, Unary};
use moh_models::{Error, Weight};
use moh_operators::shape::OutputDim;
use moh_operators::{Attributes, DOMAIN, ElementType as OperandType, GATES, List};
use moh_runtime::names;
use std::collections::{BTreeMap, BTreeSet};

/// How to record.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// The model's type in the file.
    pub dtype: ElementType,
    /// ONNX operator-set version.
    pub opset: i64,
    /// ONNX IR version.
    pub ir_version: i64,
}

/// Records `model`, with its routers' gates as additional outputs `gates.<module path>`.
///
/// # Errors
/// Those of the family's `forward`.
pub fn record(model: &Model, options: Options) -> Result<Graph> {
    record_sized(model, options, &Sizes::default())
}

/// Records `model` with some of its dimensions fixed.
///
/// # Errors
/// As [`record`].
pub fn record_sized(model: &Model, options: Options, sizes: &Sizes) -> Result<Graph> {
    Ok(recorded(model, options, sizes)?.graph)
}

fn recorded(model: &Model, options: Options, sizes: &Sizes) -> Result<Recorder> {
    let mut recorder = Recorder::new(options, sizes.clone());
    let inputs: Vec<Value> = model.inputs().iter().map(|port| recorder.port(port)).collect();
    let recorded = inputs.iter().map(|v| (v.name.clone(), v.clone()));
    let values = model.forward(&mut recorder, &Inputs::new(recorded))?;
    recorder.graph.inputs.splice(0..0, inputs);
    recorder.graph.name = model.family().to_owned();
    recorder.graph.metadata = metadata(model);
    let outputs: Vec<Value> = model.outputs().iter().map(|port| recorder.port(port)).collect();
    for (declared, value) in outputs.into_iter().zip(values) {
        recorder.output(declared, &value.name);
    }
    recorder.graph.outputs.append(&mut recorder.gate_outputs);
    Ok(recorder)
}

/// Names of values in the graph of a model, by the path of the module that they belong to.
#[derive(Debug, Clone, Default)]
pub struct Names {
    /// What modules other than attention give back.
    pub blocks: BTreeMap<String, String>,
    /// The routers' gates.
    pub gates: BTreeMap<String, String>,
}

/// The names that [`record_sized`] gives to values.
///
/// # Errors
/// As [`record`].
pub fn names(model: &Model, options: Options, sizes: &Sizes) -> Result<Names> {
    Ok(recorded(model, options, sizes)?.modules)
}

/// Family, routing and tool version.
fn metadata(model: &Model) -> BTreeMap<String, String> {
    let layers = model.layers();
    let list = |count: &dyn Fn(&moh_models::families::Layer) -> usize| {
        let counts: Vec<String> = layers.iter().map(|layer| count(layer).to_string()).collect();
        counts.join(",")
    };
    let entries = [
        (names::FAMILY, model.family().to_owned()),
        ("moh.num_heads", list(&|layer| layer.heads.num_heads)),
        (names::NUM_SHARED_HEADS, list(&|layer| layer.heads.num_shared_heads)),
        (names::TOP_K, list(&|layer| layer.heads.top_k)),
        ("moh.exporter", format!("moh-export {}", env!("CARGO_PKG_VERSION"))),
    ];
    // How callers may give the cache.
    let cache = crate::cache::in_place(model).then(|| (names::CACHE, names::IN_PLACE.to_owned()));
    entries.into_iter().chain(cache).map(|(name, value)| (name.to_owned(), value)).collect()
}

fn identity(from: &str, to: &str) -> Node {
    Node {
        op_type: "Identity",
        domain: "",
        name: format!("{to}/Identity"),
        inputs: vec![from.to_owned()],
        outputs: vec![to.to_owned()],
        attributes: Vec::new(),
    }
}

struct Recorder {
    options: Options,
    sizes: Sizes,
    graph: Graph,
    gate_outputs: Vec<Value>,
    /// What values that became outputs were called before.
    renamed: BTreeMap<String, String>,
    path: Vec<String>,
    names: BTreeSet<String>,
    /// Initializers already made, by what they hold.
    known: BTreeMap<String, Value>,
    modules: Names,
}

impl Recorder {
    fn new(options: Options, sizes: Sizes) -> Recorder {
        let graph = Graph {
            name: String::new(),
            opset: options.opset,
            ir_version: options.ir_version,
            inputs: Vec::new(),
            outputs: Vec::new(),
            initializers: Vec::new(),
            nodes: Vec::new(),
            values: BTreeMap::new(),
            functions: Vec::new(),
            metadata: BTreeMap::new(),
        };
        Recorder {
            options,
            sizes,
            graph,
            gate_outputs: Vec::new(),
            renamed: BTreeMap::new(),
            path: Vec::new(),
            names: BTreeSet::new(),
            known: BTreeMap::new(),
            modules: Names::default(),
        }
    }

    fn element_type(&self, ty: Type) -> ElementType {
        match ty {
            Type::Model => self.options.dtype,
            Type::F32 => ElementType::F32,
            Type::I64 => ElementType::I64,
            Type::Bool => ElementType::Bool,
        }
    }

    fn port(&mut self, port: &Port) -> Value {
        let part = |name: &str| self.sizes.get(name).map_or(Dim::Named(name.to_owned()), Dim::Fixed);
        let dim = |dim: &PortDim| match dim {
            PortDim::Fixed(n) => Dim::Fixed(*n),
            PortDim::Named(sum) => dims::sum(sum.split('+').map(part).collect::<Vec<_>>().iter()),
        };
        self.names.insert(port.name.clone());
        Value { name: port.name.clone(), ty: self.element_type(port.ty), dims: port.dims.iter().map(dim).collect() }
    }

    /// `name`, or `name_1`, `name_2`, ... where it is taken.
    fn unique(&mut self, name: String) -> String {
        let mut candidate = name.clone();
        let mut count = 0;
        while !self.names.insert(candidate.clone()) {
            count += 1;
            candidate = format!("{name}_{count}");
        }
        candidate
    }

    /// Adds a node of one output, which is named as the node.
    fn node(
        &mut self,
        op_type: &'static str,
        inputs: &[&Value],
        attributes: Vec<(&'static str, Attribute)>,
        ty: ElementType,
        dims: Vec<Dim>,
    ) -> Value {
        let path = self.path.join(".");
        self.node_at(&path, ("", op_type), inputs, attributes, ty, dims)
    }

    fn node_at(
        &mut self,
        path: &str,
        (domain, op_type): (&'static str, &'static str),
        inputs: &[&Value],
        attributes: Vec<(&'static str, Attribute)>,
        ty: ElementType,
        dims: Vec<Dim>,
    ) -> Value {
        let name = self.unique(if path.is_empty() { op_type.to_owned() } else { format!("{path}/{op_type}") });
        self.graph.nodes.push(Node {
            op_type,
            domain,
            name: name.clone(),
            inputs: inputs.iter().map(|v| v.name.clone()).collect(),
            outputs: vec![name.clone()],
            attributes,
        });
        let value = Value { name: name.clone(), ty, dims };
        self.graph.values.insert(name, value.clone());
        value
    }

    /// A node that keeps its input's type and dimensions.
    fn like(&mut self, op_type: &'static str, x: &Value, attributes: Vec<(&'static str, Attribute)>) -> Value {
        self.node(op_type, &[x], attributes, x.ty, x.dims.clone())
    }

    fn initializer(&mut self, key: String, name: String, ty: ElementType, dims: Vec<usize>, source: Source) -> Value {
        if let Some(value) = self.known.get(&key) {
            return value.clone();
        }
        let name = self.unique(name);
        let value = Value { name: name.clone(), ty, dims: dims.iter().map(|&d| Dim::Fixed(d)).collect() };
        self.graph.initializers.push(Initializer { name, ty, dims, source });
        self.known.insert(key, value.clone());
        value
    }

    fn tensor(&mut self, weight: &Weight, ty: ElementType, transposed: bool) -> Value {
        let mut dims = weight.shape().to_vec();
        let name = match transposed {
            true => {
                dims.reverse();
                format!("{}.T", weight.name())
            }
            false => weight.name().to_owned(),
        };
        let source = Source::Weight { weight: weight.clone(), transposed };
        self.initializer(format!("{name}:{ty}"), name, ty, dims, source)
    }

    fn ints(&mut self, values: &[i64]) -> Value {
        let text: Vec<String> = values.iter().map(i64::to_string).collect();
        let name = format!("ints[{}]", text.join(","));
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.initializer(name.clone(), name, ElementType::I64, vec![values.len()], Source::Bytes(bytes))
    }

    /// Makes `value` an output under its declared name: its producer writes that name.
    fn output(&mut self, declared: Value, value: &str) {
        let renamed = self.renamed.get(value).cloned();
        let value = renamed.as_deref().unwrap_or(value);
        let produced = self.graph.nodes.iter().any(|node| node.outputs.iter().any(|name| name == value));
        let shared = self.graph.outputs.iter().chain(&self.gate_outputs).any(|output| output.name == value);
        if produced && !shared {
            for node in &mut self.graph.nodes {
                for name in node.inputs.iter_mut().chain(&mut node.outputs).filter(|name| *name == value) {
                    name.clone_from(&declared.name);
                }
            }
            let modules = self.modules.blocks.values_mut().chain(self.modules.gates.values_mut());
            for name in modules.filter(|name| *name == value) {
                name.clone_from(&declared.name);
            }
            self.graph.values.remove(value);
            self.graph.values.insert(declared.name.clone(), declared.clone());
            self.renamed.insert(value.to_owned(), declared.name.clone());
        } else {
            self.graph.nodes.push(identity(value, &declared.name));
        }
        self.graph.outputs.push(declared);
    }

    /// A 1-D int64 value: the dimensions of `x` from `start` to `end`.
    fn shape_of(&mut self, x: &Value, end: i64) -> Value {
        let count = if end < 0 { x.dims.len() - end.unsigned_abs() as usize } else { end as usize };
        let attributes = vec![("start", Attribute::Int(0)), ("end", Attribute::Int(end))];
        self.node("Shape", &[x], attributes, ElementType::I64, vec![Dim::Fixed(count)])
    }

    fn constant_of_shape(&mut self, shape: &Value, ty: ElementType, value: f32, dims: Vec<Dim>) -> Value {
        self.node("ConstantOfShape", &[shape], vec![("value", Attribute::Scalar(ty, value))], ty, dims)
    }
}

fn index(rank: usize, axis: i64) -> usize {
    if axis < 0 { (rank as i64 + axis) as usize } else { axis as usize }
}

/// Little-endian elements of `ty`.
fn encode(ty: ElementType, values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&v| ty.bytes_of(v)).collect()
}

/// The module that a tensor belongs to: `blocks.0.attn.qkv` for `blocks.0.attn.qkv.weight`.
fn module_of(weight: &Weight) -> &str {
    weight.name().rsplit_once('.').map_or(weight.name(), |(module, _)| module)
}

impl Ops for Recorder {
    type Value = Value;

    fn weight(&mut self, weight: &Weight, ty: Type) -> Result<Value> {
        Ok(self.tensor(weight, self.element_type(ty), false))
    }

    fn constant(&mut self, ty: Type, shape: &[usize], values: &[f32]) -> Result<Value> {
        let ty = self.element_type(ty);
        let bytes = encode(ty, values);
        let name = match values {
            [one] => format!("{ty}[{one}]"),
            _ => format!("{}/constant", self.path.join(".")),
        };
        let key = format!("{ty}:{shape:?}:{bytes:?}");
        Ok(self.initializer(key, name, ty, shape.to_vec(), Source::Bytes(bytes)))
    }

    fn filled(&mut self, ty: Type, like: &Value, width: usize, value: f32) -> Result<Value> {
        let ty = self.element_type(ty);
        let leading = self.shape_of(like, -1);
        let width_list = self.ints(&[width as i64]);
        let attributes = vec![("axis", Attribute::Int(0))];
        let rank = vec![Dim::Fixed(like.dims.len())];
        let shape = self.node("Concat", &[&leading, &width_list], attributes, ElementType::I64, rank);
        let mut dims = like.dims.clone();
        if let Some(last) = dims.last_mut() {
            *last = Dim::Fixed(width);
        }
        Ok(self.constant_of_shape(&shape, ty, value, dims))
    }

    fn cast(&mut self, x: &Value, ty: Type) -> Result<Value> {
        let ty = self.element_type(ty);
        if x.ty == ty {
            return Ok(x.clone());
        }
        let to = vec![("to", Attribute::Int(i64::from(ty.onnx())))];
        Ok(self.node("Cast", &[x], to, ty, x.dims.clone()))
    }

    fn unary(&mut self, op: Unary, x: &Value) -> Result<Value> {
        Ok(match op {
            Unary::Neg => self.like("Neg", x, vec![]),
            Unary::Exp => self.like("Exp", x, vec![]),
            Unary::Log => self.like("Log", x, vec![]),
            Unary::Sqrt => self.like("Sqrt", x, vec![]),
            Unary::Cos => self.like("Cos", x, vec![]),
            Unary::Sin => self.like("Sin", x, vec![]),
            Unary::Sigmoid => self.like("Sigmoid", x, vec![]),
            Unary::Relu => self.like("Relu", x, vec![]),
            Unary::Gelu => self.like("Gelu", x, vec![]),
            Unary::GeluTanh => self.like("Gelu", x, vec![("approximate", Attribute::String("tanh"))]),
        })
    }

    fn binary(&mut self, op: Binary, a: &Value, b: &Value) -> Result<Value> {
        let (op_type, ty) = match op {
            Binary::Add => ("Add", a.ty),
            Binary::Sub => ("Sub", a.ty),
            Binary::Mul => ("Mul", a.ty),
            Binary::Div => ("Div", a.ty),
            Binary::Max => ("Max", a.ty),
            Binary::Equal => ("Equal", ElementType::Bool),
        };
        if a.ty != b.ty {
            return Err(Error::Internal("an operation on two element types"));
        }
        Ok(self.node(op_type, &[a, b], vec![], ty, dims::broadcast(&a.dims, &b.dims)))
    }

    fn select(&mut self, condition: &Value, a: &Value, b: &Value) -> Result<Value> {
        let dims = dims::broadcast(&dims::broadcast(&condition.dims, &a.dims), &b.dims);
        Ok(self.node("Where", &[condition, a, b], vec![], a.ty, dims))
    }

    fn reduce(&mut self, op: Reduce, x: &Value, axes: &[i64]) -> Result<Value> {
        let op_type = match op {
            Reduce::Sum => "ReduceSum",
            Reduce::Mean => "ReduceMean",
            Reduce::Max => "ReduceMax",
        };
        let mut dims = x.dims.clone();
        for &axis in axes {
            dims[index(x.dims.len(), axis)] = Dim::Fixed(1);
        }
        let axes = self.ints(axes);
        Ok(self.node(op_type, &[x, &axes], vec![("keepdims", Attribute::Int(1))], x.ty, dims))
    }

    fn softmax(&mut self, x: &Value) -> Result<Value> {
        Ok(self.like("Softmax", x, vec![("axis", Attribute::Int(-1))]))
    }

    fn cumulative_sum(&mut self, x: &Value, axis: i64) -> Result<Value> {
        let bytes = ElementType::I64.bytes_of(axis as f32);
        let name = format!("axis[{axis}]");
        let axis = self.initializer(name.clone(), name, ElementType::I64, vec![], Source::Bytes(bytes));
        Ok(self.node("CumSum", &[x, &axis], vec![], x.ty, x.dims.clone()))
    }

    fn matmul(&mut self, a: &Value, b: &Value) -> Result<Value> {
        let split = |x: &Value| x.dims.len().checked_sub(2).ok_or(Error::Internal("a matrix product of vectors"));
        let (rank_a, rank_b) = (split(a)?, split(b)?);
        let mut dims = dims::broadcast(&a.dims[..rank_a], &b.dims[..rank_b]);
        dims.extend([a.dims[rank_a].clone(), b.dims[rank_b + 1].clone()]);
        Ok(self.node("MatMul", &[a, b], vec![], a.ty, dims))
    }

    fn linear(&mut self, x: &Value, linear: &Linear) -> Result<Value> {
        let weight = self.tensor(&linear.weight, x.ty, true);
        let mut dims = x.dims.clone();
        if let Some(last) = dims.last_mut() {
            *last = Dim::Fixed(linear.weight.shape()[0]);
        }
        let module = module_of(&linear.weight).to_owned();
        let y = self.node_at(&module, ("", "MatMul"), &[x, &weight], vec![], x.ty, dims.clone());
        let Some(bias) = &linear.bias else { return Ok(y) };
        let bias = self.tensor(bias, x.ty, false);
        Ok(self.node_at(&module, ("", "Add"), &[&y, &bias], vec![], x.ty, dims))
    }

    fn conv2d(&mut self, x: &Value, weight: &Weight, bias: Option<&Weight>, conv: Conv) -> Result<Value> {
        let kernel = [weight.shape()[2], weight.shape()[3]];
        let size = |dim: &Dim, kernel: usize| match dim {
            Dim::Fixed(n) => Dim::Fixed((n + 2 * conv.padding - kernel) / conv.stride + 1),
            _ => Dim::Unknown,
        };
        let (rows, columns) = (size(&x.dims[2], kernel[0]), size(&x.dims[3], kernel[1]));
        let dims = vec![x.dims[0].clone(), Dim::Fixed(weight.shape()[0]), rows, columns];
        let repeat = |value: usize, times: usize| Attribute::Ints(vec![value as i64; times]);
        let attributes = vec![
            ("group", Attribute::Int(conv.groups as i64)),
            ("kernel_shape", Attribute::Ints(kernel.map(|k| k as i64).to_vec())),
            ("pads", repeat(conv.padding, 4)),
            ("strides", repeat(conv.stride, 2)),
        ];
        let module = module_of(weight).to_owned();
        let weight = self.tensor(weight, x.ty, false);
        let bias = bias.map(|bias| self.tensor(bias, x.ty, false));
        let inputs: Vec<&Value> = [x, &weight].into_iter().chain(&bias).collect();
        Ok(self.node_at(&module, ("", "Conv"), &inputs, attributes, x.ty, dims))
    }

    fn layer_norm(&mut self, x: &Value, width: usize, affine: Option<(&Weight, &Weight)>, eps: f32) -> Result<Value> {
        let attributes = vec![("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(eps))];
        match affine {
            Some((weight, bias)) => {
                let module = module_of(weight).to_owned();
                let (weight, bias) = (self.tensor(weight, x.ty, false), self.tensor(bias, x.ty, false));
                let inputs = [x, &weight, &bias];
                Ok(self.node_at(&module, ("", "LayerNormalization"), &inputs, attributes, x.ty, x.dims.clone()))
            }
            None => {
                let bytes = encode(x.ty, &vec![1.0; width]);
                let name = format!("{}.ones[{width}]", x.ty);
                let ones = self.initializer(name.clone(), name, x.ty, vec![width], Source::Bytes(bytes));
                Ok(self.node("LayerNormalization", &[x, &ones], attributes, x.ty, x.dims.clone()))
            }
        }
    }

    fn rms_norm(&mut self, x: &Value, weight: &Weight, eps: f32) -> Result<Value> {
        let path = std::mem::replace(&mut self.path, vec![module_of(weight).to_owned()]);
        let wide = self.cast(x, Type::F32)?;
        let two = self.constant(Type::F32, &[], &[2.0])?;
        // This chain is the pattern that onnxruntime fuses into one kernel.
        let squares = self.node("Pow", &[&wide, &two], vec![], wide.ty, wide.dims.clone());
        let mut row = wide.dims.clone();
        if let Some(last) = row.last_mut() {
            *last = Dim::Fixed(1);
        }
        let axes = self.ints(&[-1]);
        let keep = vec![("keepdims", Attribute::Int(1))];
        let mean = self.node("ReduceMean", &[&squares, &axes], keep, wide.ty, row);
        let eps = self.constant(Type::F32, &[], &[eps])?;
        let mean = self.binary(Binary::Add, &mean, &eps)?;
        let root = self.unary(Unary::Sqrt, &mean)?;
        let y = self.binary(Binary::Div, &wide, &root)?;
        let y = self.cast(&y, Type::Model)?;
        let weight = self.tensor(weight, y.ty, false);
        let y = self.binary(Binary::Mul, &y, &weight)?;
        self.path = path;
        Ok(y)
    }

    fn operator<O: ModelOperator>(
        &mut self,
        attributes: O::Attributes,
        inputs: &O::Inputs<List<'_, Argument<'_, Value>>>,
    ) -> Result<Value> {
        let attributes = Attributes::new::<O>(attributes)?;
        let arguments: Vec<Option<Argument<'_, Value>>> = O::list(inputs);
        let operands = || O::INPUTS.iter().zip(&arguments);
        let typed = operands().find_map(|(operand, argument)| match argument {
            Some(Argument::Value(value)) if operand.ty == OperandType::T => Some(value.ty),
            _ => None,
        });
        let t = typed.unwrap_or(self.options.dtype);
        let of = |ty: OperandType| call::element_type(ty, t);
        // As a linear layer does, a node with one matrix of weights belongs to the matrix's module.
        let mut weights = operands().filter_map(|(operand, argument)| match argument {
            Some(Argument::Weight(weight)) if !operand.optional => Some(*weight),
            _ => None,
        });
        let path = match (weights.next(), weights.next()) {
            (Some(weight), None) => module_of(weight).to_owned(),
            _ => self.path.join("."),
        };
        let mut values: Vec<Option<Value>> = Vec::with_capacity(arguments.len());
        for (operand, argument) in O::INPUTS.iter().zip(&arguments) {
            values.push(match *argument {
                Some(Argument::Value(value)) => Some(value.clone()),
                Some(Argument::Weight(weight)) => Some(self.tensor(weight, of(operand.ty), false)),
                None => None,
            });
        }
        let shapes: Vec<Option<Vec<Option<usize>>>> =
            values.iter().map(|value| value.as_ref().map(|value| call::known(&value.dims))).collect();
        let shapes: Vec<Option<&[Option<usize>]>> = shapes.iter().map(Option::as_deref).collect();
        let inferred = O::OPERATOR.infer(&attributes, &shapes)?;
        let dim = |dim: &OutputDim| match *dim {
            OutputDim::SameAs { input, axis } => {
                values[input].as_ref().map_or(Dim::Unknown, |value| value.dims[axis].clone())
            }
            OutputDim::Size(n) => Dim::Fixed(n),
            OutputDim::Max(_) | OutputDim::Unknown => Dim::Unknown,
        };
        let dims = inferred.iter().map(dim).collect();
        let inputs: Vec<&Value> = values.iter().flatten().collect();
        let written = call::written(&attributes);
        Ok(self.node_at(&path, (DOMAIN, O::NAME), &inputs, written, of(O::OUTPUT.ty), dims))
    }

    fn reshape(&mut self, x: &Value, shape: &[i64]) -> Result<Value> {
        let dims = dims::reshape(&x.dims, shape);
        let shape = self.ints(shape);
        Ok(self.node("Reshape", &[x, &shape], vec![], x.ty, dims))
    }

    fn transpose(&mut self, x: &Value, perm: &[usize]) -> Result<Value> {
        let dims = perm.iter().map(|&i| x.dims[i].clone()).collect();
        let perm = Attribute::Ints(perm.iter().map(|&i| i as i64).collect());
        Ok(self.node("Transpose", &[x], vec![("perm", perm)], x.ty, dims))
    }

    fn concat(&mut self, parts: &[&Value], axis: i64) -> Result<Value> {
        let Some(first) = parts.first() else { return Err(Error::Internal("concat of nothing")) };
        let at = index(first.dims.len(), axis);
        let mut dims = first.dims.clone();
        dims[at] = dims::sum(parts.iter().map(|part| &part.dims[at]));
        Ok(self.node("Concat", parts, vec![("axis", Attribute::Int(axis))], first.ty, dims))
    }

    fn slice(&mut self, x: &Value, axis: i64, start: usize, end: usize) -> Result<Value> {
        let mut dims = x.dims.clone();
        dims[index(x.dims.len(), axis)] = Dim::Fixed(end - start);
        let (start, end, axis) = (self.ints(&[start as i64]), self.ints(&[end as i64]), self.ints(&[axis]));
        Ok(self.node("Slice", &[x, &start, &end, &axis], vec![], x.ty, dims))
    }

    fn embedding(&mut self, weight: &Weight, indices: &Value) -> Result<Value> {
        let mut dims = indices.dims.clone();
        dims.push(Dim::Fixed(weight.shape()[1]));
        let module = module_of(weight).to_owned();
        let table = self.tensor(weight, self.options.dtype, false);
        let axis = vec![("axis", Attribute::Int(0))];
        Ok(self.node_at(&module, ("", "Gather"), &[&table, indices], axis, table.ty, dims))
    }

    fn enter(&mut self, name: &str) {
        self.path.push(name.to_owned());
    }

    fn leave(&mut self) {
        self.path.pop();
    }

    fn path(&self) -> String {
        self.path.join(".")
    }

    fn gates(&mut self, gates: Value, _active: usize) -> Result<Value> {
        let declared = Value { name: format!("{GATES}{}", self.path.join(".")), ..gates.clone() };
        self.names.insert(declared.name.clone());
        self.modules.gates.insert(self.path(), gates.name.clone());
        self.graph.nodes.push(identity(&gates.name, &declared.name));
        self.gate_outputs.push(declared);
        Ok(gates)
    }

    fn tap(&mut self, kind: Tap, value: &Value) -> Result<()> {
        if kind == Tap::Output {
            self.modules.blocks.insert(self.path(), value.name.clone());
        }
        Ok(())
    }
}
