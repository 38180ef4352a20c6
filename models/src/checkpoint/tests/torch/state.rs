//! Where in a file the weights are, and what they are called.

use super::*;

const DATA: [u8; 8] = [0; 8];

fn file(value: Vec<u8>) -> Vec<u8> {
    saved(value, &[&DATA])
}

fn one(name: &str) -> Vec<u8> {
    dict(&[(name, floats(2))])
}

#[test]
fn the_usual_keys() {
    for key in ["model", "state_dict", "model_state_dict", "module", "ema"] {
        let value = dict(&[("epoch", int(3)), (key, one("w")), ("rng", floats(2)), ("optimizer", one("exp_avg"))]);
        let (_folder, checkpoint) = opened(&file(value));
        assert_eq!((names(&checkpoint), checkpoint.weights_key()), (vec!["w"], Some(key)));
    }
    let (_folder, checkpoint) = opened(&file(dict(&[("w", floats(2)), ("epoch", int(1)), ("opt", one("m"))])));
    assert_eq!((names(&checkpoint), checkpoint.weights_key()), (vec!["w"], None));
}

#[test]
fn an_average_is_what_dit_samples_with() {
    let dit = |name: &str| {
        dict(&[
            ("final_layer.adaLN_modulation.1.weight", floats(2)),
            ("t_embedder.mlp.0.weight", floats(2)),
            (name, floats(2)),
        ])
    };
    let folder = folder_of(&file(dict(&[("model", dit("m")), ("ema", dit("e")), ("opt", one("o"))])));
    let checkpoint = folder.open().unwrap();
    assert_eq!(checkpoint.weights_key(), Some("ema"));
    assert!(checkpoint.get("e").is_some() && checkpoint.get("m").is_none());
    let checkpoint = open_with_key(&folder, "model").unwrap();
    assert_eq!(checkpoint.weights_key(), Some("model"));
    assert!(checkpoint.get("m").is_some());

    let other = file(dict(&[("model", one("m")), ("ema", one("e"))]));
    let error = refused(&other, &["ema, model all hold a state dict", "of which one must be chosen"]);
    assert!(matches!(error, Error::AmbiguousWeights { .. }));
}

#[test]
fn keys_that_are_asked_for() {
    let folder = folder_of(&file(dict(&[("generator", one("g")), ("critic", one("c")), ("epoch", int(1))])));
    let error = folder.refused(&["no state dict", "\"critic\", \"generator\""]);
    assert!(matches!(error, Error::NoStateDict { .. }));
    assert_eq!(names(&open_with_key(&folder, "generator").unwrap()), ["g"]);
    for key in ["epoch", "absent", "a\nb"] {
        let error = open_with_key(&folder, key).unwrap_err();
        assert!(matches!(error, Error::WeightsKey { .. }));
        assert_says(&error, &[&format!("{key:?}"), "\"critic\", \"generator\""]);
    }
    let folder = folder_of(&file(one("w")));
    assert_says(&open_with_key(&folder, "model").unwrap_err(), &["\"model\"", "no key holds tensors"]);
    let folder = Folder::new();
    folder.write("model.safetensors", &file_of(&[("a", &[1], 1.0)]));
    assert!(matches!(open_with_key(&folder, "model").unwrap_err(), Error::WeightsKey { .. }));
}

#[test]
fn files_without_tensors() {
    for value in [dict(&[]), int(1), tuple(&[floats(2)]), floats(2), dict(&[("a", int(1))])] {
        let error = refused(&file(value), &["no key holds tensors"]);
        assert!(matches!(error, Error::NoStateDict { .. }));
    }
    let error = refused(&file(call("models", "Net", &[])), &["an object of models.Net", "save its state_dict()"]);
    assert!(matches!(error, Error::NotAStateDict { .. }));
    let only_complex = tensor(storage("ComplexFloatStorage", "0", 1), 0, &[1], &[1]);
    assert!(matches!(refused(&file(dict(&[("w", only_complex)])), &["no tensors"]), Error::NoTensors { .. }));
}

/// Averages of the weights are named, an optimizer's state is not.
#[test]
fn other_state_dicts() {
    let average = dict(&[("module.w", floats(2)), ("n_averaged", floats(2))]);
    let value = dict(&[("model", one("w")), ("model_ema", average), ("opt", one("exp_avg")), ("epoch", int(1))]);
    let folder = folder_of(&file(value));
    let checkpoint = folder.open().unwrap();
    assert_eq!((checkpoint.weights_key(), checkpoint.other_keys()), (Some("model"), &["model_ema".to_owned()][..]));
    assert_eq!(names(&open_with_key(&folder, "model_ema").unwrap()), ["module.w", "n_averaged"]);
}

#[test]
fn shards() {
    let folder = Folder::new();
    let transposed = tensor(storage("FloatStorage", "0", 6), 0, &[3, 2], &[1, 3]);
    let six = bytes(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    folder.write("pytorch_model-00001-of-00002.bin", &saved(one("module.a"), &[&DATA]));
    folder.write("pytorch_model-00002-of-00002.bin", &saved(dict(&[("module.b", transposed)]), &[&six]));
    let map = json!({
        "module.a": "pytorch_model-00001-of-00002.bin",
        "module.b": "pytorch_model-00002-of-00002.bin",
    });
    let index = folder.write_json("pytorch_model.bin.index.json", &json!({ "metadata": {}, "weight_map": map }));
    for path in [folder.0.path(), index.as_path()] {
        let checkpoint = Checkpoint::open(path, None).unwrap();
        assert_eq!(names(&checkpoint), ["module.a", "module.b"]);
        assert_eq!(checkpoint.get("module.b").unwrap().to_f32().unwrap(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    }
    folder.write("pytorch_model-00002-of-00002.bin", &saved(one("module.c"), &[&DATA]));
    assert!(matches!(folder.refused(&["\"module.b\""]), Error::NotInShard { .. }));
}

#[test]
fn folders() {
    let folder = Folder::new();
    assert_says(&folder.open().unwrap_err(), &["model.safetensors", "pytorch_model.bin.index.json or *.pth"]);
    folder.write("readme.txt", b"");
    let only = folder.write("anything.pt", &file(one("a")));
    assert_eq!(folder.open().unwrap().path(), only);
    folder.write("other.pth", &file(one("b")));
    let error = folder.refused(&["anything.pt, other.pth; give the path of one of them"]);
    assert!(matches!(error, Error::SeveralWeights { .. }));
    assert_eq!(names(&Checkpoint::open(&only, None).unwrap()), ["a"]);
    folder.write("pytorch_model.bin", &file(one("c")));
    assert_eq!(names(&folder.open().unwrap()), ["c"]);
    folder.write("model.safetensors", &file_of(&[("d", &[1], 1.0)]));
    assert_eq!(names(&folder.open().unwrap()), ["d"]);
}
