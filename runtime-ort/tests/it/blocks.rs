//! Weights in blocks of 4 or 8 bits, and plain ones: every way to write them, in every runtime that is here, against sums in f64.

mod malformed;
mod matrix;

use crate::support::onnx::{DataType, Graph};
use crate::support::{runtimes, write};
use matrix::{Matrix, Type, numbers};
use moh_runtime::{Model, Options, RuntimeChoice, Tensor, Value};

/// How a product is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    MatMulNBits,
    /// DequantizeLinear of (inputs, outputs), MatMul.
    InOut,
    /// DequantizeLinear of (outputs, inputs), Transpose, MatMul.
    Turned,
    /// DequantizeLinear of (outputs, inputs), Gemm.
    Gemm,
}

const FORMS: [Form; 4] = [Form::MatMulNBits, Form::InOut, Form::Turned, Form::Gemm];

fn tract() -> Options {
    Options { runtime: RuntimeChoice::Tract, threads: Some(2), ..Options::default() }
}

/// A model of one product: x (n, inputs), for all but Gemm (n, 3, inputs).
fn product(form: Form, matrix: &Matrix, bias: Option<&[f32]>, level: i64) -> Graph {
    let mut graph = Graph::new();
    graph.opset(21);
    let ty = matrix.ty.onnx();
    let (rows, width) = (matrix.rows as i64, matrix.width as i64);
    let (inputs, outputs) = (width.to_string(), rows.to_string());
    let dims = |last| if form == Form::Gemm { vec!["n", last] } else { vec!["n", "3", last] };
    graph.input("x", ty, &dims(&inputs));
    if let Some(bias) = bias {
        graph.raw("bias", ty, &[rows], &matrix.ty.bytes(bias));
    }
    let own_bias = matches!(form, Form::MatMulNBits | Form::Gemm);
    let summed = bias.is_some() && !own_bias;
    let y = if summed { "product" } else { "y" };
    let sizes = [("bits", matrix.bits as i64), ("block_size", matrix.block as i64), ("N", rows), ("K", width)];
    if form == Form::MatMulNBits {
        graph.import("com.microsoft", 1);
        matrix.unsigned(&mut graph);
        let zeros = if matrix.zeros.is_some() { "zeros" } else { "" };
        let mut inputs = vec!["x", "values", "scales", zeros, "", if bias.is_some() { "bias" } else { "" }];
        while inputs.last() == Some(&"") {
            inputs.pop();
        }
        let attributes: Vec<(&str, i64)> = sizes.into_iter().chain([("accuracy_level", level)]).collect();
        graph.node("MatMulNBits", &inputs, y, &attributes);
        graph.in_domain("com.microsoft");
    } else {
        let axis = matrix.dequantized(&mut graph, form == Form::InOut);
        let inputs: &[&str] =
            if matrix.zeros.is_some() { &["values", "scales", "zeros"] } else { &["values", "scales"] };
        graph.node("DequantizeLinear", inputs, "weight", &[("axis", axis), ("block_size", matrix.block as i64)]);
        match form {
            Form::Gemm => {
                let inputs = ["x", "weight", "bias"];
                graph.node("Gemm", &inputs[..2 + usize::from(bias.is_some())], y, &[("transB", 1)]);
            }
            Form::Turned => {
                graph.node("Transpose", &["weight"], "turned", &[]);
                graph.node("MatMul", &["x", "turned"], y, &[]);
            }
            _ => graph.node("MatMul", &["x", "weight"], y, &[]),
        }
    }
    if summed {
        graph.node("Add", &["product", "bias"], "y", &[]);
    }
    graph.output("y", ty, &dims(&outputs));
    graph
}

/// `n` rows of inputs, as the type rounds them.
fn inputs(form: Form, matrix: &Matrix, n: usize) -> (Value, Vec<f64>) {
    let rows = if form == Form::Gemm { n } else { 3 * n };
    let x = numbers(rows * matrix.width, 77);
    let shape = if form == Form::Gemm { vec![n, matrix.width] } else { vec![n, 3, matrix.width] };
    let tensor = match matrix.ty {
        Type::F32 => Tensor::new(shape, x.clone()).unwrap(),
        Type::F16 => Tensor::new(shape, x.iter().map(|&x| half::f16::from_f32(x)).collect()).unwrap(),
    };
    (tensor.into(), x.iter().map(|&x| matrix.ty.rounded(x)).collect())
}

