//! Parts of a written model, each a model of its own.

use crate::error::Error;
use crate::graph::ElementType;
use crate::proto::tensor_proto::DataLocation;
use crate::proto::tensor_shape_proto::dimension;
use crate::proto::{
    self, AttributeProto, GraphProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto, ValueInfoProto,
};
use crate::record::Names;
use crate::staging::write_file;
use moh_models::Model;
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Component, Path, PathBuf};
use tempfile::TempDir;

/// Bytes of a tensor that are copied at a time.
const CHUNK: usize = 1 << 20;

/// The element type of a tensor value.
pub(super) fn element_type(value: &ValueInfoProto) -> Option<i32> {
    tensor_type(value)?.elem_type
}

/// The dimensions of a tensor value.
pub(super) fn dims(value: &ValueInfoProto) -> Vec<Option<dimension::Value>> {
    let shape = tensor_type(value).and_then(|ty| ty.shape.as_ref());
    shape.map(|shape| shape.dim.iter().map(|dim| dim.value.clone()).collect()).unwrap_or_default()
}

fn tensor_type(value: &ValueInfoProto) -> Option<&proto::type_proto::Tensor> {
    match value.r#type.as_ref()?.value.as_ref()? {
        proto::type_proto::Value::TensorType(ty) => Some(ty),
        _ => None,
    }
}

/// A model and where it is cut.
pub(super) struct Parts<'a> {
    file: &'a Path,
    model: &'a ModelProto,
    graph: &'a GraphProto,
    /// The node that makes a value.
    producers: BTreeMap<&'a str, usize>,
    initializers: BTreeMap<&'a str, &'a TensorProto>,
    /// Block ends: path and value, in the order of the graph.
    cuts: Vec<(&'a str, &'a str)>,
    /// Outputs of the model, and the part that they are made in.
    outputs: Vec<(&'a str, usize)>,
    gates: BTreeSet<&'a str>,
    /// Whether the model is in bfloat16, which is run as float32.
    widened: bool,
}

/// What a value is computed from.
#[derive(Default)]
struct Closure<'a> {
    nodes: BTreeSet<usize>,
    /// Values that the nodes read and do not make: cuts, inputs, gates, and initializers.
    read: BTreeSet<&'a str>,
}

