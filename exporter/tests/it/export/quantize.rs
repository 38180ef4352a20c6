//! Quantised weights: what is written, and what is refused.

use super::support::{Case, constant, read, unverified};
use candle_core::{Device, Tensor};
use moh_export::proto::TensorProto;
use moh_export::quantize::{Activations, Bits, Form, KeptReason, KeptTensor, Problem, QuantizationReport, Quantize};
use moh_export::{ElementType, Error, Options};

const UP: &str = "model.layers.0.mlp.up_proj.weight";

fn options(how: Quantize) -> Options {
    Options { quantize: Some(how), ..unverified() }
}

fn problem(case: &Case, options: Options) -> Problem {
    match case.export(&options) {
        Err(Error::Quantize(problem)) => {
            assert!(!case.folder().exists(), "files were left: {:?}", case.left());
            problem
        }
        other => panic!("{other:?}"),
    }
}

/// How often the graph has each operator.
fn operators(case: &Case) -> Vec<(String, usize)> {
    let model = read(&case.output());
    let mut counts = std::collections::BTreeMap::new();
    for node in &model.graph.as_ref().unwrap().node {
        *counts.entry(node.op_type().to_owned()).or_insert(0) += 1;
    }
    counts.into_iter().collect()
}

fn count(case: &Case, operator: &str) -> usize {
    operators(case).iter().find(|(name, _)| name == operator).map_or(0, |(_, count)| *count)
}

/// ONNX's type and dimensions of a constant.
fn typed(case: &Case, name: &str) -> (i32, Vec<i64>) {
    let model = read(&case.output());
    let tensor = constant(&model, name);
    (tensor.data_type(), tensor.dims.clone())
}

/// The bytes of a constant, in the model or beside it.
fn bytes(case: &Case, tensor: &TensorProto) -> Vec<u8> {
    if let Some(bytes) = &tensor.raw_data {
        return bytes.clone();
    }
    let entry = |key: &str| tensor.external_data.iter().find(|entry| entry.key() == key).unwrap().value();
    let [offset, length] = ["offset", "length"].map(|key| entry(key).parse::<usize>().unwrap());
    let file = std::fs::read(case.output().with_file_name(entry("location"))).unwrap();
    file[offset..offset + length].to_vec()
}

#[test]
fn as_standard_operators() {
    let case = Case::new("llama-moh-tiny");
    let report = case.export(&options(Quantize::new(Bits::Int4))).unwrap();
    // Three matrices a layer and the output head; the embedding is gathered.
    assert_eq!((count(&case, "DequantizeLinear"), count(&case, "MatMulNBits")), (10, 0));
    // int4 in the order of MatMul, which needs no zero points to be symmetric.
    assert_eq!(typed(&case, &format!("{UP}.T.quantized")), (22, vec![64, 160]));
    assert_eq!(typed(&case, &format!("{UP}.T.scales")), (1, vec![2, 160]));
    assert_eq!(typed(&case, "model.embed_tokens.weight.quantized"), (2, vec![128, 2, 16]));
    let names: Vec<String> =
        read(&case.output()).graph.unwrap().initializer.iter().map(|t| t.name().to_owned()).collect();
    assert!(!names.iter().any(|name| name == UP || name == &format!("{UP}.T")), "{names:?}");
    let found = report.quantization.unwrap();
    assert_eq!(found.layers.len(), 11);
    assert!(found.layers.iter().all(|layer| (0.01..0.15).contains(&layer.relative_error)), "{found:?}");
    // Four bits and a scale of f32 for 32 numbers, in place of 32 bits.
    assert_eq!(found.bytes * 32, found.bytes_before * 5);
}

