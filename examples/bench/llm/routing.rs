//! What the graph of an exported language model says: how many heads its routers use, and what it reads for a token.

use anyhow::{Context, Result};
use moh_export::proto::{ModelProto, NodeProto, TensorProto};
use prost::Message;
use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use tempfile::NamedTempFile;

fn read(path: &Path) -> Result<ModelProto> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    ModelProto::decode(bytes.as_slice()).with_context(|| path.display().to_string())
}

fn number(node: &NodeProto, name: &str) -> Option<i64> {
    node.attribute.iter().find(|attribute| attribute.name.as_deref() == Some(name)).and_then(|attribute| attribute.i)
}

/// Heads that every token uses.
fn shared(node: &NodeProto) -> i64 {
    let list = node.attribute.iter().find(|attribute| attribute.name.as_deref() == Some("shared_heads"));
    list.map_or(0, |list| list.ints.len() as i64)
}

fn is_router(node: &NodeProto) -> bool {
    node.op_type.as_deref() == Some("TopKRouter")
}

/// The share of heads that a token uses in the first layer, as text.
pub(super) fn heads_used(path: &Path) -> Result<String> {
    let graph = read(path)?.graph.unwrap_or_default();
    let share = graph.node.iter().find(|node| is_router(node)).and_then(|router| {
        let used = number(router, "top_k")? + shared(router);
        Some(100.0 * used as f64 / number(router, "num_heads")? as f64)
    });
    Ok(share.map_or("all".to_owned(), |share| format!("{share:.0} %")))
}

/// A copy of the model beside it, on the same weights, whose routers choose every head; `None` where there is no router.
pub(super) fn with_all_heads(path: &Path) -> Result<Option<NamedTempFile>> {
    let mut model = read(path)?;
    let nodes = model.graph.iter_mut().flat_map(|graph| &mut graph.node);
    let mut routers = 0;
    for router in nodes.filter(|node| is_router(node)) {
        let all = number(router, "num_heads").context("a router without num_heads")? - shared(router);
        let top_k = router.attribute.iter_mut().find(|attribute| attribute.name.as_deref() == Some("top_k"));
        top_k.context("a router without top_k")?.i = Some(all);
        routers += 1;
    }
    if routers == 0 {
        return Ok(None);
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new().prefix(".bench-").suffix(".onnx").tempfile_in(folder)?;
    file.write_all(&model.encode_to_vec())?;
    Ok(Some(file))
}

/// Bytes of the weights that one token needs: all but tables that rows are taken of.
pub(super) fn bytes(path: &Path) -> Result<u64> {
    let graph = read(path)?.graph.unwrap_or_default();
    let mut users: HashMap<&str, Vec<&NodeProto>> = HashMap::new();
    for node in &graph.node {
        for input in &node.input {
            users.entry(input).or_default().push(node);
        }
    }
    let is_read = |tensor: &&TensorProto| {
        let name = tensor.name.as_deref().unwrap_or_default();
        !name.ends_with("_cache") && reads_all(name, &users)
    };
    Ok(graph.initializer.iter().filter(is_read).map(length).sum())
}

/// Whether a node needs all of a tensor, perhaps after it was dequantised.
fn reads_all(name: &str, users: &HashMap<&str, Vec<&NodeProto>>) -> bool {
    let reads = |node: &&NodeProto| match node.op_type.as_deref().unwrap_or_default() {
        "DequantizeLinear" => node.output.iter().any(|output| reads_all(output, users)),
        op => !op.starts_with("Gather"),
    };
    users.get(name).is_some_and(|nodes| nodes.iter().any(reads))
}

fn length(tensor: &TensorProto) -> u64 {
    let external = tensor.external_data.iter().find(|entry| entry.key.as_deref() == Some("length"));
    let external = external.and_then(|entry| entry.value.as_ref()?.parse().ok());
    external.unwrap_or_else(|| tensor.raw_data.as_ref().map_or(0, |data| data.len() as u64))
}
