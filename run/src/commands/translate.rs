//! `moh-run translate`: texts in, their translations out.

use super::text;
use crate::args::TranslateArgs;
use anyhow::{Context, Result, anyhow, bail, ensure};
use moh_tasks::text::Tokenizer;
use moh_tasks::translate::{BeamOptions, Hypothesis, TranslationConfig, TranslationModel};
use serde_json::{Value, json};
use std::io::{BufRead, Read, Write};
use std::path::PathBuf;

pub(crate) fn run(args: &TranslateArgs) -> Result<()> {
    let [encoder, decoder] = paths(&args.model)?;
    let encoder = super::load(&encoder, &args.runtime)?;
    let mut model = TranslationModel::new(encoder, super::load(&decoder, &args.runtime)?)?;
    let folder = model.decoder().files_folder().to_owned();
    let config = TranslationConfig::from_folder(&folder)?;
    let tokenizer = match args.ids {
        true => None,
        false => Some(text::load_tokenizer(&folder, model.vocabulary())?),
    };
    let max_tokens = args.max_tokens.min(config.max_target.unwrap_or(usize::MAX));
    if max_tokens < args.max_tokens && !args.runtime.quiet() {
        inform!("note: at most {max_tokens} tokens, because the model's longest translation has no more");
    }
    let options = BeamOptions {
        beams: args.beams,
        length_penalty: args.length_penalty,
        max_tokens,
        start: config.start,
        end: config.end,
        padding: Some(config.padding),
    };
    let mut translated = Vec::new();
    let mut translate = |line: &str| {
        let source = tokens(line, tokenizer.as_ref(), &config, model.vocabulary())?;
        let found = model.translate(&source, &options)?;
        let texts = texts(&found, tokenizer.as_ref(), &options)?;
        if args.json {
            translated.push(object(line, &found, &texts));
            return Ok(());
        }
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", texts.first().map_or("", String::as_str))?;
        Ok::<_, anyhow::Error>(out.flush()?)
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
    if args.json {
        super::print_json(&Value::Array(translated))?;
    }
    Ok(())
}

/// The encoder and the decoder that the arguments mean.
fn paths(given: &[PathBuf]) -> Result<[PathBuf; 2]> {
    match given {
        [encoder, decoder] => Ok([encoder.clone(), decoder.clone()]),
        [folder] if folder.is_dir() => {
            let parts = ["encoder.onnx", "decoder.onnx"].map(|name| folder.join(name));
            if let Some(missing) = parts.iter().find(|part| !part.exists()) {
                bail!(
                    "{}: model not found: a translation model is exported in two parts, with `moh-export --part encoder` \
                     and `--part decoder`",
                    missing.display()
                );
            }
            Ok(parts)
        }
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
            let ids = tokenizer.encode(line, true).map_err(|e| anyhow!(e)).context("cannot tokenize the text")?;
            ids.into_iter().map(i64::from).collect()
        }
        None => text::token_ids(line)?,
    };
    text::check_ids(&ids, vocabulary)?;
    if ids.last() != Some(&config.end) {
        ids.push(config.end);
    }
    let longest = config.max_source.unwrap_or(usize::MAX);
    ensure!(ids.len() <= longest, "the text has {} tokens, the model's longest source is {longest}", ids.len());
    Ok(ids)
}

/// The hypotheses' texts, or their tokens' numbers where there is no tokenizer.
fn texts(found: &[Hypothesis], tokenizer: Option<&Tokenizer>, options: &BeamOptions) -> Result<Vec<String>> {
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
    found.iter().map(text).collect()
}

fn object(source: &str, found: &[Hypothesis], texts: &[String]) -> Value {
    let hypothesis = |(found, text): (&Hypothesis, &String)| {
        let Hypothesis { tokens, score } = found;
        json!({ "text": text, "tokens": tokens, "score": score })
    };
    json!({ "source": source, "hypotheses": found.iter().zip(texts).map(hypothesis).collect::<Vec<Value>>() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_source_ends_once() {
        let config = TranslationConfig { start: 2, end: 2, padding: 1, max_source: Some(3), max_target: None };
        let read = |line| tokens(line, None, &config, Some(9)).map_err(|e| e.to_string());
        assert_eq!(read("5 4"), Ok(vec![5, 4, 2]));
        assert_eq!(read("5 4 2"), Ok(vec![5, 4, 2]));
        assert!(read("5 4 3").unwrap_err().contains("4 tokens, the model's longest source is 3"));
    }
}
