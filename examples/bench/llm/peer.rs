//! A dense LLaMA of onnxruntime's own operators, as its model builder for onnxruntime-genai makes them for CPUs: int4 weights in blocks
//! of 32 in MatMulNBits (the output head too) and GatherBlockQuantized, queries, keys and values in one product, rotary embedding and
//! cache inside GroupQueryAttention, sums and norms in one operator. Weights are random: speed does not depend on them.

use super::shape::Shape;
use crate::graphs::{FLOAT, INT32, MICROSOFT, float, int, node};
use anyhow::{Context, Result, ensure};
use moh_export::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto,
    TensorShapeProto, TypeProto, ValueInfoProto, tensor_proto::DataLocation, tensor_shape_proto, type_proto,
};
use prost::Message;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Values that share a scale.
const BLOCK: usize = 32;

/// External tensors begin at multiples of this: onnxruntime maps pages.
const ALIGNMENT: u64 = 4096;

const UINT8: i32 = 2;
const INT64: i32 = 7;

/// What a tensor holds.
enum Fill {
    /// Two random int4 a byte.
    Nibbles,
    Constant(f32),
    /// Cosines or sines of positions and frequencies.
    Rotary(fn(f64) -> f64),
}

/// Writes the model into `folder`, whose products compute at that accuracy level (0: in float32, 4: in int8). Models of one shape
/// share a weight file, which is written once.
pub(super) fn write(shape: &Shape, accuracy_level: usize, folder: &Path) -> Result<PathBuf> {
    for (name, size) in [("hidden_size", shape.hidden), ("intermediate_size", shape.mlp)] {
        ensure!(size.is_multiple_of(BLOCK), "{name} = {size} is no multiple of the block of {BLOCK}");
    }
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let data = format!("{}.data", shape.name());
    let mut peer = Peer { shape, accuracy_level, data: &data, nodes: vec![], tensors: vec![], length: 0 };
    let graph = peer.graph();
    let path = folder.join(&data);
    if path.metadata().is_ok_and(|file| file.len() == peer.length) {
        eprintln!("{}: is there already", path.display());
    } else {
        peer.write_data(&path).with_context(|| path.display().to_string())?;
    }
    let import = |domain: &str, version| OperatorSetIdProto { domain: Some(domain.to_owned()), version: Some(version) };
    let model = ModelProto {
        ir_version: Some(10),
        opset_import: vec![import("", 21), import(MICROSOFT, 1)],
        graph: Some(graph),
        ..ModelProto::default()
    };
    let model_path = folder.join(format!("{}-level-{accuracy_level}.onnx", shape.name()));
    std::fs::write(&model_path, model.encode_to_vec())?;
    Ok(model_path)
}

/// The graph in the making.
struct Peer<'s> {
    shape: &'s Shape,
    accuracy_level: usize,
    /// The name of the weight file.
    data: &'s str,
    nodes: Vec<NodeProto>,
    tensors: Vec<(TensorProto, Fill)>,
    /// Bytes of the weight file.
    length: u64,
}