impl<'a> Parts<'a> {
    /// Cuts the model in `file` where the blocks of `model` end.
    pub(super) fn new(
        file: &'a Path,
        proto: &'a ModelProto,
        model: &Model,
        names: &'a Names,
    ) -> Result<Parts<'a>, String> {
        let Some(graph) = &proto.graph else { return Err("an ONNX model without a graph".to_owned()) };
        let mut producers = BTreeMap::new();
        for (i, node) in graph.node.iter().enumerate() {
            producers.extend(node.output.iter().map(|output| (output.as_str(), i)));
        }
        let initializers = graph.initializer.iter().filter_map(|init| Some((init.name.as_deref()?, init))).collect();
        let layers = model.layers();
        let ends_block = |path: &str| {
            let inside = |layer: &str| layer.rsplit_once('.').is_some_and(|(block, _)| block == path);
            layers.iter().any(|layer| inside(&layer.path))
        };
        let found =
            names.blocks.iter().filter(|(path, value)| ends_block(path) && producers.contains_key(value.as_str()));
        let mut cuts: Vec<(&str, &str)> = found.map(|(path, value)| (path.as_str(), value.as_str())).collect();
        cuts.sort_by_key(|(_, value)| producers[value]);
        if cuts.is_empty() {
            return Err(super::other_model(model) + ": no value in it is the end of a block");
        }
        let gates = names.gates.values().map(String::as_str).filter(|value| producers.contains_key(value)).collect();
        let widened = graph.output.iter().any(|output| element_type(output) == Some(ElementType::BF16.onnx()));
        let mut parts =
            Parts { file, model: proto, graph, producers, initializers, cuts, outputs: Vec::new(), gates, widened };
        for output in graph.output.iter().filter_map(|output| output.name.as_deref()) {
            let closure = parts.closure([output], false);
            let after = parts.cuts.iter().rposition(|(_, cut)| closure.read.contains(cut)).map_or(0, |i| i + 1);
            parts.outputs.push((output, after));
        }
        Ok(parts)
    }

    /// One a block, and one for what follows the last block, if anything does.
    pub(super) fn count(&self) -> usize {
        self.cuts.len() + usize::from(self.outputs.iter().any(|(_, part)| *part == self.cuts.len()))
    }

    pub(super) fn name(&self, index: usize) -> &str {
        self.cuts.get(index).map_or("outputs", |(path, _)| path)
    }

    pub(super) fn is_gates(&self, name: &str) -> bool {
        self.gates.contains(name)
    }

    /// What `targets` are computed from: from other cuts on, and from gates on where they are given.
    fn closure(&self, targets: impl IntoIterator<Item = &'a str>, given_gates: bool) -> Closure<'a> {
        let mut closure = Closure::default();
        let mut open = Vec::new();
        for target in targets {
            self.add(target, &mut closure, &mut open);
        }
        while let Some(name) = open.pop() {
            let is_cut = self.cuts.iter().any(|(_, cut)| *cut == name);
            if is_cut || given_gates && self.gates.contains(name) {
                closure.read.insert(name);
            } else {
                self.add(name, &mut closure, &mut open);
            }
        }
        closure
    }

    /// Adds the node that makes a value; what that reads is put into `open`.
    fn add(&self, name: &'a str, closure: &mut Closure<'a>, open: &mut Vec<&'a str>) {
        match self.producers.get(name) {
            Some(&i) if closure.nodes.insert(i) => {
                open.extend(self.graph.node[i].input.iter().map(String::as_str).filter(|input| !input.is_empty()));
            }
            Some(_) => {}
            None => drop(closure.read.insert(name)),
        }
    }

    /// Writes part `index` into a folder of its own in `scratch`.
    pub(super) fn write(&self, index: usize, scratch: &Path) -> Result<Written, Error> {
        let folder = tempfile::Builder::new().prefix("moh-export-verify-").tempdir_in(scratch);
        let folder = folder.map_err(Error::io(scratch))?;
        let mut results: Vec<&str> = self.cuts.get(index).map(|(_, cut)| *cut).into_iter().collect();
        let here = self.outputs.iter().filter(|(_, part)| *part == index).map(|(name, _)| *name);
        for output in here {
            if !results.contains(&output) {
                results.push(output);
            }
        }
        let free = self.closure(results.iter().copied(), false);
        let gates: Vec<&str> = free
            .nodes
            .iter()
            .flat_map(|&i| &self.graph.node[i].output)
            .map(String::as_str)
            .filter(|name| self.gates.contains(name))
            .collect();
        let mut data = Data::new(self, folder.path())?;
        let tensors = free.read.iter().filter_map(|name| self.initializers.get(name));
        let tensors: BTreeMap<String, TensorProto> = tensors
            .map(|tensor| Ok((tensor.name.clone().unwrap_or_default(), data.copy(tensor)?)))
            .collect::<Result<_, Error>>()?;
        data.finish()?;
        let shown: Vec<&str> = gates.iter().copied().filter(|name| !results.contains(name)).collect();
        let inputs_free =
            self.model_of(&free, &tensors, results.iter().chain(&shown).copied(), &folder.path().join(FREE))?;
        let given = self.closure(results.iter().copied(), true);
        let inputs_given = self.model_of(&given, &tensors, results.iter().copied(), &folder.path().join(GIVEN))?;
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Ok(Written { folder, inputs: [inputs_free, inputs_given], gates: owned(&gates), results: owned(&results) })
    }

    /// Writes a model of the nodes; returns its inputs.
    fn model_of<'n>(
        &self,
        closure: &Closure<'_>,
        tensors: &BTreeMap<String, TensorProto>,
        outputs: impl Iterator<Item = &'n str>,
        path: &Path,
    ) -> Result<Vec<String>, Error> {
        let inputs: Vec<&str> =
            closure.read.iter().copied().filter(|name| !self.initializers.contains_key(name)).collect();
        let typed = |name: &str| {
            let all = self.graph.value_info.iter().chain(&self.graph.input).chain(&self.graph.output);
            let mut all = all.filter(|value| value.name.as_deref() == Some(name));
            let value = all.next().cloned().ok_or_else(|| {
                let problem = format!("the type of value {name:?} is not in the file");
                Error::Exported { file: self.file.to_owned(), problem }
            })?;
            Ok::<_, Error>(if self.widened { widened_value(value) } else { value })
        };
        let nodes = closure.nodes.iter().map(|&i| self.graph.node[i].clone());
        let graph = GraphProto {
            name: self.graph.name.clone(),
            node: nodes.map(|node| if self.widened { widened_node(node) } else { node }).collect(),
            initializer: tensors
                .iter()
                .filter(|(name, _)| closure.read.contains(name.as_str()))
                .map(|(_, t)| t.clone())
                .collect(),
            input: inputs.iter().map(|name| typed(name)).collect::<Result<_, _>>()?,
            output: outputs.map(typed).collect::<Result<_, _>>()?,
            ..Default::default()
        };
        let functions = self.model.functions.iter().cloned().map(|mut function| {
            if self.widened {
                function.node = function.node.into_iter().map(widened_node).collect();
            }
            function
        });
        let model = ModelProto {
            ir_version: self.model.ir_version,
            opset_import: self.model.opset_import.clone(),
            graph: Some(graph),
            functions: functions.collect(),
            ..Default::default()
        };
        write_file(path, &model.encode_to_vec())?;
        Ok(inputs.into_iter().map(str::to_owned).collect())
    }
}

