//! `moh-run translate` with models that do not translate; `tests/parity_moa.rs` of the workspace has those that do.

use crate::models::counter;
use crate::program::{moh_run, refusal, text};
use crate::support::doubler;

#[test]
fn wrong_use_is_explained() {
    let (folder, language_model) = counter();
    let (_other, doubler) = doubler();
    let translate =
        |models: &[&str]| refusal(&[&["translate"], models, &["--runtime", "tract", "--text", "a"]].concat());
    let errors = translate(&[text(&language_model)]);
    assert!(errors.contains("expected a folder with encoder.onnx and decoder.onnx, or two models"), "{errors}");
    let errors = translate(&[text(folder.path())]);
    assert!(errors.contains("encoder.onnx: model not found"), "{errors}");
    let errors = translate(&[text(&language_model), text(&language_model)]);
    assert!(
        errors.contains("not an encoder of tokens: expected an output last_hidden_state, found logits"),
        "{errors}"
    );
    let errors = translate(&[text(&doubler), text(&language_model)]);
    assert!(errors.contains("not an encoder of tokens: expected an input input_ids, found x, mask"), "{errors}");
    for usage in [&["--beams", "0"][..], &["--max-tokens", "0"], &["--length-penalty", "a"]] {
        let args = [&["translate", text(folder.path()), "--text", "a"], usage].concat();
        assert_eq!(moh_run(&args).output().unwrap().status.code(), Some(2), "{usage:?}");
    }
}
