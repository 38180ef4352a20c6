//! Exports MoH and MoA checkpoints to ONNX, with routed attention as operators of `ai.moh`.
//!
//! checkpoint -> [`moh_models::Model`] -> [`graph::Graph`] ([`mod@record`]) -> [`mod@passes`] -> [`mod@encode`] -> files,
//! which are run and compared with candle, and with the outputs of a run of the user's own, before they take the output's name.

#![forbid(unsafe_code)]

mod background;
mod cache;
mod call;
mod chosen;
pub mod convert;
pub mod difference;
pub mod encode;
pub mod error;
mod exported;
pub mod gains;
pub mod graph;
pub mod inspect;
pub mod measured;
pub mod memory;
pub mod passes;
mod place;
mod prepare;
pub mod proto;
pub mod quantize;
pub mod random;
pub mod record;
mod report;
mod room;
mod seq2seq;
mod side_files;
pub mod staging;
pub mod target;
mod text;
pub mod verify;
pub mod weights;

pub use cache::Cache;
pub use chosen::Chosen;
pub use error::{Error, Versioned};
pub use graph::ElementType;
pub use moh_models::families::Sizes;
pub use passes::{AttentionStyle, AttentionType, DenseStyle, HeadStyle};
pub use place::Layout;
pub use quantize::{Quantization, QuantizationReport, Quantize};
pub use report::Report;
pub use side_files::SideOptions;
pub use staging::OutputFile;
pub use target::Target;

use encode::encode;
pub use moh_models::families::moa::Part;
use moh_models::presets::{self, Source};
use moh_models::{Checkpoint, Model, WeightType};
use place::Place;
use side_files::{Facts, Kind};
use staging::Staging;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use verify::{Reference, Subject};
use weights::Plan;
pub use weights::Weights;

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
    /// How a language model's cache grows; `None`: as suits the target, as the configuration says, or by concatenation.
    pub cache: Option<Cache>,
    /// Element type; `None`: the checkpoint's, but f16 for bf16.
    pub dtype: Option<ElementType>,
    /// How weights are quantised, if they are.
    pub quantize: Option<Quantize>,
    /// What the passes do.
    pub passes: passes::Options,
    /// Where the model is to run: what cannot run there is refused, and the report says what memory it will need. Chooses `cache` and the
    /// styles of `passes` where they say nothing; [`Target::options`] sets the others.
    pub target: Option<Target>,
    /// Dimensions that are the same in every call.
    pub sizes: Sizes,
    /// ONNX operator-set version.
    pub opset: i64,
    /// ONNX IR version; `None`: the one that came with the operator set.
    pub ir_version: Option<i64>,
    /// Whether to compare the written model with our own implementation; `None`: up to [`VERIFY_PARAMETERS`].
    pub verify: Option<bool>,
    /// What to compare the written model with besides, whether or not `verify`.
    pub reference: Option<ReferenceFile>,
    /// Whether to replace what is there, but for files of other models.
    pub force: bool,
    /// Where the weights go.
    pub weights: Weights,
    /// Whether to read the files that are linked, for [`Weights::Link`].
    pub check_links: bool,
    /// Whether to take the SHA-256 of what is written.
    pub digests: bool,
    /// Is told how many bytes of the weight file are ready, and how many it will have.
    pub progress: Option<fn(u64, u64)>,
    /// How the files are arranged.
    pub layout: Layout,
    /// Which files go along with the model.
    pub sides: SideOptions,
    /// Whether to write encoder and decoder, as three models on one weight file; the output is then a folder.
    pub both_parts: bool,
}