/// Checks every output against the sum of its products in f64: the difference is at most `tolerance` of the sum of their sizes.
fn check(label: &str, matrix: &Matrix, bias: Option<&[f32]>, x: &[f64], y: &Value, tolerance: f64) {
    let y = y.data().unwrap().to_f32().unwrap();
    assert_eq!(y.len(), x.len() / matrix.width * matrix.rows, "{label}");
    for (i, (x, y)) in x.chunks(matrix.width).zip(y.chunks(matrix.rows)).enumerate() {
        for (n, &found) in y.iter().enumerate() {
            let weights = (0..matrix.width).map(|k| matrix.value(n, k));
            let products: Vec<f64> = x.iter().zip(weights).map(|(x, w)| x * w).collect();
            let bias = bias.map_or(0.0, |bias| matrix.ty.rounded(bias[n]));
            let expected = products.iter().sum::<f64>() + bias;
            let size: f64 = products.iter().map(|x| x.abs()).sum::<f64>() + bias.abs();
            let difference = (f64::from(found) - expected).abs();
            assert!(difference <= tolerance * size, "{label}: row {i}, column {n}: expected {expected}, found {found}");
        }
    }
}

fn run(label: &str, options: &Options, graph: &Graph, x: &Value) -> Value {
    let (_folder, path) = write(graph);
    let mut model = Model::load(&path, options).unwrap_or_else(|e| panic!("{label}: {e}"));
    model.run([("x", x.clone())]).unwrap_or_else(|e| panic!("{label}: {e}")).remove(0)
}

/// onnxruntime joins DequantizeLinear and MatMul to a MatMulNBits with 8-bit activations.
fn tolerance(form: Form, matrix: &Matrix, options: &Options) -> f64 {
    match (options.runtime, matrix.ty) {
        (RuntimeChoice::Ort, _) if form != Form::MatMulNBits => 1e-2,
        (_, Type::F32) => 2e-6,
        (_, Type::F16) => 1e-3,
    }
}

#[test]
fn products_equal_their_sums_in_f64() {
    for form in FORMS {
        for (bits, signed, zeros) in
            [(4, true, true), (4, false, true), (4, true, false), (8, false, true), (8, true, false)]
        {
            for (rows, blocks, block, ty) in [
                (5, 3, 16, Type::F32),
                (70, 2, 32, Type::F32),
                (131, 1, 128, Type::F32),
                (300, 5, 64, Type::F32),
                (24, 3, 32, Type::F16),
            ] {
                let matrix = Matrix::new(bits, signed, zeros, [rows, blocks, block], ty);
                let bias = numbers(rows, 5);
                let bias = (blocks != 2).then_some(&bias[..]);
                let graph = product(form, &matrix, bias, 0);
                for n in [1, 5] {
                    let (value, x) = inputs(form, &matrix, n);
                    for options in runtimes() {
                        let label = format!("{form:?} of {matrix:?} in {:?}", options.runtime);
                        let y = run(&label, &options, &graph, &value);
                        check(&label, &matrix, bias, &x, &y, tolerance(form, &matrix, &options));
                    }
                }
            }
        }
    }
}

/// Without zero points, DequantizeLinear's unsigned integers count from 0, and MatMulNBits's from the middle of their range.
#[test]
fn unsigned_integers_without_zero_points() {
    for bits in [4, 8] {
        for form in FORMS {
            let mut matrix = Matrix::new(bits, false, false, [6, 3, 16], Type::F32);
            if form == Form::MatMulNBits {
                matrix.middle = 1 << (bits - 1);
            }
            let (value, x) = inputs(form, &matrix, 2);
            for options in runtimes() {
                let label = format!("{form:?} with {bits} bits in {:?}", options.runtime);
                let y = run(&label, &options, &product(form, &matrix, None, 0), &value);
                check(&label, &matrix, None, &x, &y, tolerance(form, &matrix, &options));
            }
        }
    }
}

/// With accuracy_level 4, each block of a row is x = scale * q, q from -127 to 127. Of many rows, a matrix unit rounds both factors to
/// bfloat16 instead in tract, where they are only known to be near.
#[test]
fn activations_of_8_bits() {
    for bits in [4, 8] {
        let matrix = Matrix::new(bits, false, true, [40, 4, 32], Type::F32);
        for n in [2, 4] {
            let (value, mut x) = inputs(Form::MatMulNBits, &matrix, n);
            for block in x.chunks_mut(matrix.block) {
                let scale = block.iter().fold(0f64, |most, x| most.max(x.abs())) / 127.0;
                block.iter_mut().for_each(|x| *x = (*x / scale).round() * scale);
            }
            for options in runtimes() {
                let label = format!("{bits} bits in {:?}", options.runtime);
                let near = n > 2 && options.runtime != RuntimeChoice::Ort;
                let tolerance = if near { 1e-2 } else { 1e-3 };
                let y = run(&label, &options, &product(Form::MatMulNBits, &matrix, None, 4), &value);
                check(&label, &matrix, None, &x, &y, tolerance);
            }
        }
    }
}

