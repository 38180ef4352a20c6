//! The command line.

mod doctor;
mod measure;
mod number;
mod routes;
mod runtime;
mod serve;
mod translate;

pub(crate) use doctor::DoctorArgs;
pub(crate) use measure::{BenchArgs, BenchRuntime, ProfileArgs};
pub(crate) use routes::RoutesArgs;
pub(crate) use runtime::{LibraryArgs, RuntimeArgs};
pub(crate) use serve::ServeArgs;
pub(crate) use translate::TranslateArgs;

use clap::{Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use moh_tasks::diffusion::TRAINED_STEPS;
use number::{real, seed, whole};
use std::path::PathBuf;

/// Larger numbers of tokens are mistakes.
const MOST_TOKENS: usize = 1_000_000;
/// Larger batches do not fit into memory, with any model.
const MOST_BATCH: usize = 1024;

/// Runs exported MoH and MoA models.
#[derive(Debug, Parser)]
#[command(name = "moh-run", version = moh_runtime::short_version(), long_version = moh_runtime::long_version())]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Runs a model once on tensors from a file.
    Infer(InferArgs),
    /// Continues prompts with a language model.
    Generate(GenerateArgs),
    /// Translates with an encoder-decoder model.
    Translate(TranslateArgs),
    /// Classifies images.
    Classify(ClassifyArgs),
    /// Generates images with a class-conditional diffusion model.
    Sample(SampleArgs),
    /// Shows which heads each token uses.
    Routes(RoutesArgs),
    /// Shows how long each part of a model takes, and which kernels ran.
    Profile(ProfileArgs),
    /// Compares latency and throughput of the runtimes.
    Bench(BenchArgs),
    /// Serves models over HTTP: OpenAI's API for texts, the Open Inference Protocol (REST and gRPC) for tensors.
    Serve(ServeArgs),
    /// Shows what models would run with on this machine, and checks that it works.
    Doctor(DoctorArgs),
    /// Prints a shell completion script.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Writes this program's man pages.
    #[command(hide = true)]
    Man {
        /// The folder to write to.
        folder: PathBuf,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct InferArgs {
    /// The .onnx file, or the folder that holds model.onnx.
    pub(crate) model: PathBuf,
    /// A safetensors file with a tensor for every input of the model, under its name.
    #[arg(long, value_name = "FILE")]
    pub(crate) inputs: PathBuf,
    /// The safetensors file to write every output to.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Overwrite the output file.
    #[arg(long)]
    pub(crate) force: bool,
    /// Print the outputs' names, types and shapes as JSON.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) runtime: RuntimeArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct GenerateArgs {
    /// The .onnx file, or the folder that holds model.onnx; tokenizer.json and config.json are beside it.
    pub(crate) model: PathBuf,
    /// The text to continue; `-` reads it from standard input. Several prompts are continued together.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, required_unless_present = "interactive")]
    pub(crate) prompt: Vec<String>,
    /// Continue every line of standard input, each on its own.
    #[arg(long, conflicts_with = "prompt")]
    pub(crate) interactive: bool,
    /// The most tokens to generate.
    #[arg(long, value_name = "N", default_value = "128", allow_negative_numbers = true,
        value_parser = whole(1, MOST_TOKENS))]
    pub(crate) max_tokens: usize,
    /// Sampling temperature: below 1 favours probable tokens, above 1 flattens the distribution, 0 is greedy
    /// [default: 0, or 1 with --top-k or --top-p].
    #[arg(long, value_name = "T", allow_negative_numbers = true, value_parser = real(0.0, 1000.0))]
    pub(crate) temperature: Option<f64>,
    /// Sample from the K most probable tokens.
    #[arg(long, value_name = "K", allow_negative_numbers = true, value_parser = whole(1, MOST_TOKENS))]
    pub(crate) top_k: Option<usize>,
    /// Nucleus sampling: sample from the most probable tokens whose probabilities add up to P.
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = real(0.0, 1.0))]
    pub(crate) top_p: Option<f64>,
    /// Seed of the sampling; the same seed gives the same tokens [default: 0].
    #[arg(long, allow_negative_numbers = true, value_parser = seed)]
    pub(crate) seed: Option<u64>,
    /// Stop before this text; may be given several times.
    #[arg(long, value_name = "TEXT", conflicts_with = "ids", allow_hyphen_values = true,
        value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) stop: Vec<String>,
    /// Continue after an end-of-sequence token.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Read and print token ids instead of text; no tokenizer is needed.
    #[arg(long)]
    pub(crate) ids: bool,
    /// Print texts, tokens and times as JSON, at the end.
    #[arg(long, conflicts_with = "interactive")]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) runtime: RuntimeArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ClassifyArgs {
    /// The .onnx file, or the folder that holds model.onnx; preprocessing and class names come from config.json and
    /// preprocessor_config.json beside it.
    pub(crate) model: PathBuf,
    /// PNG, JPEG or WebP files.
    #[arg(required = true, value_name = "IMAGE")]
    pub(crate) images: Vec<PathBuf>,
    /// The number of classes to print.
    #[arg(long, value_name = "N", default_value = "5", allow_negative_numbers = true,
        value_parser = whole(1, 1_000_000))]
    pub(crate) top: usize,
    /// Batch size.
    #[arg(long, value_name = "N", default_value = "8", allow_negative_numbers = true,
        value_parser = whole(1, MOST_BATCH))]
    pub(crate) batch: usize,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Also tell how images are prepared, and what was done to each of them.
    #[arg(short, long, conflicts_with = "quiet")]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) runtime: RuntimeArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct SampleArgs {
    /// The .onnx file, or the folder that holds model.onnx; the number of classes comes from config.json beside it.
    pub(crate) model: PathBuf,
    /// Classes to generate: numbers and ranges, such as 3, 0,7 or 0-9.
    #[arg(long = "class", value_name = "CLASSES", allow_negative_numbers = true, value_parser = parse_classes,
        required = true)]
    pub(crate) classes: Classes,
    /// Images per class.
    #[arg(long, value_name = "N", default_value = "1", allow_negative_numbers = true,
        value_parser = whole(1, MOST_IMAGES))]
    pub(crate) count: usize,
    /// The PNG file to write; several images become a grid with one column per class.
    #[arg(short, long, value_name = "FILE", required_unless_present = "raw")]
    pub(crate) output: Option<PathBuf>,
    /// Write the raw samples to a safetensors file.
    #[arg(long, value_name = "FILE")]
    pub(crate) raw: Option<PathBuf>,
    /// Overwrite output files.
    #[arg(long)]
    pub(crate) force: bool,
    /// Denoising steps, at most 1000, the number that models are trained on.
    #[arg(long, value_name = "N", default_value = "50", allow_negative_numbers = true,
        value_parser = whole(1, TRAINED_STEPS))]
    pub(crate) steps: usize,
    /// Seed of the noise; the same seed gives the same images.
    #[arg(long, default_value = "0", allow_negative_numbers = true, value_parser = seed)]
    pub(crate) seed: u64,
    /// Sampler.
    #[arg(long, value_enum, default_value = "ddpm")]
    pub(crate) sampler: SamplerArg,
    /// DDIM's eta: 0 is deterministic, 1 adds as much noise as DDPM [default: 0].
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true, value_parser = real(0.0, 1.0))]
    pub(crate) eta: Option<f64>,
    /// Scale of classifier-free guidance; 1 turns it off and halves the time.
    #[arg(long, value_name = "FACTOR", default_value = "1", allow_negative_numbers = true,
        value_parser = real(-1000.0, 1000.0))]
    pub(crate) guidance: f64,
    /// Guide only the first N channels [default: 3, as the published models do, or all if there are fewer].
    #[arg(long, value_name = "N", requires = "guidance", allow_negative_numbers = true,
        value_parser = whole(0, 1024))]
    pub(crate) guidance_channels: Option<usize>,
    /// Clip each step's estimate of the image to -1..1 [default: on for pixels, off for latents].
    #[arg(long, value_enum)]
    pub(crate) clip: Option<Switch>,
    /// The VAE's decoder, an .onnx file, for models that generate latents.
    #[arg(long, value_name = "FILE", requires = "output")]
    pub(crate) vae: Option<PathBuf>,
    /// The VAE's scaling factor: latents are divided by it.
    #[arg(long, value_name = "FACTOR", default_value_t = moh_tasks::diffusion::SCALING_FACTOR, requires = "vae",
        allow_negative_numbers = true, value_parser = real(1e-6, 1e6))]
    pub(crate) vae_scaling_factor: f64,
    /// Enlarge every pixel to N x N.
    #[arg(long, value_name = "N", default_value = "1", requires = "output", allow_negative_numbers = true,
        value_parser = whole(1, 1024))]
    pub(crate) scale: usize,
    /// Batch size.
    #[arg(long, value_name = "N", default_value = "16", allow_negative_numbers = true,
        value_parser = whole(1, MOST_BATCH))]
    pub(crate) batch: usize,
    /// Print what was sampled, and the time, as JSON.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) runtime: RuntimeArgs,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum SamplerArg {
    /// Ancestral sampling, with the model's variance if it gives one.
    Ddpm,
    /// Deterministic with --eta 0; good with fewer steps.
    Ddim,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

