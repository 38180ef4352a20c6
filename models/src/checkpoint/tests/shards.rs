//! Checkpoints of several files.

use super::*;

fn index(folder: &Folder, weight_map: &Value) -> PathBuf {
    folder.write_json(
        "model.safetensors.index.json",
        &json!({ "metadata": { "total_size": 8 }, "weight_map": weight_map }),
    )
}

#[test]
fn an_index_names_its_shards() {
    let folder = Folder::new();
    let first = folder.write("model-1.safetensors", &file_of(&[("a", &[1], 1.0), ("c", &[1], 3.0)]));
    let second = folder.write("parts/model-2.safetensors", &file_of(&[("b", &[1], 2.0)]));
    let map = json!({ "a": "model-1.safetensors", "b": "parts/model-2.safetensors", "c": "model-1.safetensors" });
    let path = index(&folder, &map);
    for path in [folder.0.path(), path.as_path()] {
        let checkpoint = Checkpoint::open(path, None).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(checkpoint.files().collect::<Vec<_>>(), [&first, &second]);
        assert_eq!(checkpoint.get("b").unwrap().to_f32().unwrap(), [2.0]);
        assert_eq!(checkpoint.get("b").unwrap().file(), second);
    }
}

#[test]
fn shards_outside_the_folder() {
    let folder = Folder::new();
    let outside = folder.write("outside.safetensors", &file_of(&[("a", &[1], 1.0)]));
    for shard in [outside.to_str().unwrap(), "../outside.safetensors", "x/../../outside.safetensors", "./a", "", ".."] {
        folder.write_json("in/config.json", &json!({}));
        let path = folder.write_json("in/model.safetensors.index.json", &json!({ "weight_map": { "a": shard } }));
        let error = Checkpoint::open(&path, None).unwrap_err();
        assert!(matches!(error, Error::ShardPath { .. }), "{shard}: {error}");
        assert_says(&error, &["index.json", shard]);
    }
}

#[test]
fn a_shard_that_is_missing() {
    let folder = Folder::new();
    index(&folder, &json!({ "a": "model-1.safetensors" }));
    let error = folder.refused(&["index.json", "model-1.safetensors", "does not exist"]);
    assert!(matches!(error, Error::ShardMissing { .. }));
}

#[test]
fn a_shard_of_an_unknown_format() {
    let folder = Folder::new();
    folder.write("model-1.h5", b"PK");
    index(&folder, &json!({ "a": "model-1.h5" }));
    assert!(matches!(folder.refused(&["model-1.h5"]), Error::UnknownFormat { .. }));
}

#[test]
fn a_shard_that_does_not_hold_its_tensor() {
    let folder = Folder::new();
    folder.write("model-1.safetensors", &file_of(&[("a", &[1], 1.0)]));
    folder.write("model-2.safetensors", &file_of(&[("b", &[1], 1.0)]));
    index(&folder, &json!({ "a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors" }));
    assert!(matches!(folder.refused(&["\"c\"", "model-2.safetensors"]), Error::NotInShard { .. }));
    index(&folder, &json!({ "a": "model-2.safetensors", "b": "model-1.safetensors" }));
    assert!(matches!(folder.refused(&["\"a\"", "model-2.safetensors"]), Error::NotInShard { .. }));
}

#[test]
fn a_tensor_in_two_shards() {
    let folder = Folder::new();
    folder.write("model-1.safetensors", &file_of(&[("a", &[1], 1.0)]));
    folder.write("model-2.safetensors", &file_of(&[("a", &[1], 1.0), ("b", &[1], 1.0)]));
    index(&folder, &json!({ "a": "model-1.safetensors", "b": "model-2.safetensors" }));
    let error = folder.refused(&["\"a\"", "model-1.safetensors", "model-2.safetensors"]);
    assert!(matches!(error, Error::DuplicateTensor { .. }));
}

#[test]
fn a_malformed_index() {
    let folder = Folder::new();
    for text in ["", "[]", "{}", "{\"weight_map\":[]}", "{\"weight_map\":{\"a\":1}}", "{\"weight_map\":null}"] {
        folder.write("model.safetensors.index.json", text.as_bytes());
        assert!(matches!(folder.refused(&["index.json: the index cannot be read"]), Error::Json { .. }), "{text}");
    }
    folder.write("model.safetensors.index.json", br#"{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}"#);
    assert!(matches!(folder.refused(&["\"a\" is listed twice"]), Error::Json { .. }));
    folder.write("model.safetensors.index.json", b"\xff");
    assert!(matches!(folder.refused(&["index is not UTF-8"]), Error::Utf8 { .. }));
    index(&folder, &json!({}));
    assert!(matches!(folder.refused(&["index.json: no tensors"]), Error::NoTensors { .. }));
}
