//! `moh-run sample` with a model that knows the picture: its noise always leads to the class's brightness.

use crate::program::{names, refusal, run, text};
use crate::support::onnx::{DataType, Graph};
use crate::support::{doubler, write};
use moh_runtime::Tensor;
use moh_tasks::image::Picture;
use moh_tasks::read_tensors;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// What classes 0 to 2 and the null class look like.
const BRIGHTNESS: [f32; 4] = [-0.5, 0.25, 0.75, 0.0];

/// A diffusion model of 2 x 2 pixels: noise = (x - sqrt(a) brightness) / sqrt(1 - a).
fn knowing(channels: usize, learns_variance: bool) -> (TempDir, PathBuf) {
    let width = channels.to_string();
    let mut graph = Graph::new();
    graph.input("hidden_states", DataType::Float, &["batch", &width, "2", "2"]);
    graph.input("timestep", DataType::Float, &["batch"]);
    graph.input("class_labels", DataType::Int64, &["batch"]);
    let left = (0..1000).scan(1.0, |product, t| {
        *product *= 1.0 - (1e-4 + (0.02 - 1e-4) * f64::from(t) / 999.0);
        Some(*product)
    });
    let left: Vec<f64> = left.collect();
    graph.floats("picture_table", &left.iter().map(|a| a.sqrt() as f32).collect::<Vec<f32>>());
    graph.floats("noise_table", &left.iter().map(|a| (1.0 - a).sqrt() as f32).collect::<Vec<f32>>());
    graph.floats("brightness_table", &BRIGHTNESS);
    graph.ints("outer", &[1, 2, 3]);
    graph.node("Cast", &["timestep"], "step", &[("to", i64::from(DataType::Int64 as i32))]);
    for (table, index) in [("picture", "step"), ("noise", "step"), ("brightness", "class_labels")] {
        graph.node("Gather", &[&format!("{table}_table"), index], &format!("{table}_row"), &[("axis", 0)]);
        graph.node("Unsqueeze", &[&format!("{table}_row"), "outer"], table, &[]);
    }
    graph.node("Mul", &["picture", "brightness"], "known", &[]);
    graph.node("Sub", &["hidden_states", "known"], "rest", &[]);
    let out = if learns_variance { "epsilon" } else { "out_hidden_states" };
    graph.node("Div", &["rest", "noise"], out, &[]);
    let mut channels_out = channels;
    if learns_variance {
        graph.node("Tanh", &["hidden_states"], "variance", &[]);
        graph.node("Concat", &["epsilon", "variance"], "out_hidden_states", &[("axis", 1)]);
        channels_out *= 2;
    }
    graph.output("out_hidden_states", DataType::Float, &["batch", &channels_out.to_string(), "2", "2"]);
    graph.metadata("moh.family", "moh-dit");
    let (folder, path) = write(&graph);
    std::fs::write(folder.path().join("config.json"), r#"{"num_classes": 3, "class_dropout_prob": 0.1}"#).unwrap();
    (folder, path)
}

/// Runs `sample` and gives the raw samples.
fn raw(model: &Path, more: &[&str]) -> Vec<f32> {
    let path = model.with_file_name("raw.safetensors");
    let args = [&["sample", text(model), "--raw", text(&path), "--force", "-q"], more].concat();
    let (success, _, errors) = run(&args);
    assert!(success, "{errors}");
    assert_eq!(errors, "");
    let tensors = read_tensors(&path).unwrap();
    tensors.iter().find(|(name, _)| name == "samples").unwrap().1.as_slice::<f32>().unwrap().to_vec()
}

fn near(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4), "{found:?}, expected {expected:?}");
}

#[test]
fn every_sampler_ends_at_the_picture() {
    for learns_variance in [false, true] {
        let (_folder, model) = knowing(1, learns_variance);
        let expected = [[-0.5; 4], [0.75; 4]].concat();
        for name in names() {
            for sampler in [&["--sampler", "ddpm"][..], &["--sampler", "ddim"], &["--sampler", "ddim", "--eta", "0.5"]]
            {
                for steps in ["1", "7", "50"] {
                    let args = [&["--class", "0,2", "--steps", steps, "--runtime", name], sampler].concat();
                    near(&raw(&model, &args), &expected);
                }
            }
        }
    }
}

