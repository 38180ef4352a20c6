//! Texts as server-sent events.

use super::generation::Generation;
use crate::text::{Event, Finish};
use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, StreamExt};
use serde::Serialize;
use serde_json::Value;
use std::convert::Infallible;
use std::time::Duration;

/// Proxies close connections on which nothing comes.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

/// The events of one API.
pub(super) trait Form: Send + 'static {
    /// What comes before all.
    fn begin(&self) -> Option<Value>;
    /// A piece of the text, or its end.
    fn piece(&self, text: &str, finish: Option<Finish>) -> Value;
    /// The numbers of tokens, at the end.
    fn usage(&self, prompt: usize, generated: usize) -> Option<Value>;
}

/// Streams a text that has begun.
pub(super) fn answer(generation: Generation, form: impl Form) -> Response {
    let begun = stream::iter(form.begin().map(|event| sent(&event)));
    let rest = stream::unfold(Some((generation, form)), |state| async move {
        let (mut generation, form) = state?;
        if generation.has_ended() {
            return None;
        }
        let events = match generation.next().await {
            Event::Text(text) => vec![sent(&form.piece(&text, None))],
            Event::End { finish, tokens } => {
                let usage = form.usage(generation.prompt_tokens, tokens);
                let mut events = vec![sent(&form.piece("", Some(finish)))];
                events.extend(usage.iter().map(sent));
                events.push(done());
                events
            }
            Event::Failed(problem) => vec![sent(&problem.openai()), done()],
        };
        Some((stream::iter(events), Some((generation, form))))
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
