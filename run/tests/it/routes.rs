//! `moh-run routes`.

use crate::models::{counter, counter_with_gates, write_tokenizer};
use crate::program::{names, refusal, run, text};
use crate::support::onnx::{DataType, Graph};
use crate::support::write;
use moh_tasks::image::Picture;
use serde_json::{Value, json};
use std::path::PathBuf;
use tempfile::TempDir;

/// Four patches of 2 by 2 pixels and two heads: a patch uses head 0 where it is not black, head 1 always.
fn patches() -> (TempDir, PathBuf) {
    let mut graph = Graph::new();
    graph.input("pixel_values", DataType::Float, &["batch", "1", "4", "4"]);
    graph.ints("split", &[0, 2, 2, 2, 2]);
    graph.ints("inside", &[2, 4]);
    graph.ints("tokens", &[0, 4, 1]);
    graph.ints("all", &[1, 2]);
    graph.floats("zero", &[0.0]);
    graph.floats("one", &[1.0]);
    graph.node("Reshape", &["pixel_values", "split"], "blocks", &[]);
    graph.node("ReduceSum", &["blocks", "inside"], "sums", &[("keepdims", 0)]);
    graph.node("Reshape", &["sums", "tokens"], "first", &[]);
    graph.node("Mul", &["first", "zero"], "zeros", &[]);
    graph.node("Add", &["zeros", "one"], "second", &[]);
    graph.node("Concat", &["first", "second"], "gates.blocks.0.attn", &[("axis", 2)]);
    graph.node("ReduceSum", &["gates.blocks.0.attn", "inner"], "logits", &[("keepdims", 0)]);
    graph.ints("inner", &[1]);
    graph.output("logits", DataType::Float, &["batch", "2"]);
    graph.output("gates.blocks.0.attn", DataType::Float, &["batch", "4", "2"]);
    for (key, value) in [("moh.family", "moh-vit"), ("moh.num_shared_heads", "1"), ("moh.top_k", "1")] {
        graph.metadata(key, value);
    }
    let (folder, path) = write(&graph);
    let config = r#"{"image_mean": 0, "image_std": 1, "image_resize": 4}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    (folder, path)
}

