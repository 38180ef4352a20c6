//! `moh-run translate` with models that do not translate; `tests/parity_moa.rs` of the workspace has those that do.

use crate::models::counter;
use crate::program::{moh_run, names, refusal, run, text};
use crate::support::onnx::{DataType, Graph};
use crate::support::{doubler, write};
use tempfile::TempDir;

/// A model that counts on from the token that decoders begin with, whatever the source.
fn counting_on() -> (TempDir, TempDir) {
    let mut encoder = Graph::new();
    encoder.input("input_ids", DataType::Int64, &["batch", "sequence"]);
    encoder.input("attention_mask", DataType::Int64, &["batch", "sequence"]);
    encoder.ints("last", &[2]);
    encoder.cast_to_float("input_ids", "ids");
    encoder.node("Unsqueeze", &["ids", "last"], "last_hidden_state", &[]);
    encoder.output("last_hidden_state", DataType::Float, &["batch", "sequence", "1"]);
    let mut decoder = Graph::new();
    decoder.input("input_ids", DataType::Int64, &["batch", "sequence"]);
    decoder.input("encoder_hidden_states", DataType::Float, &["batch", "encoder_sequence", "1"]);
    decoder.input("encoder_attention_mask", DataType::Int64, &["batch", "encoder_total"]);
    decoder.input("past_key_values.0.decoder.key", DataType::Float, &["batch", "1", "past", "1"]);
    decoder.input("past_key_values.0.encoder.key", DataType::Float, &["batch", "1", "encoder_past", "1"]);
    decoder.ints("one", &[1]);
    decoder.ints("two", &[2]);
    decoder.ints("outer", &[1, 3]);
    decoder.floats("vocabulary", &[-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    decoder.cast_to_float("input_ids", "ids");
    decoder.node("Unsqueeze", &["ids", "two"], "column", &[]);
    decoder.node("Sub", &["vocabulary", "column"], "distance", &[]);
    decoder.node("Mul", &["distance", "distance"], "square", &[]);
    decoder.node("Neg", &["square"], "logits", &[]);
    decoder.node("Unsqueeze", &["ids", "outer"], "key", &[]);
    decoder.node("Concat", &["past_key_values.0.decoder.key", "key"], "present.0.decoder.key", &[("axis", 2)]);
    decoder.node("Unsqueeze", &["encoder_hidden_states", "one"], "source", &[]);
    decoder.node("Concat", &["past_key_values.0.encoder.key", "source"], "present.0.encoder.key", &[("axis", 2)]);
    decoder.output("logits", DataType::Float, &["batch", "sequence", "7"]);
    decoder.output("present.0.decoder.key", DataType::Float, &["batch", "1", "present", "1"]);
    decoder.output("present.0.encoder.key", DataType::Float, &["batch", "1", "encoder_present", "1"]);
    let ((first, _), (second, _)) = (write(&encoder), write(&decoder));
    let config = r#"{"eos_token_id": 5, "decoder_start_token_id": 2}"#;
    std::fs::write(second.path().join("config.json"), config).unwrap();
    (first, second)
}

#[test]
fn json_is_one_array_of_texts() {
    let (encoder, decoder) = counting_on();
    for name in names() {
        let args = ["translate", text(encoder.path()), text(decoder.path()), "--ids", "--text", "1 6", "--text", "3"];
        let (success, printed, errors) = run(&[&args[..], &["--beams", "2", "--runtime", name]].concat());
        assert!(success, "{errors}");
        assert_eq!(printed, "3 4\n3 4\n");
        let (success, printed, errors) = run(&[&args[..], &["--json", "--beams", "2", "--runtime", name]].concat());
        assert!(success && errors.is_empty(), "{errors}");
        let found: serde_json::Value = serde_json::from_str(&printed).unwrap();
        assert_eq!((&found[0]["source"], &found[1]["source"]), (&"1 6".into(), &"3".into()));
        let best = &found[1]["hypotheses"][0];
        assert_eq!((&best["text"], &best["tokens"]), (&"3 4".into(), &serde_json::json!([3, 4, 5])));
        assert_eq!(found[0]["hypotheses"].as_array().unwrap().len(), 2);
    }
}

#[test]
fn wrong_use_is_explained() {
    let (folder, language_model) = counter();
    let (_other, doubler) = doubler();
    let translate =
        |models: &[&str]| refusal(&[&["translate"], models, &["--runtime", "tract", "--text", "a"]].concat());
    let errors = translate(&[text(&language_model)]);
    assert!(errors.contains("expected a folder with encoder.onnx and decoder.onnx, or two models"), "{errors}");
    let errors = translate(&[text(folder.path())]);
    assert!(errors.contains("encoder.onnx: model not found: a translation model is exported in two parts"), "{errors}");
    let errors = translate(&[text(&language_model), text(&language_model)]);
    assert!(
        errors.contains("not an encoder of tokens: expected an output last_hidden_state, found logits"),
        "{errors}"
    );
    let errors = translate(&[text(&doubler), text(&language_model)]);
    assert!(errors.contains("not an encoder of tokens: expected an input input_ids, found x, mask"), "{errors}");
    for usage in
        [&["--beams", "0"][..], &["--max-tokens", "0"], &["--length-penalty", "a"], &["--length-penalty", "NaN"]]
    {
        let args = [&["translate", text(folder.path()), "--text", "a"], usage].concat();
        assert_eq!(moh_run(&args).output().unwrap().status.code(), Some(2), "{usage:?}");
    }
}