#[test]
fn as_an_operator_of_onnxruntime() {
    let case = Case::new("llama-moh-tiny");
    let how = Quantize { form: Form::Nbits, zero_points: true, block: 16, ..Quantize::new(Bits::Int8) };
    case.export(&Options { dtype: Some(ElementType::F16), ..options(how) }).unwrap();
    assert_eq!((count(&case, "DequantizeLinear"), count(&case, "MatMulNBits")), (0, 10));
    assert_eq!(typed(&case, &format!("{UP}.quantized")), (2, vec![160, 4, 16]));
    assert_eq!(typed(&case, &format!("{UP}.scales")), (10, vec![160, 4]));
    assert_eq!(typed(&case, &format!("{UP}.zero_points")), (2, vec![160, 4]));
    let imports = read(&case.output()).opset_import;
    assert!(imports.iter().any(|set| (set.domain(), set.version()) == ("com.microsoft", 1)));
}

/// Bytes in the middle half of the range.
#[test]
fn with_a_reduced_range() {
    for reduce_range in [false, true] {
        for zero_points in [false, true] {
            let case = Case::new("llama-moh-tiny");
            let how = Quantize { form: Form::Nbits, zero_points, reduce_range, ..Quantize::new(Bits::Int8) };
            let report = case.export(&options(how)).unwrap();
            let model = read(&case.output());
            let bytes = bytes(&case, constant(&model, &format!("{UP}.quantized")));
            assert_eq!(bytes.iter().all(|value| (64..192).contains(value)), reduce_range, "{zero_points}");
            let worst =
                report.quantization.unwrap().layers.iter().map(|layer| layer.relative_error).fold(0.0, f64::max);
            assert_eq!(worst > 0.006, reduce_range, "{worst}");
        }
    }
}

/// With zero points there is a bias of zeros before them.
#[test]
fn as_an_operator_of_ours() {
    for zero_points in [false, true] {
        let case = Case::new("llama-moh-tiny");
        let how = Quantize { form: Form::Moh, zero_points, block: 16, ..Quantize::new(Bits::Int4) };
        case.export(&options(Quantize { activations: Activations::Int8, ..how })).unwrap();
        // The gates of three MLPs have an activation function.
        let counts = ["MatMulNBits", "LinearNBits", "LinearActivationNBits"].map(|op_type| count(&case, op_type));
        assert_eq!(counts, [0, 7, 3]);
        assert_eq!(typed(&case, &format!("{UP}.quantized")), (2, vec![160, 4, 8]));
        let model = read(&case.output());
        assert!(model.opset_import.iter().any(|set| (set.domain(), set.version()) == ("ai.moh", 2)));
        for operator in ["LinearNBits", "LinearActivationNBits"] {
            assert!(model.functions.iter().any(|function| function.name() == operator), "{operator} has no body");
        }
        let graph = model.graph.unwrap();
        let node = graph.node.iter().find(|node| node.input.contains(&format!("{UP}.quantized"))).unwrap();
        let number = |name: &str| node.attribute.iter().find(|found| found.name() == name).unwrap().i();
        assert_eq!((number("bits"), number("block_size"), number("accuracy_level")), (4, 16, 4));
        // The gate is what the MLP's other half makes.
        let gated = graph.node.iter().find(|node| node.op_type() == "LinearActivationNBits").unwrap();
        let optional = ["ai.moh/zeros[160].f32", &gated.output[0], "ai.moh/zeros[1].f32", &format!("{UP}.zero_points")];
        // (Others have a residual.)
        assert_eq!(node.input[3..], optional[..if zero_points { 4 } else { 3 }]);
    }
}

/// MoA's experts, which the checkpoint has one matrix a head.
#[test]
fn routed_operators() {
    let case = Case::new("moa-enc-tiny");
    case.export(&options(Quantize::new(Bits::Int4))).unwrap();
    for (operator, dense) in [("RoutedProjectionNBits", "RoutedProjection"), ("RoutedCombineNBits", "RoutedCombine")] {
        assert_eq!((count(&case, operator), count(&case, dense)), (2, 0), "{:?}", operators(&case));
    }
    let experts = "encoder.layers.0.self_attn.q_proj.experts.w.quantized";
    assert_eq!(typed(&case, experts), (2, vec![192, 2, 16]));
    let output = "encoder.layers.0.self_attn.q_proj.output_experts.w.quantized";
    assert_eq!(typed(&case, output), (2, vec![64, 6, 16]));
    let imports = read(&case.output()).opset_import;
    assert!(imports.iter().any(|set| (set.domain(), set.version()) == ("ai.moh", 2)));
}