#[test]
fn heads_of_a_text() {
    let (folder, model) = counter_with_gates();
    write_tokenizer(folder.path());
    for name in names() {
        let svg = folder.path().join(format!("{name}.svg"));
        let args = ["routes", text(&model), "abaca", "-o", text(&svg), "--json", "--runtime", name];
        let (success, printed, errors) = run(&args);
        assert!(success, "{errors}");
        let found: Value = serde_json::from_str(&printed).unwrap();
        assert_eq!(found["tokens"], json!(["a", "b", "a", "c", "a"]));
        let layer = &found["layers"][0];
        assert_eq!(layer["share"], json!([0.4, 0.8, 0.8]));
        assert_eq!(layer["heads_of_tokens"], json!([[1, 2], [0, 2], [1, 2], [0, 1], [1, 2]]));
        assert!((layer["imbalance"].as_f64().unwrap() - 0.08f64.sqrt()).abs() < 1e-9);
        let picture = std::fs::read_to_string(&svg).unwrap();
        assert!(picture.starts_with("<svg") && picture.contains("layers.0.attn") && picture.ends_with("</svg>\n"));
        let errors = refusal(&args);
        assert!(errors.contains("exists already; --force overwrites it"), "{errors}");
    }
    // As long a text as the model takes, and a longer one.
    let config = folder.path().join("config.json");
    std::fs::write(&config, r#"{"max_position_embeddings": 4}"#).unwrap();
    let errors = refusal(&["routes", text(&model), "abaca", "--runtime", "tract"]);
    assert!(errors.contains("the text has 5 tokens, the model's longest sequence is 4"), "{errors}");
    std::fs::write(&config, r#"{"max_position_embeddings": 5}"#).unwrap();
    let (success, printed, errors) = run(&["routes", text(&model), "abaca", "--runtime", "tract"]);
    assert!(success, "{errors}");
    assert!(printed.contains("layers.0.attn    67 %") && printed.contains(" 40  80  80"), "{printed}");
}

#[test]
fn heads_of_an_image() {
    let (folder, model) = patches();
    let png = folder.path().join("corner.png");
    let white = |x: usize, y: usize| if x >= 2 && y < 2 { 255 } else { 0 };
    let samples = (0..16).map(|i| white(i % 4, i / 4)).collect();
    Picture::new(4, 4, 1, samples).unwrap().write_png(&png, true).unwrap();
    for name in names() {
        let svg = folder.path().join(format!("{name}.svg"));
        let args = ["routes", text(&model), text(&png), "-o", text(&svg), "--json", "--runtime", name];
        let (success, printed, errors) = run(&args);
        assert!(success, "{errors}");
        let found: Value = serde_json::from_str(&printed).unwrap();
        assert_eq!(found["layers"][0]["heads_of_tokens"], json!([[1], [0, 1], [1], [1]]));
        assert_eq!(found["layers"][0]["shared_heads"], json!([1]));
        let picture = std::fs::read_to_string(&svg).unwrap();
        assert!(picture.contains("2 x 2 patches") && picture.contains("data:image/png;base64,"), "{picture}");
        assert!(picture.contains("d=\"M1 0h1v1h-1z\""), "{picture}");
    }
}

/// What is written is an SVG, whatever the name.
#[test]
fn the_picture_is_called_svg() {
    let (folder, model) = counter_with_gates();
    write_tokenizer(folder.path());
    for name in ["r.png", "r", "svg"] {
        let path = folder.path().join(name);
        let errors = refusal(&["routes", text(&model), "a", "-o", text(&path), "--runtime", "tract"]);
        assert!(errors.contains("expected a name that ends in .svg, as an SVG picture is written"), "{errors}");
        assert!(!path.exists());
    }
    let path = folder.path().join("r.SVG");
    assert!(run(&["routes", text(&model), "a", "-o", text(&path), "--runtime", "tract"]).0 && path.exists());
}

#[test]
fn wrong_use_is_explained() {
    let (folder, model) = counter();
    let errors = refusal(&["routes", text(&model), "a", "--runtime", "tract"]);
    assert!(
        errors.contains("expected outputs gates.*, found none: moh-export writes them with `--output-gates`"),
        "{errors}"
    );
    assert!(refusal(&["routes", "/nowhere", "a"]).contains("/nowhere: model not found"));
    drop(folder);
    let (folder, model) = counter_with_gates();
    let routes = |input: &str| refusal(&["routes", text(&model), input, "--runtime", "tract"]);
    assert!(routes("a").contains("tokenizer.json: the model's tokenizer must be beside it"));
    write_tokenizer(folder.path());
    assert!(routes("").contains("prompt: it is empty"));
    for (option, value) in [("--timestep", "5"), ("--seed", "0")] {
        let errors = refusal(&["routes", text(&model), "a", option, value, "--runtime", "tract"]);
        assert!(errors.contains(&format!("{option} is for diffusion models: leave it out")), "{errors}");
    }
    std::fs::write(folder.path().join("config.json"), r#"{"max_position_embeddings": 3}"#).unwrap();
    assert!(routes("abcd").contains("the text has 4 tokens, the model's longest sequence is 3"));
    let (folder, model) = patches();
    let routes = |input: &str| refusal(&["routes", text(&model), input, "--runtime", "tract"]);
    assert!(routes("/nowhere.png").contains("/nowhere.png: "));
    let not_an_image = folder.path().join("config.json");
    assert!(
        routes(text(&not_an_image)).contains("config.json: not a PNG, JPEG or WebP"),
        "{}",
        routes(text(&not_an_image))
    );
}
