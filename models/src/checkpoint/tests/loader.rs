//! What does not fit a model is reported at once.

use super::*;

fn checkpoint() -> (Folder, Checkpoint) {
    let folder = Folder::new();
    let data = [0u8; 32];
    let header = json!({
        "a.weight": { "dtype": "F32", "shape": [2], "data_offsets": [0, 8] },
        "b.weight": { "dtype": "F16", "shape": [2, 1], "data_offsets": [8, 12] },
        "c.weight": { "dtype": "BF16", "shape": [2], "data_offsets": [12, 16] },
        "d.weight": { "dtype": "I64", "shape": [1], "data_offsets": [16, 24] },
        "e.weight": { "dtype": "U64", "shape": [1], "data_offsets": [24, 32] },
    });
    folder.write("model.safetensors", &raw_json(&header, &data));
    let checkpoint = folder.open().unwrap();
    (folder, checkpoint)
}

#[test]
fn a_model_that_fits() {
    let (_folder, checkpoint) = checkpoint();
    let mut loader = Loader::new(&checkpoint);
    assert_eq!(loader.weight("a.weight", &[2]).to_f32().unwrap(), [0.0; 2]);
    assert_eq!(loader.weight("b.weight", &[2, 1]).dtype(), WeightType::F16);
    assert!(loader.optional("c.weight", &[2]).is_some());
    assert!(loader.optional("c.bias", &[2]).is_none());
    loader.finish(|name| name.starts_with('d') || name.starts_with('e')).unwrap();
}

#[test]
fn all_that_does_not_fit() {
    let (folder, checkpoint) = checkpoint();
    let mut loader = Loader::new(&checkpoint);
    loader.weight("a.weight", &[2]);
    assert_eq!(loader.weight("b.weight", &[1, 2]).shape(), [1, 2]);
    assert!(loader.optional("b.weight", &[7]).is_none());
    assert!(loader.weight("x.weight", &[usize::MAX, 3]).is_absent());
    loader.weight("x.weight", &[3]);
    loader.weight("d.weight", &[1]);
    assert!(loader.optional("e.weight", &[1]).is_none());
    let error = loader.finish(|_| false).unwrap_err();
    let file = folder.path("model.safetensors");
    let Error::Tensors(mismatch) = &error else { panic!("{error}") };
    let (b, d, e) = ("b.weight".to_owned(), "d.weight".to_owned(), "e.weight".to_owned());
    let expected = [
        Problem::Shape { file: file.clone(), tensor: b, expected: vec![1, 2], found: vec![2, 1] },
        Problem::Missing { tensor: "x.weight".to_owned(), expected: vec![usize::MAX, 3] },
        Problem::Type { file: file.clone(), tensor: d, found: WeightType::I64 },
        Problem::Type { file: file.clone(), tensor: e, found: WeightType::U64 },
        Problem::Unexpected { file: file.clone(), tensor: "c.weight".to_owned(), found: vec![2] },
    ];
    assert_eq!(mismatch.problems, expected);
    let file = file.display();
    let text = format!(
        "{file}: the tensors are not those of the model that the configuration describes\n\
         1 missing:\n  \"x.weight\" [18446744073709551615, 3]\n\
         1 of another shape:\n  \"b.weight\": expected [1, 2], found [2, 1] in {file}\n\
         2 of another type:\n  \"d.weight\": expected F64, F32, F16 or BF16, found I64 in {file}\n  \
         \"e.weight\": expected F64, F32, F16 or BF16, found U64 in {file}\n\
         1 unexpected:\n  \"c.weight\" [2] in {file}"
    );
    assert_eq!(error.to_string(), text);
}

#[test]
fn a_long_list_is_cut() {
    let (_folder, checkpoint) = checkpoint();
    let mut loader = Loader::new(&checkpoint);
    for layer in 0..100 {
        loader.weight(&format!("layers.{layer}.weight"), &[1]);
    }
    let text = loader.finish(|_| true).unwrap_err().to_string();
    assert!(text.contains("100 missing:\n  \"layers.0.weight\" [1]"), "{text}");
    assert!(text.ends_with("\"layers.19.weight\" [1]\n  and 80 more"), "{text}");
}