/// The operators that tract runs, by their names.
fn operators(graph: &Graph, x: &Value) -> Vec<String> {
    let (_folder, path) = write(graph);
    let mut names = Vec::new();
    let mut model = Model::load(&path, &tract()).unwrap();
    model
        .run_timed(vec![("x".to_owned(), x.clone())], &[], &mut |_, operator, _| names.push(operator.to_owned()))
        .unwrap();
    names.retain(|name| name != "Source");
    names
}

#[test]
fn a_product_with_its_bias_is_one_operator_in_tract() {
    let matrix = Matrix::new(4, true, true, [8, 2, 32], Type::F32);
    let bias = numbers(8, 3);
    for form in FORMS {
        let (value, _) = inputs(form, &matrix, 1);
        assert_eq!(operators(&product(form, &matrix, Some(&bias), 0), &value), ["BlockLinear"], "{form:?}");
    }
}

/// A Gemm's addend may be a number, a row or a column.
#[test]
fn the_addend_of_a_gemm_broadcasts() {
    let matrix = Matrix::new(4, true, false, [4, 1, 32], Type::F32);
    type Addend = (&'static [i64], fn(usize) -> usize);
    let addends: [Addend; 3] = [(&[], |_| 0), (&[1, 4], |i| i % 4), (&[4, 1], |i| i / 4)];
    for (dims, at) in addends {
        let addend = &[1.0, 2.0, 3.0, 4.0][..dims.iter().product::<i64>() as usize];
        let mut graph = product(Form::Gemm, &matrix, None, 0);
        graph.output("z", DataType::Float, &["n", "4"]);
        graph.raw("addend", DataType::Float, dims, &Type::F32.bytes(addend));
        graph.node("Gemm", &["x", "weight", "addend"], "z", &[("transB", 1)]);
        let (value, x) = inputs(Form::Gemm, &matrix, 4);
        for options in runtimes() {
            let (_folder, path) = write(&graph);
            let outputs = Model::load(&path, &options).unwrap().run([("x", value.clone())]).unwrap();
            let [y, z] = [&outputs[0], &outputs[1]].map(|value| value.as_slice::<f32>().unwrap());
            for (i, (y, z)) in y.iter().zip(z).enumerate() {
                let (expected, runtime) = (y + addend[at(i)], options.runtime);
                assert!((expected - z).abs() < 1e-4, "{runtime:?}, {dims:?}: element {i}: {expected}, found {z}");
            }
            check("gemm", &matrix, None, &x, &outputs[0], tolerance(Form::Gemm, &matrix, &options));
        }
    }
}

/// Rows of a table: GatherBlockQuantized, and DequantizeLinear with Gather.
#[test]
fn rows_of_a_table() {
    for (bits, zeros, block) in [(4, true, 16), (4, false, 32), (8, true, 16), (8, false, 64)] {
        for gathered in [false, true] {
            let mut matrix = Matrix::new(bits, !gathered, zeros, [9, 3, block], Type::F32);
            let mut graph = Graph::new();
            graph.opset(21);
            graph.input("x", DataType::Int64, &["n", "2"]);
            let size = ("block_size", block as i64);
            if gathered {
                matrix.middle = 1 << (bits - 1);
                graph.import("com.microsoft", 1);
                matrix.table(&mut graph);
                let attributes = [size, ("bits", bits as i64), ("gather_axis", 0), ("quantize_axis", 1)];
                let inputs: &[&str] = &["values", "x", "scales", "zeros"];
                graph.node("GatherBlockQuantized", &inputs[..3 + usize::from(zeros)], "y", &attributes);
                graph.in_domain("com.microsoft");
            } else {
                let axis = matrix.dequantized(&mut graph, false);
                let inputs: &[&str] = &["values", "scales", "zeros"];
                graph.node("DequantizeLinear", &inputs[..2 + usize::from(zeros)], "table", &[("axis", axis), size]);
                graph.node("Gather", &["table", "x"], "y", &[]);
            }
            graph.output("y", DataType::Float, &["n", "2", &(3 * block).to_string()]);
            let indices = [0i64, 8, 3, -1];
            let x: Value = Tensor::new([2, 2], indices.to_vec()).unwrap().into();
            for options in runtimes() {
                let label = format!("{bits} bits, zero points: {zeros}, gathered: {gathered}, {:?}", options.runtime);
                let y = run(&label, &options, &graph, &x);
                let y = y.as_slice::<f32>().unwrap();
                for (row, index) in y.chunks(matrix.width).zip(indices) {
                    for (k, &found) in row.iter().enumerate() {
                        let expected = matrix.value(index.rem_euclid(9) as usize, k);
                        assert!(
                            (f64::from(found) - expected).abs() <= 1e-6 * expected.abs(),
                            "{label}: {expected}, found {found}"
                        );
                    }
                }
            }
        }
    }
}

/// Weights in another file, at offsets of every alignment; the file is read while the model runs.
#[test]
fn weights_in_another_file() {
    let matrix = Matrix::new(4, false, true, [10, 3, 32], Type::F32);
    for form in [Form::MatMulNBits, Form::InOut] {
        for gap in [0, 1, 4] {
            let mut graph = product(form, &matrix, None, 0);
            let data = graph.move_external("model.onnx_data", gap);
            let (folder, path) = write(&graph);
            std::fs::write(folder.path().join("model.onnx_data"), data).unwrap();
            let (value, x) = inputs(form, &matrix, 2);
            for options in runtimes() {
                let label = format!("{form:?}, gap {gap}, {:?}", options.runtime);
                let y = Model::load(&path, &options).unwrap().run([("x", value.clone())]).unwrap();
                check(&label, &matrix, None, &x, &y[0], tolerance(form, &matrix, &options));
            }
        }
    }
}

/// Products with plain matrices in another file: one alone, one that two products read, and one of two constants.
#[test]
fn plain_matrices_in_another_file() {
    for (ty, tolerance) in [(Type::F32, 2e-6), (Type::F16, 1e-3)] {
        let matrix = numbers(8 * 5, 3);
        let mut graph = Graph::new();
        graph.input("x", ty.onnx(), &["n", "3", "8"]);
        for name in ["alone", "shared"] {
            graph.raw(name, ty.onnx(), &[8, 5], &ty.bytes(&matrix));
        }
        graph.raw("eye", ty.onnx(), &[8, 8], &ty.bytes(&(0..64).map(|i| f32::from(i % 9 == 0)).collect::<Vec<f32>>()));
        graph.raw("rows", ty.onnx(), &[8, 5], &ty.bytes(&matrix));
        graph.node("MatMul", &["eye", "rows"], "constant", &[]);
        for (output, weight) in [("y0", "alone"), ("y1", "shared"), ("y2", "shared"), ("y3", "constant")] {
            graph.node("MatMul", &["x", weight], output, &[]);
            graph.output(output, ty.onnx(), &["n", "3", "5"]);
        }
        let data = graph.move_external("model.onnx_data", 2);
        let (folder, path) = write(&graph);
        std::fs::write(folder.path().join("model.onnx_data"), data).unwrap();
        let x: Vec<f32> = numbers(2 * 3 * 8, 9);
        let tensor = match ty {
            Type::F32 => Tensor::new([2, 3, 8], x.clone()),
            Type::F16 => Tensor::new([2, 3, 8], x.iter().map(|&x| half::f16::from_f32(x)).collect()),
        };
        let value: Value = tensor.unwrap().into();
        for options in runtimes() {
            for y in Model::load(&path, &options).unwrap().run([("x", value.clone())]).unwrap() {
                let y = y.data().unwrap().to_f32().unwrap();
                for (i, found) in y.iter().enumerate() {
                    let product = |k: usize| ty.rounded(x[i / 5 * 8 + k]) * ty.rounded(matrix[k * 5 + i % 5]);
                    let (expected, size) =
                        ((0..8).map(product).sum::<f64>(), (0..8).map(|k| product(k).abs()).sum::<f64>());
                    let difference = (f64::from(*found) - expected).abs();
                    assert!(difference <= tolerance * size, "{ty:?}, {:?}: {expected}, found {found}", options.runtime);
                }
            }
        }
    }
}

/// A prepared product is refused as a plain one is.
#[test]
fn plain_matrices_of_wrong_sizes() {
    let build = |dims: [i64; 2], bytes: usize| {
        let mut graph = Graph::new();
        graph.input("x", DataType::Float, &["n", "8"]);
        graph.raw("weight", DataType::Float, &dims, &vec![0; bytes]);
        graph.node("MatMul", &["x", "weight"], "y", &[]);
        graph.output("y", DataType::Float, &["n", "5"]);
        graph
    };
    for (dims, bytes, expected) in
        [([7, 5], 140, "expected rows of 7"), ([8, 5], 159, "weight: expected 160 bytes, found 159")]
    {
        let (_folder, path) = write(&build(dims, bytes));
        let error = Model::load(&path, &tract()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
