//! Exports MoH and MoA checkpoints to ONNX, with routed attention as operators of `ai.moh`.
//!
//! checkpoint -> [`moh_models::Model`] -> [`graph::Graph`] ([`mod@record`]) -> [`mod@passes`] -> [`mod@encode`] -> files,
//! which are run and compared with candle before they take the output's name.

#![forbid(unsafe_code)]

mod call;
pub mod encode;
pub mod error;
pub mod graph;
pub mod inspect;
pub mod passes;
pub mod proto;
pub mod random;
pub mod record;
mod report;
pub mod sides;
pub mod staging;
pub mod verify;
pub mod weights;

pub use error::{Error, Versioned};
pub use graph::ElementType;
pub use moh_models::families::Sizes;
pub use passes::{AttentionStyle, AttentionType};
pub use report::Report;

use encode::encode;
pub use moh_models::families::moa::Part;
use moh_models::presets::{self, Source};
use moh_models::{Checkpoint, Model, WeightType};
use staging::{Staging, data_name};
use std::path::{Path, PathBuf};
use weights::Plan;

/// How to export.
#[derive(Debug, Clone)]
pub struct Options {
    /// The family; `None`: as the configuration says.
    pub family: Option<String>,
    /// Another configuration file than the checkpoint's config.json.
    pub config: Option<PathBuf>,
    /// The published model whose configuration is used, in the place of any file: one of [`moh_models::presets::NAMES`].
    pub preset: Option<String>,
    /// Key of the weights in a file of torch.save that holds several state dicts.
    pub weights_key: Option<String>,
    /// Patterns of tensors to be ignored where the model has no use for them: [`Checkpoint::ignore_unexpected`].
    pub ignore_unexpected: Vec<String>,
    /// The part of an encoder-decoder; `None`: as the configuration says.
    pub part: Option<Part>,
    /// Element type; `None`: the checkpoint's, but f16 for bf16.
    pub dtype: Option<ElementType>,
    /// What the passes do.
    pub passes: passes::Options,
    /// Dimensions that are the same in every call.
    pub sizes: Sizes,
    /// ONNX operator-set version.
    pub opset: i64,
    /// ONNX IR version; `None`: the one that came with the operator set.
    pub ir_version: Option<i64>,
    /// Whether to verify; `None`: up to [`VERIFY_PARAMETERS`].
    pub verify: Option<bool>,
    /// Whether to replace what is there.
    pub force: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            family: None,
            config: None,
            preset: None,
            weights_key: None,
            ignore_unexpected: Vec::new(),
            part: None,
            dtype: None,
            passes: passes::Options::default(),
            sizes: Sizes::default(),
            opset: DEFAULT_OPSET,
            ir_version: None,
            verify: None,
            force: false,
        }
    }
}

/// The operator set that exported models use unless told otherwise: onnxruntime >= 1.18.
pub const DEFAULT_OPSET: i64 = 21;

/// Models of up to so many parameters are verified unless told otherwise.
pub const VERIFY_PARAMETERS: usize = 500_000_000;

/// The IR version that came with an operator set.
fn ir_version_of(opset: i64) -> i64 {
    match opset {
        ..=20 => 9,
        21 | 22 => 10,
        23 => 11,
        _ => 12,
    }
}

fn check_versions(options: &Options) -> Result<i64, Error> {
    if !(20..=24).contains(&options.opset) {
        let expected = "20 to 24".to_owned();
        return Err(Error::Version { what: Versioned::Opset, expected, found: options.opset });
    }
    let ir_version = options.ir_version.unwrap_or(ir_version_of(options.opset));
    if !(9..=13).contains(&ir_version) {
        return Err(Error::Version { what: Versioned::Ir, expected: "9 to 13".to_owned(), found: ir_version });
    }
    Ok(ir_version)
}