/// Optional inputs are known by their places: before zero points stand biases, gates and residuals, that change nothing where the layer has none.
#[test]
fn routed_operators_with_zero_points() {
    let case = Case::new("moa-enc-tiny");
    case.export(&options(Quantize { zero_points: true, block: 16, ..Quantize::new(Bits::Int4) })).unwrap();
    let graph = read(&case.output()).graph.unwrap();
    let routed: Vec<_> = graph.node.iter().filter(|node| node.op_type().starts_with("Routed")).collect();
    let routed = routed.iter().filter(|node| node.op_type().ends_with("NBits"));
    let mut count = 0;
    for node in routed {
        let [bias, neutral @ .., zero_points] = &node.input[4..] else { panic!("{node:?}") };
        assert!(bias.starts_with("ai.moh/zeros") && zero_points.ends_with(".zero_points"), "{:?}", node.input);
        match neutral {
            [] => assert_eq!(node.op_type(), "RoutedProjectionNBits"),
            [gate, residual] => {
                assert_eq!((node.op_type(), &gate[..]), ("RoutedCombineNBits", "ai.moh/all1[1].f32"));
                assert!(
                    graph.node.iter().any(|add| add.output.contains(residual))
                        || graph.input.iter().any(|input| input.name() == residual),
                    "{residual}"
                );
            }
            others => panic!("{others:?}"),
        }
        count += 1;
    }
    assert_eq!(count, 4);
}

/// What quantisation reports on a model of layers of 64 numbers, and mixtures of experts that are `width` wide inside.
fn experts(width: usize, how: Quantize) -> QuantizationReport {
    quantized([64, width], how).unwrap()
}

/// The same, with layers of another size.
fn quantized([hidden, width]: [usize; 2], how: Quantize) -> Result<QuantizationReport, Error> {
    let folder = tempfile::tempdir().unwrap();
    let config = format!(
        r#"{{"family": "moh-llama", "hidden_size": {hidden}, "intermediate_size": {width}, "num_hidden_layers": 1, "num_attention_heads": 2,
        "vocab_size": 256, "moe_num_experts": 4, "moe_top_k": 2}}"#
    );
    let (file, checkpoint) = (folder.path().join("config.json"), folder.path().join("checkpoint"));
    std::fs::write(&file, config).unwrap();
    let mut program = crate::support::Run::tract().command();
    let done = program.arg("random").arg(&file).arg("-o").arg(&checkpoint).output().unwrap();
    assert!(done.status.success(), "{}", crate::support::text(&done.stderr));
    let report = moh_export::export(&checkpoint, &folder.path().join("out/model.onnx"), &options(how))?;
    Ok(report.quantization.unwrap())
}

fn is_of_experts(name: &str) -> bool {
    name.contains(".experts.")
}

/// The node of a mixture of experts has two weights, both quantised or none.
#[test]
fn weights_of_one_node_are_kept_together() {
    let all = experts(64, Quantize::new(Bits::Int4));
    let names: Vec<&str> = all.layers.iter().map(|layer| &*layer.tensor).filter(|name| is_of_experts(name)).collect();
    let [first, second] = names[..] else { panic!("{:?}", all.layers) };
    let report = experts(64, Quantize { keep: vec![first.to_owned()], ..Quantize::new(Bits::Int4) });
    let reason = |name: &str| report.kept.iter().find(|kept| kept.tensor == name).map(|kept| kept.reason);
    assert_eq!([reason(first), reason(second)], [Some(KeptReason::Asked), Some(KeptReason::Together)]);
    let told = format!("; kept as asked for: {first}; kept because another weight of their node is: {second}");
    assert!(report.to_string().contains(&told), "{report}");
}

