//! What an export says about itself.

use crate::error::Error;
use crate::graph::ElementType;
use crate::verify::Verification;
use moh_models::checkpoint::{DefaultValue, Prefix};
use moh_models::count::Macs;
use moh_models::families::Layer;
use moh_models::{Checkpoint, Model, Warning};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// A finished export.
#[derive(Debug)]
pub struct Report {
    /// The family.
    pub family: String,
    /// The preset that the configuration is of, if it is no file's.
    pub preset: Option<&'static str>,
    /// The key of the weights, where the checkpoint held more than them.
    pub weights_key: Option<String>,
    /// What was done to the names in the files to make them the model's.
    pub prefix: Option<Prefix>,
    /// Tensors that were ignored, as was asked for.
    pub ignored: Vec<String>,
    /// Defaults that stand in for absent keys of the configuration, those of heads and routing first.
    pub defaults: Vec<DefaultValue>,
    /// What is probably not as it was meant.
    pub warnings: Vec<Warning>,
    /// The attention layers.
    pub layers: Vec<Layer>,
    /// Mean share of the heads that a token uses.
    pub active_share: f64,
    /// Numbers in the checkpoint.
    pub parameters: usize,
    /// Element type of the file.
    pub dtype: ElementType,
    /// Why that type, where it is not the checkpoint's.
    pub note: Option<String>,
    /// Multiply-accumulates of one forward over `tokens` tokens.
    pub macs: Macs,
    /// Tokens that `macs` counts.
    pub tokens: usize,
    /// The files written and their lengths.
    pub files: Vec<(PathBuf, u64)>,
    /// How the written model was verified.
    pub verification: Verification,
    /// The whole export.
    pub elapsed: Duration,
}

impl Report {
    pub(crate) fn new(
        checkpoint: &Checkpoint,
        model: &Model,
        dtype: ElementType,
        note: Option<String>,
        files: Vec<PathBuf>,
        verification: Verification,
        elapsed: Duration,
    ) -> Result<Report, Error> {
        let workload = model.workload();
        let length = |path: &PathBuf| std::fs::metadata(path).map_or(0, |meta| meta.len());
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
            dtype,
            note,
            macs: model.macs(&workload.sizes)?,
            tokens: workload.tokens,
            files: files.into_iter().map(|path| (path.clone(), length(&path))).collect(),
            verification,
            elapsed,
        })
    }
}

/// A number with a unit prefix: 1.23 M.
pub(crate) fn short(n: f64) -> String {
    let (scale, unit) = match n {
        n if n >= 1e12 => (1e12, " T"),
        n if n >= 1e9 => (1e9, " G"),
        n if n >= 1e6 => (1e6, " M"),
        n if n >= 1e3 => (1e3, " k"),
        _ => (1.0, ""),
    };
    if unit.is_empty() { format!("{n}") } else { format!("{:.2}{unit}", n / scale) }
}

fn bytes(n: u64) -> String {
    let text = short(n as f64);
    if text.contains(' ') { format!("{text}B") } else { format!("{text} B") }
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

/// Equal neighbours as one: `8 x 4, 6 x 2`.
pub(crate) fn runs(counts: &[usize]) -> String {
    let mut groups: Vec<(usize, usize)> = Vec::new();
    for &count in counts {
        match groups.last_mut() {
            Some((value, times)) if *value == count => *times += 1,
            _ => groups.push((count, 1)),
        }
    }
    let text: Vec<String> =
        groups.iter().map(|(v, n)| if *n == 1 { v.to_string() } else { format!("{v} (x{n})") }).collect();
    text.join(", ")
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
        writeln!(f, "parameters    {}, written as {}", short(self.parameters as f64), self.dtype)?;
        if let Some(note) = &self.note {
            writeln!(f, "note          {note}")?;
        }
        let per_token = |macs: u64| short(macs as f64 / self.tokens.max(1) as f64);
        let saved = 100.0 * (1.0 - self.macs.routed as f64 / self.macs.dense.max(1) as f64);
        writeln!(
            f,
            "MACs/token    {} dense, {} routed ({saved:.1} % less, at {} tokens)",
            per_token(self.macs.dense),
            per_token(self.macs.routed),
            self.tokens
        )?;
        for (path, length) in &self.files {
            writeln!(f, "wrote         {} ({})", path.display(), bytes(*length))?;
        }
        writeln!(f, "verified      {}", self.verification)?;
        write!(f, "time          {:.2} s", self.elapsed.as_secs_f64())
    }
}