const FREE: &str = "free.onnx";
const GIVEN: &str = "given.onnx";
const DATA: &str = "data";

/// A part on the disk, as long as this lives.
pub(super) struct Written {
    folder: TempDir,
    inputs: [Vec<String>; 2],
    gates: Vec<String>,
    results: Vec<String>,
}

impl Written {
    /// The model that routes itself, or the one whose gates are inputs.
    pub(super) fn path(&self, given_gates: bool) -> PathBuf {
        self.folder.path().join(if given_gates { GIVEN } else { FREE })
    }

    pub(super) fn inputs(&self, given_gates: bool) -> &[String] {
        &self.inputs[usize::from(given_gates)]
    }

    /// The gates that it computes.
    pub(super) fn gates(&self) -> &[String] {
        &self.gates
    }

    /// What is to be compared: the block's end, and outputs of the model.
    pub(super) fn results(&self) -> &[String] {
        &self.results
    }
}

/// The weights of a part: a copy, because runtimes refuse weights in another folder than the model's.
struct Data<'a> {
    parts: &'a Parts<'a>,
    path: PathBuf,
    out: BufWriter<File>,
    end: u64,
    open: BTreeMap<String, File>,
}

impl<'a> Data<'a> {
    fn new(parts: &'a Parts<'a>, folder: &Path) -> Result<Data<'a>, Error> {
        let path = folder.join(DATA);
        let out = BufWriter::with_capacity(CHUNK, File::create(&path).map_err(Error::io(&path))?);
        Ok(Data { parts, path, out, end: 0, open: BTreeMap::new() })
    }

    /// Copies a tensor's elements, and returns it with its new place.
    fn copy(&mut self, tensor: &TensorProto) -> Result<TensorProto, Error> {
        let widened = self.parts.widened && tensor.data_type == Some(ElementType::BF16.onnx());
        let mut copy = tensor.clone();
        if widened {
            copy.data_type = Some(ElementType::F32.onnx());
        }
        if tensor.data_location != Some(DataLocation::External as i32) {
            copy.raw_data = copy.raw_data.map(|bytes| if widened { widen(&bytes) } else { bytes });
            return Ok(copy);
        }
        let name = tensor.name.as_deref().unwrap_or_default();
        let bad = |problem: String| {
            let problem = format!("tensor {name:?}: {problem}");
            Error::Exported { file: self.parts.file.to_owned(), problem }
        };
        let entry = |key: &str| {
            let found = tensor.external_data.iter().find(|entry| entry.key.as_deref() == Some(key));
            found.and_then(|entry| entry.value.as_deref())
        };
        let number = |key: &str| entry(key).and_then(|value| value.parse::<u64>().ok());
        let location = entry("location").ok_or_else(|| bad("no location of its data".to_owned()))?;
        if Path::new(location).components().any(|part| !matches!(part, Component::Normal(_))) {
            return Err(bad(format!("its data is in {location:?}, which is not in the model's folder")));
        }
        let length = number("length").ok_or_else(|| bad("no length of its data".to_owned()))?;
        let source = self.parts.file.with_file_name(location);
        if !self.open.contains_key(location) {
            self.open.insert(location.to_owned(), File::open(&source).map_err(Error::io(&source))?);
        }
        let Some(mut file) = self.open.get(location) else { return Ok(copy) };
        let offset = number("offset").unwrap_or(0);
        let (end, found) = (offset.saturating_add(length), file.metadata().map_err(Error::io(&source))?.len());
        if end > found {
            let problem = format!("truncated: tensor {name:?} ends at byte {end}, and the file has {found}");
            return Err(Error::Exported { file: source, problem });
        }
        file.seek(SeekFrom::Start(offset)).map_err(Error::io(&source))?;
        let start = self.end.next_multiple_of(256);
        let padding = vec![0; (start - self.end) as usize];
        self.out.write_all(&padding).map_err(Error::io(&self.path))?;
        let (mut left, mut buffer, mut written) = (length, vec![0; CHUNK], 0);
        while left > 0 {
            let part = &mut buffer[..left.min(CHUNK as u64) as usize];
            file.read_exact(part).map_err(Error::io(&source))?;
            left -= part.len() as u64;
            let wide = if widened { widen(part) } else { Vec::new() };
            let part = if widened { &wide } else { &*part };
            self.out.write_all(part).map_err(Error::io(&self.path))?;
            written += part.len() as u64;
        }
        self.end = start + written;
        let entry = |key: &str, value: String| StringStringEntryProto { key: Some(key.to_owned()), value: Some(value) };
        copy.external_data = vec![
            entry("location", DATA.to_owned()),
            entry("offset", start.to_string()),
            entry("length", written.to_string()),
        ];
        Ok(copy)
    }

    fn finish(mut self) -> Result<(), Error> {
        self.out.flush().map_err(Error::io(&self.path))
    }
}