#[test]
fn guidance_moves_away_from_the_null_class_in_three_channels() {
    let (_folder, model) = knowing(4, true);
    let sample = |more: &[&str]| raw(&model, &[&["--class", "1", "--runtime", "tract", "--steps", "5"], more].concat());
    near(&sample(&["--guidance", "2"]), &[[0.5; 12].as_slice(), &[0.25; 4]].concat());
    near(&sample(&["--guidance", "2", "--guidance-channels", "4"]), &[0.5; 16]);
    near(&sample(&["--guidance", "2", "--guidance-channels", "0"]), &[0.25; 16]);
    near(&sample(&["--guidance", "0"]), &[[0.0; 12].as_slice(), &[0.25; 4]].concat());
    let (_folder, model) = knowing(1, true);
    near(&raw(&model, &["--class", "1", "--runtime", "tract", "--guidance", "3"]), &[0.75; 4]);
}

#[test]
fn pixels_are_clipped_unless_told_otherwise() {
    let (_folder, model) = knowing(1, false);
    let sample =
        |more: &[&str]| raw(&model, &[&["--class", "2", "--guidance", "2", "--runtime", "tract"], more].concat());
    near(&sample(&[]), &[1.0; 4]);
    near(&sample(&["--clip", "off"]), &[1.5; 4]);
}

/// A model that sees no noise keeps what it is given.
fn indifferent() -> (TempDir, PathBuf) {
    let mut graph = Graph::new();
    graph.input("hidden_states", DataType::Float, &["batch", "1", "2", "2"]);
    graph.input("timestep", DataType::Float, &["batch"]);
    graph.input("class_labels", DataType::Int64, &["batch"]);
    graph.ints("outer", &[1, 2, 3]);
    graph.floats("zero", &[0.0]);
    graph.cast_to_float("class_labels", "classes");
    graph.node("Add", &["timestep", "classes"], "row", &[]);
    graph.node("Unsqueeze", &["row", "outer"], "rows", &[]);
    graph.node("Add", &["hidden_states", "rows"], "sum", &[]);
    graph.node("Mul", &["sum", "zero"], "out_hidden_states", &[]);
    graph.output("out_hidden_states", DataType::Float, &["batch", "1", "2", "2"]);
    write(&graph)
}