/// Where no blocks were asked for, those of a tensor fit its rows, and those of a node's weights are of one size.
#[test]
fn blocks_fit_the_rows() {
    let case = Case::new("llama-moh-tiny");
    for form in [Form::Qdq, Form::Nbits, Form::Moh] {
        let options = Options { force: true, ..options(Quantize { form, ..Quantize::new(Bits::Int8) }) };
        let report = case.export(&options).unwrap().quantization.unwrap();
        let of = |name: &str| report.layers.iter().find(|layer| layer.tensor == name).unwrap().block;
        assert_eq!([of(UP), of("model.layers.0.mlp.down_proj.weight")], [64, 32]);
        assert!(report.to_string().contains(" tensors to int8, blocks of 64 and 32, symmetric"), "{report}");
        let graph = read(&case.output()).graph.unwrap();
        for (tensor, block) in [(UP, 64), ("model.layers.0.mlp.down_proj.weight", 32)] {
            let data = format!("{tensor}{}.quantized", if form == Form::Qdq { ".T" } else { "" });
            let node = graph.node.iter().find(|node| node.input.contains(&data)).unwrap();
            let attribute = node.attribute.iter().find(|attribute| attribute.name() == "block_size").unwrap();
            assert_eq!(attribute.i(), block, "{form:?} {tensor}");
        }
    }
    // Rows of 64 and 48 numbers, then of 64 and 40.
    let report = experts(48, Quantize::new(Bits::Int8));
    let blocks: Vec<usize> =
        report.layers.iter().filter(|layer| is_of_experts(&layer.tensor)).map(|layer| layer.block).collect();
    assert_eq!(blocks, [16, 16]);
    let report = experts(40, Quantize::new(Bits::Int8));
    assert!(!report.layers.iter().any(|layer| is_of_experts(&layer.tensor)), "{report:?}");
    let of_experts = |kept: &&KeptTensor| is_of_experts(&kept.tensor) && kept.reason == KeptReason::Rows;
    assert_eq!(report.kept.iter().filter(of_experts).count(), 2, "{:?}", report.kept);
    let rows = report.kept.iter().filter(|kept| kept.reason == KeptReason::Rows);
    let rows: Vec<&str> = rows.map(|kept| kept.tensor.as_str()).collect();
    let told = format!("; kept because their rows are no whole blocks: {}", rows.join(", "));
    assert!(report.to_string().ends_with(&told), "{report}");
    // No row of this model is whole blocks: that is no quantised model.
    let found = quantized([40, 40], Quantize::new(Bits::Int4));
    assert!(matches!(found, Err(Error::Quantize(Problem::NothingFits))), "{found:?}");
    // All layers are kept as asked for.
    let all = quantized([64, 64], Quantize { keep: vec!["*".to_owned()], ..Quantize::new(Bits::Int4) });
    assert!(matches!(all, Err(Error::Quantize(Problem::NothingLeft))), "{all:?}");
    let reduced = experts(64, Quantize { reduce_range: true, ..Quantize::new(Bits::Int8) });
    assert!(reduced.to_string().contains(", symmetric, reduced range, "), "{reduced}");
}

#[test]
fn the_same_bytes_each_time() {
    let case = Case::new("llama-moh-tiny");
    let of = |force| {
        case.export(&Options { force, ..options(Quantize::new(Bits::Int4)) }).unwrap();
        (std::fs::read(case.output()).unwrap(), std::fs::read(case.data()).unwrap())
    };
    assert!(of(false) == of(true));
}

#[test]
fn layers_are_kept() {
    let case = Case::new("llama-moh-tiny");
    let keep = vec!["lm_head".to_owned(), "model.layers.1.*".to_owned()];
    let report = case.export(&options(Quantize { keep, ..Quantize::new(Bits::Int4) })).unwrap();
    assert_eq!(typed(&case, "lm_head.weight.T"), (1, vec![64, 128]));
    let found = report.quantization.unwrap();
    assert_eq!((found.layers.len(), found.kept.len()), (7, 4));
}

