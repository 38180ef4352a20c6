//! `moh-run generate`: a prompt in, its continuation out, as it comes.

use crate::args::GenerateArgs;
use anyhow::{Context, Result, anyhow, bail, ensure};
use moh_runtime::generate::{GenerateOptions, Generated, GenerationConfig, LanguageModel, Prompts, TextStream};
use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;
use tokenizers::Tokenizer;

/// More than any model takes: a bound for input that does not end.
const LONGEST_PROMPT: u64 = 16 << 20;

pub(crate) fn run(args: &GenerateArgs) -> Result<()> {
    let mut model = LanguageModel::new(super::load(&args.model, &args.runtime)?)?;
    let folder = model.model().path().parent().unwrap_or(Path::new("")).to_owned();
    let tokenizer = load_tokenizer(&folder.join("tokenizer.json"))?;
    let config = GenerationConfig::from_folder(&folder)?;
    let prompt = encode(&tokenizer, &prompt_text(&args.prompt)?, &config)?;
    let max_tokens = room(&prompt, args, &config)?;

    let ids: Vec<i64> = prompt.iter().map(|&id| i64::from(id)).collect();
    let stop = if args.ignore_eos { &[][..] } else { &config.end };
    let options = GenerateOptions { max_tokens, stop, keep_logits: false };
    let mut printer = Printer::new(args.ids, &tokenizer, &prompt, stop)?;
    let mut printed = Ok(());
    let generated = model.generate(&Prompts::new(&[ids], 0)?, &options, |step| {
        printed = step.iter().flatten().try_for_each(|&token| printer.push(token));
        if printed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    printed?;
    printer.finish()?;
    if !args.runtime.quiet {
        report(&generated, prompt.len(), model.model().runtime_name());
    }
    Ok(())
}

fn load_tokenizer(path: &Path) -> Result<Tokenizer> {
    let text =
        std::fs::read(path).with_context(|| format!("{}: the model's tokenizer must be beside it", path.display()))?;
    Tokenizer::from_bytes(text).map_err(|e| anyhow!("{}: not a tokenizer: {e}", path.display()))
}

fn prompt_text(argument: &str) -> Result<String> {
    if argument != "-" {
        return Ok(argument.to_owned());
    }
    let mut text = Vec::new();
    std::io::stdin().take(LONGEST_PROMPT + 1).read_to_end(&mut text).context("cannot read standard input")?;
    ensure!(text.len() as u64 <= LONGEST_PROMPT, "standard input: expected a prompt of at most {LONGEST_PROMPT} bytes");
    String::from_utf8(text).context("standard input: expected text in UTF-8")
}

fn encode(tokenizer: &Tokenizer, text: &str, config: &GenerationConfig) -> Result<Vec<u32>> {
    let encoding = tokenizer.encode(text, true).map_err(|e| anyhow!("cannot tokenize the prompt: {e}"))?;
    let begin = config.begin.and_then(|id| u32::try_from(id).ok());
    match (encoding.get_ids(), begin) {
        ([], Some(begin)) => Ok(vec![begin]),
        ([], None) => bail!("the prompt is empty, and the model has no token that begins a text"),
        (ids, _) => Ok(ids.to_vec()),
    }
}

/// How many tokens may be generated.
fn room(prompt: &[u32], args: &GenerateArgs, config: &GenerationConfig) -> Result<usize> {
    let wanted = args.max_tokens.get();
    let Some(longest) = config.max_length else { return Ok(wanted) };
    match longest.checked_sub(prompt.len()) {
        None | Some(0) => {
            bail!("the prompt has {} tokens, the model's longest sequence is {longest}", prompt.len())
        }
        Some(room) if room < wanted => {
            if !args.runtime.quiet {
                eprintln!("note: at most {room} tokens, because the model's longest sequence is {longest}");
            }
            Ok(room)
        }
        Some(_) => Ok(wanted),
    }
}

/// Writes tokens to standard output, as numbers or as text.
struct Printer<'t> {
    text: Option<TextStream<'t>>,
    stop: &'t [i64],
    any: bool,
}

impl<'t> Printer<'t> {
    fn new(ids: bool, tokenizer: &'t Tokenizer, prompt: &[u32], stop: &'t [i64]) -> Result<Printer<'t>> {
        let text = if ids { None } else { Some(TextStream::new(tokenizer, prompt).map_err(|e| anyhow!(e))?) };
        Ok(Printer { text, stop, any: false })
    }

    fn push(&mut self, token: i64) -> Result<()> {
        let piece = match &mut self.text {
            None if self.any => format!(" {token}"),
            None => token.to_string(),
            Some(_) if self.stop.contains(&token) => return Ok(()),
            Some(text) => {
                let token = u32::try_from(token).with_context(|| format!("token {token} is out of range"))?;
                text.push(token).map_err(|e| anyhow!(e))?
            }
        };
        self.any = true;
        write(&piece)
    }

    fn finish(self) -> Result<()> {
        let rest = self.text.map_or(Ok(String::new()), TextStream::finish).map_err(|e| anyhow!(e))?;
        write(&(rest + "\n"))
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
        eprintln!("{name} {tokens} tokens in {:.3} s, {:.1} tokens/s", time.as_secs_f64(), rate(tokens, time));
    };
    eprintln!("runtime {runtime}");
    line("prefill", prompt, generated.prefill);
    line("decode", generated.decode_steps, generated.decode);
}
