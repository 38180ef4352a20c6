//! `/v1/completions`: continues a prompt.

use super::generation::{self, Generation, Source, Usual, Wanted, Whole};
use super::logprobs::{self, OfCompletion, Teller, aside};
use super::options::{Options, parse};
use super::stream::{self, Chunks, Form};
use super::{Usage, now, text_model};
use crate::door::{Payload, RequestId};
use crate::problem::{Kind, Problem};
use crate::server::App;
use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use moh_tasks::generate::Score;
use moh_tasks::text::Tokenizer;
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
    /// Whether the texts begin with their prompts. With it, `max_tokens` may be 0.
    echo: Option<bool>,
    /// Tells how probable the texts' tokens were, with echo the prompts' as well, and the most probable ones of each place, 0 to 20 of them.
    #[schema(value_type = Option<u8>)]
    logprobs: Option<Value>,
    #[serde(flatten)]
    options: Options,
}

/// A prompt, or several.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a text, numbers of tokens, or a list of one of these")]
enum Prompt {
    Text(String),
    /// Numbers of tokens.
    Tokens(Vec<i64>),
    /// Several texts.
    Texts(Vec<String>),
    /// Several lists of numbers of tokens.
    TokenLists(Vec<Vec<i64>>),
}

impl Prompt {
    fn sources(self) -> Vec<Source> {
        let text = |text| Source::Text { text, special: true };
        match self {
            Prompt::Text(one) => vec![text(one)],
            Prompt::Tokens(ids) => vec![Source::Tokens(ids)],
            Prompt::Texts(several) => several.into_iter().map(text).collect(),
            Prompt::TokenLists(several) => several.into_iter().map(Source::Tokens).collect(),
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
    choices: Vec<Choice>,
    usage: Usage,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = CompletionChoice)]
struct Choice {
    index: usize,
    text: String,
    logprobs: Option<OfCompletion>,
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
    let Request { model, prompt, echo, logprobs, options } = parse(&body).map_err(|problem| or_chat(problem, &body))?;
    let found = text_model(&app, &model)?;
    let (is_stream, include_usage) = (options.is_stream(), options.include_usage());
    let (echo, top) = (echo.unwrap_or(false), logprobs::of_completion(logprobs.as_ref())?);
    let wanted = Wanted { sources: prompt.sources(), usual: Usual::Tokens(USUAL_TOKENS), top, echo };
    let each = options.texts_a_prompt()?;
    let mut generations = generation::begin(&app, found, wanted, options, deadline).await?;
    let (id, created, tokenizer) = (format!("cmpl-{id}"), now(), &found.1.tokenizer);
    let form = |generation: &Generation| Completion::of(generation, tokenizer, top.is_some(), echo);
    if is_stream {
        let texts = generations.into_iter().map(|generation| (form(&generation), generation)).collect();
        return Ok(stream::answer(texts, Chunks { id, created, model, include_usage, each }));
    }
    let (mut choices, mut usage) = (Vec::with_capacity(generations.len()), Usage::default());
    for (index, generation) in generations.iter_mut().enumerate() {
        let mut form = form(generation);
        let Whole { text, scores, finish, tokens } = generation.whole().await?;
        usage.add(if index % each == 0 { generation.prompt.len() } else { 0 }, tokens);
        choices.push(Choice { index, text, logprobs: form.logprobs(&scores), finish_reason: finish.name() });
    }
    let answer = Answer { id, object: "text_completion", created, model, choices, usage };
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

/// What a completion's text becomes.
struct Completion {
    /// If it is told how probable tokens were.
    teller: Option<Teller>,
    /// The prompt's first token, if the text begins with it.
    first: Option<i64>,
}

impl Completion {
    fn of(generation: &Generation, tokenizer: &Arc<Tokenizer>, scored: bool, echo: bool) -> Completion {
        let (context, first) = if echo { (&[][..], generation.prompt.first()) } else { (&generation.prompt[..], None) };
        Completion { teller: scored.then(|| Teller::after(tokenizer.clone(), context)), first: first.copied() }
    }

    /// How probable the next tokens were.
    fn logprobs(&mut self, scores: &[Score]) -> Option<OfCompletion> {
        let first = self.first.take();
        let teller = self.teller.as_mut()?;
        Some(aside(scores, || teller.completion(first, scores)))
    }
}

impl Form for Completion {
    const OBJECT: &'static str = "text_completion";

    fn begin(&self) -> Option<stream::Choice> {
        None
    }

    fn piece(&mut self, text: &str, scores: &[Score]) -> stream::Choice {
        ("text", json!(text), json!(self.logprobs(scores)))
    }

    fn end(&self) -> stream::Choice {
        ("text", json!(""), Value::Null)
    }
}
