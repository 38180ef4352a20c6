//! Texts as server-sent events.

use super::Usage;
use super::generation::Generation;
use crate::text::{Event, Finish};
use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, StreamExt};
use serde::Serialize;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::time::Duration;

/// Proxies close connections on which nothing comes.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

/// What one API's events hold.
pub(super) trait Form: Send + 'static {
    /// Their `object`.
    const OBJECT: &'static str;
    /// What a choice holds before all, if there is such an event.
    fn begin(&self) -> Option<Choice>;
    /// What a choice holds with a piece of the text, or at its end.
    fn piece(&self, text: &str, is_end: bool) -> Choice;
}

/// A field of a choice, and its value.
pub(super) type Choice = (&'static str, Value);

/// The events of a stream.
pub(super) struct Chunks<F> {
    pub(super) form: F,
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) include_usage: bool,
}

impl<F: Form> Chunks<F> {
    fn chunk(&self, choices: Value, usage: Option<Usage>) -> Value {
        let mut chunk = json!({ "id": self.id, "object": F::OBJECT, "created": self.created, "model": self.model,
            "choices": choices });
        if self.include_usage {
            chunk["usage"] = json!(usage);
        }
        chunk
    }

    fn choice(&self, (field, value): Choice, finish: Option<Finish>) -> Value {
        let choice = json!({ "index": 0, field: value, "logprobs": null, "finish_reason": finish.map(Finish::name) });
        self.chunk(json!([choice]), None)
    }

    fn begin(&self) -> Option<Value> {
        self.form.begin().map(|choice| self.choice(choice, None))
    }

    fn piece(&self, text: &str) -> Value {
        self.choice(self.form.piece(text, false), None)
    }

    fn end(&self, finish: Finish) -> Value {
        self.choice(self.form.piece("", true), Some(finish))
    }

    /// The numbers of tokens, if they are wanted.
    fn usage(&self, prompt: usize, generated: usize) -> Option<Value> {
        self.include_usage.then(|| self.chunk(json!([]), Some(Usage::new(prompt, generated))))
    }
}

/// Streams a text that has begun.
pub(super) fn answer<F: Form>(generation: Generation, chunks: Chunks<F>) -> Response {
    let begun = stream::iter(chunks.begin().map(|event| sent(&event)));
    let rest = stream::unfold(Some((generation, chunks)), |state| async move {
        let (mut generation, chunks) = state?;
        if generation.has_ended() {
            return None;
        }
        let events = match generation.next().await {
            Event::Text(text) => vec![sent(&chunks.piece(&text))],
            Event::End { finish, tokens } => {
                let usage = chunks.usage(generation.prompt_tokens, tokens);
                let mut events = vec![sent(&chunks.end(finish))];
                events.extend(usage.iter().map(sent));
                events.push(done());
                events
            }
            Event::Failed(problem) => vec![sent(&problem.openai()), done()],
        };
        Some((stream::iter(events), Some((generation, chunks))))
    });
    let events = begun.chain(rest.flatten()).map(Ok::<_, Infallible>);
    Sse::new(events).keep_alive(KeepAlive::new().interval(SIGN_OF_LIFE)).into_response()
}

fn sent(value: &impl Serialize) -> Sent {
    // JSON values have no keys that JSON has not.
    Sent::default().data(serde_json::to_string(value).unwrap_or_default())
}

fn done() -> Sent {
    Sent::default().data("[DONE]")
}