/// A model that sees no noise, and whose variance is that of the class; the null class has the largest.
fn spread_by_class() -> (TempDir, PathBuf) {
    let mut graph = Graph::new();
    graph.input("hidden_states", DataType::Float, &["batch", "1", "2", "2"]);
    graph.input("timestep", DataType::Float, &["batch"]);
    graph.input("class_labels", DataType::Int64, &["batch"]);
    graph.ints("outer", &[1, 2, 3]);
    graph.floats("zero", &[0.0]);
    graph.floats("variance_table", &[-1.0, -0.5, 0.0, 1.0]);
    graph.node("Unsqueeze", &["timestep", "outer"], "step", &[]);
    graph.node("Add", &["hidden_states", "step"], "sum", &[]);
    graph.node("Mul", &["sum", "zero"], "noise", &[]);
    graph.node("Gather", &["variance_table", "class_labels"], "variance_row", &[("axis", 0)]);
    graph.node("Unsqueeze", &["variance_row", "outer"], "variance_rows", &[]);
    graph.node("Add", &["noise", "variance_rows"], "variance", &[]);
    graph.node("Concat", &["noise", "variance"], "out_hidden_states", &[("axis", 1)]);
    graph.output("out_hidden_states", DataType::Float, &["batch", "2", "2", "2"]);
    let (folder, path) = write(&graph);
    std::fs::write(folder.path().join("config.json"), r#"{"num_classes": 3}"#).unwrap();
    (folder, path)
}

/// Guidance is for the noise. Here both rows agree on it, so that nothing changes.
#[test]
fn the_variance_is_that_of_the_class_under_guidance() {
    let (_folder, model) = spread_by_class();
    for name in names() {
        let sample = |class: &str, guidance: &str| {
            let args = ["--class", class, "--guidance", guidance, "--steps", "4", "--clip", "off", "--runtime", name];
            raw(&model, &args)
        };
        assert_eq!(sample("0-2", "3"), sample("0-2", "1"), "{name}");
        assert_ne!(sample("0", "1"), sample("2", "1"), "{name}: the variance does matter");
    }
}

#[test]
fn a_seed_draws_the_same_whatever_the_batches() {
    let (_folder, model) = indifferent();
    let sample = |seed: &str, batch: &str| {
        let args =
            ["--class", "0-4", "--steps", "3", "--seed", seed, "--batch", batch, "--clip", "off", "--runtime", "tract"];
        raw(&model, &args)
    };
    let first = sample("7", "16");
    assert_eq!(first, sample("7", "2"));
    assert_ne!(first, sample("8", "16"));
    assert!(first.chunks(4).enumerate().all(|(i, a)| first.chunks(4).skip(i + 1).all(|b| a != b)), "{first:?}");
}

#[test]
fn classes_make_a_grid_of_columns() {
    let (folder, model) = knowing(1, true);
    let output = folder.path().join("grid.png");
    let args = ["sample", text(&model), "--class", "0-2", "--count", "2", "-o", text(&output), "--scale", "3"];
    let (success, printed, errors) = run(&[&args[..], &["--runtime", "tract"]].concat());
    assert!(success, "{errors}");
    assert_eq!(printed, "");
    assert!(errors.starts_with("runtime tract\nsampled 6 images in ") && !errors.contains('\r'), "{errors}");
    let grid = Picture::open(&output).unwrap();
    assert_eq!((grid.width(), grid.height(), grid.channels()), (3 * 8 + 2, 2 * 8 + 2, 1));
    let at = |column: usize, row: usize| grid.samples()[(5 + 8 * row) * grid.width() + 5 + 8 * column];
    for row in 0..2 {
        assert_eq!([at(0, row), at(1, row), at(2, row)], [64, 159, 223]);
    }
    let (_, _, errors) = run(&[&args[..], &["--runtime", "tract"]].concat());
    assert!(errors.contains("grid.png exists already; --force overwrites it"), "{errors}");
    let same = ["--raw", text(&output), "--force", "--runtime", "tract"];
    let (success, _, errors) = run(&[&args[..], &same].concat());
    assert!(!success && errors.contains("expected another file for --raw than for -o"), "{errors}");
    assert!(Picture::open(&output).is_ok(), "it was not touched");
}

/// A decoder of 4 channels to red, green and blue of twice the width: what it is given times 0.18215.
fn decoder(folder: &Path) -> PathBuf {
    let mut graph = Graph::new();
    graph.input("latent_sample", DataType::Float, &["batch", "4", "height", "width"]);
    graph.ints("colours", &[0, 1, 2]);
    graph.floats("factor", &[0.18215]);
    graph.node("Gather", &["latent_sample", "colours"], "three", &[("axis", 1)]);
    graph.node("Concat", &["three", "three"], "wide", &[("axis", 3)]);
    graph.node("Mul", &["wide", "factor"], "sample", &[]);
    graph.output("sample", DataType::Float, &["batch", "3", "height", "wide"]);
    let path = folder.join("decoder.onnx");
    std::fs::write(&path, graph.encode()).unwrap();
    path
}

#[test]
fn latents_are_decoded_or_explained() {
    let (folder, model) = knowing(4, true);
    let vae = decoder(folder.path());
    let output = folder.path().join("out.png");
    for name in names() {
        let base = ["sample", text(&model), "--class", "2", "-o", text(&output), "--runtime", name, "--force"];
        let errors = refusal(&base);
        assert!(
            errors.contains("makes latents of 4 channels, not pixels: name the VAE's decoder with --vae"),
            "{errors}"
        );
        let (success, _, errors) = run(&[&base[..], &["--vae", text(&vae)]].concat());
        assert!(success, "{errors}");
        let picture = Picture::open(&output).unwrap();
        assert_eq!((picture.width(), picture.height(), picture.channels()), (4, 2, 3));
        assert!(picture.samples().iter().all(|&sample| sample == 223), "{picture:?}");
        // Latents are divided by another factor, of twice the size.
        let (success, _, errors) = run(&[&base[..], &["--vae", text(&vae), "--vae-scaling-factor", "0.3643"]].concat());
        assert!(success, "{errors}");
        let picture = Picture::open(&output).unwrap();
        assert!(picture.samples().iter().all(|&sample| sample == 175), "{picture:?}");
    }
    let (_other, doubler) = doubler();
    let errors = refusal(&[
        "sample",
        text(&model),
        "--class",
        "2",
        "-o",
        text(&output),
        "--force",
        "--runtime",
        "tract",
        "--vae",
        text(&doubler),
    ]);
    assert!(errors.contains("not a VAE's decoder: expected one input"), "{errors}");
    let (_pixels, pixels) = knowing(1, false);
    let errors = refusal(&[
        "sample",
        text(&pixels),
        "--class",
        "2",
        "-o",
        text(&output),
        "--force",
        "--runtime",
        "tract",
        "--vae",
        text(&vae),
    ]);
    assert!(errors.contains("makes latents of 1 channels") && errors.contains("decodes 4"), "{errors}");
}

#[test]
fn raw_samples_come_with_their_classes() {
    let (folder, model) = knowing(4, false);
    let path = folder.path().join("latents.safetensors");
    let args = ["sample", text(&model), "--class", "2,0", "--raw", text(&path), "--runtime", "tract", "--count", "2"];
    assert!(run(&args).0);
    let tensors = read_tensors(&path).unwrap();
    assert_eq!(tensors[0], ("class_labels".to_owned(), Tensor::new([4], vec![2i64, 0, 2, 0]).unwrap()));
    assert_eq!((tensors[1].0.as_str(), tensors[1].1.shape()), ("samples", &[4, 4, 2, 2][..]));
}

#[test]
fn json_says_what_was_sampled() {
    let (folder, model) = knowing(1, true);
    let output = folder.path().join("out.png");
    let args = ["sample", text(&model), "--class", "0,2", "-o", text(&output), "--seed", "7", "--steps", "3", "--json"];
    let (success, printed, errors) = run(&[&args[..], &["--runtime", "tract"]].concat());
    assert!(success && errors.is_empty(), "{errors}");
    let found: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(
        (&found["classes"], &found["seed"], &found["steps"]),
        (&serde_json::json!([0, 2]), &7.into(), &3.into())
    );
    assert_eq!((&found["image"], &found["raw"]), (&text(&output).into(), &serde_json::Value::Null));
}

#[test]
fn wrong_use_is_explained() {
    let (folder, model) = knowing(1, true);
    let output = folder.path().join("out.png");
    let sample =
        |more: &[&str]| refusal(&[&["sample", text(&model), "-o", text(&output), "--runtime", "tract"], more].concat());
    assert!(sample(&["--class", "3"]).contains("class 3: the model has classes 0 to 2"));
    let errors = sample(&["--class", "-1"]);
    assert!(errors.contains("\"-1\" is not the number of a class, nor a range of them"), "{errors}");
    for (option, value, expected) in [
        ("--steps", "0", "a whole number from 1 to 1000"),
        ("--steps", "1001", "a whole number from 1 to 1000"),
        ("--eta", "2", "a number from 0 to 1"),
        ("--eta", "-1", "a number from 0 to 1"),
        ("--guidance", "NaN", "a number from -1000 to 1000"),
        ("--scale", "100000", "a whole number from 1 to 1024"),
        ("--count", "0", "a whole number from 1 to 10000"),
        ("--seed", "-1", "a whole number from 0 to 18446744073709551615"),
        ("--batch", "-8", "a whole number from 1 to 1024"),
    ] {
        let errors = sample(&["--class", "0", option, value]);
        assert!(errors.starts_with(&format!("error: invalid value '{value}' for '{option} ")), "{errors}");
        assert!(errors.contains(&format!("expected {expected}\n")), "{errors}");
    }
    let errors = sample(&["--class", "0-2", "--count", "1000", "--scale", "1024"]);
    assert!(
        errors.contains("a picture of 6152 x 2050002 pixels was asked for: expected at most 268435456 pixels"),
        "{errors}"
    );
    assert!(
        sample(&["--class", "0-2", "--count", "9999"]).contains("29997 images were asked for: expected at most 10000")
    );
    let guided = ["--class", "0", "--guidance", "2", "--guidance-channels", "2"];
    assert!(sample(&guided).contains("at most 1 channels to guide, found 2"));
    // Options without what they belong to.
    assert!(sample(&["--class", "0", "--guidance-channels", "1"]).contains("--guidance <FACTOR>"));
    assert!(sample(&["--class", "0", "--eta", "1"]).contains("--eta is a parameter of DDIM: add --sampler ddim"));
    for option in [["--scale", "2"], ["--vae", "vae.onnx"]] {
        let raw = ["sample", text(&model), "--class", "0", "--raw", "out.safetensors", option[0], option[1]];
        assert!(refusal(&raw).contains("--output <FILE>"), "{option:?}");
    }
    let errors = refusal(&["sample", text(&model), "--class", "0", "-o", "out.jpg", "--runtime", "tract"]);
    assert!(errors.contains("out.jpg: expected a name that ends in .png"), "{errors}");
    std::fs::write(folder.path().join("config.json"), r#"{"num_classes": 3, "class_dropout_prob": 0}"#).unwrap();
    assert!(sample(&["--class", "0", "--guidance", "4"]).contains("needs a null class, and the model has none"));
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    assert!(sample(&["--class", "0", "--guidance", "4"]).contains("num_classes in a config.json beside the model"));
    assert!(!output.exists());
    let (_other, doubler) = doubler();
    let errors = refusal(&["sample", text(&doubler), "--class", "0", "-o", text(&output), "--runtime", "tract"]);
    assert!(errors.contains("not a diffusion model of classes: expected inputs hidden_states, timestep"), "{errors}");
    let errors = refusal(&["classify", text(&model), "a.png", "--runtime", "tract"]);
    assert!(errors.contains("family moh-dit: `moh-run sample` draws images with it"), "{errors}");
}
