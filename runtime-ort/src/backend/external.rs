//! Weights in files beside the model, where these are symbolic links, as in the cache of Hugging Face's hub: there the model and its data
//! are links into a folder of blobs.
//!
//! A location is part of the model, which may come from anywhere: it must be a path below the model's folder, and the file that it leads
//! to must lie there, or where the model's own file lies once links are followed.

use std::path::{Component, Path, PathBuf};
use tract_onnx::pb::tensor_proto::DataLocation;
use tract_onnx::pb::{AttributeProto, GraphProto, ModelProto, TensorProto};
use tract_onnx::prelude::Framework;
use tract_onnx::tract_hir::internal::{TractErrorContext, TractResult, bail, ensure, format_err};

const LOCATION: &str = "location";

/// What is wrong with the files of the data of the model in `path`, if that can be told.
pub(super) fn problem(path: &Path) -> Option<String> {
    let mut model = tract_onnx::onnx().proto_model_for_path(path).ok()?;
    resolve(path, &mut model).err().map(|e| e.to_string())
}

/// Checks where the data of the model in `path` is, and gives the folder that tract is to look for it in. Where links lead out of the
/// model's folder, which tract refuses, locations are changed to what they lead to, from the file system's root on.
pub(super) fn resolve(path: &Path, model: &mut ModelProto) -> TractResult<PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = canonical(folder)?;
    let mut tensors = Vec::new();
    if let Some(graph) = &mut model.graph {
        external(graph, &mut tensors);
    }
    let mut files = Vec::with_capacity(tensors.len());
    for tensor in &mut tensors {
        let needed = number(tensor, "offset").saturating_add(number(tensor, "length"));
        if let Some(location) = location(tensor) {
            let file = follow(path, &folder, location)?;
            let found = file.metadata()?.len();
            ensure!(
                needed <= found,
                "its data file {} is truncated: expected at least {needed} bytes, found {found}: copy it again",
                folder.join(location).display()
            );
            files.push(file);
        }
    }
    if files.iter().all(|file| file.starts_with(&folder)) {
        return Ok(folder);
    }
    let root = folder.ancestors().last().unwrap_or(&folder).to_owned();
    for (location, file) in tensors.into_iter().filter_map(location).zip(&files) {
        let file = file.strip_prefix(&root).ok().and_then(Path::to_str);
        *location = file.context("the path of the model's data is not valid UTF-8")?.to_owned();
    }
    Ok(root)
}

/// The file that a location leads to.
fn follow(path: &Path, folder: &Path, location: &str) -> TractResult<PathBuf> {
    let inside = Path::new(location).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    ensure!(inside, "its data would be in {location:?}: expected a path inside the model's folder");
    let file = folder.join(location);
    ensure!(file.exists(), "its data file {} is missing: copy it together with the model", file.display());
    let file = canonical(&file)?;
    let beside = canonical(path)?;
    if !file.starts_with(folder) && !beside.parent().is_some_and(|blobs| file.starts_with(blobs)) {
        bail!(
            "its data file {location:?} is a link to {}: expected a file in the folder of the model, or in the folder that \
             the model itself is a link into",
            file.display()
        );
    }
    Ok(file)
}

fn canonical(path: &Path) -> TractResult<PathBuf> {
    path.canonicalize().map_err(|e| format_err!("{}: {e}", path.display()))
}

/// A number among the facts about a tensor's data; 0 where it is not told, which means the start, or all there is.
fn number(tensor: &TensorProto, key: &str) -> u64 {
    let entry = tensor.external_data.iter().find(|entry| entry.key == key);
    entry.and_then(|entry| entry.value.parse().ok()).unwrap_or(0)
}

fn location(tensor: &mut TensorProto) -> Option<&mut String> {
    tensor.external_data.iter_mut().find(|entry| entry.key == LOCATION).map(|entry| &mut entry.value)
}

/// The tensors of a graph, and of the graphs in its nodes, whose data is in another file.
fn external<'a>(graph: &'a mut GraphProto, found: &mut Vec<&'a mut TensorProto>) {
    let is_external = |tensor: &&mut TensorProto| tensor.data_location == Some(DataLocation::External as i32);
    found.extend(graph.initializer.iter_mut().filter(is_external));
    for attribute in graph.node.iter_mut().flat_map(|node| &mut node.attribute) {
        let AttributeProto { t, tensors, g, graphs, .. } = attribute;
        found.extend(t.iter_mut().chain(tensors).filter(is_external));
        g.iter_mut().chain(graphs).for_each(|graph| external(graph, found));
    }
}