/// Elements of bfloat16 as float32, exactly.
fn widen(bytes: &[u8]) -> Vec<u8> {
    bytes.as_chunks::<2>().0.iter().flat_map(|&[low, high]| [0, 0, low, high]).collect()
}

fn widened_type(ty: i32) -> i32 {
    if ty == ElementType::BF16.onnx() { ElementType::F32.onnx() } else { ty }
}

fn widened_value(mut value: ValueInfoProto) -> ValueInfoProto {
    if let Some(proto::type_proto::Value::TensorType(ty)) = value.r#type.as_mut().and_then(|ty| ty.value.as_mut()) {
        ty.elem_type = ty.elem_type.map(widened_type);
    }
    value
}

/// The node with float32 in the place of bfloat16: as the target of casts, and in constants.
fn widened_node(mut node: NodeProto) -> NodeProto {
    let cast = node.op_type.as_deref() == Some("Cast");
    let widened = |mut attribute: AttributeProto| {
        if cast && attribute.name.as_deref() == Some("to") {
            attribute.i = attribute.i.map(|ty| i64::from(widened_type(ty as i32)));
        }
        if let Some(tensor) = attribute.t.as_mut().filter(|tensor| tensor.data_type == Some(ElementType::BF16.onnx())) {
            tensor.data_type = Some(ElementType::F32.onnx());
            tensor.raw_data = tensor.raw_data.take().map(|bytes| widen(&bytes));
        }
        attribute
    };
    node.attribute = node.attribute.into_iter().map(widened).collect();
    node
}
