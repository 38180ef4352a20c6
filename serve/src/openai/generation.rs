//! A text on its way from a model's thread to a client.

use super::options::Options;
use crate::deadline::Deadline;
use crate::model::{Served, TextModel};
use crate::problem::{Kind, Problem};
use crate::server::App;
use crate::text::{Event, Finish, Prompt};
use moh_tasks::text::{check_ids, encode, or_begin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

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

/// A text that is being generated. When it is dropped, the model's thread stops.
pub(super) struct Generation {
    pub(super) prompt_tokens: usize,
    /// The first event, which is there before anything is answered.
    first: Option<Event>,
    rest: Events,
    ended: bool,
    began: Instant,
    /// The request's, for the log: a stream goes on after its handler.
    span: tracing::Span,
}

impl Generation {
    /// Gives a text to the model and waits for its first piece. `usual`: what holds where the request says nothing of its length.
    ///
    /// # Errors
    /// A [`Problem`] for what the model cannot take, a full queue, or a deadline that passes.
    pub(super) async fn begin(
        app: &App,
        (served, model): (&Served, &TextModel),
        source: Source,
        mut options: Options,
        usual: Usual,
        deadline: Deadline,
    ) -> Result<Generation, Problem> {
        app.check_open()?;
        options.check()?;
        let (chooser, stop, most) = (options.chooser()?, options.stops()?, options.most()?);
        let tokens = tokens(model, source).await?;
        let is_models = model.config.max_length == served.bounds.length;
        let limit = if is_models { MODEL_LIMIT } else { MEMORY_LIMIT };
        let max_tokens = room(tokens.len(), most, usual, model.config.max_length, limit)?;
        let prompt_tokens = tokens.len();
        let (events, received) = unbounded_channel();
        let (ignore_end, begun) = (options.ignore_eos.unwrap_or(false), Arc::<AtomicBool>::default());
        let prompt = Prompt { tokens, max_tokens, chooser, stop, ignore_end, deadline, begun: begun.clone(), events };
        let began = Instant::now();
        served.generate(model, prompt)?;
        let mut rest = Events { received, deadline, begun };
        let first = rest.next().await;
        if let Event::Failed(problem) = first {
            let closing = app.is_closing() && problem == Problem::lost();
            return Err(if closing { Problem::closing() } else { problem });
        }
        let span = tracing::Span::current();
        Ok(Generation { prompt_tokens, first: Some(first), rest, ended: false, began, span })
    }

    /// The next event; the last one ends or fails.
    pub(super) async fn next(&mut self) -> Event {
        let event = match self.first.take() {
            Some(first) => first,
            None => self.rest.next().await,
        };
        match &event {
            Event::Text(_) => {}
            Event::End { finish, tokens } => self.end(finish.name(), Some(*tokens)),
            Event::Failed(problem) => self.end(problem.code(), None),
        }
        event
    }

    /// Logs the end, of which a stream's answer says nothing: that is logged when it begins.
    fn end(&mut self, finish: &str, tokens: Option<usize>) {
        self.ended = true;
        let (prompt_tokens, ms) = (self.prompt_tokens, self.began.elapsed().as_millis() as u64);
        self.span.in_scope(|| tracing::info!(prompt_tokens, tokens, finish, ms, "the text ended"));
    }

    /// Whether the last event was given.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// The whole text.
    ///
    /// # Errors
    /// The [`Problem`] that it ends with.
    pub(super) async fn whole(mut self) -> Result<(String, Finish, usize), Problem> {
        let mut text = String::new();
        loop {
            match self.next().await {
                Event::Text(piece) => text += &piece,
                Event::End { finish, tokens } => return Ok((text, finish, tokens)),
                Event::Failed(problem) => return Err(problem),
            }
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended {
            self.end("client_left", None);
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
    if room == 0 {
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
