//! ONNX models node by node.

use prost::Message;
use tract_onnx::pb::tensor_proto::DataLocation;
pub(crate) use tract_onnx::pb::tensor_proto::DataType;

use tract_onnx::pb::attribute_proto::AttributeType;
use tract_onnx::pb::tensor_shape_proto::{Dimension, dimension};
use tract_onnx::pb::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto,
    TensorShapeProto, TypeProto, ValueInfoProto, type_proto,
};

/// A model under construction.
pub(crate) struct Graph {
    graph: GraphProto,
    opsets: Vec<OperatorSetIdProto>,
    metadata: Vec<StringStringEntryProto>,
}

impl Graph {
    pub(crate) fn new() -> Graph {
        let graph = GraphProto { name: "test".to_owned(), ..GraphProto::default() };
        let opsets = vec![OperatorSetIdProto { domain: String::new(), version: 18 }];
        Graph { graph, opsets, metadata: Vec::new() }
    }

    pub(crate) fn import(&mut self, domain: &str, version: i64) {
        self.opsets.push(OperatorSetIdProto { domain: domain.to_owned(), version });
    }

    pub(crate) fn metadata(&mut self, key: &str, value: &str) {
        self.metadata.push(StringStringEntryProto { key: key.to_owned(), value: value.to_owned() });
    }

    pub(crate) fn input(&mut self, name: &str, ty: DataType, dims: &[&str]) {
        self.graph.input.push(value_info(name, ty, dims));
    }

    pub(crate) fn output(&mut self, name: &str, ty: DataType, dims: &[&str]) {
        self.graph.output.push(value_info(name, ty, dims));
    }

    pub(crate) fn node(&mut self, op_type: &str, inputs: &[&str], output: &str, attributes: &[(&str, i64)]) {
        let attribute = |&(name, i): &(&str, i64)| AttributeProto {
            name: name.to_owned(),
            r#type: AttributeType::Int as i32,
            i,
            ..AttributeProto::default()
        };
        self.graph.node.push(NodeProto {
            name: output.to_owned(),
            op_type: op_type.to_owned(),
            input: inputs.iter().map(|&input| input.to_owned()).collect(),
            output: vec![output.to_owned()],
            attribute: attributes.iter().map(attribute).collect(),
            ..NodeProto::default()
        });
    }

    /// An If, whose branches have no inputs.
    pub(crate) fn branches(&mut self, condition: &str, output: &str, [then, other]: [Graph; 2]) {
        let attribute = |(name, graph): (&str, Graph)| AttributeProto {
            name: name.to_owned(),
            r#type: AttributeType::Graph as i32,
            g: Some(graph.graph),
            ..AttributeProto::default()
        };
        self.node("If", &[condition], output, &[]);
        if let Some(node) = self.graph.node.last_mut() {
            node.attribute = [("then_branch", then), ("else_branch", other)].map(attribute).into();
        }
    }

    /// Replaces the version of ONNX's own operators, and with it the format's.
    pub(crate) fn opset(&mut self, version: i64) {
        self.opsets[0].version = version;
    }

    /// Puts the last node's operator into another domain.
    pub(crate) fn in_domain(&mut self, domain: &str) {
        if let Some(node) = self.graph.node.last_mut() {
            node.domain = domain.to_owned();
        }
    }

    pub(crate) fn cast_to_float(&mut self, input: &str, output: &str) {
        self.node("Cast", &[input], output, &[("to", i64::from(DataType::Float as i32))]);
    }

    pub(crate) fn ints(&mut self, name: &str, values: &[i64]) {
        let tensor = TensorProto { int64_data: values.to_vec(), ..tensor(name, DataType::Int64, values.len()) };
        self.graph.initializer.push(tensor);
    }

    pub(crate) fn floats(&mut self, name: &str, values: &[f32]) {
        let tensor = TensorProto { float_data: values.to_vec(), ..tensor(name, DataType::Float, values.len()) };
        self.graph.initializer.push(tensor);
    }

    /// Floats in another file.
    pub(crate) fn external_floats(&mut self, name: &str, len: usize, location: &str) {
        let entry = StringStringEntryProto { key: "location".to_owned(), value: location.to_owned() };
        self.graph.initializer.push(TensorProto {
            external_data: vec![entry],
            data_location: Some(DataLocation::External as i32),
            ..tensor(name, DataType::Float, len)
        });
    }

    /// Any elements, by their bytes.
    pub(crate) fn raw(&mut self, name: &str, ty: DataType, dims: &[i64], bytes: &[u8]) {
        let tensor = TensorProto { raw_data: bytes.to_vec(), dims: dims.to_vec(), ..tensor(name, ty, 0) };
        self.graph.initializer.push(tensor);
    }

    /// Moves the elements of all initializers into a file beside the model, whose bytes are returned: each after a gap of `gap` bytes.
    pub(crate) fn move_external(&mut self, location: &str, gap: usize) -> Vec<u8> {
        let mut file = Vec::new();
        for tensor in &mut self.graph.initializer {
            file.resize(file.len() + gap, 0);
            let [offset, length] = [file.len(), tensor.raw_data.len()].map(|n| n.to_string());
            file.append(&mut tensor.raw_data);
            let entries = [("location", location.to_owned()), ("offset", offset), ("length", length)];
            let entries = entries.map(|(key, value)| StringStringEntryProto { key: key.to_owned(), value });
            tensor.external_data = entries.into();
            tensor.data_location = Some(DataLocation::External as i32);
        }
        file
    }

    /// Numbers in bfloat16, given by their bits.
    pub(crate) fn bfloat16(&mut self, name: &str, bits: &[u16]) {
        let raw_data = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        self.graph.initializer.push(TensorProto { raw_data, ..tensor(name, DataType::Bfloat16, bits.len()) });
    }

    /// The file's bytes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        ModelProto {
            ir_version: if self.opsets[0].version < 21 { 8 } else { 10 },
            opset_import: self.opsets.clone(),
            graph: Some(self.graph.clone()),
            metadata_props: self.metadata.clone(),
            ..ModelProto::default()
        }
        .encode_to_vec()
    }
}

fn tensor(name: &str, ty: DataType, len: usize) -> TensorProto {
    TensorProto { name: name.to_owned(), data_type: ty as i32, dims: vec![len as i64], ..TensorProto::default() }
}

fn value_info(name: &str, ty: DataType, dims: &[&str]) -> ValueInfoProto {
    let dimension = |dim: &&str| {
        let value = match dim.parse() {
            Ok(number) => dimension::Value::DimValue(number),
            Err(_) => dimension::Value::DimParam((*dim).to_owned()),
        };
        Dimension { value: Some(value), ..Dimension::default() }
    };
    let shape = TensorShapeProto { dim: dims.iter().map(dimension).collect() };
    let tensor = type_proto::Tensor { elem_type: ty as i32, shape: Some(shape) };
    let r#type = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: name.to_owned(), r#type: Some(r#type), ..ValueInfoProto::default() }
}