impl Peer<'_> {
    fn graph(&mut self) -> GraphProto {
        let (kv, dim) = (self.shape.kv_heads.to_string(), self.shape.head_dim.to_string());
        let mut input = vec![
            value("input_ids", INT64, &["batch", "sequence"]),
            value("attention_mask", INT64, &["batch", "total"]),
        ];
        let mut output = vec![value("logits", FLOAT, &["batch", "sequence", &self.shape.vocabulary.to_string()])];
        for layer in 0..self.shape.layers {
            for kind in ["key", "value"] {
                let cache = |name: String| value(&name, FLOAT, &["batch", &kv, "capacity", &dim]);
                input.push(cache(format!("past_key_values.{layer}.{kind}")));
                output.push(cache(format!("present.{layer}.{kind}")));
            }
        }
        self.lengths();
        self.rotary();
        self.embedding();
        let mut x = "embedded".to_owned();
        let mut added = String::new();
        for layer in 0..self.shape.layers {
            let normed;
            (x, normed) = self.norm(&format!("{layer}.input_norm"), &x, &added);
            added = self.attention(layer, &normed);
            let normed;
            (x, normed) = self.norm(&format!("{layer}.mlp_norm"), &x, &added);
            added = self.mlp(layer, &normed);
        }
        let (_, normed) = self.norm("norm", &x, &added);
        self.product("logits", &normed, self.shape.vocabulary, self.shape.hidden);
        let initializer = self.tensors.iter().map(|(tensor, _)| tensor.clone()).chain(integers()).collect();
        GraphProto {
            name: Some("dense".to_owned()),
            node: std::mem::take(&mut self.nodes),
            initializer,
            input,
            output,
            ..GraphProto::default()
        }
    }

    fn node(&mut self, domain: &str, op: &str, inputs: &[&str], outputs: &[&str], attributes: Vec<AttributeProto>) {
        let mut node = node(domain, op, inputs, outputs, attributes);
        node.name = Some(outputs[0].to_owned());
        self.nodes.push(node);
    }

    /// Keys of each row before its last one, and keys of the longest row, as GroupQueryAttention wants them.
    fn lengths(&mut self) {
        let to = |ty: i32| vec![int("to", ty as usize)];
        self.node("", "ReduceSum", &["attention_mask", "one_axis"], &["attended"], vec![int("keepdims", 0)]);
        self.node("", "Sub", &["attended", "one_axis"], &["before_last"], vec![]);
        self.node("", "Cast", &["before_last"], &["seqlens_k"], to(INT32));
        self.node("", "Shape", &["attention_mask"], &["mask_shape"], vec![]);
        self.node("", "Gather", &["mask_shape", "one"], &["total"], vec![int("axis", 0)]);
        self.node("", "Cast", &["total"], &["total_sequence_length"], to(INT32));
    }

    fn rotary(&mut self) {
        let dims = [self.shape.context, self.shape.head_dim / 2];
        self.tensor("cos_cache", FLOAT, &dims, Fill::Rotary(f64::cos));
        self.tensor("sin_cache", FLOAT, &dims, Fill::Rotary(f64::sin));
    }

    fn embedding(&mut self) {
        let Shape { vocabulary, hidden, .. } = *self.shape;
        self.tensor("embedding", UINT8, &[vocabulary, hidden / 2], Fill::Nibbles);
        self.tensor("embedding.scales", FLOAT, &[vocabulary, hidden / BLOCK], Fill::Constant(0.2));
        let attributes = vec![int("bits", 4), int("block_size", BLOCK), int("gather_axis", 0), int("quantize_axis", 1)];
        let inputs = ["embedding", "input_ids", "embedding.scales"];
        self.node(MICROSOFT, "GatherBlockQuantized", &inputs, &["embedded"], attributes);
    }

    /// The sum of both, and its norm; nothing is added before the first layer.
    fn norm(&mut self, name: &str, x: &str, added: &str) -> (String, String) {
        let (weight, normed, sum) = (format!("{name}.weight"), name.to_owned(), format!("{name}.sum"));
        self.tensor(&weight, FLOAT, &[self.shape.hidden], Fill::Constant(1.0));
        let epsilon = float("epsilon", self.shape.epsilon);
        if added.is_empty() {
            let attributes = vec![epsilon, int("axis", 2), int("stash_type", 1)];
            self.node("", "SimplifiedLayerNormalization", &[x, &weight], &[&normed], attributes);
            return (x.to_owned(), normed);
        }
        let outputs = [normed.as_str(), "", "", sum.as_str()];
        self.node(MICROSOFT, "SkipSimplifiedLayerNormalization", &[x, added, &weight], &outputs, vec![epsilon]);
        (sum, normed)
    }

    fn attention(&mut self, layer: usize, x: &str) -> String {
        let Shape { hidden, heads, kv_heads, head_dim, .. } = *self.shape;
        let qkv = self.product(&format!("{layer}.qkv"), x, (heads + 2 * kv_heads) * head_dim, hidden);
        let name = |kind: &str| format!("{layer}.{kind}");
        let [past_key, past_value] = ["key", "value"].map(|kind| format!("past_key_values.{layer}.{kind}"));
        let [key, value] = ["key", "value"].map(|kind| format!("present.{layer}.{kind}"));
        let attended = name("attended");
        let attributes = vec![
            int("num_heads", heads),
            int("kv_num_heads", kv_heads),
            float("scale", (head_dim as f32).powf(-0.5)),
            int("do_rotary", 1),
            int("rotary_interleaved", 0),
        ];
        let inputs =
            [&qkv, "", "", &past_key, &past_value, "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"];
        self.node(MICROSOFT, "GroupQueryAttention", &inputs, &[&attended, &key, &value], attributes);
        self.product(&name("o"), &attended, hidden, heads * head_dim)
    }

    fn mlp(&mut self, layer: usize, x: &str) -> String {
        let Shape { hidden, mlp, .. } = *self.shape;
        let name = |part: &str| format!("{layer}.{part}");
        let gate = self.product(&name("gate"), x, mlp, hidden);
        let up = self.product(&name("up"), x, mlp, hidden);
        let [sigmoid, silu, both] = ["sigmoid", "silu", "both"].map(name);
        self.node("", "Sigmoid", &[&gate], &[&sigmoid], vec![]);
        self.node("", "Mul", &[&gate, &sigmoid], &[&silu], vec![]);
        self.node("", "Mul", &[&silu, &up], &[&both], vec![]);
        self.product(&name("down"), &both, hidden, mlp)
    }

    /// `x` (.., k) times the transpose of a quantised matrix (n, k); gives its own name.
    fn product(&mut self, name: &str, x: &str, n: usize, k: usize) -> String {
        let (weight, scales) = (format!("{name}.weight"), format!("{name}.scales"));
        self.tensor(&weight, UINT8, &[n, k / BLOCK, BLOCK / 2], Fill::Nibbles);
        // Outputs of the inputs' size: int4 from -8 to 7 have a standard deviation of 4.6.
        self.tensor(&scales, FLOAT, &[n, k / BLOCK], Fill::Constant((k as f32).powf(-0.5) / 4.6));
        let attributes = vec![
            int("K", k),
            int("N", n),
            int("bits", 4),
            int("block_size", BLOCK),
            int("accuracy_level", self.accuracy_level),
        ];
        self.node(MICROSOFT, "MatMulNBits", &[x, &weight, &scales], &[name], attributes);
        name.to_owned()
    }

    /// A tensor in the weight file.
    fn tensor(&mut self, name: &str, ty: i32, dims: &[usize], fill: Fill) {
        let offset = self.length.next_multiple_of(ALIGNMENT);
        let bytes = dims.iter().product::<usize>() as u64 * if ty == FLOAT { 4 } else { 1 };
        self.length = offset + bytes;
        let entry = |key: &str, value: String| StringStringEntryProto { key: Some(key.to_owned()), value: Some(value) };
        let tensor = TensorProto {
            name: Some(name.to_owned()),
            data_type: Some(ty),
            dims: dims.iter().map(|&dim| dim as i64).collect(),
            data_location: Some(DataLocation::External as i32),
            external_data: vec![
                entry("location", self.data.to_owned()),
                entry("offset", offset.to_string()),
                entry("length", bytes.to_string()),
            ],
            ..TensorProto::default()
        };
        self.tensors.push((tensor, fill));
    }

    fn write_data(&self, path: &Path) -> Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        let (mut at, mut random) = (0u64, 0x9e37_79b9_7f4a_7c15u64);
        for (tensor, fill) in &self.tensors {
            let padding = at.next_multiple_of(ALIGNMENT) - at;
            out.write_all(&vec![0; padding as usize])?;
            let elements: usize = tensor.dims.iter().product::<i64>() as usize;
            at += padding + elements as u64 * if matches!(fill, Fill::Nibbles) { 1 } else { 4 };
            match fill {
                Fill::Nibbles => nibbles(elements, &mut random, &mut out)?,
                Fill::Constant(x) => (0..elements).try_for_each(|_| out.write_all(&x.to_le_bytes()))?,
                Fill::Rotary(wave) => self.rotations(*wave, &mut out)?,
            }
        }
        out.flush()?;
        ensure!(at == self.length, "wrote {at} bytes of {}", self.length);
        Ok(())
    }

    fn rotations(&self, wave: fn(f64) -> f64, out: &mut impl Write) -> Result<()> {
        let half = self.shape.head_dim / 2;
        for position in 0..self.shape.context {
            for i in 0..half {
                let angle = position as f64 * self.shape.theta.powf(-(i as f64) / half as f64);
                out.write_all(&(wave(angle) as f32).to_le_bytes())?;
            }
        }
        Ok(())
    }
}

