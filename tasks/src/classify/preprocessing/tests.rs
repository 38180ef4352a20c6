#![allow(clippy::unwrap_used)]

use super::*;

fn read(files: &[(&str, &str)], channels: usize, size: usize) -> std::result::Result<Preprocessing, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    Preprocessing::from_folder(folder.path(), channels, size).map_err(|e| format!("{:#}", anyhow::Error::new(e)))
}

const OWN: &str = "config.json";
const HF: &str = "preprocessor_config.json";

#[test]
fn without_files_it_is_as_for_imagenet() {
    let usual = read(&[], 3, 224).unwrap();
    assert_eq!((usual.size, usual.resize, usual.filter), (224, Resize::Shorter(256), Filter::Bicubic));
    assert_eq!((usual.mean, usual.std), (vec![0.485, 0.456, 0.406], vec![0.229, 0.224, 0.225]));
    let gray = read(&[(OWN, r#"{"hidden_size": 8}"#)], 1, 8).unwrap();
    assert_eq!((gray.mean.len(), gray.std.len()), (1, 1));
    assert!((gray.mean[0] - 0.449).abs() < 1e-6);
}

#[test]
fn own_keys_come_before_those_of_hugging_face() {
    let hf = r#"{"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3], "size": {"shortest_edge": 40}, "resample": 2,
        "crop_size": {"height": 32, "width": 32}}"#;
    let theirs = read(&[(HF, hf)], 3, 32).unwrap();
    assert_eq!((theirs.resize, theirs.filter), (Resize::Shorter(40), Filter::Bilinear));
    assert_eq!((theirs.mean, theirs.std), (vec![0.1, 0.2, 0.3], vec![1.0, 2.0, 3.0]));
    let own =
        r#"{"image_mean": 0.5, "image_std": [0.5, 0.6, 0.7], "image_resize": 64, "image_interpolation": "nearest"}"#;
    let ours = read(&[(HF, hf), (OWN, own)], 3, 32).unwrap();
    assert_eq!((ours.resize, ours.filter), (Resize::Shorter(64), Filter::Nearest));
    assert_eq!((ours.mean, ours.std), (vec![0.5; 3], vec![0.5, 0.6, 0.7]));
}

#[test]
fn hugging_face_resizes_in_several_ways() {
    let resize = |text: &str| read(&[(HF, text)], 3, 32).map(|p| p.resize);
    assert_eq!(resize(r#"{"size": {"height": 32, "width": 32}}"#), Ok(Resize::Exact));
    assert_eq!(resize(r#"{"size": 32}"#), Ok(Resize::Exact));
    assert_eq!(resize(r#"{"size": 36, "crop_size": 32}"#), Ok(Resize::Shorter(36)));
    assert_eq!(resize(r#"{"size": 36, "do_resize": false}"#), Ok(Resize::Keep));
    assert_eq!(resize(r#"{"crop_size": 64, "do_center_crop": false}"#), Ok(Resize::Shorter(36)));
    let plain = read(&[(HF, r#"{"do_normalize": false, "image_mean": [9, 9, 9]}"#)], 3, 32).unwrap();
    assert_eq!((plain.mean, plain.std), (vec![0.0; 3], vec![1.0; 3]));
}

#[test]
fn a_share_of_the_shorter_side_is_cropped() {
    let resize = |text: &str, size| read(&[(HF, text)], 3, size).map(|p| p.resize);
    assert_eq!(resize(r#"{"size": {"shortest_edge": 224}, "crop_pct": 0.875}"#, 224), Ok(Resize::Shorter(256)));
    assert_eq!(resize(r#"{"size": 224, "crop_pct": 0.95}"#, 224), Ok(Resize::Shorter(235)));
    assert_eq!(resize(r#"{"size": {"shortest_edge": 384}, "crop_pct": 0.875}"#, 384), Ok(Resize::Exact));
    for (text, expected) in [
        (r#"{"size": {"shortest_edge": 256}, "crop_pct": 0.875}"#, "size: expected the model's size, 224"),
        (r#"{"size": 224, "crop_pct": 0}"#, "crop_pct: expected above 1/8, and at most 1, found 0"),
        (r#"{"size": 224, "crop_pct": 1.5}"#, "crop_pct: expected"),
        (r#"{"size": 224, "crop_pct": 0.1}"#, "crop_pct: expected"),
    ] {
        let error = resize(text, 224).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

/// Pixels that are not divided by 255, or by something else, before the mean is taken away.
#[test]
fn other_ranges_of_numbers_are_those_of_hugging_face() {
    let picture = Picture::new(2, 2, 3, (0..12).map(|i| i * 20).collect()).unwrap();
    let pixels = |text: &str| {
        let mut pixels = Vec::new();
        read(&[(HF, text)], 3, 2).unwrap().append(&picture, &mut pixels);
        pixels
    };
    let near = |found: &[f32], expected: &dyn Fn(f32) -> f32| {
        // Channel after channel.
        let samples = (0..3).flat_map(|channel| (0..4).map(move |pixel| ((3 * pixel + channel) * 20) as f32));
        found.len() == 12 && found.iter().zip(samples).all(|(a, x)| (a - expected(x)).abs() < 1e-4)
    };
    let size = r#""size": {"height": 2, "width": 2}"#;
    let of = |more: &str| pixels(&format!("{{{size}, {more}}}"));
    let usual = of(r#""image_mean": 0.5, "image_std": 0.25"#);
    assert!(near(&usual, &|x| (x / 255.0 - 0.5) / 0.25), "{usual:?}");
    assert_eq!(
        of(r#""image_mean": 0.5, "image_std": 0.25, "rescale_factor": 0.00392156862745098, "do_rescale": true"#),
        usual
    );
    let found = of(r#""image_mean": 127.5, "image_std": 60, "do_rescale": false, "rescale_factor": 7"#);
    assert!(near(&found, &|x| (x - 127.5) / 60.0), "{found:?}");
    let found = of(r#""image_mean": 1, "image_std": 1, "rescale_factor": 0.00784313725490196"#);
    assert!(near(&found, &|x| x / 127.5 - 1.0), "{found:?}");
    let found = of(r#""do_normalize": false, "do_rescale": false"#);
    assert!(near(&found, &|x| x), "{found:?}");
    // Ours are of numbers from 0 to 1.
    let own =
        read(&[(HF, r#"{"do_rescale": false}"#), (OWN, r#"{"image_mean": 0.5, "image_std": 0.25}"#)], 3, 2).unwrap();
    assert_eq!((own.mean, own.std), (vec![0.5; 3], vec![0.25; 3]));
    for (text, expected) in [
        (r#"{"rescale_factor": 0}"#, "rescale_factor: expected a positive number, found 0"),
        (r#"{"rescale_offset": true}"#, "rescale_offset: expected false, found true"),
        (r#"{"do_flip_channel_order": true}"#, "do_flip_channel_order: expected false, found true"),
    ] {
        let found = read(&[(HF, text)], 3, 32).unwrap_err();
        assert!(found.contains(expected), "{found}");
    }
}

/// What is smaller than the model's size and not to be resized has black around it.
#[test]
fn small_pictures_are_padded_where_they_keep_their_size() {
    let kept = read(&[(HF, r#"{"do_resize": false, "crop_size": 4}"#)], 3, 4).unwrap();
    let seen = kept.seen(&Picture::new(6, 1, 3, (1..19).collect()).unwrap());
    assert_eq!((seen.width(), seen.height()), (4, 4));
    let row: Vec<u8> = seen.plane(0).collect();
    assert_eq!(row, [[0; 4], [0; 4], [4, 7, 10, 13], [0; 4]].concat());
}

#[test]
fn what_does_not_fit_is_named() {
    let wrong = |name: &str, text: &str| read(&[(name, text)], 3, 32).unwrap_err();
    for (name, text, expected) in [
        (
            OWN,
            r#"{"image_mean": [1, 2]}"#,
            "config.json: not an image configuration: image_mean: expected a number, or",
        ),
        (OWN, r#"{"image_std": 0}"#, "image_std: expected positive numbers"),
        (
            OWN,
            r#"{"image_resize": 31}"#,
            "image_resize: expected at least the model's size, 32, and at most 8 times that, found 31",
        ),
        (OWN, r#"{"image_interpolation": "best"}"#, "expected nearest, bilinear or bicubic, found best"),
        (OWN, "{", "config.json: not a model configuration"),
        (HF, r#"{"resample": 1}"#, "preprocessor_config.json: not an image configuration: resample: expected 0"),
        (HF, r#"{"crop_size": 224}"#, "crop_size: expected the model's size, 32, found 224"),
        (HF, r#"{"size": {"height": 64, "width": 64}}"#, "size: expected the model's size, 32"),
        (HF, r#"{"size": {"shortest_edge": 16}}"#, "size: expected at least the model's size"),
        // Found by the fuzz target `preprocessing`: pictures were made that large.
        (HF, r#"{"size": 1336666669, "crop_size": 32}"#, "and at most 8 times that, found 1336666669"),
        (OWN, r#"{"image_resize": 257}"#, "at most 8 times that, found 257"),
        (HF, r#"{"size": "large"}"#, "size: expected shortest_edge, or height and width"),
    ] {
        let message = wrong(name, text);
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn pixels_are_normalised_channel_by_channel() {
    let own = r#"{"image_mean": [0, 0.5, 1], "image_std": [1, 0.5, 0.25], "image_resize": 2, "image_interpolation": "nearest"}"#;
    let preprocessing = read(&[(OWN, own)], 3, 2).unwrap();
    let mut pixels = Vec::new();
    let colours = Picture::new(2, 2, 3, vec![0, 255, 51, 255, 255, 0, 0, 0, 0, 51, 51, 51]).unwrap();
    preprocessing.append(&colours, &mut pixels);
    assert_eq!(pixels, [0.0, 1.0, 0.0, 0.2, 1.0, 1.0, -1.0, -0.6, -3.2, -4.0, -4.0, -3.2]);
    pixels.clear();
    // The middle of a wider picture, gray in every channel.
    let gray = Picture::new(4, 2, 1, vec![9, 0, 255, 9, 9, 255, 0, 9]).unwrap();
    preprocessing.append(&gray, &mut pixels);
    assert_eq!(pixels, [0.0, 1.0, 1.0, 0.0, -1.0, 1.0, 1.0, -1.0, -4.0, 0.0, 0.0, -4.0]);
}

#[test]
fn a_gray_model_sees_luma() {
    let own = r#"{"image_mean": 0, "image_std": 1, "image_resize": 1}"#;
    let mut pixels = Vec::new();
    read(&[(OWN, own)], 1, 1).unwrap().append(&Picture::new(1, 1, 3, vec![255, 0, 0]).unwrap(), &mut pixels);
    assert_eq!(pixels, [76.0 / 255.0]);
}

#[test]
fn every_setting_says_where_it_comes_from() {
    let usual = read(&[], 3, 224).unwrap();
    let expected = "  size           224 x 224  [the model]\n  \
                    resize         shorter side to 256 pixels, then the centre is cropped  [default (ImageNet)]\n  \
                    interpolation  bicubic  [default (ImageNet)]\n  \
                    mean           0.485 0.456 0.406  [default (ImageNet)]\n  \
                    std            0.229 0.224 0.225  [default (ImageNet)]";
    assert_eq!(usual.to_string(), expected);
    let hf = r#"{"image_mean": 0.5, "size": 32, "resample": 2}"#;
    let mixed = read(&[(HF, hf), (OWN, r#"{"image_std": 0.25, "image_interpolation": "nearest"}"#)], 3, 32).unwrap();
    let Origins { resize, filter, mean, std } = mixed.origins;
    assert_eq!([resize, filter, mean, std], [Origin::Processor, Origin::Config, Origin::Processor, Origin::Config]);
    let plain = read(&[(HF, r#"{"do_normalize": false}"#)], 3, 32).unwrap();
    assert_eq!((plain.origins.mean, plain.origins.resize), (Origin::Processor, Origin::ImageNet));
}

#[test]
fn the_middle_of_a_picture_that_is_all_length_is_seen() {
    let preprocessing = read(&[(OWN, r#"{"image_resize": 256}"#)], 3, 32).unwrap();
    // Black, but for the middle.
    let samples = (0..100_000).flat_map(|x| [if (49_000..51_000).contains(&x) { 200 } else { 0 }; 3]).collect();
    let seen = preprocessing.seen(&Picture::new(100_000, 1, 3, samples).unwrap());
    assert!((seen.width(), seen.height()) == (32, 32) && seen.samples().iter().all(|&sample| sample == 200));
}
