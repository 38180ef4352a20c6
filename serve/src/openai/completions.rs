//! `/v1/completions`: continues a prompt.

use super::generation::{Generation, Source, Usual};
use super::options::{Options, parse};
use super::stream::{self, Chunks, Form};
use super::{Usage, now, text_model, unsupported};
use crate::door::{Payload, RequestId};
use crate::problem::{Kind, Problem};
use crate::server::App;
use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use utoipa::ToSchema;

/// OpenAI's default.
const USUAL_TOKENS: usize = 16;

#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = CompletionRequest)]
pub(super) struct Request {
    model: String,
    prompt: Prompt,
    #[serde(flatten)]
    options: Options,
}

/// A prompt.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a text, or numbers of tokens")]
enum Prompt {
    Text(String),
    /// Numbers of tokens.
    Tokens(Vec<i64>),
    /// One text.
    Texts(Vec<String>),
    /// One list of numbers of tokens.
    TokenLists(Vec<Vec<i64>>),
}

impl Prompt {
    fn source(self) -> Result<Source, Problem> {
        let text = |text| Source::Text { text, special: true };
        match self {
            Prompt::Text(one) => Ok(text(one)),
            Prompt::Tokens(ids) => Ok(Source::Tokens(ids)),
            Prompt::Texts(mut several) if several.len() == 1 => Ok(text(several.remove(0))),
            Prompt::TokenLists(mut several) if several.len() == 1 => Ok(Source::Tokens(several.remove(0))),
            Prompt::Texts(_) | Prompt::TokenLists(_) => {
                Err(unsupported("prompt", "one prompt a request: several requests share the model's steps"))
            }
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Completion)]
struct Answer {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: [Choice; 1],
    usage: Usage,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = CompletionChoice)]
struct Choice {
    index: usize,
    text: String,
    #[schema(value_type = Option<Object>)]
    logprobs: Value,
    finish_reason: &'static str,
}

/// Continues a prompt.
#[utoipa::path(post, path = "/v1/completions", operation_id = "complete_text", request_body = Request,
    responses((status = 200, body = Answer), (status = 400), (status = 404), (status = 413), (status = 422),
        (status = 429), (status = 503), (status = 504)))]
pub(super) async fn complete(
    State(app): State<Arc<App>>,
    Extension(RequestId(id)): Extension<RequestId>,
    Payload { body, deadline }: Payload,
) -> Result<Response, Problem> {
    let Request { model, prompt, options } = parse(&body).map_err(|problem| or_chat(problem, &body))?;
    let found = text_model(&app, &model)?;
    let (is_stream, include_usage) = (options.is_stream(), options.include_usage());
    let source = prompt.source()?;
    let generation = Generation::begin(&app, found, source, options, Usual::Tokens(USUAL_TOKENS), deadline).await?;
    let (id, created) = (format!("cmpl-{id}"), now());
    if is_stream {
        return Ok(stream::answer(generation, Chunks { form: Completion, id, created, model, include_usage }));
    }
    let prompt_tokens = generation.prompt_tokens;
    let (text, finish, tokens) = generation.whole().await?;
    let choice = Choice { index: 0, text, logprobs: Value::Null, finish_reason: finish.name() };
    let usage = Usage::new(prompt_tokens, tokens);
    let answer = Answer { id, object: "text_completion", created, model, choices: [choice], usage };
    Ok(axum::Json(answer).into_response())
}

/// `problem`, or where a chat belongs, if the request has `messages` in place of a prompt.
fn or_chat(problem: Problem, body: &[u8]) -> Problem {
    #[derive(Deserialize)]
    struct Chat {
        #[serde(rename = "messages")]
        _messages: IgnoredAny,
        prompt: Option<IgnoredAny>,
    }
    match serde_json::from_slice(body) {
        Ok(Chat { prompt: None, .. }) => {
            Problem::new(Kind::Form, "body: expected prompt, found messages: chats go to /v1/chat/completions")
        }
        _ => problem,
    }
}

/// Completions' events.
struct Completion;

impl Form for Completion {
    const OBJECT: &'static str = "text_completion";

    fn begin(&self) -> Option<stream::Choice> {
        None
    }

    fn piece(&self, text: &str, _is_end: bool) -> stream::Choice {
        ("text", json!(text))
    }
}
