//! onnxruntime as the peer of a measurement: models of a few nodes, written here, run in this process.

// Each benchmark uses a part of this.
#![allow(dead_code)]

use ort::environment::Environment;
use ort::session::builder::GraphOptimizationLevel;
use ort::session::{Session, SessionInputValue};
use ort::value::TensorRef;
use std::error::Error;
use std::sync::OnceLock;

/// A node's attribute.
pub(crate) enum Attribute {
    /// An integer.
    Int(&'static str, i64),
    /// A float.
    Float(&'static str, f32),
    /// A text.
    Text(&'static str, &'static str),
}

/// A model under construction: float32 tensors, names as in ONNX.
#[derive(Default)]
pub(crate) struct Graph {
    bytes: Vec<u8>,
}

impl Graph {
    /// An input.
    pub(crate) fn input(mut self, name: &str, shape: &[usize]) -> Graph {
        self.bytes.extend(field(11, &value_info(name, shape, 1)));
        self
    }

    /// An input of int32.
    pub(crate) fn int_input(mut self, name: &str, shape: &[usize]) -> Graph {
        self.bytes.extend(field(11, &value_info(name, shape, 6)));
        self
    }

    /// An output.
    pub(crate) fn output(mut self, name: &str, shape: &[usize]) -> Graph {
        self.bytes.extend(field(12, &value_info(name, shape, 1)));
        self
    }

    /// A constant.
    pub(crate) fn constant(mut self, name: &str, shape: &[usize], data: &[f32]) -> Graph {
        let mut tensor: Vec<u8> = shape.iter().flat_map(|&dim| int(1, dim as u64)).collect();
        tensor.extend(int(2, 1));
        tensor.extend(field(8, name.as_bytes()));
        tensor.extend(field(9, &data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()));
        self.bytes.extend(field(5, &tensor));
        self
    }

    /// A node. An empty input name is an absent input.
    pub(crate) fn node(
        mut self,
        domain: &str,
        operator: &str,
        inputs: &[&str],
        outputs: &[&str],
        attributes: &[Attribute],
    ) -> Graph {
        let mut node: Vec<u8> = inputs.iter().flat_map(|name| field(1, name.as_bytes())).collect();
        node.extend(outputs.iter().flat_map(|name| field(2, name.as_bytes())));
        node.extend(field(4, operator.as_bytes()));
        node.extend(attributes.iter().flat_map(|attribute| field(5, &attribute.encode())));
        node.extend(field(7, domain.as_bytes()));
        self.bytes.extend(field(1, &node));
        self
    }

    /// The model in a session of so many threads. `ORT_DYLIB_PATH` names the library.
    pub(crate) fn load(self, threads: usize) -> Result<Peer, Box<dyn Error>> {
        let mut graph = self.bytes;
        graph.extend(field(2, b"peer"));
        let mut model = int(1, 10);
        model.extend(field(8, &int(2, 21)));
        model.extend(field(8, &[field(1, b"com.microsoft"), int(2, 1)].concat()));
        model.extend(field(7, &graph));
        // A process has one.
        static ENVIRONMENT: OnceLock<Environment> = OnceLock::new();
        let environment = match ENVIRONMENT.get() {
            Some(environment) => environment,
            None => {
                let path = std::env::var("ORT_DYLIB_PATH").map_err(|e| format!("ORT_DYLIB_PATH: {e}"))?;
                let environment = ort::init_from(path)?.with_telemetry(false).build()?;
                ENVIRONMENT.get_or_init(|| environment)
            }
        };
        let session = Session::builder(environment)?
            .with_intra_threads(threads)?
            .with_optimization_level(GraphOptimizationLevel::All)?
            .commit_from_memory(&model)?;
        Ok(Peer { session })
    }
}

impl Attribute {
    fn encode(&self) -> Vec<u8> {
        match self {
            Attribute::Int(name, value) => [field(1, name.as_bytes()), int(3, *value as u64), int(20, 2)].concat(),
            Attribute::Float(name, value) => {
                [field(1, name.as_bytes()), vec![2 << 3 | 5], value.to_le_bytes().to_vec(), int(20, 1)].concat()
            }
            Attribute::Text(name, value) => {
                [field(1, name.as_bytes()), field(4, value.as_bytes()), int(20, 3)].concat()
            }
        }
    }
}

/// A loaded model.
pub(crate) struct Peer {
    session: Session,
}

impl Peer {
    /// Runs the model once on shapes and data in the order of its inputs.
    pub(crate) fn run(&mut self, inputs: &[(Vec<usize>, Input<'_>)]) -> Result<(), Box<dyn Error>> {
        let values = inputs.iter().map(|(shape, data)| match *data {
            Input::Float(data) => TensorRef::from_array_view((shape.clone(), data)).map(SessionInputValue::from),
            Input::Int(data) => TensorRef::from_array_view((shape.clone(), data)).map(SessionInputValue::from),
        });
        let values = values.collect::<ort::Result<Vec<SessionInputValue<'_>>>>()?;
        self.session.run(values.as_slice())?;
        Ok(())
    }
}

/// An input's data.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    /// float32
    Float(&'a [f32]),
    /// int32
    Int(&'a [i32]),
}

fn value_info(name: &str, shape: &[usize], element: u64) -> Vec<u8> {
    let dims: Vec<u8> = shape.iter().flat_map(|&dim| field(1, &int(1, dim as u64))).collect();
    let tensor = [int(1, element), field(2, &dims)].concat();
    [field(1, name.as_bytes()), field(2, &field(1, &tensor))].concat()
}

/// A protobuf field of bytes.
fn field(number: u64, bytes: &[u8]) -> Vec<u8> {
    [varint(number << 3 | 2), varint(bytes.len() as u64), bytes.to_vec()].concat()
}

/// A protobuf field of an integer.
fn int(number: u64, value: u64) -> Vec<u8> {
    [varint(number << 3), varint(value)].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}
