//! Families of other crates.

use moh_export::verify::Verification;
use moh_export::{Options, export_model};
use moh_models::Model;
use moh_models::checkpoint::{Checkpoint, Loader, Weight};
use moh_models::error::Result;
use moh_models::families::{Family, Inputs, Layer, Port, PortDim, Sizes, Workload};
use moh_models::ops::{Linear, Ops, Type};
use moh_models::router::load_linear;
use moh_models::sample::{Rng, Sample};
use safetensors::tensor::{Dtype, TensorView};

const DIMS: [PortDim; 2] = [PortDim::Named("batch"), PortDim::Named("sequence")];
const WIDTH: usize = 8;

/// Its output has two names.
struct Twice {
    embedding: Weight,
    classes: Linear,
}

impl Family for Twice {
    fn load(_name: &str, checkpoint: &Checkpoint) -> Result<Twice> {
        let mut loader = Loader::new(checkpoint);
        let embedding = loader.weight("embedding.weight", &[4, WIDTH]);
        let classes = load_linear(&mut loader, "classes", 4, WIDTH, false);
        loader.finish(|_| false)?;
        Ok(Twice { embedding, classes })
    }

    fn layers(&self) -> Vec<Layer> {
        Vec::new()
    }

    fn inputs(&self) -> Vec<Port> {
        vec![Port { name: "input_ids".to_owned(), ty: Type::I64, dims: DIMS.to_vec() }]
    }

    fn outputs(&self) -> Vec<Port> {
        let dims = vec![DIMS[0], DIMS[1], PortDim::Fixed(4)];
        let port = |name: &str| Port { name: name.to_owned(), ty: Type::Model, dims: dims.clone() };
        vec![port("logits"), port("scores"), port("again")]
    }

    fn workload(&self) -> Workload {
        Workload { sizes: vec![("batch", 1), ("sequence", 3)], tokens: 3 }
    }

    fn samples(&self, _sizes: &Sizes) -> Vec<Vec<Sample>> {
        vec![vec![Rng::new(0).ids("input_ids", &[2, 5], 4)]]
    }

    fn forward<O: Ops>(&self, ops: &mut O, inputs: &Inputs<O::Value>) -> Result<Vec<O::Value>> {
        let x = ops.embedding(&self.embedding, &inputs.get("input_ids")?)?;
        let logits = ops.linear(&x, &self.classes)?;
        Ok(vec![logits.clone(), logits.clone(), logits])
    }
}

#[test]
fn one_value_may_be_several_outputs() {
    let folder = tempfile::tempdir().unwrap();
    let numbers: Vec<u8> = (0..4 * WIDTH).flat_map(|i| (i as f32 / 32.0 - 0.4).to_le_bytes()).collect();
    let tensor = || TensorView::new(Dtype::F32, vec![4, WIDTH], &numbers).unwrap();
    let tensors = [("embedding.weight", tensor()), ("classes.weight", tensor())];
    std::fs::write(folder.path().join("model.safetensors"), safetensors::serialize(tensors, None).unwrap()).unwrap();
    std::fs::write(folder.path().join("config.json"), r#"{"family": "twice"}"#).unwrap();
    let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
    let model = Model::of::<Twice>("twice", &checkpoint).unwrap();
    let options = Options { verify: Some(true), ..Options::default() };
    let report = export_model(&checkpoint, &model, &folder.path().join("out/model.onnx"), &options).unwrap();
    assert!(matches!(report.verification, Verification::Agrees(_)), "{report}");
}
