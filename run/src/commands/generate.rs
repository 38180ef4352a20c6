//! `moh-run generate`: prompts in, their continuations out, as they come.

mod printer;

use super::text::{self, LONGEST};
use crate::args::GenerateArgs;
use anyhow::{Context, Result, bail};
use moh_tasks::generate::{GenerateOptions, Generated, GenerationConfig, LanguageModel, Prompts, Sampling};
use moh_tasks::text::Tokenizer;
use printer::Printer;
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal, Read, Write};
use std::ops::ControlFlow;
use std::time::Duration;

pub(crate) fn run(args: &GenerateArgs) -> Result<()> {
    let model = LanguageModel::new(super::load(&args.model, &args.runtime)?)?;
    let folder = model.model().files_folder().to_owned();
    let tokenizer = match args.ids {
        true => None,
        false => Some(text::load_tokenizer(&folder, model.vocabulary())?),
    };
    let config = GenerationConfig::from_folder(&folder)?;
    let mut session = Session { args, model, tokenizer, config };
    if sampling(args).is_none() && !args.runtime.quiet() {
        let given =
            [("--seed", args.seed.is_some()), ("--top-k", args.top_k.is_some()), ("--top-p", args.top_p.is_some())];
        for (option, _) in given.iter().filter(|(_, is_given)| *is_given) {
            inform!(
                "note: {option} changes nothing, because the most probable token is taken each time: --temperature 1 samples"
            );
        }
    }
    if args.interactive {
        return session.interact();
    }
    session.continue_all(&text::prompts(&args.prompt)?)
}

struct Session<'a> {
    args: &'a GenerateArgs,
    model: LanguageModel,
    /// Without one, prompts and continuations are numbers of tokens.
    tokenizer: Option<Tokenizer>,
    config: GenerationConfig,
}

