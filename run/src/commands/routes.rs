//! `moh-run routes`: which heads the tokens of a text, or the patches of an image, use.

use super::text;
use crate::args::RoutesArgs;
use anyhow::{Context, Result, bail, ensure};
use moh_runtime::Model;
use moh_tasks::classify::Classifier;
use moh_tasks::diffusion::DiffusionModel;
use moh_tasks::generate::{GenerationConfig, LanguageModel, Prompts};
use moh_tasks::image::Picture;
use moh_tasks::routes::{LayerRoutes, Subject, check, layers, svg};
use moh_tasks::write_text;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;

/// Where a diffusion model is shown if nothing is said.
const TIMESTEP: usize = 500;

pub(crate) fn run(args: &RoutesArgs) -> Result<()> {
    if let Some(output) = &args.output {
        let is_svg = output.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("svg"));
        ensure!(is_svg, "{}: expected a name that ends in .svg, as an SVG picture is written", output.display());
        super::check_output([output], args.force)?;
    }
    let model = super::load(&args.model, &args.runtime)?;
    check(&model)?;
    let takes = |name: &str| model.inputs().iter().any(|input| input.name == name);
    let name = model.metadata().get(moh_runtime::names::FAMILY).cloned().unwrap_or_else(|| "model".to_owned());
    let is_diffusion = takes("timestep");
    for (option, is_given) in [("--timestep", args.timestep.is_some()), ("--seed", args.seed.is_some())] {
        ensure!(
            is_diffusion || !is_given,
            "{option} is for diffusion models: leave it out for {}",
            args.model.display()
        );
    }
    let (subject, about, layers) = match () {
        () if takes("pixel_values") => of_image(model, args)?,
        () if is_diffusion => of_sample(model, args)?,
        () => of_text(model, args)?,
    };
    ensure!(!layers.is_empty(), "{}: it has no attention layers", args.model.display());
    if let Some(output) = &args.output {
        write_text(output, &svg(&format!("{name}: {about}"), &layers, &subject), args.force)?;
    }
    if args.json {
        super::print_json(&object(&about, &layers, &subject))?;
    } else if args.output.is_none() {
        std::io::stdout().lock().write_all(table(&layers).as_bytes())?;
    }
    Ok(())
}

type Routed = (Subject, String, Vec<LayerRoutes>);

fn of_image(model: Model, args: &RoutesArgs) -> Result<Routed> {
    let mut classifier = Classifier::new(model)?;
    let picture = Picture::open(Path::new(&args.input))?;
    let outputs = classifier.outputs(std::slice::from_ref(&picture))?;
    let seen = classifier.preprocessing().seen(&picture).png()?;
    let name = Path::new(&args.input).file_name().map_or(args.input.clone(), |name| name.to_string_lossy().into());
    Ok((Subject::Image(Some(seen)), name, layers(classifier.model(), &outputs)?))
}

fn of_sample(model: Model, args: &RoutesArgs) -> Result<Routed> {
    let mut model = DiffusionModel::new(model)?;
    let class: i64 = args.input.parse().ok().with_context(|| {
        format!("{:?}: expected the number of a class, as this model draws images of classes", args.input)
    })?;
    let seed = args.seed.unwrap_or(0);
    let (timestep, outputs) = model.outputs_at(class, args.timestep.unwrap_or(TIMESTEP), seed)?;
    let about = format!("class {class} at timestep {timestep}, seed {seed}");
    Ok((Subject::Image(None), about, layers(model.model(), &outputs)?))
}

fn of_text(model: Model, args: &RoutesArgs) -> Result<Routed> {
    let mut model = LanguageModel::new(model)?;
    let folder = model.model().files_folder().to_owned();
    let tokenizer = text::load_tokenizer(&folder, model.vocabulary())?;
    let config = GenerationConfig::from_folder(&folder)?;
    let [prompt] = &text::prompts(std::slice::from_ref(&args.input))?[..] else { bail!("expected one text") };
    let ids = text::encode(&tokenizer, prompt, &config)?;
    if let Some(longest) = config.max_length.filter(|&longest| ids.len() > longest) {
        bail!("the text has {} tokens, the model's longest sequence is {longest}", ids.len());
    }
    let prompts = Prompts::new(&[ids.iter().map(|&id| i64::from(id)).collect()], 0)?;
    let outputs = model.outputs(&prompts)?;
    let piece = |&id: &u32| match tokenizer.decode(&[id], false) {
        Ok(piece) if !piece.is_empty() => piece,
        _ => tokenizer.token(id).unwrap_or_else(|| id.to_string()),
    };
    let tokens: Vec<String> = ids.iter().map(piece).collect();
    let about = format!("a text of {} tokens", tokens.len());
    Ok((Subject::Text(tokens), about, layers(model.model(), &outputs)?))
}

fn table(layers: &[LayerRoutes]) -> String {
    let width = layers.iter().map(|layer| layer.path.len()).max().unwrap_or(0).max("layer".len());
    let mut text = format!("{:width$}  in use  imbalance  share of the tokens that use each head, %\n", "layer");
    for layer in layers {
        let shares: Vec<String> =
            (0..layer.heads()).map(|head| format!("{:>3.0}", 100.0 * layer.share(head))).collect();
        let uneven = layer.imbalance().map_or("-".to_owned(), |imbalance| format!("{imbalance:.2}"));
        let active = 100.0 * layer.active();
        text += &format!("{:width$}  {active:>4.0} %  {uneven:>9}  {}\n", layer.path, shares.join(" "));
    }
    text
}

fn object(about: &str, layers: &[LayerRoutes], subject: &Subject) -> Value {
    let layer = |layer: &LayerRoutes| {
        let heads = 0..layer.heads();
        let used = |token| heads.clone().filter(|&head| layer.uses(token, head)).collect::<Vec<usize>>();
        json!({
            "path": layer.path,
            "num_heads": layer.heads(),
            "shared_heads": layer.shared(),
            "share": heads.clone().map(|head| layer.share(head)).collect::<Vec<f64>>(),
            "active": layer.active(),
            "imbalance": layer.imbalance(),
            "heads_of_tokens": (0..layer.tokens()).map(used).collect::<Vec<Vec<usize>>>(),
        })
    };
    let tokens = if let Subject::Text(tokens) = subject { Some(tokens) } else { None };
    json!({ "input": about, "tokens": tokens, "layers": layers.iter().map(layer).collect::<Vec<Value>>() })
}
