//! What people do with exported models: trained ones and published ones, in every runtime.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use moh::{checkpoint, export, golden, runtimes, with_gates};
use moh_export::Options as Export;
use moh_runtime::{Model, Tensor};
use moh_tasks::classify::Classifier;
use moh_tasks::diffusion::{DiffusionModel, SampleOptions, Sampler, pictures};
use moh_tasks::image::Picture;
use moh_tasks::routes;
use std::ops::ControlFlow;

fn quick() -> Export {
    Export { verify: Some(false), ..Export::default() }
}

/// The pictures of `reference-samples.png`: two rows of the classes 0 to 9, every pixel 4 x 4.
fn reference_digits() -> Vec<Vec<f64>> {
    let all = Picture::open(&checkpoint("digits-moh-dit").join("reference-samples.png")).unwrap().to_gray();
    let at = |x: usize, y: usize| f64::from(all.samples()[y * all.width() + x]);
    let digit = |class: usize| {
        let pixel =
            |i: usize| (0..2).map(|row| at(2 + 66 * class + i % 16 * 4, 2 + 66 * row + i / 16 * 4)).sum::<f64>();
        (0..256).map(pixel).collect()
    };
    (0..10).map(digit).collect()
}

fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let center = |x: &[f64]| {
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        x.iter().map(|x| x - mean).collect::<Vec<f64>>()
    };
    let (a, b) = (center(a), center(b));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(&a, &b) / (dot(&a, &a) * dot(&b, &b)).sqrt()
}

/// A sampled digit resembles those that PyTorch sampled of its class more than those of any other, and every runtime draws
/// the same.
#[test]
fn sampled_digits_are_digits() {
    let target = tempfile::tempdir().unwrap();
    let path = export(&checkpoint("digits-moh-dit"), target.path(), &quick());
    let reference = reference_digits();
    let labels: Vec<i64> = (0..20).map(|i| i % 10).collect();
    let mut first: Option<Tensor> = None;
    for (name, options) in runtimes() {
        let mut model = DiffusionModel::new(Model::load(&path, &options).unwrap()).unwrap();
        let options = SampleOptions {
            steps: 50,
            sampler: Sampler::Ddpm,
            guidance: 4.0,
            guidance_channels: None,
            clip: true,
            seed: 1,
        };
        let samples = model.sample(&labels, 0, &options, |_| ControlFlow::Continue(())).unwrap();
        let mut right = 0;
        for (picture, &label) in pictures(&samples).unwrap().iter().zip(&labels) {
            let drawn: Vec<f64> = picture.samples().iter().map(|&sample| f64::from(sample)).collect();
            let scores: Vec<f64> = reference.iter().map(|digit| correlation(&drawn, digit)).collect();
            let best = (0..10).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap();
            right += usize::from(best as i64 == label);
        }
        println!("{name}: {right} of {} samples resemble their class most", labels.len());
        assert!(right >= 18, "{name}: {right}");
        let error = first.as_ref().map_or(0.0, |first| moh::max_abs(&samples, first));
        assert!(error < 1e-3, "{name}: {error} from the first runtime");
        first.get_or_insert(samples);
    }
}

