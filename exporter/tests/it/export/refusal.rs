//! A model that disagrees with its checkpoint does not take the output's name.

use super::support::{Case, unverified};
use moh_export::verify::Verification;
use moh_export::{ElementType, Error, Options};
use std::fs;

/// The golden LLaMA with logits beyond f16's range, though every weight is within it.
fn large_logits() -> Case {
    let case = Case::new("llama-moh-tiny");
    case.rewrite(|name, tensor| {
        if name != "lm_head.weight" {
            return tensor;
        }
        let largest = tensor.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        (tensor * f64::from(60_000.0 / largest)).unwrap()
    });
    case
}

#[test]
fn outputs_that_f16_cannot_hold() {
    let f16 = Options { dtype: Some(ElementType::F16), verify: Some(true), ..Options::default() };
    let case = large_logits();
    match case.export(&f16) {
        Err(Error::Disagreement(reason)) => assert!(reason.starts_with("logits: element "), "{reason}"),
        other => panic!("expected a disagreement, found {other:?}"),
    }
    assert!(!case.folder().exists(), "files were left: {:?}", case.left());

    case.place("model.onnx", "old");
    case.place("model.onnx_data", "old data");
    let refused = case.export(&Options { force: true, ..f16.clone() });
    assert!(matches!(refused, Err(Error::Disagreement(_))), "{refused:?}");
    assert_eq!(case.left(), ["model.onnx", "model.onnx_data"]);
    assert_eq!(fs::read_to_string(case.output()).unwrap(), "old");
    assert_eq!(fs::read_to_string(case.data()).unwrap(), "old data");
}

/// The refusal is about f16 and not about the checkpoint, and it is verification that refuses.
#[test]
fn the_same_checkpoint_otherwise() {
    let verified = large_logits().export(&Options { verify: Some(true), ..Options::default() }).unwrap();
    assert!(matches!(verified.verification, Verification::Agrees(_)), "{}", verified.verification);
    let skipped = large_logits().export(&Options { dtype: Some(ElementType::F16), ..unverified() }).unwrap();
    assert!(matches!(skipped.verification, Verification::Skipped(_)), "{}", skipped.verification);
}
