//! What an export says about itself, as text and as JSON.

use crate::chosen::Chosen;
use crate::error::Error;
use crate::graph::ElementType;
use crate::quantize::QuantizationReport;
use crate::staging::OutputFile;
use crate::text::{bytes, runs, short, shown};
use crate::verify::{Compared, Verification};
use moh_models::checkpoint::{DefaultValue, Prefix};
use moh_models::count::Macs;
use moh_models::families::Layer;
use moh_models::{Checkpoint, Model, Warning};
use serde::{Serialize, Serializer};
use std::fmt;
use std::time::Duration;

/// A finished export. Serialized, it has the same fields.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The family.
    pub family: String,
    /// The preset that the configuration is of, if it is no file's.
    pub preset: Option<&'static str>,
    /// The key of the weights, where the checkpoint held more than them.
    pub weights_key: Option<String>,
    /// What was done to the names in the files to make them the model's.
    #[serde(serialize_with = "prefix")]
    pub prefix: Option<Prefix>,
    /// Tensors that were ignored, as was asked for.
    pub ignored: Vec<String>,
    /// Defaults that stand in for absent keys of the configuration, those of heads and routing first.
    pub defaults: Vec<DefaultValue>,
    /// What is probably not as it was meant.
    #[serde(serialize_with = "texts")]
    pub warnings: Vec<Warning>,
    /// The attention layers.
    #[serde(serialize_with = "layers")]
    pub layers: Vec<Layer>,
    /// Mean share of the heads that a token uses.
    pub active_share: f64,
    /// Numbers in the checkpoint.
    pub parameters: usize,
    /// What it was exported for.
    pub target: Option<Chosen>,
    /// Element type of the file.
    #[serde(serialize_with = "shown")]
    pub dtype: ElementType,
    /// What was quantised, and how well; `None` where nothing was.
    pub quantization: Option<QuantizationReport>,
    /// What the user should know, such as why that type is not the checkpoint's.
    pub notes: Vec<String>,
    /// Multiply-accumulates of one forward over `tokens` tokens.
    #[serde(serialize_with = "macs")]
    pub macs: Macs,
    /// Tokens that `macs` counts.
    pub tokens: usize,
    /// The files written, and links to files of the checkpoint.
    pub files: Vec<OutputFile>,
    /// How the written model compares with our own implementation.
    pub verification: Verification,
    /// How it compares with the user's own outputs, where there are any.
    pub reference: Option<Compared>,
    /// The whole export.
    #[serde(rename = "seconds", serialize_with = "seconds")]
    pub elapsed: Duration,
    /// The most memory that this process has had, in bytes; `None` where the system does not say.
    pub peak_memory: Option<u64>,
}

fn layers<S: Serializer>(layers: &[Layer], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(layers.iter().map(|layer| {
        serde_json::json!({
            "path": layer.path,
            "num_heads": layer.heads.num_heads,
            "kv_num_heads": layer.kv_num_heads,
            "head_dim": layer.head_dim,
            "num_shared_heads": layer.heads.num_shared_heads,
            "top_k": layer.heads.top_k,
        })
    }))
}

fn macs<S: Serializer>(macs: &Macs, to: S) -> Result<S::Ok, S::Error> {
    serde_json::json!({ "dense": macs.dense, "routed": macs.routed }).serialize(to)
}

fn prefix<S: Serializer>(prefix: &Option<Prefix>, to: S) -> Result<S::Ok, S::Error> {
    prefix.as_ref().map(ToString::to_string).serialize(to)
}

fn texts<S: Serializer>(warnings: &[Warning], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(warnings.iter().map(ToString::to_string))
}

fn seconds<S: Serializer>(elapsed: &Duration, to: S) -> Result<S::Ok, S::Error> {
    elapsed.as_secs_f64().serialize(to)
}

