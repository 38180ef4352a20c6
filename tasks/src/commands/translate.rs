//! `moh-run translate`: texts in, their translations out.

use super::text;
use crate::args::TranslateArgs;
use anyhow::{Context, Result, anyhow, bail, ensure};
use moh_tasks::translate::{BeamOptions, Hypothesis, TranslationConfig, TranslationModel};
use serde_json::json;
use std::io::{BufRead, Read, Write};
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

pub(crate) fn run(args: &TranslateArgs) -> Result<()> {
    let [encoder, decoder] = paths(&args.model)?;
    let encoder = super::load(&encoder, &args.runtime)?;
    let mut model = TranslationModel::new(encoder, super::load(&decoder, &args.runtime)?)?;
    let folder = model.decoder().path().parent().unwrap_or(Path::new("")).to_owned();
    let config = TranslationConfig::from_folder(&folder)?;
    let tokenizer = match args.ids {
        true => None,
        false => Some(text::load_tokenizer(&folder, model.vocabulary())?),
    };
    let options = BeamOptions {
        beams: args.beams.get(),
        length_penalty: args.length_penalty,
        max_tokens: args.max_tokens.get(),
        start: config.start,
        end: config.end,
        padding: Some(config.padding),
    };
    let mut translate = |line: &str| {
        let source = tokens(line, tokenizer.as_ref(), &config, model.vocabulary())?;
        let found = model.translate(&source, &options)?;
        show(args, &found, tokenizer.as_ref(), &options)
    };
    for line in &args.text {
        translate(line)?;
    }
    if args.text.is_empty() {
        let mut input = std::io::stdin().lock();
        loop {
            let mut line = Vec::new();
            let read = input.by_ref().take(text::LONGEST).read_until(b'\n', &mut line);
            if read.context("cannot read standard input")? == 0 {
                break;
            }
            let line = String::from_utf8(line).context("standard input: expected text in UTF-8")?;
            translate(line.trim_end_matches(['\r', '\n']))?;
        }
    }
    Ok(())
}

/// The encoder and the decoder that the arguments mean.
fn paths(given: &[PathBuf]) -> Result<[PathBuf; 2]> {
    match given {
        [encoder, decoder] => Ok([encoder.clone(), decoder.clone()]),
        [folder] if folder.is_dir() => Ok(["encoder.onnx", "decoder.onnx"].map(|name| folder.join(name))),
        _ => bail!(
            "{}: expected a folder with encoder.onnx and decoder.onnx, or two models: the encoder and the decoder",
            given.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" ")
        ),
    }
}

/// A source's tokens, the one that ends it included.
fn tokens(
    line: &str,
    tokenizer: Option<&Tokenizer>,
    config: &TranslationConfig,
    vocabulary: Option<usize>,
) -> Result<Vec<i64>> {
    let mut ids: Vec<i64> = match tokenizer {
        Some(tokenizer) => {
            let encoding = tokenizer.encode(line, true).map_err(|e| anyhow!(e)).context("cannot tokenize the text")?;
            encoding.get_ids().iter().map(|&id| i64::from(id)).collect()
        }
        None => {
            let number = |word: &str| word.parse().with_context(|| format!("{word:?} is not the number of a token"));
            line.split_whitespace().map(number).collect::<Result<_>>()?
        }
    };
    if let Some(id) = ids.iter().find(|&&id| id < 0 || vocabulary.is_some_and(|n| id >= n as i64)) {
        bail!("token {id}: the model knows {}", vocabulary.unwrap_or(0));
    }
    if ids.last() != Some(&config.end) {
        ids.push(config.end);
    }
    let longest = config.max_source.unwrap_or(usize::MAX);
    ensure!(ids.len() <= longest, "the text has {} tokens, the model's longest source is {longest}", ids.len());
    Ok(ids)
}

fn show(
    args: &TranslateArgs,
    found: &[Hypothesis],
    tokenizer: Option<&Tokenizer>,
    options: &BeamOptions,
) -> Result<()> {
    let text = |hypothesis: &Hypothesis| {
        let ids = hypothesis.tokens.iter().copied().filter(|&id| id != options.end);
        match tokenizer {
            Some(tokenizer) => {
                let ids: Vec<u32> = ids.filter_map(|id| u32::try_from(id).ok()).collect();
                tokenizer.decode(&ids, true).map_err(|e| anyhow!(e)).context("cannot decode the translation")
            }
            None => Ok(ids.map(|id| id.to_string()).collect::<Vec<_>>().join(" ")),
        }
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        let object = |hypothesis: &Hypothesis| -> Result<serde_json::Value> {
            let Hypothesis { tokens, score } = hypothesis;
            Ok(json!({ "text": text(hypothesis)?, "tokens": tokens, "score": score }))
        };
        writeln!(out, "{}", serde_json::Value::Array(found.iter().map(object).collect::<Result<_>>()?))?;
    } else {
        writeln!(out, "{}", found.first().map(text).transpose()?.unwrap_or_default())?;
    }
    out.flush()?;
    Ok(())
}
