//! `moh-run classify` with a model that tells colours.

use crate::program::{names, refusal, run, text};
use crate::support::onnx::{DataType, Graph};
use crate::support::{doubler, have_onnxruntime, runtimes, write};
use moh_runtime::Model;
use moh_tasks::classify::Classifier;
use moh_tasks::image::Picture;
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A model whose logits are the channels' means: (batch, 3, 4, 4) -> (batch, 3).
fn colours(ty: DataType) -> (TempDir, PathBuf) {
    let mut graph = Graph::new();
    graph.input("pixel_values", ty, &["batch", "3", "4", "4"]);
    graph.ints("sides", &[2, 3]);
    graph.node("ReduceMean", &["pixel_values", "sides"], "logits", &[("keepdims", 0)]);
    graph.output("logits", ty, &["batch", "3"]);
    graph.metadata("moh.family", "moh-vit");
    let (folder, path) = write(&graph);
    let config = r#"{"id2label": {"0": "red", "1": "green"}, "image_mean": 0, "image_std": 1, "image_resize": 4}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    (folder, path)
}

/// A picture of one colour.
fn picture(folder: &Path, name: &str, pixel: [u8; 3]) -> PathBuf {
    let path = folder.join(name);
    Picture::new(6, 5, 3, pixel.repeat(30)).unwrap().write_png(&path, true).unwrap();
    path
}

#[test]
fn the_most_probable_classes_come_first() {
    let (folder, model) = colours(DataType::Float);
    let red = picture(folder.path(), "red.png", [255, 51, 0]);
    let blue = picture(folder.path(), "blue.png", [0, 0, 255]);
    for name in names() {
        for batch in ["1", "8"] {
            let args =
                ["classify", text(&model), text(&red), text(&blue), "--top", "2", "--batch", batch, "--runtime", name];
            let (success, printed, errors) = run(&args);
            assert!(success, "{errors}");
            // Softmax of (1, 0.2, 0) and of (0, 0, 1).
            let expected = format!(
                "{}\n   55.03 %     0  red\n   24.73 %     1  green\n{}\n   57.61 %     2\n   21.19 %     0  red\n",
                red.display(),
                blue.display()
            );
            assert_eq!((printed, errors.as_str()), (expected, ""));
        }
    }
}

#[test]
fn json_says_the_same() {
    let (folder, model) = colours(DataType::Float);
    let red = picture(folder.path(), "red.png", [255, 51, 0]);
    let (success, printed, errors) = run(&["classify", text(&model), text(&red), "--json", "--runtime", "tract"]);
    assert!(success, "{errors}");
    let all: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(all[0]["image"], text(&red));
    let classes = all[0]["classes"].as_array().unwrap();
    assert_eq!(classes.len(), 3, "there are no more");
    assert_eq!((&classes[0]["class"], &classes[0]["label"]), (&Value::from(0), &Value::from("red")));
    assert_eq!(classes[2]["label"], Value::Null);
    let sum: f64 = classes.iter().map(|class| class["probability"].as_f64().unwrap()).sum();
    assert!((sum - 1.0).abs() < 1e-6, "{sum}");
}

#[test]
fn a_model_in_half_precision_takes_pictures() {
    if !have_onnxruntime() {
        return;
    }
    let (folder, path) = colours(DataType::Float16);
    let red = Picture::open(&picture(folder.path(), "red.png", [255, 51, 0])).unwrap();
    for options in runtimes() {
        let mut classifier = Classifier::new(Model::load(&path, &options).unwrap()).unwrap();
        let best = &classifier.classify(std::slice::from_ref(&red), 1).unwrap()[0][0];
        assert_eq!((best.class, best.label.as_deref()), (0, Some("red")));
        assert!((best.probability - 0.5503).abs() < 1e-3, "{}", best.probability);
    }
}

#[test]
fn a_jpeg_is_cut_to_its_middle() {
    let (_folder, model) = colours(DataType::Float);
    let jpeg = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/red-over-blue.jpg");
    let (success, printed, errors) = run(&["classify", text(&model), text(&jpeg), "--runtime", "tract", "--json"]);
    assert!(success, "{errors}");
    let all: Value = serde_json::from_str(&printed).unwrap();
    let of = |class: i64| {
        let classes = all[0]["classes"].as_array().unwrap().iter();
        classes.filter(|c| c["class"] == class).map(|c| c["probability"].as_f64().unwrap()).sum::<f64>()
    };
    assert!((of(0) - of(2)).abs() < 0.01 && of(1) < 0.28, "{printed}");
}

#[test]
fn wrong_use_is_explained() {
    let (folder, model) = colours(DataType::Float);
    let classify = |model: &Path, image: &str| refusal(&["classify", text(model), image, "--runtime", "tract"]);
    assert!(classify(&model, "/nowhere.png").contains("/nowhere.png: image not found"));
    let tale = folder.path().join("tale.txt");
    std::fs::write(&tale, "once upon a time").unwrap();
    assert!(classify(&model, text(&tale)).contains("tale.txt: not a PNG or JPEG image"));
    assert!(classify(Path::new("/nowhere"), "a.png").contains("/nowhere: model not found"));
    let (_other, doubler) = doubler();
    let errors = classify(&doubler, "a.png");
    assert!(
        errors.contains("not an image classifier: expected the input pixel_values alone, found x, mask"),
        "{errors}"
    );
    std::fs::write(folder.path().join("config.json"), r#"{"image_std": [1]}"#).unwrap();
    assert!(classify(&model, "a.png").contains("config.json: not an image configuration: image_std"));
}

#[test]
fn a_model_says_what_it_is_for() {
    let (_folder, model) = colours(DataType::Float);
    let errors = refusal(&["generate", text(&model), "--prompt", "a", "--runtime", "tract"]);
    let expected = "the model is of the family moh-vit: `moh-run classify` names what is in images with it";
    assert!(errors.contains(expected), "{errors}");
}