/// The classes of a picture are those of the logits that candle computes from its numbers.
#[test]
fn classes_are_those_of_the_logits() {
    let target = tempfile::tempdir().unwrap();
    let path = export(&golden("vit-tiny-b"), target.path(), &quick());
    let labels: Vec<String> = (0..10).map(|class| format!(r#""{class}": "class {class}""#)).collect();
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(target.path().join("config.json")).unwrap()).unwrap();
    config["id2label"] = serde_json::from_str(&format!("{{{}}}", labels.join(","))).unwrap();
    std::fs::write(target.path().join("config.json"), config.to_string()).unwrap();

    let samples = (0..64 * 64 * 3).map(|i| (i * i / 97 % 256) as u8).collect();
    let picture = Picture::new(64, 64, 3, samples).unwrap();
    std::fs::write(
        target.path().join("preprocessor_config.json"),
        r#"{"do_resize": false, "image_mean": [0.5, 0.25, 0.75], "image_std": [0.25, 0.5, 1.0]}"#,
    )
    .unwrap();
    let plane = |c: usize, mean: f32, std: f32| picture.plane(c).map(move |x| (f32::from(x) / 255.0 - mean) / std);
    let pixels = plane(0, 0.5, 0.25).chain(plane(1, 0.25, 0.5)).chain(plane(2, 0.75, 1.0)).collect();
    let pixels = Tensor::new([1, 3, 64, 64], pixels).unwrap();
    let mut reference = moh::Candle::load(&golden("vit-tiny-b"), None);
    let logits = moh::Runner::run(&mut reference, &[("pixel_values".to_owned(), pixels)].into())["logits"].clone();
    let logits = logits.as_slice::<f32>().unwrap().to_vec();
    let mut order: Vec<usize> = (0..10).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let sum: f32 = logits.iter().map(|x| x.exp()).sum();
    for (name, options) in runtimes() {
        let mut classifier = Classifier::new(Model::load(&path, &options).unwrap()).unwrap();
        let best = classifier.classify(&[picture.clone(), picture.clone()], 3).unwrap();
        assert_eq!(best[0], best[1], "{name}");
        for (prediction, &class) in best[0].iter().zip(&order) {
            assert_eq!(prediction.class, class, "{name}");
            assert_eq!(prediction.label, Some(format!("class {class}")));
            let expected = logits[class].exp() / sum;
            assert!((prediction.probability - expected).abs() < 1e-4, "{name}: {prediction:?}, expected {expected}");
        }
    }
}

/// The heads of every token are as many as planned, and each runtime's shares are the same.
#[test]
fn routes_of_a_sampled_digit() {
    let target = tempfile::tempdir().unwrap();
    let path = export(&checkpoint("digits-moh-dit"), target.path(), &Export { verify: Some(false), ..with_gates() });
    let mut first: Option<Vec<f64>> = None;
    for (name, options) in runtimes() {
        let mut model = DiffusionModel::new(Model::load(&path, &options).unwrap()).unwrap();
        let (timestep, outputs) = model.outputs_at(3, 500, 1).unwrap();
        assert!((480..=500).contains(&timestep), "{name}: {timestep}");
        let layers = routes::layers(model.model(), &outputs).unwrap();
        assert_eq!(layers.len(), 6, "{name}");
        for layer in &layers {
            let (shared, top_k) = layer.planned.unwrap();
            assert_eq!((layer.tokens(), layer.heads(), layer.shared().len()), (64, 6, shared), "{name}");
            for token in 0..layer.tokens() {
                let used = (0..layer.heads()).filter(|&head| layer.uses(token, head)).count();
                assert_eq!(used, shared + top_k, "{name}: {} token {token}", layer.path);
            }
        }
        let picture = routes::svg("a digit", &layers, &routes::Subject::Image(None));
        assert_eq!(picture.matches("8 x 8 patches").count(), 6);
        let shares: Vec<f64> = layers.iter().flat_map(|layer| (0..6).map(|head| layer.share(head))).collect();
        let same = first.get_or_insert_with(|| shares.clone());
        // Noise grows through the steps before: a few tokens may choose otherwise.
        assert!(shares.iter().zip(same).all(|(a, b)| (a - *b).abs() <= 0.05), "{name}: {shares:?}");
    }
}

/// What `moh-run doctor` does: our kernels run, and their numbers are right.
#[test]
fn doctor_finds_kernels_in_every_runtime_that_has_them() {
    let folder = tempfile::tempdir().unwrap();
    for (name, options) in runtimes().into_iter().filter(|(_, options)| !options.without_custom_ops) {
        let checked = moh_tasks::doctor::check(&options, folder.path()).unwrap();
        assert!(checked.iter().all(moh_tasks::doctor::Checked::is_right), "{name}: {checked:?}");
        assert_eq!(checked.len(), moh_operators::OPERATORS.len(), "{name}");
        if name != "tract" {
            let library = moh_runtime::operator_library(&options).unwrap();
            let build = library.build.unwrap();
            assert_eq!((build.commit.as_str(), build.cuda), (moh_runtime::COMMIT, false), "{}", library.path.display());
        }
    }
}

/// Loads a model with the library that is beside this program; only as a child of the test below.
#[test]
#[ignore = "a child process of `a_setting_that_the_library_refuses_is_no_reason_to_run_without_it`"]
fn load_with_found_library() {
    let target = tempfile::tempdir().unwrap();
    let path = export(&checkpoint("digits-moh-dit"), target.path(), &quick());
    let options = moh_runtime::Options { runtime: moh_runtime::RuntimeChoice::Ort, ..moh_runtime::Options::default() };
    match Model::load(&path, &options) {
        Ok(model) => println!("found={:?}", model.notices()),
        Err(error) => println!("found={error}"),
    }
}

#[test]
fn a_setting_that_the_library_refuses_is_no_reason_to_run_without_it() {
    if !moh::have_onnxruntime() {
        return;
    }
    let load = |name: &str, value: &str| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "tasks::load_with_found_library", "--nocapture"]);
        let output = command.env_remove("MOH_OPS_LIBRARY").env(name, value).output().unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        output.lines().find_map(|line| line.split_once("found=")).unwrap_or_else(|| panic!("{output}")).1.to_owned()
    };
    assert_eq!(load("MOH_PACK_WEIGHTS", "yes"), "[]");
    let error = load("MOH_PACK_WEIGHTS", "often");
    assert!(error.ends_with("environment variable MOH_PACK_WEIGHTS: expected 0 or 1, found \"often\""), "{error}");
    let error = load("MOH_CPU_ISA", "abacus");
    assert!(error.contains("environment variable MOH_CPU_ISA: expected one that this processor has"), "{error}");
}