impl Report {
    pub(crate) fn new(
        checkpoint: &Checkpoint,
        model: &Model,
        dtype: ElementType,
        notes: Vec<String>,
        files: Vec<OutputFile>,
        (verification, reference): (Verification, Option<Compared>),
        elapsed: Duration,
    ) -> Result<Report, Error> {
        let workload = model.workload();
        Ok(Report {
            family: model.family().to_owned(),
            preset: checkpoint.preset().map(|preset| preset.name),
            weights_key: checkpoint.weights_key().map(str::to_owned),
            prefix: model.prefix().cloned(),
            ignored: model.ignored().to_vec(),
            defaults: model.defaults().to_vec(),
            warnings: model.warnings().to_vec(),
            layers: model.layers(),
            active_share: model.active_share(),
            parameters: model.parameters(),
            target: None,
            dtype,
            quantization: None,
            notes,
            macs: model.macs(&workload.sizes)?,
            tokens: workload.tokens,
            files,
            verification,
            reference,
            elapsed,
            peak_memory: peak_memory(),
        })
    }
}

/// The largest resident set of this process up to now, in bytes.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().strip_suffix(" kB")?;
    Some(kilobytes.trim().parse::<u64>().ok()? * 1024)
}

/// The first of many things in one line.
fn shortened(all: &[impl fmt::Display], what: &str) -> String {
    const SHOWN: usize = 6;
    let shown: Vec<String> = all.iter().take(SHOWN).map(|one| one.to_string()).collect();
    match all.len() {
        ..=SHOWN => shown.join(", "),
        count => format!("{}, and {} more {what}", shown.join(", "), count - SHOWN),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = |count: &dyn Fn(&Layer) -> usize| runs(&self.layers.iter().map(count).collect::<Vec<_>>());
        writeln!(f, "family        {}", self.family)?;
        if let Some(preset) = self.preset {
            writeln!(f, "preset        {preset}")?;
        }
        if let Some(key) = &self.weights_key {
            writeln!(f, "weights key   {}", key.escape_debug())?;
        }
        if let Some(prefix) = &self.prefix {
            writeln!(f, "name prefix   {prefix}")?;
        }
        if !self.ignored.is_empty() {
            writeln!(f, "ignored       {}", shortened(&self.ignored, "tensors"))?;
        }
        if !self.defaults.is_empty() {
            writeln!(f, "defaults      {}", shortened(&self.defaults, "keys"))?;
        }
        for warning in &self.warnings {
            writeln!(f, "warning       {warning}")?;
        }
        writeln!(f, "layers        {}", self.layers.len())?;
        writeln!(f, "heads         {}", heads(&|layer| layer.heads.num_heads))?;
        writeln!(f, "  shared      {}", heads(&|layer| layer.heads.num_shared_heads))?;
        writeln!(f, "  top-k       {}", heads(&|layer| layer.heads.top_k))?;
        writeln!(f, "active heads  {:.1} %", 100.0 * self.active_share)?;
        let rest = if self.quantization.is_some() { "those that are not quantised " } else { "" };
        writeln!(f, "parameters    {}, {rest}written as {}", short(self.parameters as f64), self.dtype)?;
        if let Some(quantization) = &self.quantization {
            writeln!(f, "quantised     {quantization}")?;
        }
        if let Some(chosen) = &self.target {
            writeln!(f, "target        {chosen}")?;
            writeln!(f, "memory        {}", chosen.memory)?;
        }
        for note in &self.notes {
            writeln!(f, "note          {note}")?;
        }
        let per_token = |macs: u64| short(macs as f64 / self.tokens.max(1) as f64);
        writeln!(
            f,
            "MACs/token    {} dense, {} routed ({:.1} % less, at {} tokens)",
            per_token(self.macs.dense),
            per_token(self.macs.routed),
            100.0 * self.macs.saved(),
            self.tokens
        )?;
        for file in &self.files {
            writeln!(f, "wrote         {} ({})", file.path.display(), bytes(file.bytes))?;
        }
        writeln!(f, "verified      {}", self.verification)?;
        if let Some(reference) = &self.reference {
            writeln!(f, "reference     {reference}")?;
        }
        write!(f, "time          {:.2} s", self.elapsed.as_secs_f64())?;
        match self.peak_memory {
            Some(peak) => write!(f, ", at most {} of memory", bytes(peak)),
            None => Ok(()),
        }
    }
}
