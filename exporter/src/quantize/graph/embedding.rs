//! Embeddings with a quantised table: the rows that are wanted are gathered as they are stored, and made numbers of. All in standard
//! operators, of as much work as there are tokens.

use super::rewriter::{Rewriter, Tensors};
use crate::graph::{Attribute, Dim, ElementType, Node};
use crate::quantize::{Matrix, Order};
use moh_operators::DOMAIN;

/// Writes the rows of the table that `gather` reads.
pub(super) fn write(rewriter: &mut Rewriter<'_>, gather: &Node, table: &Matrix) {
    let indices = gather.inputs[1].clone();
    let leading = rewriter.graph.value(&indices).map_or(Vec::new(), |value| value.dims);
    let (bits, block, blocks) = (table.grid().bits.count(), table.block(), table.columns() / table.block());
    let ty = table.scale_type();
    let mut rows = Rows { rewriter, name: gather.name.clone(), indices, leading, ty };
    let Tensors { data, scales, zero_points } = rows.rewriter.tensors(table, Order::Rows);

    let codes = rows.gather("data", data, ElementType::U8, &[blocks, block * bits / 8]);
    let codes = rows.numbers("data", codes, bits, &[blocks, block]);
    let scales = rows.gather("scales", scales, ty, &[blocks]);
    let scales = rows.reshape("scales/column", scales, &[blocks, 1]);
    let zero = match zero_points {
        None => rows.scalar(f32::from(table.grid().middle())),
        Some(zero_points) => {
            let bytes = (blocks * bits).div_ceil(8);
            let zeros = rows.gather("zero_points", zero_points, ElementType::U8, &[bytes]);
            let mut zeros = rows.numbers("zero_points", zeros, bits, &[bytes * 8 / bits]);
            if bytes * 8 / bits > blocks {
                let bounds = [0, blocks as i64, -1].map(|bound| rows.ints(&[bound]));
                let inputs = [zeros].into_iter().chain(bounds).collect();
                zeros = rows.push("Slice", "zero_points/Slice", inputs, vec![], ty, &[blocks]);
            }
            rows.reshape("zero_points/column", zeros, &[blocks, 1])
        }
    };
    let centred = rows.push("Sub", "Sub", vec![codes, zero], vec![], ty, &[blocks, block]);
    let scaled = rows.push("Mul", "Mul", vec![centred, scales], vec![], ty, &[blocks, block]);
    let shape = rows.shape(&[table.columns()]);
    let inputs = vec![scaled, shape];
    let name = gather.name.clone();
    let outputs = gather.outputs.clone();
    rewriter.graph.nodes.push(Node { op_type: "Reshape", domain: "", name, inputs, outputs, attributes: vec![] });
}

/// Values with the dimensions of the indices, and then some of their own.
struct Rows<'a, 'g> {
    rewriter: &'a mut Rewriter<'g>,
    name: String,
    indices: String,
    leading: Vec<Dim>,
    /// The type of numbers.
    ty: ElementType,
}

impl Rows<'_, '_> {
    fn push(
        &mut self,
        op_type: &'static str,
        name: &str,
        inputs: Vec<String>,
        attributes: Vec<(&'static str, Attribute)>,
        ty: ElementType,
        own: &[usize],
    ) -> String {
        let dims = self.leading.iter().cloned().chain(own.iter().map(|&n| Dim::Fixed(n))).collect();
        self.rewriter.push(op_type, format!("{}/{name}", self.name), inputs, attributes, ty, dims)
    }

    fn gather(&mut self, name: &str, table: String, ty: ElementType, own: &[usize]) -> String {
        let inputs = vec![table, self.indices.clone()];
        self.push("Gather", name, inputs, vec![("axis", Attribute::Int(0))], ty, own)
    }

    /// The bytes, or the halves of each with the low one first, as numbers in that shape.
    fn numbers(&mut self, name: &str, bytes: String, bits: usize, shape: &[usize]) -> String {
        let ty = self.ty;
        let to = vec![("to", Attribute::Int(i64::from(ty.onnx())))];
        if bits == 8 {
            return self.push("Cast", &format!("{name}/Cast"), vec![bytes], to, ty, shape);
        }
        let mut packed = shape.to_vec();
        if let Some(last) = packed.last_mut() {
            *last /= 2;
        }
        // Arithmetic instead of shifts, which not all runtimes have for bytes. It is exact in every type.
        let number = |this: &mut Self, op, suffix: &str, inputs: Vec<String>, own: &[usize]| {
            this.push(op, &format!("{name}/{suffix}"), inputs, vec![], ty, own)
        };
        let bytes = self.push("Cast", &format!("{name}/Cast"), vec![bytes], to, ty, &packed);
        let (sixteen, sixteenth) = (self.scalar(16.0), self.scalar(0.0625));
        let shifted = number(self, "Mul", "shifted", vec![bytes.clone(), sixteenth], &packed);
        let high = number(self, "Floor", "high", vec![shifted], &packed);
        let above = number(self, "Mul", "above", vec![high.clone(), sixteen], &packed);
        let low = number(self, "Sub", "low", vec![bytes, above], &packed);
        let single = [&packed[..], &[1]].concat();
        let axes = self.ints(&[-1]);
        let low = number(self, "Unsqueeze", "low/column", vec![low, axes.clone()], &single);
        let high = number(self, "Unsqueeze", "high/column", vec![high, axes], &single);
        let pairs = [&packed[..], &[2]].concat();
        let axis = vec![("axis", Attribute::Int(-1))];
        let pairs = self.push("Concat", &format!("{name}/pairs"), vec![low, high], axis, ty, &pairs);
        self.reshape(&format!("{name}/integers"), pairs, shape)
    }

    fn reshape(&mut self, name: &str, x: String, own: &[usize]) -> String {
        let shape = self.shape(own);
        let ty = self.ty;
        self.push("Reshape", name, vec![x, shape], vec![], ty, own)
    }

    /// The leading dimensions as they are, and `own`.
    fn shape(&mut self, own: &[usize]) -> String {
        let shape: Vec<i64> = vec![0; self.leading.len()].into_iter().chain(own.iter().map(|&n| n as i64)).collect();
        self.ints(&shape)
    }

    fn ints(&mut self, values: &[i64]) -> String {
        let text: Vec<String> = values.iter().map(i64::to_string).collect();
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.rewriter.constant(format!("ints[{}]", text.join(",")), ElementType::I64, vec![values.len()], bytes)
    }

    fn scalar(&mut self, value: f32) -> String {
        let ty = self.ty;
        self.rewriter.constant(format!("{DOMAIN}/{ty}[{value}]"), ty, Vec::new(), ty.bytes_of(value))
    }
}