/// The classes of `--class`, in the order that they were given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Classes(pub(crate) Vec<i64>);

/// More than any grid that can be looked at.
pub(crate) const MOST_IMAGES: usize = 10_000;

fn parse_classes(text: &str) -> Result<Classes, String> {
    let mut classes = Vec::new();
    for part in text.split(',') {
        let bad = |_| format!("{part:?} is not the number of a class, nor a range of them");
        let number = |text: &str| text.trim().parse::<u32>().map_err(bad);
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(part)?, number(part)?),
        };
        if first > last {
            return Err(format!("{part:?} is an empty range"));
        }
        classes.extend((first..=last).take(MOST_IMAGES + 1).map(i64::from));
        if classes.len() > MOST_IMAGES {
            return Err(format!("more than {MOST_IMAGES} classes"));
        }
    }
    Ok(Classes(classes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// Options of one name would read each other's values; clap sees it in debug builds only.
    #[test]
    fn no_two_options_have_a_name() {
        Args::command().debug_assert();
        let mut commands = vec![Args::command()];
        while let Some(command) = commands.pop() {
            let mut names: Vec<&str> = command.get_arguments().map(|argument| argument.get_id().as_str()).collect();
            assert!(!names.is_empty() || command.has_subcommands(), "{}", command.get_name());
            names.sort_unstable();
            let found = names.windows(2).find(|pair| pair[0] == pair[1]);
            assert_eq!(found, None, "{}", command.get_name());
            commands.extend(command.get_subcommands().cloned());
        }
    }

    #[test]
    fn classes_are_numbers_and_ranges() {
        assert_eq!(parse_classes("3"), Ok(Classes(vec![3])));
        assert_eq!(parse_classes("7,0-2, 1"), Ok(Classes(vec![7, 0, 1, 2, 1])));
        for bad in ["", "a", "1,", "-1", "3-1", "1-", "0-4000000000", "1.5"] {
            assert!(parse_classes(bad).is_err(), "{bad}");
        }
    }
}
