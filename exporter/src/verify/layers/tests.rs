#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use crate::{AttentionStyle, Options, export};
use candle_core::Device;
use moh_models::Checkpoint;
use std::path::PathBuf;
use tempfile::TempDir;

/// An export of golden data, and what to compare it with.
struct Case {
    folder: TempDir,
    model: Model,
}

impl Case {
    fn new(golden: &str, change: impl Fn(&mut Options)) -> Case {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(golden);
        let folder = tempfile::tempdir().unwrap();
        let mut options = Options { verify: Some(false), ..Options::default() };
        change(&mut options);
        export(&golden, &folder.path().join("out/model.onnx"), &options).unwrap();
        let model = Model::load(&Checkpoint::open(&golden, None).unwrap(), None).unwrap();
        Case { folder, model }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("out/model.onnx")
    }

    fn verify(&self) -> Result<LayerReport, Error> {
        let report = verify_layers(&self.file(), &self.model, false, self.folder.path());
        let left = std::fs::read_dir(self.folder.path()).unwrap().count();
        assert_eq!(left, 1, "the parts are gone");
        report
    }
}

const GOLDEN: [&str; 5] = ["llama-moh-tiny", "vit-tiny-b", "dit-tiny-75", "moa-enc-tiny", "moa-dec-tiny"];

#[test]
fn every_family_agrees_in_every_type() {
    for name in GOLDEN {
        for dtype in [ElementType::F32, ElementType::F16, ElementType::BF16] {
            let case = Case::new(name, |options| options.dtype = Some(dtype));
            let report = case.verify().unwrap();
            assert!(report.agrees, "{name} {dtype}: {report}");
            // MoA's stacks give what their last block does.
            let after = usize::from(!name.starts_with("moa"));
            assert_eq!(report.layers.len(), blocks(&case.model) + after, "{name}: {report}");
            let rows: usize = report.layers.iter().map(|layer| layer.rows).sum();
            assert!(rows > 0, "{name}: {report}");
        }
    }
}

/// Blocks with attention: a decoder's have two attention layers each.
fn blocks(model: &Model) -> usize {
    let layers = model.layers();
    let paths: std::collections::BTreeSet<&str> =
        layers.iter().filter_map(|layer| Some(layer.path.rsplit_once('.')?.0)).collect();
    paths.len()
}

#[test]
fn other_forms_of_a_model() {
    let portable = Case::new("llama-moh-tiny", |options| options.passes.bodies.attention = AttentionStyle::Portable);
    let sized = Case::new("llama-moh-tiny", |options| {
        options.sizes = Sizes::new([("batch".to_owned(), 1), ("sequence".to_owned(), 2), ("past".to_owned(), 3)]);
    });
    let shown = Case::new("dit-tiny-75", |options| options.passes.gates.gates = crate::passes::Gates::Output);
    for case in [portable, sized, shown] {
        let report = case.verify().unwrap();
        assert!(report.agrees, "{report}");
    }
}

/// What rounding does to the selection of heads has a bound, so that another router is found in every type.
#[test]
fn the_block_with_another_router_is_found() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/dit-tiny-75");
    let other = tempfile::tempdir().unwrap();
    std::fs::copy(golden.join("config.json"), other.path().join("config.json")).unwrap();
    let mut tensors = candle_core::safetensors::load(golden.join("model.safetensors"), &Device::Cpu).unwrap();
    let router = tensors.get_mut("blocks.1.attn.wg.weight").unwrap();
    *router = (&*router * -3.0).unwrap();
    candle_core::safetensors::save(&tensors, other.path().join("model.safetensors")).unwrap();
    for dtype in [ElementType::F32, ElementType::F16] {
        let mut case = Case::new("dit-tiny-75", |options| options.dtype = Some(dtype));
        case.model = Model::load(&Checkpoint::open(other.path(), None).unwrap(), None).unwrap();
        let report = case.verify().unwrap();
        let wrong: Vec<&str> =
            report.layers.iter().filter(|layer| layer.problem.is_some()).map(|layer| layer.layer.as_str()).collect();
        assert_eq!(wrong, ["blocks.1"], "{dtype}: {report}");
    }
}

/// One weight of one block is another, or none: that block disagrees and no other one does.
#[test]
fn the_block_with_another_weight_is_found() {
    let cases = ["llama-moh-tiny", "vit-tiny-b", "dit-tiny-75"].map(|name| (name, 50f32));
    for (name, value) in cases.into_iter().chain([("vit-tiny-b", f32::NAN)]) {
        let case = Case::new(name, |options| options.dtype = Some(ElementType::F32));
        let proto = exported::read(&case.file()).unwrap();
        let block = case.model.layers()[1].path.rsplit_once('.').unwrap().0.to_owned();
        let graph = proto.graph.unwrap();
        let in_block = |init: &&crate::proto::TensorProto| {
            let name = init.name.as_deref().unwrap();
            name.starts_with(&format!("{block}.mlp")) && !init.external_data.is_empty()
        };
        let tensor = graph.initializer.iter().find(in_block).unwrap();
        let offset: usize = tensor.external_data[1].value.as_ref().unwrap().parse().unwrap();
        let data = case.file().with_file_name("model.onnx_data");
        let mut bytes = std::fs::read(&data).unwrap();
        bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
        std::fs::write(&data, bytes).unwrap();
        let report = case.verify().unwrap();
        let wrong: Vec<&str> =
            report.layers.iter().filter(|layer| layer.problem.is_some()).map(|layer| layer.layer.as_str()).collect();
        assert_eq!(wrong, [block.as_str()], "{name}: {report}");
        assert!(!report.agrees && report.worst().unwrap().layer == block);
        assert!(report.to_string().contains("1 of"), "{report}");
    }
}

#[test]
fn files_that_are_no_export_of_the_checkpoint() {
    let (llama, vit) = (Case::new("llama-moh-tiny", |_| ()), Case::new("vit-tiny-b", |_| ()));
    let other = verify_layers(&llama.file(), &vit.model, false, llama.folder.path()).unwrap_err();
    assert!(other.to_string().contains("not an export of this moh-vit checkpoint"), "{other}");
    std::fs::write(vit.file(), b"not a model").unwrap();
    let none = vit.verify().unwrap_err();
    assert!(none.to_string().contains("model.onnx: not an ONNX model"), "{none}");
    std::fs::File::options()
        .write(true)
        .open(llama.folder.path().join("out/model.onnx_data"))
        .unwrap()
        .set_len(100)
        .unwrap();
    let short = llama.verify().unwrap_err().to_string();
    assert!(short.contains("model.onnx_data: truncated: tensor") && short.contains("the file has 100"), "{short}");
}