/// Its matrices are too small, but for the embedding.
#[test]
fn what_decides_the_heads_is_kept() {
    let case = Case::new("llama-moh-tiny");
    let report = |how: Quantize| case.export(&Options { force: true, ..options(how) }).unwrap().quantization.unwrap();
    let kept = |how: Quantize| report(how).kept;
    let int8 = || Quantize::new(Bits::Int8);
    let embedding = KeptTensor { tensor: "model.embed_tokens.weight".to_owned(), reason: KeptReason::Routing };
    let told = report(int8()).to_string();
    assert!(told.ends_with("; kept because they choose heads: model.embed_tokens.weight"), "{told}");
    assert_eq!(kept(int8()), [embedding]);
    assert_eq!(typed(&case, "model.embed_tokens.weight"), (1, vec![128, 64]));
    assert_eq!(kept(Quantize { exact_routing: false, ..int8() }), []);
    assert_eq!(kept(Quantize::new(Bits::Int4)), []);
    // A trained router has weights of its own, which stay anyhow.
    let case = Case::new("vit-tiny-b");
    let report = case.export(&options(Quantize { block: 16, ..int8() })).unwrap();
    assert_eq!(report.quantization.unwrap().kept, []);
}

#[test]
fn what_cannot_be_quantised() {
    let case = Case::new("llama-moh-tiny");
    let int4 = || Quantize::new(Bits::Int4);
    let found = problem(&case, options(Quantize { block: 64, fit_blocks: false, ..int4() }));
    let Problem::Block { tensor, columns, block, fits, others, file } = found else { panic!("{found:?}") };
    assert_eq!((tensor.as_str(), columns, block), ("model.layers.0.mlp.down_proj.weight", 160, 64));
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    assert_eq!((fits, file), (vec![16, 32], case.weights()));
    assert_eq!(others, ["model.layers.1.mlp.down_proj.weight", "model.layers.2.mlp.down_proj.weight"]);
    let found = problem(&case, options(Quantize { block: 24, ..int4() }));
    assert_eq!(found, Problem::BlockSize { block: 24 });
    let found = problem(&case, Options { dtype: Some(ElementType::BF16), ..options(int4()) });
    assert_eq!(found, Problem::Type { ty: ElementType::BF16 });
    let found = problem(&case, Options { opset: 20, ..options(int4()) });
    assert_eq!(found, Problem::Opset { opset: 20 });
    let found = problem(&case, options(Quantize { activations: Activations::Int8, ..int4() }));
    assert_eq!(found, Problem::Activations);
    let found = problem(&case, options(Quantize { keep: vec!["*.mlp.fc1".to_owned()], ..int4() }));
    assert!(matches!(&found, Problem::Keep { pattern, .. } if pattern == "*.mlp.fc1"), "{found:?}");
    // The other forms are no standard operators.
    for form in [Form::Nbits, Form::Moh] {
        case.export(&Options { opset: 20, force: true, ..options(Quantize { form, ..int4() }) }).unwrap();
    }
}

#[test]
fn numbers_that_no_model_may_have() {
    let tensors = [UP, "model.embed_tokens.weight"];
    for (tensor, form) in
        tensors.into_iter().flat_map(|tensor| [(tensor, Form::Qdq), (tensor, Form::Nbits), (tensor, Form::Moh)])
    {
        for value in [f32::NAN, f32::INFINITY, -70_000.0] {
            let case = Case::new("llama-moh-tiny");
            case.rewrite(|name, weight| {
                if name != tensor {
                    return weight;
                }
                let mut values = weight.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                values[3 * 64 + 5] = value;
                Tensor::from_vec(values, weight.dims(), &Device::Cpu).unwrap()
            });
            let how = Quantize { form, ..Quantize::new(Bits::Int4) };
            let place = match case.export(&Options { dtype: Some(ElementType::F16), ..options(how) }) {
                Err(Error::Model(moh_models::Error::NotFinite { file, tensor, index, .. })) => (file, tensor, index),
                Err(Error::Range { file, tensor, index, .. }) => (file, tensor, index),
                other => panic!("{tensor} with {value}: {other:?}"),
            };
            assert_eq!(place, (case.weights(), tensor.to_owned(), 3 * 64 + 5));
            assert!(!case.folder().exists(), "files were left: {:?}", case.left());
        }
    }
}
