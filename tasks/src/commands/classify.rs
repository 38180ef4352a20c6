//! `moh-run classify`: images in, the most probable classes out.

use crate::args::ClassifyArgs;
use anyhow::Result;
use moh_tasks::classify::{Classifier, Prediction};
use moh_tasks::image::Picture;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};

pub(crate) fn run(args: &ClassifyArgs) -> Result<()> {
    let mut classifier = Classifier::new(super::load(&args.model, &args.runtime)?)?;
    let mut all = Vec::new();
    for paths in args.images.chunks(args.batch.get()) {
        let pictures = paths.iter().map(|path| Picture::open(path)).collect::<moh_tasks::Result<Vec<_>>>()?;
        let predictions = classifier.classify(&pictures, args.top.get())?;
        if args.json {
            all.extend(paths.iter().zip(&predictions).map(|(path, best)| object(path, best)));
        } else {
            print(paths, &predictions)?;
        }
    }
    if args.json {
        writeln!(std::io::stdout().lock(), "{:#}", Value::Array(all))?;
    }
    Ok(())
}

fn object(path: &Path, best: &[Prediction]) -> Value {
    let class = |prediction: &Prediction| {
        let Prediction { class, label, probability } = prediction;
        json!({ "class": class, "label": label, "probability": probability })
    };
    json!({ "image": path.to_string_lossy(), "classes": best.iter().map(class).collect::<Vec<Value>>() })
}

fn print(paths: &[PathBuf], predictions: &[Vec<Prediction>]) -> Result<()> {
    let mut output = std::io::stdout().lock();
    for (path, best) in paths.iter().zip(predictions) {
        writeln!(output, "{}", path.display())?;
        for Prediction { class, label, probability } in best {
            let label = label.as_ref().map(|label| format!("  {}", label.escape_debug())).unwrap_or_default();
            writeln!(output, "  {:6.2} %  {class:>4}{label}", 100.0 * probability)?;
        }
    }
    Ok(())
}
