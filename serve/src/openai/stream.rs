//! Texts as server-sent events.

use super::Usage;
use super::generation::Generation;
use crate::text::{Event, Finish};
use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, BoxStream, SelectAll, StreamExt};
use moh_tasks::generate::Score;
use serde::Serialize;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::time::Duration;

/// Proxies close connections on which nothing comes.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

/// What one API's events hold, of one text.
pub(super) trait Form: Send + 'static {
    /// Their `object`.
    const OBJECT: &'static str;
    /// What a choice holds before all, if there is such an event.
    fn begin(&self) -> Option<Choice>;
    /// What a choice holds with a piece of the text, and the scores of its tokens.
    fn piece(&mut self, text: &str, scores: &[Score]) -> Choice;
    /// What a choice holds at its end.
    fn end(&self) -> Choice;
}

/// A field of a choice, its value, and that of `logprobs`.
pub(super) type Choice = (&'static str, Value, Value);

/// The events of a stream.
pub(super) struct Chunks {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) include_usage: bool,
    /// Texts for each prompt.
    pub(super) each: usize,
}

impl Chunks {
    fn chunk<F: Form>(&self, choices: Value, usage: Option<Usage>) -> Value {
        let mut chunk = json!({ "id": self.id, "object": F::OBJECT, "created": self.created, "model": self.model,
            "choices": choices });
        if self.include_usage {
            chunk["usage"] = json!(usage);
        }
        chunk
    }

    fn choice<F: Form>(&self, index: usize, choice: Choice, finish: Option<Finish>) -> Value {
        let (field, value, logprobs) = choice;
        let finish = finish.map(Finish::name);
        let choice = json!({ "index": index, field: value, "logprobs": logprobs, "finish_reason": finish });
        self.chunk::<F>(json!([choice]), None)
    }
}

/// Texts on their way into one stream.
struct Merged<F> {
    forms: Vec<F>,
    /// Events with the text's number.
    events: SelectAll<BoxStream<'static, (usize, Event)>>,
    prompts: Vec<usize>,
    chunks: Chunks,
    usage: Usage,
    /// Texts that have not ended.
    left: usize,
}

impl<F: Form> Merged<F> {
    /// What is sent for the next event; `None` after the last one.
    async fn next(&mut self) -> Option<Vec<Sent>> {
        if self.left == 0 {
            return None;
        }
        let (index, event) = self.events.next().await?;
        Some(match event {
            Event::Piece { text, scores } => {
                let choice = self.forms[index].piece(&text, &scores);
                vec![sent(&self.chunks.choice::<F>(index, choice, None))]
            }
            Event::End { finish, tokens } => {
                self.usage.add(if index % self.chunks.each == 0 { self.prompts[index] } else { 0 }, tokens);
                self.left -= 1;
                let mut events = vec![sent(&self.chunks.choice::<F>(index, self.forms[index].end(), Some(finish)))];
                if self.left == 0 {
                    let usage = self.chunks.include_usage.then(|| self.chunks.chunk::<F>(json!([]), Some(self.usage)));
                    events.extend(usage.iter().map(sent));
                    events.push(done());
                }
                events
            }
            Event::Failed(problem) => {
                self.left = 0;
                vec![sent(&problem.openai()), done()]
            }
        })
    }
}

/// Streams texts that have begun.
pub(super) fn answer<F: Form>(texts: Vec<(F, Generation)>, chunks: Chunks) -> Response {
    let (forms, generations): (Vec<F>, Vec<Generation>) = texts.into_iter().unzip();
    let begin = |(index, form): (usize, &F)| Some(chunks.choice::<F>(index, form.begin()?, None));
    let begun: Vec<Sent> = forms.iter().enumerate().filter_map(begin).map(|event| sent(&event)).collect();
    let prompts = generations.iter().map(|generation| generation.prompt.len()).collect();
    let numbered = generations.into_iter().enumerate();
    let events: Vec<_> =
        numbered.map(|(index, generation)| generation.events().map(move |event| (index, event)).boxed()).collect();
    let (left, events) = (events.len(), stream::select_all(events));
    let merged = Merged { forms, events, prompts, chunks, usage: Usage::default(), left };
    let rest = stream::unfold(merged, |mut merged| async move { merged.next().await.map(|sent| (sent, merged)) });
    let events = stream::iter(begun).chain(rest.flat_map(stream::iter)).map(Ok::<_, Infallible>);
    Sse::new(events).keep_alive(KeepAlive::new().interval(SIGN_OF_LIFE)).into_response()
}

fn sent(value: &impl Serialize) -> Sent {
    // JSON values have no keys that JSON has not.
    Sent::default().data(serde_json::to_string(value).unwrap_or_default())
}

fn done() -> Sent {
    Sent::default().data("[DONE]")
}
