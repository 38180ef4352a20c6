//! A `config.json`: the model that it describes, and its graph where that is small.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moh_export::graph::ElementType;
use moh_export::record;
use moh_models::{Config, Model};

/// Tensors of a model whose graph is recorded.
const MOST: usize = 200;

fuzz_target!(|bytes: &[u8]| {
    let Ok(values) = serde_json::from_slice(bytes) else { return };
    let config = Config::new("config.json", values);
    let Ok((model, tensors)) = Model::plan(&config, None) else { return };
    for (_, shape) in &tensors {
        shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).expect("a tensor that no memory can hold");
    }
    if tensors.len() > MOST {
        return;
    }
    let _ = (model.layers(), model.inputs(), model.outputs(), model.workload(), model.warnings(), model.active_share());
    let _ = model.resized(1000);
    let _ = model.count(&model.workload().sizes);
    let _ = record::record(&model, record::Options { dtype: ElementType::F32, opset: 21, ir_version: 10 });
});
