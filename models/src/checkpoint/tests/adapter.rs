//! Adapters, which are no models.

use super::*;

#[test]
fn adapters_are_to_be_merged() {
    let lora = file_of(&[("base_model.model.layers.0.q_proj.lora_A.weight", &[1, 1], 1.0)]);
    let plain = file_of(&[("a", &[1], 1.0)]);
    for (name, bytes) in [("adapter_model.safetensors", &lora), ("adapter_model.safetensors", &plain)] {
        let folder = Folder::new();
        let file = folder.write(name, bytes);
        let command = "merge_and_unload().save_pretrained(\"merged\")";
        for path in [folder.0.path(), &file] {
            let error = Checkpoint::open(path, None).unwrap_err();
            assert!(matches!(error, Error::Adapter { .. }));
            assert_says(&error, &[name, "adapter weights", "merge them into the model first", command]);
        }
    }
    // A whole model with its adapters beside the weights.
    let folder = Folder::new();
    folder.write("model.safetensors", &lora);
    assert_says(&folder.open().unwrap_err(), &["model.safetensors", "q_proj.lora_A.weight", "merge"]);
    // A merged model with what is left of the adapter.
    folder.write("model.safetensors", &plain);
    folder.write("adapter_config.json", b"{}");
    assert_eq!(folder.open().unwrap().names().collect::<Vec<_>>(), ["a"]);
    std::fs::remove_file(folder.path("model.safetensors")).unwrap();
    assert!(matches!(folder.refused(&["adapter_config.json"]), Error::Adapter { .. }));
}