impl Session<'_> {
    /// A continuation of every line of standard input; a line that cannot be continued is told, and the next one read.
    fn interact(&mut self) -> Result<()> {
        let stdin = std::io::stdin();
        loop {
            if stdin.is_terminal() {
                write("> ")?;
            }
            let mut line = Vec::new();
            if stdin.lock().take(LONGEST).read_until(b'\n', &mut line).context("cannot read standard input")? == 0 {
                return Ok(());
            }
            let line = String::from_utf8(line).context("standard input: expected text in UTF-8")?;
            let line = line.trim_end_matches(['\r', '\n']);
            if line.is_empty() {
                continue;
            }
            match self.continue_all(&[line.to_owned()]) {
                Err(error) if error.downcast_ref::<std::io::Error>().is_none() => inform!("error: {error:#}"),
                result => result?,
            }
        }
    }

    /// Continues the prompts as one batch: one as its text comes, several one after the other at the end.
    fn continue_all(&mut self, texts: &[String]) -> Result<()> {
        let args = self.args;
        let prompts = texts.iter().map(|text| self.tokens(text)).collect::<Result<Vec<Vec<i64>>>>()?;
        let max_tokens = room(&prompts, args, &self.config)?;
        let stop = if args.ignore_eos { &[][..] } else { &self.config.end };
        let options = GenerateOptions { max_tokens, stop, sampling: sampling(args), keep_logits: false, part: None };
        let printer = |prompt: &Vec<i64>| Printer::new(self.tokenizer.as_ref(), prompt, stop, &args.stop);
        let mut printers = prompts.iter().map(printer).collect::<Result<Vec<Printer<'_>>>>()?;
        let mut output = Output { shown: vec![String::new(); texts.len()], at_once: texts.len() == 1 && !args.json };
        let mut printed = Ok(());
        // A text that has ended goes on in the batch until all have.
        let mut lengths = vec![0; texts.len()];
        let mut generated = self.model.generate(&Prompts::new(&prompts, 0)?, &options, |step| {
            printed = step.iter().enumerate().try_for_each(|(row, token)| match token {
                Some(token) => {
                    lengths[row] += usize::from(!printers[row].ended());
                    output.add(row, &printers[row].push(*token)?)
                }
                None => Ok(()),
            });
            let go_on = printed.is_ok() && !printers.iter().all(Printer::ended);
            if go_on { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        printed?;
        for (tokens, length) in generated.tokens.iter_mut().zip(lengths) {
            tokens.truncate(length);
        }
        for (row, printer) in printers.iter_mut().enumerate() {
            output.add(row, &printer.finish()?)?;
        }
        let (runtime, read) = (self.model.model().runtime_name(), prompts.iter().map(Vec::len).sum());
        if args.json {
            let rows = texts.iter().zip(&prompts).zip(output.shown.iter().zip(&generated.tokens));
            let rows = rows.map(|((text, prompt), (shown, tokens))| {
                json!({ "prompt": text, "prompt_tokens": prompt, "text": shown, "tokens": tokens })
            });
            let ms = |time: Duration| 1e3 * time.as_secs_f64();
            let (prefill, decode) = (ms(generated.prefill), ms(generated.decode));
            let texts: Vec<Value> = rows.collect();
            let object = json!({ "runtime": runtime, "prefill_ms": prefill, "decode_ms": decode, "texts": texts });
            return Ok(super::print_json(&object)?);
        }
        output.finish(args.ids)?;
        if !args.runtime.quiet() {
            report(&generated, read, runtime);
        }
        Ok(())
    }

    /// A prompt's tokens.
    fn tokens(&self, prompt: &str) -> Result<Vec<i64>> {
        if let Some(tokenizer) = &self.tokenizer {
            return Ok(text::encode(tokenizer, prompt, &self.config)?.into_iter().map(i64::from).collect());
        }
        let ids = text::token_ids(prompt)?;
        text::check_ids(&ids, self.model.vocabulary())?;
        Ok(text::or_begin(ids, &self.config)?)
    }
}

/// How many tokens may be generated after every prompt.
fn room(prompts: &[Vec<i64>], args: &GenerateArgs, config: &GenerationConfig) -> Result<usize> {
    let wanted = args.max_tokens;
    let prompt = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let Some(longest) = config.max_length else { return Ok(wanted) };
    match longest.checked_sub(prompt) {
        None | Some(0) => bail!("the prompt has {prompt} tokens, the model's longest sequence is {longest}"),
        Some(room) if room < wanted => {
            if !args.runtime.quiet() {
                inform!("note: at most {room} tokens, because the model's longest sequence is {longest}");
            }
            Ok(room)
        }
        Some(_) => Ok(wanted),
    }
}

/// How tokens are drawn; `None`: greedily, which a temperature of 0 asks for, too.
fn sampling(args: &GenerateArgs) -> Option<Sampling> {
    let drawn = args.temperature.is_some() || args.top_k.is_some() || args.top_p.is_some();
    let temperature = args.temperature.unwrap_or(1.0);
    let (top_k, top_p) = (args.top_k, args.top_p.unwrap_or(1.0));
    (drawn && temperature != 0.0).then_some(Sampling { temperature, top_k, top_p, seed: args.seed.unwrap_or(0) })
}

/// Text that is on standard output already, or waits for its turn.
struct Output {
    shown: Vec<String>,
    /// Whether it is written as it comes, and not kept.
    at_once: bool,
}

impl Output {
    fn add(&mut self, row: usize, piece: &str) -> Result<()> {
        if self.at_once {
            return write(piece);
        }
        self.shown[row] += piece;
        Ok(())
    }

    fn finish(self, ids: bool) -> Result<()> {
        if self.at_once {
            return write("\n");
        }
        for (number, text) in (1..).zip(self.shown) {
            let title = if ids { String::new() } else { format!("==> prompt {number} <==\n") };
            write(&format!("{title}{text}\n"))?;
        }
        Ok(())
    }
}

fn write(text: &str) -> Result<()> {
    let mut output = std::io::stdout().lock();
    output.write_all(text.as_bytes())?;
    output.flush()?;
    Ok(())
}

fn report(generated: &Generated, prompt: usize, runtime: &str) {
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE);
    let line = |name: &str, tokens: usize, time: Duration| {
        inform!("{name} {tokens} tokens in {:.3} s, {:.1} tokens/s", time.as_secs_f64(), rate(tokens, time));
    };
    // Every sequence's first token comes with the prompt.
    let decoded = generated.tokens.iter().map(|tokens| tokens.len().saturating_sub(1)).sum();
    inform!("runtime {runtime}");
    line("prefill", prompt, generated.prefill);
    line("decode", decoded, generated.decode);
}
