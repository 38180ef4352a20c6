//! `moh-run classify`: images in, the most probable classes out.

use crate::args::ClassifyArgs;
use anyhow::{Result, bail};
use moh_tasks::classify::{Classifier, Origin, Prediction, Preprocessing};
use moh_tasks::image::{Adjustment, Picture};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;

/// An image's classes and what was done to it, or why it cannot be read.
type Outcome = Result<(Vec<Prediction>, Vec<Adjustment>), String>;

/// An image that cannot be read does not keep the others from being classified.
pub(crate) fn run(args: &ClassifyArgs) -> Result<()> {
    let mut classifier = Classifier::new(super::load(&args.model, &args.runtime)?)?;
    tell(args, classifier.preprocessing());
    let (mut all, mut failed) = (Vec::new(), Vec::new());
    for paths in args.images.chunks(args.batch) {
        let opened: Vec<_> = paths.iter().map(|path| Picture::open_told(path)).collect();
        let pictures: Vec<Picture> = opened.iter().flatten().map(|(picture, _)| picture.clone()).collect();
        let mut predictions = classifier.classify(&pictures, args.top)?.into_iter();
        for (path, opened) in paths.iter().zip(opened) {
            let outcome: Outcome = match opened {
                Ok((_, adjustments)) => Ok((predictions.next().unwrap_or_default(), adjustments)),
                Err(error) => Err(format!("{:#}", anyhow::Error::from(error))),
            };
            match args.json {
                true => all.push(object(path, &outcome)),
                false => print(path, &outcome, args.verbose)?,
            }
            failed.extend(outcome.err());
        }
    }
    if args.json {
        let (runtime, images) = (classifier.model().runtime_name(), Value::Array(all));
        let preprocessing = preprocessing(classifier.preprocessing());
        super::print_json(&json!({ "runtime": runtime, "preprocessing": preprocessing, "images": images }))?;
    }
    match (&failed[..], &args.images[..]) {
        ([], _) => Ok(()),
        ([error], [_]) => bail!("{error}"),
        (errors, images) => {
            bail!("{} of {} images cannot be read:\n  {}", errors.len(), images.len(), errors.join("\n  "))
        }
    }
}

/// How images are prepared, where it was asked for; a note where nothing but a default says it.
fn tell(args: &ClassifyArgs, preprocessing: &Preprocessing) {
    if args.verbose {
        inform!("preprocessing:\n{preprocessing}");
    } else if preprocessing.origins.mean == Origin::ImageNet && !args.runtime.quiet() {
        inform!(
            "note: images are prepared as for ImageNet, because no file beside the model says how (-v shows it); \
             if your model was trained otherwise, write a preprocessor_config.json"
        );
    }
}

fn preprocessing(used: &Preprocessing) -> Value {
    let Preprocessing { size, resize, filter, mean, std, origins } = used;
    // As it was written: 0.485, not the nearest f32's 0.48500001430511475.
    let short = |numbers: &[f32]| numbers.iter().filter_map(|x| x.to_string().parse().ok()).collect::<Vec<f64>>();
    json!({
        "size": size,
        "resize": { "value": resize.to_string(), "from": origins.resize.name() },
        "interpolation": { "value": filter.name(), "from": origins.filter.name() },
        "mean": { "value": short(mean), "from": origins.mean.name() },
        "std": { "value": short(std), "from": origins.std.name() },
    })
}

fn object(path: &Path, outcome: &Outcome) -> Value {
    let class = |prediction: &Prediction| {
        let Prediction { class, label, probability } = prediction;
        json!({ "class": class, "label": label, "probability": probability })
    };
    let image = path.to_string_lossy();
    match outcome {
        Ok((best, adjustments)) => {
            let adjustments: Vec<String> = adjustments.iter().map(ToString::to_string).collect();
            let classes: Vec<Value> = best.iter().map(class).collect();
            json!({ "image": image, "adjustments": adjustments, "classes": classes })
        }
        Err(error) => json!({ "image": image, "error": error }),
    }
}

/// What is to be said of an image that cannot be read is said in the end.
fn print(path: &Path, outcome: &Outcome, verbose: bool) -> Result<()> {
    let Ok((best, adjustments)) = outcome else { return Ok(()) };
    for adjustment in adjustments.iter().filter(|_| verbose) {
        inform!("{}: {adjustment}", path.display());
    }
    let mut output = std::io::stdout().lock();
    writeln!(output, "{}", path.display())?;
    for Prediction { class, label, probability } in best {
        let shown = |label: &String| label.chars().filter(|c| !c.is_control()).collect::<String>();
        let label = label.as_ref().map(|label| format!("  {}", shown(label))).unwrap_or_default();
        writeln!(output, "  {:6.2} %  {class:>4}{label}", 100.0 * probability)?;
    }
    Ok(())
}
