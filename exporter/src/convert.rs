//! A dense LLaMA as a Mixture-of-Head model, to be exported or trained on: its weights as they are, a configuration that says which
//! heads are shared and how many of the others a token uses, and for the two-stage router initial weights.

mod cost;
mod files;
mod heads;

pub use cost::{Cost, nats_per_token};
pub use heads::Shares;

use crate::error::Error;
use crate::place::{Layout, Place};
use crate::staging::{OutputFile, Staging};
use files::Sources;
use heads::Heads;
use moh_models::{Checkpoint, Model, Warning};
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// The family that is converted.
const DENSE: &str = "llama";

/// How the heads of a token are chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum RouterKind {
    /// By the norms of their queries, as MoH-LLaMA3-8B does: no new weights.
    #[default]
    QueryNorm,
    /// By weights of their own, as the models that the MoH paper trains from scratch; they are random before a training.
    TwoStage,
}

impl RouterKind {
    /// The family of models with that router.
    pub fn family(self) -> &'static str {
        match self {
            RouterKind::QueryNorm => "moh-llama",
            RouterKind::TwoStage => "moh-llm",
        }
    }
}

/// How to convert.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// How many heads are shared and active.
    pub shares: Shares,
    /// What chooses the others.
    pub router: RouterKind,
    /// What the two-stage router's weights come from.
    pub seed: u64,
    /// Whether the weight files are hard links to the source's, in the place of copies.
    pub link: bool,
    /// Tokens of a text to measure the cost of the conversion on ([`Cost`]), as many as the model has positions for. With fewer than
    /// two of them nothing is measured.
    pub text: Vec<i64>,
    /// Is told how many bytes of the weight files are written, and how many there are.
    pub progress: Option<fn(u64, u64)>,
}

/// A converted checkpoint.
#[derive(Debug, Serialize)]
pub struct Converted {
    /// Its family.
    pub family: &'static str,
    /// What chooses the heads.
    pub router: RouterKind,
    /// Attention layers.
    pub layers: usize,
    /// Heads of each layer.
    pub num_heads: usize,
    /// The first of them, which every token uses.
    pub num_shared_heads: usize,
    /// How many of the others a token uses.
    pub top_k: usize,
    /// Numbers of the routers' initial weights.
    pub router_parameters: usize,
    /// What the conversion costs before any training, if a text was given.
    pub cost: Option<Cost>,
    /// What is probably not as its author meant it.
    #[serde(serialize_with = "warnings")]
    pub warnings: Vec<Warning>,
    /// The files.
    pub files: Vec<OutputFile>,
}

fn warnings<S: serde::Serializer>(warnings: &[Warning], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(warnings.iter().map(Warning::to_string))
}

impl fmt::Display for Converted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (all, shared, top_k) = (self.num_heads, self.num_shared_heads, self.top_k);
        let router = match self.router {
            RouterKind::QueryNorm => "chosen by query norms".to_owned(),
            RouterKind::TwoStage => format!("two-stage router, {} random weights", self.router_parameters),
        };
        writeln!(f, "family  {}, {router}", self.family)?;
        writeln!(f, "heads   {all} heads: {shared} shared, {top_k} of {} routed (x{})", all - shared, self.layers)?;
        if let Some(cost) = &self.cost {
            writeln!(f, "cost    {cost}")?;
        }
        let files: Vec<String> = self.files.iter().map(|file| format!("wrote   {}", file.path.display())).collect();
        f.write_str(&files.join("\n"))
    }
}

/// Writes the dense LLaMA at `path` (a file, an index or a folder) as a Mixture-of-Head model to the folder `output`, which must not
/// exist: the configuration with the keys `family` and those of the heads, weight files byte by byte, tokenizer, generation
/// settings, chat template and licences. Weights are streamed. The first heads of each layer become the shared ones, as in the
/// published models.
///
/// `output` appears when it is complete: it is prepared in a folder beside it, read as a checkpoint once more, and renamed.
///
/// # Errors
/// [`Error::FolderExists`]; [`Error::Share`] for shares that make no router; [`Error::Model`] for what [`Checkpoint::open`] and
/// [`Model::load`] refuse of a `llama`, or a configuration that is of no `llama`; [`Error::Routers`] for a two-stage router
/// beside weights in another format than safetensors; [`Error::Link`]; [`Error::Room`]; [`Error::Io`]. Nothing is left then.
pub fn convert(path: &Path, output: &Path, options: &Options) -> Result<Converted, Error> {
    let place = Place::new(output, Layout::Flat);
    if place.model.is_empty() || output.symlink_metadata().is_ok() {
        return Err(Error::FolderExists { path: output.to_owned() });
    }
    let checkpoint = Checkpoint::open(path, None)?;
    check_dense(&checkpoint)?;
    let dense = Model::load(&checkpoint, Some(DENSE))?;
    let layers = dense.layers();
    let heads = Heads::choose(layers.first().map_or(0, |layer| layer.heads.num_heads), options.shares)?;
    let text = cost::text(&checkpoint, &options.text)?;
    let sources = Sources::new(&checkpoint, &dense, &heads, options)?;

    let staging = Staging::at(place)?;
    let prepare = || {
        sources.write(&staging, options)?;
        let written = Checkpoint::open(&staging.model(), None)?;
        let model = Model::load(&written, None)?;
        text.map(|tokens| Cost::measure(&dense, &model, tokens)).transpose()
    };
    let cost = prepare().map_err(|error| staging.at_output(error))?;
    let files = sources.files(&staging.model(), output)?;
    staging.commit_folder(output)?;
    let counts = heads.counts;
    Ok(Converted {
        family: options.router.family(),
        router: options.router,
        layers: layers.len(),
        num_heads: counts.num_heads,
        num_shared_heads: counts.num_shared_heads,
        top_k: counts.top_k,
        router_parameters: sources.router_parameters(),
        cost,
        warnings: dense.warnings().to_vec(),
        files,
    })
}

/// Refuses configurations of other models. Where there is no key of ours, transformers' name of the architecture decides: others read
/// keys that change what is computed, and that a LLaMA does not know.
fn check_dense(checkpoint: &Checkpoint) -> Result<(), moh_models::Error> {
    let config = checkpoint.config();
    let key = if config.has("family") { "family" } else { "model_type" };
    match config.str_opt(key)? {
        Some(DENSE) => Ok(()),
        found => Err(config.rejects(key, format!("{DENSE}, a dense model"), found.unwrap_or("nothing"))),
    }
}