/// Random bytes (xorshift).
fn nibbles(count: usize, state: &mut u64, out: &mut impl Write) -> Result<()> {
    let mut left = count;
    while left > 0 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        let bytes = state.to_le_bytes();
        let part = left.min(bytes.len());
        out.write_all(&bytes[..part])?;
        left -= part;
    }
    Ok(())
}

/// The number 1, as an index and as a list of axes.
fn integers() -> [TensorProto; 2] {
    let integer = |name: &str, dims: Vec<i64>| TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(INT64),
        dims,
        int64_data: vec![1],
        ..TensorProto::default()
    };
    [integer("one", vec![]), integer("one_axis", vec![1])]
}

/// An input or output; dimensions are numbers or names.
fn value(name: &str, ty: i32, dims: &[&str]) -> ValueInfoProto {
    use tensor_shape_proto::dimension::Value;
    let dim = |&dim: &&str| tensor_shape_proto::Dimension {
        value: Some(dim.parse().map_or_else(|_| Value::DimParam(dim.to_owned()), Value::DimValue)),
        ..tensor_shape_proto::Dimension::default()
    };
    let shape = Some(TensorShapeProto { dim: dims.iter().map(dim).collect() });
    let tensor = type_proto::Tensor { elem_type: Some(ty), shape };
    ValueInfoProto {
        name: Some(name.to_owned()),
        r#type: Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() }),
        ..ValueInfoProto::default()
    }
}
