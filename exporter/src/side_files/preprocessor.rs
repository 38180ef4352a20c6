//! preprocessor_config.json: the checkpoint's; else from our keys of config.json, or as models of ImageNet are evaluated, where
//! a preset says that it is one. Nothing else tells how a model's images were prepared, and to guess would be silently wrong.

use super::facts::{Facts, Kind};
use super::json;
use crate::error::Error;
use serde_json::{Map, Value, json};

/// What to know where there is no such file.
pub(super) const MISSING: &str = "preprocessor_config.json is not written, because nothing says how the model's images are \
                                  prepared; put image_mean, image_std and image_resize into the checkpoint's config.json";

/// ImageNet's mean and standard deviation.
const IMAGENET: [[f64; 3]; 2] = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]];

pub(super) fn write(facts: &Facts<'_>) -> Result<Option<String>, Error> {
    let Kind::Classifier { channels, size, .. } = facts.kind else { return Ok(None) };
    let there = json::read(&facts.checkpoint.folder().join("preprocessor_config.json"))?;
    if let Some((object, text)) = there {
        let named = ["image_processor_type", "feature_extractor_type"].iter().any(|key| object.contains_key(*key));
        let cropped = ["crop_size", "do_center_crop"].iter().any(|key| object.get(*key).is_some_and(|v| *v != false))
            || object.get("size").is_some_and(|size| size.get("shortest_edge").is_some());
        let class = ("image_processor_type", json!(class(cropped)));
        return Ok(Some(if named { text } else { json::with_keys(&object, &text, vec![class]) }));
    }
    let config = facts.checkpoint.config();
    let keys = ["image_mean", "image_std", "image_resize", "image_interpolation"];
    let told = facts.checkpoint.preset().is_some() || keys.iter().any(|key| config.has(key));
    // Image processors make three channels.
    if !told || channels != 3 {
        return Ok(None);
    }
    let statistics = |key: &str, default: [f64; 3]| match config.value(key) {
        Some(Value::Number(number)) => json!([number, number, number]),
        Some(list) => list.clone(),
        None => json!(default),
    };
    let resample = match config.str_opt("image_interpolation")? {
        Some("nearest") => 0,
        Some("bilinear") => 2,
        None | Some("bicubic") => 3,
        Some(other) => {
            return Err(config.rejects("image_interpolation", "nearest, bilinear or bicubic", other).into());
        }
    };
    let shorter = facts.number("image_resize").unwrap_or(size as u64 * 8 / 7);
    let side = json!({ "height": size, "width": size });
    let object = json!({
        "image_processor_type": class(true),
        "do_convert_rgb": true,
        "do_resize": true, "size": { "shortest_edge": shorter }, "resample": resample,
        "do_center_crop": true, "crop_size": side,
        "do_rescale": true, "rescale_factor": 1.0 / 255.0,
        "do_normalize": true,
        "image_mean": statistics("image_mean", IMAGENET[0]),
        "image_std": statistics("image_std", IMAGENET[1]),
    });
    let object: Map<String, Value> = object.as_object().cloned().unwrap_or_default();
    Ok(Some(json::pretty(&Value::Object(object))))
}

/// transformers' class: that of ViT cuts nothing out, that of CLIP does, and is the same otherwise.
fn class(cropped: bool) -> &'static str {
    if cropped { "CLIPImageProcessor" } else { "ViTImageProcessor" }
}