/// The type that the model is written in, and why where that is not the checkpoint's.
fn choose_dtype(model: &Model, options: &Options) -> (ElementType, Option<String>) {
    match (options.dtype, model.weight_type()) {
        (Some(dtype), _) => (dtype, None),
        (None, WeightType::F16) => (ElementType::F16, None),
        (None, WeightType::BF16) => {
            let note = "bf16 weights are written as f16, because no CPU runtime multiplies bf16; they stay bf16 where that type is chosen";
            (ElementType::F16, Some(note.to_owned()))
        }
        (None, WeightType::F64) => (ElementType::F32, Some("f64 weights are written as f32".to_owned())),
        (None, _) => (ElementType::F32, None),
    }
}

/// Refuses outputs that are there, unless `force`, or that would replace the checkpoint.
fn check_output(output: &Path, checkpoint: &Checkpoint, options: &Options) -> Result<(), Error> {
    if output.extension().is_none_or(|extension| extension != "onnx") || output.is_dir() {
        return Err(Error::OutputName { path: output.to_owned() });
    }
    let data = output.with_file_name(data_name(output));
    for path in [output.to_owned(), data] {
        let same = |file: &Path| matches!((file.canonicalize(), path.canonicalize()), (Ok(a), Ok(b)) if a == b);
        if checkpoint.files().any(same) {
            return Err(Error::OverwritesInput { path });
        }
        if path.symlink_metadata().is_ok() && !options.force {
            return Err(Error::Exists { path });
        }
    }
    Ok(())
}

/// Refuses to choose a part of a model that has none.
///
/// # Errors
/// [`Error::Part`].
pub fn check_part(part: Option<Part>, model: &Model) -> Result<(), Error> {
    match part {
        Some(_) if model.family() != "moa" => Err(Error::Part { family: model.family().to_owned() }),
        _ => Ok(()),
    }
}

/// Refuses to fix dimensions that the model does not have.
fn check_sizes(sizes: &Sizes, model: &Model) -> Result<(), Error> {
    let known = model.dimensions();
    match sizes.names().find(|name| !known.contains(name)) {
        None => Ok(()),
        Some(name) => {
            let known = known.into_iter().collect::<Vec<_>>().join(", ");
            Err(Error::Dimension { name: name.to_owned(), family: model.family().to_owned(), known })
        }
    }
}

/// Exports the checkpoint at `path` (a file, an index or a folder) to `output`, whose folder is made.
///
/// # Errors
/// See [`Error`]; the output is then as it was.
pub fn export(path: &Path, output: &Path, options: &Options) -> Result<Report, Error> {
    let started = std::time::Instant::now();
    let ir_version = check_versions(options)?;
    let source = Source::new(options.config.as_deref(), options.preset.as_deref());
    let mut checkpoint = presets::open(path, source, options.weights_key.as_deref(), &options.ignore_unexpected)?;
    if let Some(part) = options.part {
        checkpoint.configure("part", part.name());
    }
    let model = Model::load(&checkpoint, options.family.as_deref())?;
    check_part(options.part, &model)?;
    check_sizes(&options.sizes, &model)?;
    options.passes.check()?;
    check_output(output, &checkpoint, options)?;
    let target = output.parent().unwrap_or(Path::new(""));
    let sides = sides::side_files(&checkpoint, target, options.force)?;

    let (dtype, note) = choose_dtype(&model, options);
    let recording = record::Options { dtype, opset: options.opset, ir_version };
    let recorded = record::record_sized(&model, recording, &options.sizes)?;
    let mut graph = recorded.clone();
    passes::run(&mut graph, &options.passes)?;
    let plan = Plan::new(&graph);
    let data_name = data_name(output);

    let staging = Staging::new(output)?;
    staging::write_file(&staging.model(), &encode(&graph, &plan, &data_name)?)?;
    weights::write_data(&graph, &plan, &staging.path(&data_name))?;
    for (name, side) in &sides {
        side.write(&staging.path(name))?;
    }
    let verification = match options.verify.unwrap_or(model.parameters() <= VERIFY_PARAMETERS) {
        true => verify::Subject { model: &model, recorded: &recorded, plan: &plan, dtype, options }.verify(&staging)?,
        false => verify::Verification::Skipped("not asked for".to_owned()),
    };
    let names: Vec<String> = sides.iter().map(|(name, _)| (*name).to_owned()).collect();
    let files = staging.commit(&names)?;
    Report::new(&checkpoint, &model, dtype, note, files, verification, started.elapsed())
}
