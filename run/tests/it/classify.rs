//! `moh-run classify` with a model that tells colours.

use crate::program::{moh_run, names, outcome, refusal, run, text};
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
    let first = &all["images"][0];
    assert_eq!((&first["image"], &all["runtime"]), (&Value::from(text(&red)), &Value::from("tract")));
    let used = &all["preprocessing"];
    assert_eq!(used["resize"]["value"], "shorter side to 4 pixels, then the centre is cropped");
    assert_eq!(
        (&used["resize"]["from"], &used["interpolation"]["from"]),
        (&"config.json".into(), &"default (ImageNet)".into())
    );
    let classes = first["classes"].as_array().unwrap();
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
    let jpeg = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tasks/tests/data/red-over-blue.jpg");
    let (success, printed, errors) = run(&["classify", text(&model), text(&jpeg), "--runtime", "tract", "--json"]);
    assert!(success, "{errors}");
    let all: Value = serde_json::from_str(&printed).unwrap();
    let of = |class: i64| {
        let classes = all["images"][0]["classes"].as_array().unwrap().iter();
        classes.filter(|c| c["class"] == class).map(|c| c["probability"].as_f64().unwrap()).sum::<f64>()
    };
    assert!((of(0) - of(2)).abs() < 0.01 && of(1) < 0.28, "{printed}");
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tasks/tests/data").join(name)
}

/// A truncated JPEG, as an interrupted copy leaves it.
#[test]
fn a_bad_image_is_told_in_the_end_and_the_others_are_classified() {
    let (folder, model) = colours(DataType::Float);
    let red = picture(folder.path(), "red.png", [255, 51, 0]);
    let half = folder.path().join("half.jpg");
    let whole = std::fs::read(data("red-over-blue.jpg")).unwrap();
    std::fs::write(&half, &whole[..whole.len() / 2]).unwrap();
    let base = ["classify", text(&model), text(&half), text(&red), "/nowhere.png", text(&red), "--runtime", "tract"];
    for batch in ["1", "2", "8"] {
        let (success, printed, errors) = run(&[&base[..], &["--batch", batch, "--top", "1"]].concat());
        assert!(!success);
        let one = format!("{}\n   55.03 %     0  red\n", red.display());
        assert_eq!(printed, format!("{one}{one}"));
        let expected = format!(
            "error: 2 of 4 images cannot be read:\n  {}: not a PNG, JPEG or WebP image: the file is truncated\n  \
             /nowhere.png: image not found\n",
            half.display()
        );
        assert_eq!(errors, expected);
    }
    let (success, printed, _) = run(&[&base[..], &["--json"]].concat());
    assert!(!success);
    let images = &serde_json::from_str::<Value>(&printed).unwrap()["images"];
    assert!(images[0]["error"].as_str().unwrap().ends_with("the file is truncated"), "{printed}");
    assert_eq!((&images[1]["classes"][0]["label"], &images[3]["classes"][0]["label"]), (&"red".into(), &"red".into()));
    assert!(refusal(&["classify", text(&model), text(&half), "--runtime", "tract"]).contains("half.jpg: not a PNG"));
}

#[test]
fn preprocessing_is_told_where_it_is_asked_for_and_where_it_is_assumed() {
    let (folder, model) = colours(DataType::Float);
    let image = data("images/rgba.png");
    let classify = |more: &[&str]| {
        let (success, printed, errors) =
            run(&[&["classify", text(&model), text(&image), "--runtime", "tract"], more].concat());
        assert!(success, "{errors}");
        (printed, errors)
    };
    assert_eq!(classify(&[]).1, "");
    let (_, told) = classify(&["-v"]);
    assert!(
        told.starts_with("preprocessing:\n  size           4 x 4  [the model]\n  resize         shorter side to 4"),
        "{told}"
    );
    assert!(told.contains("mean           0 0 0  [config.json]\n"), "{told}");
    assert!(told.ends_with("rgba.png: transparent pixels put over white\n"), "{told}");
    let (printed, _) = classify(&["--json"]);
    let all: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(all["images"][0]["adjustments"][0], "transparent pixels put over white");
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    let note = "note: images are prepared as for ImageNet, because no file beside the model says how";
    assert!(classify(&[]).1.starts_with(note));
    assert_eq!(classify(&["-q"]).1, "");
}

#[test]
fn wrong_use_is_explained() {
    let (folder, model) = colours(DataType::Float);
    let classify = |model: &Path, image: &str| refusal(&["classify", text(model), image, "--runtime", "tract"]);
    assert!(classify(&model, "/nowhere.png").contains("/nowhere.png: image not found"));
    let tale = folder.path().join("tale.txt");
    std::fs::write(&tale, "once upon a time").unwrap();
    assert!(classify(&model, text(&tale)).contains("tale.txt: not a PNG, JPEG or WebP image"));
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

/// A model in a folder `onnx` has its files in the folder above, wherever one is.
#[test]
fn a_models_files_are_found_from_inside_its_folder() {
    let (folder, model) = colours(DataType::Float);
    let red = picture(folder.path(), "red.png", [255, 51, 0]);
    std::fs::create_dir(folder.path().join("onnx")).unwrap();
    std::fs::rename(&model, folder.path().join("onnx/model.onnx")).unwrap();
    for (inside, named) in [("", "onnx/model.onnx"), ("onnx", "model.onnx"), ("onnx", "./model.onnx"), ("onnx", ".")] {
        let mut command = moh_run(&["classify", named, text(&red), "--top", "1", "--runtime", "tract"]);
        let (success, printed, errors) = outcome(&command.current_dir(folder.path().join(inside)).output().unwrap());
        assert!(success && printed.ends_with("55.03 %     0  red\n"), "{named}: {printed}{errors}");
    }
}

/// Where there is no onnxruntime, a GPU that was asked for is not replaced by tract.
#[test]
fn a_gpu_that_is_asked_for_is_not_left_out() {
    let (folder, model) = colours(DataType::Float);
    let red = picture(folder.path(), "red.png", [255, 51, 0]);
    let mut command = moh_run(&["classify", text(&model), text(&red), "--device", "cuda"]);
    let command = command.envs([("ORT_DYLIB_PATH", ""), ("PATH", "/nowhere"), ("LD_LIBRARY_PATH", "")]);
    let (success, printed, errors) = outcome(&command.output().unwrap());
    assert!(!success && printed.is_empty() && errors.starts_with("error: "), "{printed}{errors}");
}

#[test]
fn a_model_says_what_it_is_for() {
    let (_folder, model) = colours(DataType::Float);
    let errors = refusal(&["generate", text(&model), "--prompt", "a", "--runtime", "tract"]);
    let expected = "the model is of the family moh-vit: `moh-run classify` names what is in images with it";
    assert!(errors.contains(expected), "{errors}");
}