/// A safetensors file with inputs of the model, under their names, and the outputs that the user's own code gives for them.
#[derive(Debug, Clone)]
pub struct ReferenceFile {
    /// The file.
    pub path: PathBuf,
    /// The largest error of an output, in units of its largest value (or of 1); `None`: as between our own implementations.
    pub tolerance: Option<f32>,
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
            cache: None,
            dtype: None,
            quantize: None,
            passes: passes::Options::default(),
            target: None,
            sizes: Sizes::default(),
            opset: DEFAULT_OPSET,
            ir_version: None,
            verify: None,
            reference: None,
            force: false,
            weights: Weights::Copy,
            check_links: false,
            digests: false,
            progress: None,
            layout: Layout::default(),
            sides: SideOptions::default(),
            both_parts: false,
        }
    }
}

/// The operator set that exported models use unless told otherwise: onnxruntime >= 1.18.
pub const DEFAULT_OPSET: i64 = 21;

/// Models of up to so many parameters are verified unless told otherwise.
pub const VERIFY_PARAMETERS: usize = 500_000_000;

/// What to know of a model in bfloat16.
pub const BF16_NOTE: &str =
    "a bf16 model loads in no CPU runtime, neither onnxruntime nor tract; for CPUs, write f16 or f32";

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

/// The type that the model is written in, and what there is to know about that.
fn choose_dtype(model: &Model, options: &Options) -> (ElementType, Option<&'static str>) {
    match (options.dtype, model.weight_type()) {
        (Some(ElementType::BF16), _) => (ElementType::BF16, Some(BF16_NOTE)),
        (None, WeightType::BF16) if options.weights == Weights::Link => (ElementType::BF16, Some(BF16_NOTE)),
        (Some(dtype), _) => (dtype, None),
        (None, WeightType::F16) => (ElementType::F16, None),
        (None, WeightType::BF16) => {
            let note = "the checkpoint's bf16 weights are written as f16, because CPU runtimes do not run bf16 models";
            (ElementType::F16, Some(note))
        }
        (None, WeightType::F64) => (ElementType::F32, Some("the checkpoint's f64 weights are written as f32")),
        (None, _) => (ElementType::F32, None),
    }
}

/// Refuses what the passes cannot do together, and a form of quantised layers that they cannot write.
fn check_passes(options: &Options) -> Result<(), Error> {
    options.passes.check()?;
    let has_ours = options.quantize.as_ref().is_some_and(|how| how.form == quantize::Form::Moh);
    match has_ours && options.passes.bodies.attention == AttentionStyle::Portable {
        true => Err(Error::Portable { option: "--form moh" }),
        false => Ok(()),
    }
}

/// Refuses what the target cannot run.
fn check_target(options: &Options, dtype: ElementType) -> Result<(), Error> {
    options.target.map_or(Ok(()), |target| target.check(options, dtype))
}

