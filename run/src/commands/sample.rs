//! `moh-run sample`: classes in, images out.

mod grid;
mod progress;

use crate::args::{MOST_IMAGES, RuntimeArgs, SampleArgs, SamplerArg, Switch};
use anyhow::{Context, Result, bail, ensure};
use moh_runtime::{Model, Tensor};
use moh_tasks::diffusion::{Decoder, DiffusionModel, SampleOptions, Sampler, pictures};
use moh_tasks::write_tensors;
use serde_json::json;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Pixels of the largest picture that is written: 3 bytes each, and once more while it is compressed.
const MOST_PIXELS: usize = 1 << 28;
/// Pixels that the published VAE makes of a side of its latents' each.
const VAE_FACTOR: usize = 8;

pub(crate) fn run(args: &SampleArgs) -> Result<()> {
    let is_ddim = matches!(args.sampler, SamplerArg::Ddim);
    ensure!(is_ddim || args.eta.is_none(), "--eta is a parameter of DDIM: add --sampler ddim");
    check_outputs(args)?;
    let mut model = DiffusionModel::new(super::load(&args.model, &args.runtime)?)?;
    let mut decoder = args.vae.as_deref().map(|path| load_decoder(path, &args.runtime)).transpose()?;
    check_channels(args, &model, decoder.as_ref())?;
    check_size(args, &model, decoder.as_ref())?;
    let options = options(args, model.channels());
    // A row of the grid has one image of every class.
    let labels: Vec<i64> = args.classes.0.iter().copied().cycle().take(args.classes.0.len() * args.count).collect();

    let began = Instant::now();
    let samples = draw(args, &mut model, &labels, &options)?;
    let seconds = began.elapsed().as_secs_f64();
    if let Some(path) = &args.raw {
        let labels = Tensor::new([labels.len()], labels.clone())?;
        write_tensors(
            path,
            &[("samples".to_owned(), samples.clone()), ("class_labels".to_owned(), labels)],
            args.force,
        )?;
    }
    if let Some(path) = &args.output {
        let drawn = match &mut decoder {
            Some(decoder) => decoder.decode(&samples, args.vae_scaling_factor)?,
            None => pictures(&samples)?,
        };
        let columns = columns(args.classes.0.len(), args.count);
        grid::grid(&drawn, columns, args.scale)?.write_png(path, args.force)?;
    }
    if args.json {
        let file = |path: &Option<PathBuf>| path.as_ref().map(|path| path.to_string_lossy().into_owned());
        super::print_json(&json!({
            "runtime": model.model().runtime_name(),
            "classes": labels,
            "steps": options.steps,
            "seed": options.seed,
            "guidance": options.guidance,
            "seconds": seconds,
            "image": file(&args.output),
            "raw": file(&args.raw),
        }))?;
    } else if !args.runtime.quiet() {
        let (images, steps) = (labels.len(), options.steps);
        inform!("runtime {}", model.model().runtime_name());
        inform!(
            "sampled {images} {} in {seconds:.3} s, {:.1} ms a step and image",
            if images == 1 { "image" } else { "images" },
            1e3 * seconds / (images * steps) as f64
        );
    }
    Ok(())
}

fn check_outputs(args: &SampleArgs) -> Result<()> {
    let images = args.classes.0.len() * args.count;
    ensure!(images <= MOST_IMAGES, "{images} images were asked for: expected at most {MOST_IMAGES}");
    super::check_output(args.output.iter().chain(&args.raw), args.force)?;
    if let (Some(output), Some(raw)) = (&args.output, &args.raw) {
        let is_same = std::path::absolute(output)? == std::path::absolute(raw)?;
        ensure!(!is_same, "{}: expected another file for --raw than for -o", raw.display());
    }
    match &args.output {
        Some(path) if path.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("png")) => {
            bail!("{}: expected a name that ends in .png", path.display())
        }
        _ => Ok(()),
    }
}

fn load_decoder(path: &Path, runtime: &RuntimeArgs) -> Result<Decoder> {
    // How it runs has been told of the model already.
    let model = Model::load(path, &runtime.options()?).context("the VAE's decoder")?;
    Ok(Decoder::new(model)?)
}

/// Whether the grid of images fits into memory: the VAE's part in its size is known by its published factor only.
fn check_size(args: &SampleArgs, model: &DiffusionModel, decoder: Option<&Decoder>) -> Result<()> {
    if args.output.is_none() {
        return Ok(());
    }
    let columns = columns(args.classes.0.len(), args.count);
    let rows = (args.classes.0.len() * args.count).div_ceil(columns);
    let side = model.size() * args.scale * decoder.map_or(1, |_| VAE_FACTOR);
    let (width, height) = (grid::side(columns, side), grid::side(rows, side));
    let fits = width.checked_mul(height).is_some_and(|pixels| pixels <= MOST_PIXELS);
    ensure!(
        fits,
        "a picture of {width} x {height} pixels was asked for: expected at most {MOST_PIXELS} pixels; \
         lower --scale or --count"
    );
    Ok(())
}

/// Whether what the model makes can become an image.
fn check_channels(args: &SampleArgs, model: &DiffusionModel, decoder: Option<&Decoder>) -> Result<()> {
    let (channels, path) = (model.channels(), model.model().path().display());
    match decoder {
        Some(decoder) if decoder.channels() != channels => {
            let decoder_path = decoder.model().path().display();
            bail!("{path} makes latents of {channels} channels, {decoder_path} decodes {}", decoder.channels())
        }
        None if args.output.is_some() && !matches!(channels, 1 | 3) => bail!(
            "{path} makes latents of {channels} channels, not pixels: name the VAE's decoder with --vae decoder.onnx, \
             or write the latents with --raw in place of -o"
        ),
        _ => Ok(()),
    }
}

fn options(args: &SampleArgs, channels: usize) -> SampleOptions {
    let pixels = args.vae.is_none() && matches!(channels, 1 | 3);
    SampleOptions {
        steps: args.steps,
        sampler: match args.sampler {
            SamplerArg::Ddpm => Sampler::Ddpm,
            SamplerArg::Ddim => Sampler::Ddim { eta: args.eta.unwrap_or(0.0) },
        },
        guidance: args.guidance,
        guidance_channels: args.guidance_channels,
        clip: args.clip.map_or(pixels, |clip| clip == Switch::On),
        seed: args.seed,
    }
}

/// One sample a label: (labels, channels, size, size).
fn draw(args: &SampleArgs, model: &mut DiffusionModel, labels: &[i64], options: &SampleOptions) -> Result<Tensor> {
    let batches = labels.chunks(args.batch);
    let progress = progress::bar(batches.len() * options.steps, args.runtime.quiet());
    let mut numbers = Vec::new();
    let mut first = 0;
    for (i, batch) in batches.enumerate() {
        let samples = model.sample(batch, first, options, |done| {
            progress.set_position((i * options.steps + done) as u64);
            ControlFlow::Continue(())
        })?;
        numbers.extend_from_slice(samples.as_slice::<f32>().unwrap_or_default());
        first += batch.len() as u64;
    }
    Ok(Tensor::new([labels.len(), model.channels(), model.size(), model.size()], numbers)?)
}

/// A column a class; the images of one class as near to a square as can be.
fn columns(classes: usize, count: usize) -> usize {
    match classes {
        1 => (1..=count).find(|columns| columns * columns >= count).unwrap_or(count),
        _ => classes,
    }
}
