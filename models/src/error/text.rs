//! Parts of the errors' texts.

use std::path::Path;

use crate::unused_key::UnusedKey;

pub(super) fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
}

pub(super) fn changed(expected: u64, found: u64) -> String {
    let lengths = match expected == found {
        true => format!("{found} bytes, as when it was opened, but written to since"),
        false => format!("{expected} bytes when it was opened, {found} now"),
    };
    format!("the file changed while it was read: {lengths}; let nothing write to a checkpoint that is being read")
}

pub(super) fn listed(keys: &[UnusedKey]) -> String {
    keys.iter().map(UnusedKey::to_string).collect::<Vec<_>>().join(", ")
}

pub(super) fn keys_with_tensors(keys: &[String]) -> String {
    match keys {
        [] => "no key holds tensors".to_owned(),
        keys => format!("the keys that hold tensors are {}", quoted(keys)),
    }
}

pub(super) fn no_state_dict(keys: &[String]) -> String {
    let found = format!("no state dict, a dictionary of tensors by their names; {}", keys_with_tensors(keys));
    match keys {
        [] => format!("{found}; save the weights in Python:\n{SAVE}"),
        _ => found,
    }
}

/// How to save the weights of a model in PyTorch.
const SAVE: &str = "  from safetensors.torch import save_file\n  save_file(model.state_dict(), \"model.safetensors\")";

pub(super) fn fits(families: &[String]) -> String {
    match families {
        [] => String::new(),
        families => format!("; its keys fit {}", families.join(" or ")),
    }
}

pub(super) fn has(keys: &[String]) -> String {
    if keys.is_empty() { String::new() } else { format!(" (it has {})", keys.join(", ")) }
}

/// The tensor in its file, or where it comes from.
pub(super) fn named(file: &Path, tensor: &str) -> String {
    match file.as_os_str().is_empty() {
        true => format!("{tensor:?}, computed from the checkpoint's tensors: "),
        false => format!("{}: tensor {tensor:?}: ", file.display()),
    }
}

pub(super) fn adapter(path: &Path, tensor: Option<&str>) -> String {
    let shown = tensor.map_or(String::new(), |tensor| format!(" (such as {tensor:?})"));
    let folder = path.parent().unwrap_or(Path::new("")).display();
    format!(
        "these are adapter weights{shown}; merge them into the model first, in Python:\n  from peft import PeftModel\n  \
         PeftModel.from_pretrained(base_model, \"{folder}\").merge_and_unload().save_pretrained(\"merged\")"
    )
}
