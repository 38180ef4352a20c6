//! Texts and their tokens.

use anyhow::{Context, Result, ensure};
use moh_tasks::generate::GenerationConfig;
use moh_tasks::text::Tokenizer;
pub(super) use moh_tasks::text::{check_ids, load_tokenizer, or_begin};
use std::io::Read;

/// Bytes of a text: more than any model takes, a bound for input that does not end.
pub(super) const LONGEST: u64 = 16 << 20;

/// The texts of the arguments, of which one may be `-`, standard input.
pub(super) fn prompts(arguments: &[String]) -> Result<Vec<String>> {
    let from_input = arguments.iter().filter(|argument| *argument == "-").count();
    ensure!(from_input <= 1, "only one prompt can be read from standard input");
    arguments.iter().map(|argument| if argument == "-" { read_prompt() } else { Ok(argument.clone()) }).collect()
}

fn read_prompt() -> Result<String> {
    let mut text = Vec::new();
    std::io::stdin().take(LONGEST + 1).read_to_end(&mut text).context("cannot read standard input")?;
    ensure!(text.len() as u64 <= LONGEST, "standard input: expected a prompt of at most {LONGEST} bytes");
    String::from_utf8(text).context("standard input: expected text in UTF-8")
}

/// The numbers of tokens that a text lists.
pub(super) fn token_ids(text: &str) -> Result<Vec<i64>> {
    let number = |word: &str| {
        word.parse().ok().with_context(|| format!("{word:?} is not the number of a token, which --ids asks for"))
    };
    text.split([' ', ',', '\n', '\t', '\r']).filter(|word| !word.is_empty()).map(number).collect()
}

/// A text's tokens, with those that the tokenizer puts around it; for an empty text the one that begins texts.
pub(super) fn encode(tokenizer: &Tokenizer, text: &str, config: &GenerationConfig) -> moh_tasks::Result<Vec<u32>> {
    moh_tasks::text::encode(tokenizer, text, true, config)
}