/// Refuses outputs that are there, unless `force`, or that would replace the checkpoint; `models` are their names.
fn check_output(place: &Place, models: &[&str], checkpoint: &Checkpoint, options: &Options) -> Result<(), Error> {
    for path in models.iter().copied().chain([place.data.as_str()]).map(|name| place.beside_model(name)) {
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

/// Refuses outputs that are no name for a model.
fn check_name(output: &Path) -> Result<(), Error> {
    if output.is_dir() {
        return Err(Error::OutputFolder { path: output.to_owned() });
    }
    if output.extension().is_none_or(|extension| extension != "onnx") {
        return Err(Error::OutputName { path: output.to_owned() });
    }
    if output.file_name().is_some_and(|name| name.to_str().is_none()) {
        return Err(Error::OutputUtf8 { path: output.to_owned() });
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

/// Refuses to fix dimensions that none of the models, parts of one, has.
fn check_sizes(sizes: &Sizes, models: &[Model]) -> Result<(), Error> {
    let known: BTreeSet<&str> = models.iter().flat_map(Model::dimensions).collect();
    match sizes.names().find(|name| !known.contains(name)) {
        None => Ok(()),
        Some(name) => {
            let known = known.into_iter().collect::<Vec<_>>().join(", ");
            let family = models.first().map_or(String::new(), |model| model.family().to_owned());
            Err(Error::Dimension { name: name.to_owned(), family, known })
        }
    }
}

/// Refuses to fix lengths of a language model's sequences that it cannot have.
fn check_lengths(facts: &Facts<'_>, sizes: &Sizes) -> Result<(), Error> {
    let (sequence, past) = (sizes.get("sequence").unwrap_or(1), sizes.get("past").unwrap_or(0));
    let is_language_model = matches!(facts.kind, Kind::LanguageModel { .. });
    match facts.context().filter(|_| is_language_model) {
        Some(longest) if sequence.saturating_add(past) as u64 > longest => {
            Err(Error::Lengths { sequence, past, longest })
        }
        _ => Ok(()),
    }
}

/// Exports the checkpoint at `path` (a file, an index or a folder) to `output`, whose folder is made. With
/// [`Options::both_parts`], `output` is the folder.
///
/// # Errors
/// See [`Error`]; the output is then as it was.
pub fn export(path: &Path, output: &Path, options: &Options) -> Result<Report, Error> {
    let mut options = options.clone();
    options.passes.settle(options.target, options.weights == Weights::Link);
    let options = &options;
    if options.both_parts {
        return seq2seq::export(path, output, options);
    }
    let started = std::time::Instant::now();
    check_versions(options)?;
    let mut checkpoint = open(path, options)?;
    if let Some(part) = options.part {
        checkpoint.configure("part", part.name());
    }
    if let Some(cache) = Cache::of_options(options) {
        cache.put(&mut checkpoint);
    }
    let model = Model::load(&checkpoint, options.family.as_deref())?;
    export_since(started, &checkpoint, &model, output, options)
}

/// Exports `model`, which was read from `checkpoint`, to `output`: also one of a family of another crate ([`Model::of`]).
///
/// [`Options::family`], [`Options::config`] and what else says how to read a checkpoint say nothing here.
///
/// # Errors
/// See [`Error`]; the output is then as it was.
pub fn export_model(checkpoint: &Checkpoint, model: &Model, output: &Path, options: &Options) -> Result<Report, Error> {
    let mut options = options.clone();
    options.passes.settle(options.target, options.weights == Weights::Link);
    export_since(std::time::Instant::now(), checkpoint, model, output, &options)
}

fn export_since(
    started: std::time::Instant,
    checkpoint: &Checkpoint,
    model: &Model,
    output: &Path,
    options: &Options,
) -> Result<Report, Error> {
    let ir_version = check_versions(options)?;
    check_part(options.part, model)?;
    Cache::check(options, model)?;
    check_sizes(&options.sizes, std::slice::from_ref(model))?;
    check_passes(options)?;
    check_name(output)?;
    let place = Place::new(output, options.layout);
    let models = [place.model.as_str()];
    check_output(&place, &models, checkpoint, options)?;

    let (dtype, note) = choose_dtype(model, options);
    check_target(options, dtype)?;
    let recording = record::Options { dtype, opset: options.opset, ir_version };
    let mut recorded = record::record_sized(model, recording, &options.sizes)?;
    passes::before_quantization(&mut recorded, &options.passes)?;
    let quantization = options.quantize.as_ref().map(|how| quantize::apply(&mut recorded, how)).transpose()?;
    let mut graph = recorded.clone();
    passes::run(&mut graph, &options.passes)?;
    let reference = match &options.reference {
        Some(ReferenceFile { path, .. }) if dtype == ElementType::BF16 => {
            let problem = format!("the model's outputs cannot be compared with these: {}", verify::NO_BF16);
            return Err(Error::Reference { file: path.clone(), problem });
        }
        Some(ReferenceFile { path, tolerance }) => Some(Reference::open(path, *tolerance, model, &graph)?),
        None => None,
    };
    let mut plan = Plan::with(&graph, options.weights, dtype, &place)?;
    let external = plan.iter().next().is_some();
    let facts = Facts::new(checkpoint, model, &graph, dtype, (options.layout, &place), external)?;
    check_lengths(&facts, &options.sizes)?;
    let chosen = Chosen::new(&facts, &[&graph], options)?;
    let (sides, side_notes) = side_files::side_files(&facts, &options.sides)?;
    // Refused before the work. All are prepared: another export may change those that are there already.
    side_files::missing(&sides, &place, &models, options.force)?;

    let mut staging = Staging::at(place.clone())?;
    staging.keep(checkpoint.files());
    let staged = staging.begin(&mut plan, &graph, &sides, options).and_then(|()| {
        staging.add_file(&place.model, &encode(&graph, &plan, &place.data)?)?;
        staging.add_data(&graph, &plan, options)
    });
    let quantization = quantization.as_ref();
    let subject = Subject { model, recorded: &recorded, graph: &graph, plan: &plan, dtype, options, quantization };
    let found = staged
        .and_then(|()| subject.check(&staging, skipped(model, dtype, options)?, reference.as_ref()))
        .map_err(|error| staging.at_output(error))?;
    // Another export may have put its files there meanwhile.
    let turn = staging.turn();
    let (missing, kept) = side_files::missing(&sides, &place, &models, options.force)?;
    let names: Vec<String> = missing.into_iter().map(|side| side.name).collect();
    let files = staging.commit(turn, &names)?;
    let notes = note.into_iter().map(str::to_owned).chain(plan.note(options.weights));
    let notes = notes.chain(quantization.and_then(Quantization::note));
    let notes = notes.chain(options.passes.notes(&[&graph], options.target)).chain(side_notes).chain(kept);
    let notes = notes.chain(place.shadowed()).chain(not_ignored(&[model], options)).collect();
    let mut report = Report::new(checkpoint, model, dtype, notes, files, found, started.elapsed())?;
    report.target = chosen;
    report.quantization = options.quantize.as_ref().map(|how| QuantizationReport::of(how, quantization));
    Ok(report)
}

/// Opens the checkpoint with the configuration that the options name.
fn open(path: &Path, options: &Options) -> Result<Checkpoint, Error> {
    let source = Source::new(options.config.as_deref(), options.preset.as_deref());
    Ok(presets::open(path, source, options.weights_key.as_deref(), &options.ignore_unexpected)?)
}

/// What to know of names of tensors to be ignored, where no such tensor of the models, parts of one, was.
fn not_ignored(models: &[&Model], options: &Options) -> Option<String> {
    let patterns: Vec<String> = options.ignore_unexpected.iter().map(|pattern| format!("'{pattern}'")).collect();
    // They may also have chosen the prefix; what lacks it is not remembered.
    let is_unused = |model: &&Model| model.ignored().is_empty() && model.prefix().is_none();
    let why = "--ignore-unexpected changed nothing: no tensor that the model has no use for is named";
    (!patterns.is_empty() && models.iter().all(is_unused)).then(|| format!("{why} {}", patterns.join(" or ")))
}

/// Why the written model is not compared with our own implementation, if it is not.
///
/// # Errors
/// [`Error::VerifySize`] where it is asked for, and the sizes that the options fix are too large.
fn skipped(model: &Model, dtype: ElementType, options: &Options) -> Result<Option<String>, Error> {
    /// Numbers of 4 bytes: a GiB.
    const LIMIT: usize = 1 << 28;
    let numbers = verify::extent(model, &options.sizes);
    let why = match options.verify {
        _ if dtype == ElementType::BF16 => verify::NO_BF16.to_owned(),
        Some(false) => "as asked for".to_owned(),
        Some(true) if numbers > LIMIT => return Err(Error::VerifySize { numbers, limit: LIMIT }),
        None if numbers > LIMIT => format!("with the sizes asked for it would take {numbers} numbers"),
        None if model.parameters() > VERIFY_PARAMETERS => "the model has more than 500 million parameters".to_owned(),
        _ => return Ok(None),
    };
    Ok(Some(why))
}
