//! `moh-run infer`: tensors in, tensors out.

use crate::args::InferArgs;
use anyhow::{Context, Result, ensure};
use moh_runtime::{Model, Tensor, Value};
use moh_tasks::{read_tensors, write_tensors};
use serde_json::json;
use std::path::Path;

pub(crate) fn run(args: &InferArgs) -> Result<()> {
    super::check_output([&args.output], args.force)?;
    let given = read_tensors(&args.inputs)?;
    let mut model = super::load(&args.model, &args.runtime)?;
    if let Ok(output) = args.output.canonicalize() {
        let mut data = model.path().as_os_str().to_owned();
        data.push("_data");
        let is_of_model =
            [model.path(), Path::new(&data)].iter().any(|file| file.canonicalize().is_ok_and(|file| file == output));
        ensure!(!is_of_model, "{}: this is a file of the model itself", args.output.display());
    }
    let inputs = given
        .into_iter()
        .map(|(name, tensor)| fit(&model, name, tensor))
        .collect::<moh_runtime::Result<Vec<_>>>()
        .with_context(|| args.inputs.display().to_string())?;
    let outputs = model.run(inputs)?;
    let mut tensors = Vec::with_capacity(outputs.len());
    for (info, value) in model.outputs().iter().zip(&outputs) {
        tensors.push((info.name.clone(), value.to_tensor()?));
    }
    write_tensors(&args.output, &tensors, args.force)?;
    if args.json {
        let output = |(name, tensor): &(String, Tensor)| {
            let ty = tensor.element_type().name();
            json!({ "name": name, "type": ty, "shape": tensor.shape() })
        };
        let outputs = tensors.iter().map(output).collect::<Vec<_>>();
        let (runtime, file) = (model.runtime_name(), args.output.to_string_lossy());
        super::print_json(&json!({ "runtime": runtime, "file": file, "outputs": outputs }))?;
    } else if !args.runtime.quiet() {
        for (name, tensor) in &tensors {
            inform!("{name} {} {:?}", tensor.element_type(), tensor.shape());
        }
    }
    Ok(())
}

/// The tensor in the element type that the model takes; one that it does not take is left for the model to refuse.
fn fit(model: &Model, name: String, tensor: Tensor) -> moh_runtime::Result<(String, Value)> {
    let tensor = match model.inputs().iter().find(|input| input.name == name) {
        Some(input) => tensor.convert(&name, input.element_type)?,
        None => tensor,
    };
    Ok((name, tensor.into()))
}
