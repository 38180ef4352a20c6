//! A language model against a dense one of the same shape in onnxruntime's own int4 operators, against tract, and what memory and loading
//! take.

mod cold;
mod onnxruntime;
mod peer;
mod routing;
mod shape;
mod step;
mod tract;

use crate::machine;
use crate::measure::{Settings, Table, Times, alternate};
use anyhow::{Context, Result, bail};
pub(crate) use cold::child;
use onnxruntime::OnnxRuntime;
use serde_json::Value as Json;
use shape::Shape;
use std::path::{Path, PathBuf};
use step::{Decoder, Step};
use tract::Tract;

const STEPS: [(&str, Step); 4] = [
    ("decode after 128", Step { past: 128, tokens: 1 }),
    ("decode after 1024", Step { past: 1024, tokens: 1 }),
    ("decode after 4096", Step { past: 4096, tokens: 1 }),
    ("prefill 512", Step { past: 0, tokens: 512 }),
];

/// Tokens that a cache in place has room for.
const CAPACITY: usize = 4096 + 64;

const COLUMNS: [&str; 9] = [
    "step",
    "heads",
    "threads",
    "library ms",
    "of bandwidth",
    "dense, level 4 ms",
    "dense, level 0 ms",
    "tract ms",
    "library to level 4 / level 0; tract to library",
];

/// What the command line says of this section.
#[derive(Default)]
pub(crate) struct Paths {
    /// The exported model.
    pub(crate) model: Option<PathBuf>,
    /// Where the dense models are written, and found again.
    pub(crate) folder: Option<PathBuf>,
}

/// Who runs which file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Library,
    /// onnxruntime alone.
    Dense,
    Tract,
}

impl Who {
    const ALL: [(Who, &'static str); 3] = [(Who::Library, "library"), (Who::Dense, "dense"), (Who::Tract, "tract")];

    fn name(self) -> &'static str {
        Who::ALL.iter().find(|(who, _)| *who == self).map_or("", |(_, name)| name)
    }

    fn named(name: &str) -> Result<Who> {
        Who::ALL.iter().find(|(_, known)| *known == name).map(|(who, _)| *who).with_context(|| name.to_owned())
    }

    fn load(self, path: &Path, threads: usize) -> Result<Box<dyn Decoder>> {
        let library = || std::env::var("MOH_OPS_LIBRARY").context("MOH_OPS_LIBRARY names no libmoh_ops");
        Ok(match self {
            Who::Library => Box::new(OnnxRuntime::load(path, Some(&library()?), threads, CAPACITY)?),
            Who::Dense => Box::new(OnnxRuntime::load(path, None, threads, CAPACITY)?),
            Who::Tract => Box::new(Tract::load(path, threads, CAPACITY)?),
        })
    }
}

pub(crate) fn run(settings: &Settings, paths: &Paths, tables: &mut Vec<Json>) -> Result<()> {
    let Some(model) = &paths.model else { bail!("llm needs --model MODEL.onnx") };
    let shape = Shape::of(model)?;
    let folder = paths.folder.clone().unwrap_or_else(|| PathBuf::from("target/bench/llm"));
    let peers = [4, 0].map(|level| peer::write(&shape, level, &folder));
    let [level_4, level_0] = peers;
    let rivals = [(Who::Dense, level_4?), (Who::Dense, level_0?)];
    let weights = routing::bytes(model)?;
    println!(
        "{} layers of width {}; read for a token: {:.2} GB of weights, dense {:.2} GB; cache of 4096 tokens {:.2} GB.\n",
        shape.layers,
        shape.hidden,
        weights as f64 / 1e9,
        routing::bytes(&rivals[0].1)? as f64 / 1e9,
        (2 * shape.layers * shape.kv_heads * shape.head_dim * 4096 * 4) as f64 / 1e9,
    );
    let all_heads = routing::with_all_heads(model)?;
    let mut variants = vec![(routing::heads_used(model)?, model.clone())];
    if let Some(all) = &all_heads {
        variants.insert(0, ("all".to_owned(), all.path().to_owned()));
    }
    {
        let mut table = Table::new("A language model, batch 1", &COLUMNS, tables);
        for &threads in &settings.threads {
            for (heads, path) in &variants {
                rows(settings, (heads, path), &rivals, weights, threads, &mut table)?;
            }
        }
    }
    cold::run(settings, model, &rivals, tables)
}

/// Rows of one model with these threads; two models at a time, because more of a large one would not fit the memory.
fn rows(
    settings: &Settings,
    (heads, path): (&str, &Path),
    dense: &[(Who, PathBuf); 2],
    weights: u64,
    threads: usize,
    table: &mut Table<'_>,
) -> Result<()> {
    let wanted: Vec<(&str, Step)> = STEPS.into_iter().filter(|(name, _)| settings.wants(name)).collect();
    let tract = (Who::Tract, path.to_owned());
    // Of each rival, for each step: our times and the rival's.
    let mut found: Vec<Vec<[Times; 2]>> = Vec::new();
    // Other work on the machine lowers it: the best of several moments.
    let mut bandwidth = machine::bandwidth(threads);
    for (who, rival) in dense.iter().chain([&tract]) {
        let mut both = vec![Who::Library.load(path, threads)?, who.load(rival, threads)?];
        let mut times = Vec::new();
        for (_, step) in &wanted {
            both.iter_mut().try_for_each(|model| model.prepare(*step))?;
            let pair = alternate(&mut both, settings.time)?;
            times.push([pair[0], pair[1]]);
        }
        found.push(times);
        drop(both);
        bandwidth = bandwidth.max(machine::bandwidth(threads));
    }
    for (i, (name, step)) in wanted.iter().enumerate() {
        let pairs: Vec<[Times; 2]> = found.iter().map(|times| times[i]).collect();
        let ours = pairs.iter().map(|[ours, _]| *ours).min_by(|a, b| a.min.total_cmp(&b.min)).context("no run")?;
        let ratio = |pair: &[Times; 2]| pair[0].min / pair[1].min;
        let read = weights as f64 / ours.min / 1e9;
        table.row(&[
            (*name).to_owned(),
            heads.to_owned(),
            threads.to_string(),
            ours.cell(),
            if step.tokens == 1 { format!("{:.0} %", 100.0 * read / bandwidth) } else { "-".to_owned() },
            pairs[0][1].cell(),
            pairs[1][1].cell(),
            pairs[2][1].cell(),
            format!("{:.2} / {:.2}; {:.2}", ratio(&pairs[0]), ratio(&pairs[1]), 1.0 / ratio(&pairs[2])),
        ]);
    }
    Ok(())
}
