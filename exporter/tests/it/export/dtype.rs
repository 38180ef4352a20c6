//! The element type that a model is written in where no option says it: the one of the checkpoint's largest tensor.

use super::support::{Case, constant, read, unverified};
use candle_core::DType;
use moh_export::{BF16_NOTE, ElementType, Options, Report};

/// Elements of the golden LLaMA's largest tensors, the matrices of its MLPs; most of its tensors are smaller.
const LARGEST: usize = 160 * 64;

/// The golden LLaMA with its largest tensors in one type and all others in another, exported.
fn export(largest: DType, others: DType, options: &Options) -> Report {
    let case = Case::new("llama-moh-tiny");
    case.rewrite(|_, tensor| {
        let dtype = if tensor.elem_count() == LARGEST { largest } else { others };
        tensor.to_dtype(dtype).unwrap()
    });
    let report = case.export(options).unwrap();
    let model = read(&case.output());
    for name in ["model.layers.0.mlp.up_proj.weight.T", "lm_head.weight.T", "model.norm.weight"] {
        let constant = constant(&model, name);
        assert_eq!(constant.data_type(), report.dtype.onnx(), "{name}");
        let elements = constant.dims.iter().product::<i64>() as usize;
        let length = match &constant.raw_data {
            Some(bytes) => bytes.len(),
            None => constant.external_data.iter().find(|e| e.key() == "length").unwrap().value().parse().unwrap(),
        };
        assert_eq!(length, elements * report.dtype.size(), "{name}");
    }
    report
}

/// The notes but for that of a checkpoint without a tokenizer, which these are.
fn of_type(notes: Vec<String>) -> Vec<String> {
    notes.into_iter().filter(|note| !note.starts_with("tokenizer.json is not written")).collect()
}

#[test]
fn the_largest_tensor_decides() {
    let cases = [
        (DType::F32, DType::F16, ElementType::F32, None),
        (DType::F32, DType::BF16, ElementType::F32, None),
        (DType::F16, DType::F32, ElementType::F16, None),
        (DType::BF16, DType::F32, ElementType::F16, Some("the checkpoint's bf16 weights are written as f16")),
        (DType::F64, DType::F16, ElementType::F32, Some("the checkpoint's f64 weights are written as f32")),
    ];
    for (largest, others, expected, note) in cases {
        let report = export(largest, others, &unverified());
        assert_eq!(report.dtype, expected, "{largest:?} among {others:?}");
        match note {
            None => assert_eq!(of_type(report.notes), [""; 0]),
            Some(note) => assert!(report.notes.iter().any(|n| n.starts_with(note)), "{:?}", report.notes),
        }
    }
}

#[test]
fn an_option_decides() {
    for dtype in [ElementType::F32, ElementType::F16, ElementType::BF16] {
        let report = export(DType::F16, DType::F32, &Options { dtype: Some(dtype), ..unverified() });
        let note = (dtype == ElementType::BF16).then_some(BF16_NOTE.to_owned());
        assert_eq!((report.dtype, of_type(report.notes)), (dtype, note.into_iter().collect()));
    }
}
