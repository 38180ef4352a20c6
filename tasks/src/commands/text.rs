//! Texts and their tokens.

use anyhow::{Context, Result, anyhow, bail, ensure};
use moh_tasks::generate::GenerationConfig;
use std::io::Read;
use std::path::Path;
use tokenizers::Tokenizer;

/// Bytes of a text: more than any model takes, a bound for input that does not end.
pub(super) const LONGEST: u64 = 16 << 20;

/// The tokenizer in a model's folder.
///
/// # Errors
/// Where there is none, or it is not one, or it has tokens that the model, which knows `vocabulary` of them, does not.
pub(super) fn load_tokenizer(folder: &Path, vocabulary: Option<usize>) -> Result<Tokenizer> {
    let path = &folder.join("tokenizer.json");
    let text = std::fs::read(path).with_context(|| {
        format!(
            "{}: the model's tokenizer must be beside it: copy it from the checkpoint, or give token numbers and --ids",
            path.display()
        )
    })?;
    let tokenizer = Tokenizer::from_bytes(text)
        .map_err(|e| anyhow!(e))
        .with_context(|| format!("{}: not a tokenizer", path.display()))?;
    // Vocabularies may be padded to a round size, so the model may know more.
    let tokens = tokenizer.get_vocab(true);
    if let (Some(vocabulary), Some((token, &id))) = (vocabulary, tokens.iter().max_by_key(|(_, id)| **id)) {
        ensure!(
            (id as usize) < vocabulary,
            "{}: not the model's tokenizer: its token {token:?} is number {id}, and the model knows {vocabulary}",
            path.display()
        );
    }
    Ok(tokenizer)
}

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

/// Checks that the model knows the tokens; `vocabulary` is how many it knows.
pub(super) fn check_ids(ids: &[i64], vocabulary: Option<usize>) -> Result<()> {
    let is_known = |&id: &i64| usize::try_from(id).is_ok_and(|id| vocabulary.is_none_or(|count| id < count));
    match (ids.iter().find(|id| !is_known(id)), vocabulary) {
        (Some(id), Some(count)) => {
            bail!("token {id}: the model knows {count} tokens, 0 to {}", count.saturating_sub(1))
        }
        (Some(id), None) => bail!("token {id}: expected a number from 0 on"),
        (None, _) => Ok(()),
    }
}

/// A text's tokens; for an empty text the one that begins texts.
pub(super) fn encode(tokenizer: &Tokenizer, text: &str, config: &GenerationConfig) -> Result<Vec<u32>> {
    let encoding = tokenizer.encode(text, true).map_err(|e| anyhow!(e)).context("cannot tokenize the prompt")?;
    or_begin(encoding.get_ids().to_vec(), config)
}

/// The tokens of a prompt, or where there are none the one that begins texts.
pub(super) fn or_begin<T: TryFrom<i64>>(ids: Vec<T>, config: &GenerationConfig) -> Result<Vec<T>> {
    let begin = config.begin.and_then(|id| T::try_from(id).ok());
    match (ids.is_empty(), begin) {
        (false, _) => Ok(ids),
        (true, Some(begin)) => Ok(vec![begin]),
        (true, None) => bail!("the prompt is empty, and the model has no token that begins a text"),
    }
}
