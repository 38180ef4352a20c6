//! A text on its way from a model's thread to a client.

use super::options::Options;
use crate::deadline::Deadline;
use crate::model::{Served, TextModel};
use crate::problem::{Kind, Problem};
use crate::server::App;
use crate::text::{Event, Finish, Prompt, Scores};
use futures_util::stream::{self, Stream};
use moh_tasks::generate::Score;
use moh_tasks::text::{Tokenizer, check_ids, encode, or_begin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Texts of a request at most.
const MOST_TEXTS: usize = 128;

/// Bytes of a prompt for each token of the model's longest sequence: no tokenizer of texts needs as many.
const BYTES_A_TOKEN: usize = 64;

/// What is to be continued.
pub(super) enum Source {
    Tokens(Vec<i64>),
    /// With the tokens that the tokenizer puts around texts, or without.
    Text {
        text: String,
        special: bool,
    },
}

/// Texts that are asked for at once.
pub(super) struct Wanted {
    pub(super) sources: Vec<Source>,
    /// How long a text may become where the request says nothing.
    pub(super) usual: Usual,
    /// Most probable tokens of each place that are told beside the text's own, if somebody asks how probable these are.
    pub(super) top: Option<usize>,
    /// Whether the prompts are part of the texts.
    pub(super) echo: bool,
}

/// A text that is being generated. When it is dropped, the model's thread stops.
pub(super) struct Generation {
    /// The prompt's tokens.
    pub(super) prompt: Vec<i64>,
    /// The prompt, where the text begins with it.
    echo: Option<String>,
    /// The event that comes next, where it is there already.
    first: Option<Event>,
    rest: Events,
    ended: bool,
    /// What one of the request's texts failed with, which ends the others.
    failure: Arc<OnceLock<&'static str>>,
    began: Instant,
    /// The request's, for the log: a stream goes on after its handler.
    span: tracing::Span,
}

/// A text that has ended.
pub(super) struct Whole {
    pub(super) text: String,
    pub(super) scores: Vec<Score>,
    pub(super) finish: Finish,
    /// Generated tokens.
    pub(super) tokens: usize,
}

/// Gives texts to the model, `n` for each prompt, those of a prompt beside each other, and waits for the first one's first piece.
///
/// # Errors
/// A [`Problem`] for what the model cannot take, a full queue, or a deadline that passes.
pub(super) async fn begin(
    app: &App,
    (served, model): (&Served, &TextModel),
    wanted: Wanted,
    mut options: Options,
    deadline: Deadline,
) -> Result<Vec<Generation>, Problem> {
    app.check_open()?;
    options.check()?;
    let Wanted { sources, usual, top, echo } = wanted;
    let each = options.texts_a_prompt()?;
    let most_texts = MOST_TEXTS.min(model.queue.room());
    if sources.is_empty() || sources.len().saturating_mul(each) > most_texts {
        let message = format!("expected 1 to {most_texts} texts at once, found {} prompts, n = {each}", sources.len());
        return Err(Problem::invalid(message));
    }
    let (choosers, stop, most) = (options.choosers(each)?, options.stops()?, options.most(echo)?);
    let is_models = model.config.max_length == served.bounds.length;
    let limit = if is_models { MODEL_LIMIT } else { MEMORY_LIMIT };
    let scores = top.map(|top| Scores { top, of_prompt: echo });
    let (mut prompts, mut generations, failure) = (Vec::new(), Vec::new(), Arc::default());
    for source in sources {
        let given = if let Source::Text { text, .. } = &source { Some(text.clone()) } else { None };
        let tokens = tokens(model, source).await?;
        let max_tokens = room(tokens.len(), most, usual, model.config.max_length, limit)?;
        let echo = match echo {
            true => Some(given.map_or_else(|| decoded(&model.tokenizer, &tokens), Ok)?),
            false => None,
        };
        for chooser in &choosers {
            let (events, received) = unbounded_channel();
            let (ignore_end, begun) = (options.ignore_eos.unwrap_or(false), Arc::<AtomicBool>::default());
            let (chooser, stop, echo) = (chooser.clone(), stop.clone(), echo.clone());
            let rest = Events { received, deadline, begun: begun.clone() };
            let (prompt, failure) = (tokens.clone(), Arc::clone(&failure));
            let (began, span) = (Instant::now(), tracing::Span::current());
            generations.push(Generation { prompt, echo, first: None, rest, ended: false, failure, began, span });
            let tokens = tokens.clone();
            prompts.push(Prompt { tokens, max_tokens, scores, chooser, stop, ignore_end, deadline, begun, events });
        }
    }
    if let Err(problem) = served.generate(model, prompts) {
        generations.iter_mut().for_each(|generation| generation.ended = true);
        return Err(problem);
    }
    if let Some(generation) = generations.first_mut() {
        let first = generation.rest.next().await;
        if let Event::Failed(problem) = first {
            let _ = generation.failure.set(problem.code());
            let closing = app.is_closing() && problem == Problem::lost();
            return Err(if closing { Problem::closing() } else { problem });
        }
        generation.first = Some(first);
    }
    Ok(generations)
}

impl Generation {
    /// The next event; the last one ends or fails.
    pub(super) async fn next(&mut self) -> Event {
        let mut event = match self.first.take() {
            Some(first) => first,
            None => self.rest.next().await,
        };
        if let Some(prompt) = self.echo.take() {
            match &mut event {
                Event::Piece { text, .. } => text.insert_str(0, &prompt),
                Event::End { .. } => {
                    self.first = Some(std::mem::replace(&mut event, Event::Piece { text: prompt, scores: Vec::new() }));
                }
                Event::Failed(_) => {}
            }
        }
        match &event {
            Event::Piece { .. } => {}
            Event::End { finish, tokens } => self.end(finish.name(), Some(*tokens)),
            Event::Failed(problem) => {
                let _ = self.failure.set(problem.code());
                self.end(problem.code(), None);
            }
        }
        event
    }

    /// All events.
    pub(super) fn events(self) -> impl Stream<Item = Event> {
        stream::unfold(self, |mut generation| async move {
            match generation.ended {
                true => None,
                false => Some((generation.next().await, generation)),
            }
        })
    }

    /// The whole text.
    ///
    /// # Errors
    /// The [`Problem`] that it ends with.
    pub(super) async fn whole(&mut self) -> Result<Whole, Problem> {
        let (mut text, mut scores) = (String::new(), Vec::new());
        loop {
            match self.next().await {
                Event::Piece { text: piece, scores: more } => {
                    text += &piece;
                    scores.extend(more);
                }
                Event::End { finish, tokens } => return Ok(Whole { text, scores, finish, tokens }),
                Event::Failed(problem) => return Err(problem),
            }
        }
    }

    /// Logs the end, of which a stream's answer says nothing: that is logged when it begins.
    fn end(&mut self, finish: &str, tokens: Option<usize>) {
        self.ended = true;
        let (prompt_tokens, ms) = (self.prompt.len(), self.began.elapsed().as_millis() as u64);
        self.span.in_scope(|| tracing::info!(prompt_tokens, tokens, finish, ms, "the text ended"));
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended {
            self.end(self.failure.get().copied().unwrap_or("client_left"), None);
        }
    }
}

/// What comes from the model's thread.
struct Events {
    received: UnboundedReceiver<Event>,
    deadline: Deadline,
    /// Whether its turn came: the text may be slow to show.
    begun: Arc<AtomicBool>,
}

impl Events {
    async fn next(&mut self) -> Event {
        match tokio::time::timeout_at(self.deadline.end.into(), self.received.recv()).await {
            Ok(Some(event)) => event,
            // The thread dropped it: for having waited too long, or because it failed.
            Ok(None) if self.deadline.has_passed() => Event::Failed(self.deadline.waited()),
            Ok(None) => Event::Failed(Problem::lost()),
            Err(_) if self.begun.load(Ordering::Relaxed) => Event::Failed(self.deadline.ran()),
            Err(_) => Event::Failed(self.deadline.waited()),
        }
    }
}

/// The text of a prompt that is given as tokens.
fn decoded(tokenizer: &Tokenizer, tokens: &[i64]) -> Result<String, Problem> {
    let ids: Vec<u32> = tokens.iter().filter_map(|&token| u32::try_from(token).ok()).collect();
    tokenizer.decode(&ids, true).map_err(|e| Problem::invalid(format!("prompt: the tokenizer cannot decode it: {e}")))
}

/// The tokens of a prompt.
async fn tokens(model: &TextModel, source: Source) -> Result<Vec<i64>, Problem> {
    let bad = |e: moh_tasks::Error| Problem::invalid(e.to_string());
    match source {
        Source::Tokens(ids) => {
            check_ids(&ids, model.vocabulary).map_err(bad)?;
            or_begin(ids, &model.config).map_err(bad)
        }
        Source::Text { text, special } => {
            let most = model.config.max_length.map(|longest| longest.saturating_mul(BYTES_A_TOKEN));
            if let Some(most) = most.filter(|&most| text.len() > most) {
                let message = format!("prompt: {} bytes, expected at most {most}", text.len());
                return Err(Problem::new(Kind::Context, message));
            }
            let (tokenizer, config) = (model.tokenizer.clone(), model.config.clone());
            let encode = move || encode(&tokenizer, &text, special, &config);
            let ids = tokio::task::spawn_blocking(encode).await.map_err(|e| Problem::failed(e.to_string()))?;
            Ok(ids.map_err(bad)?.into_iter().map(i64::from).collect())
        }
    }
}

/// How long a text may become where the request does not say.
#[derive(Debug, Clone, Copy)]
pub(super) enum Usual {
    /// Generated tokens.
    Tokens(usize),
    /// Of a chat: tokens with its prompt, or as many as the model takes.
    Chat(Option<usize>),
}

impl Usual {
    /// Generated tokens, after so many of the prompt; `None`: as many as the model takes.
    fn tokens(self, prompt: usize) -> Option<usize> {
        match self {
            Usual::Tokens(tokens) => Some(tokens),
            Usual::Chat(total) => total.map(|total| total.saturating_sub(prompt).max(USUAL)),
        }
    }
}

/// Generated tokens where neither the request nor the model says anything, and of a chat where memory would permit fewer to all at once: it may
/// have to wait then.
const USUAL: usize = 1024;

/// What keeps texts from being longer, for messages.
const MODEL_LIMIT: &str = "the model's longest sequence is";
const MEMORY_LIMIT: &str = "the longest text that the memory for caches, --cache-memory, has room for is";

/// How many tokens may be generated, where a prompt with them has at most `longest`, for which `limit` has the words.
fn room(
    prompt: usize,
    most: Option<usize>,
    usual: Usual,
    longest: Option<usize>,
    limit: &str,
) -> Result<usize, Problem> {
    let usual = usual.tokens(prompt);
    let Some(longest) = longest else { return Ok(most.or(usual).unwrap_or(USUAL)) };
    let room = longest.saturating_sub(prompt);
    let has = format!("the prompt has {prompt} {}", if prompt == 1 { "token" } else { "tokens" });
    if room == 0 && most != Some(0) {
        let message = format!("{has}, {limit} {longest}");
        return Err(Problem::new(Kind::Context, message));
    }
    match most {
        Some(most) if most > room => {
            let message = format!("{has} and max_tokens is {most}, {limit} {longest}");
            Err(Problem::new(Kind::Context, message))
        }
        Some(most) => Ok(most),
        None => Ok(usual.unwrap_or(room).min(room)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_text_ends_where_the_longest_sequence_does() {
        let (few, all) = (Usual::Tokens(16), Usual::Chat(None));
        let room = |prompt, most, usual, longest| room(prompt, most, usual, longest, MODEL_LIMIT);
        assert_eq!(room(10, Some(90), few, Some(100)), Ok(90));
        assert_eq!(room(10, None, few, Some(100)), Ok(16));
        assert_eq!(room(90, None, few, Some(100)), Ok(10));
        assert_eq!(room(10, None, all, Some(100)), Ok(90));
        assert_eq!(room(10, None, all, None), Ok(1024));
        // A slot's share of the memory is for the prompt, too.
        assert_eq!(room(500, None, Usual::Chat(Some(4000)), Some(8000)), Ok(3500));
        assert_eq!(room(5000, None, Usual::Chat(Some(4000)), Some(8000)), Ok(1024));
        let message = |prompt| room(prompt, Some(100), few, Some(100)).unwrap_err().message;
        assert!(message(1).starts_with("the prompt has 1 token and max_tokens is 100"), "{}", message(1));
        assert!(message(100).starts_with("the prompt has 100 tokens, "), "{}", message(100));
        for (prompt, most) in [(10, Some(91)), (100, None), (101, Some(1)), (10, Some(usize::MAX))] {
            assert_eq!(room(prompt, most, few, Some(100)).unwrap_err().kind, Kind::Context, "{prompt} {most:?}");
        }
    }
}
