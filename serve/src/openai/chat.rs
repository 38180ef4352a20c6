//! `/v1/chat/completions`: answers a conversation.

use super::generation::{self, Generation, Source, Usual, Wanted, Whole};
use super::logprobs::{self, OfChat, Teller, aside};
use super::options::{Options, parse};
use super::stream::{self, Chunks, Form};
use super::{Usage, now, text_model, unsupported};
use crate::door::{Payload, RequestId};
use crate::model;
use crate::problem::Problem;
use crate::server::App;
use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use moh_tasks::generate::Score;
use moh_tasks::text::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use utoipa::ToSchema;

#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatRequest)]
pub(super) struct Request {
    model: String,
    messages: Vec<Message>,
    /// Whether to tell how probable the answer's tokens were.
    logprobs: Option<bool>,
    /// The most probable tokens of each place to tell with logprobs, 0 to 20.
    #[schema(value_type = Option<u8>)]
    top_logprobs: Option<Value>,
    /// Only false.
    echo: Option<bool>,
    #[serde(flatten)]
    options: Options,
}

#[derive(Debug, Deserialize, ToSchema)]
struct Message {
    /// As the model's chat template has them: system, user and assistant, mostly.
    role: String,
    #[serde(default)]
    content: Option<Content>,
    /// Only null or empty.
    #[serde(default)]
    #[schema(value_type = Option<Vec<Object>>)]
    tool_calls: Option<Value>,
    /// Only null.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    function_call: Option<Value>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a text, or parts of it")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize, ToSchema)]
struct Part {
    /// Only text.
    r#type: String,
    #[serde(default)]
    text: String,
}

impl Message {
    fn plain(self) -> Result<model::Message, Problem> {
        for (what, value) in [("tool_calls", &self.tool_calls), ("function_call", &self.function_call)] {
            let none =
                value.as_ref().is_none_or(|value| value.is_null() || value.as_array().is_some_and(Vec::is_empty));
            if !none {
                return Err(unsupported(&format!("messages: {what}"), "none"));
            }
        }
        let content = match self.content {
            None => String::new(),
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => {
                if let Some(part) = parts.iter().find(|part| part.r#type != "text") {
                    return Err(unsupported(&format!("messages: a part of type {:?}", part.r#type), "text"));
                }
                parts.into_iter().map(|part| part.text).collect()
            }
        };
        Ok(model::Message { role: self.role, content })
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ChatCompletion)]
struct Answer {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<Choice>,
    usage: Usage,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ChatChoice)]
struct Choice {
    index: usize,
    message: Said,
    logprobs: Option<OfChat>,
    finish_reason: &'static str,
}

#[derive(Debug, Serialize, ToSchema)]
struct Said {
    role: &'static str,
    content: String,
}

/// Answers a conversation, by the model's chat template.
#[utoipa::path(post, path = "/v1/chat/completions", operation_id = "complete_chat", request_body = Request,
    responses((status = 200, body = Answer), (status = 400), (status = 404), (status = 413), (status = 422),
        (status = 429), (status = 503), (status = 504)))]
pub(super) async fn complete(
    State(app): State<Arc<App>>,
    Extension(RequestId(id)): Extension<RequestId>,
    Payload { body, deadline }: Payload,
) -> Result<Response, Problem> {
    let Request { model, messages, logprobs, top_logprobs, echo, options } = parse(&body)?;
    let found = text_model(&app, &model)?;
    let Some(template) = &found.1.chat else {
        return Err(Problem::invalid(format!(
            "model {model}: it has no chat template, in tokenizer_config.json or chat_template.jinja; /v1/completions \
             continues texts"
        )));
    };
    if messages.is_empty() {
        return Err(Problem::invalid("messages: expected at least one"));
    }
    let messages = messages.into_iter().map(Message::plain).collect::<Result<Vec<_>, _>>()?;
    // The template writes the tokens that are around texts.
    let source = Source::Text { text: template.render(&messages)?, special: false };
    let (is_stream, include_usage) = (options.is_stream(), options.include_usage());
    let top = logprobs::of_chat(logprobs, top_logprobs.as_ref())?;
    if echo == Some(true) {
        return Err(unsupported("echo", "false"));
    }
    let wanted = Wanted { sources: vec![source], usual: Usual::Chat(found.1.usual), top, echo: false };
    let mut generations = generation::begin(&app, found, wanted, options, deadline).await?;
    let (id, created, tokenizer) = (format!("chatcmpl-{id}"), now(), &found.1.tokenizer);
    let form = |generation: &Generation| Chat::of(generation, tokenizer, top.is_some());
    if is_stream {
        let each = generations.len();
        let texts = generations.into_iter().map(|generation| (form(&generation), generation)).collect();
        return Ok(stream::answer(texts, Chunks { id, created, model, include_usage, each }));
    }
    let (mut choices, mut usage) = (Vec::with_capacity(generations.len()), Usage::default());
    for (index, generation) in generations.iter_mut().enumerate() {
        let mut form = form(generation);
        let Whole { text: content, scores, finish, tokens } = generation.whole().await?;
        usage.add(if index == 0 { generation.prompt.len() } else { 0 }, tokens);
        let (message, logprobs) = (Said { role: "assistant", content }, form.logprobs(&scores));
        choices.push(Choice { index, message, logprobs, finish_reason: finish.name() });
    }
    let answer = Answer { id, object: "chat.completion", created, model, choices, usage };
    Ok(axum::Json(answer).into_response())
}

/// What a chat's answer becomes.
struct Chat {
    /// If it is told how probable tokens were.
    teller: Option<Teller>,
}

impl Chat {
    fn of(generation: &Generation, tokenizer: &Arc<Tokenizer>, scored: bool) -> Chat {
        Chat { teller: scored.then(|| Teller::after(tokenizer.clone(), &generation.prompt)) }
    }

    /// How probable the next tokens were.
    fn logprobs(&mut self, scores: &[Score]) -> Option<OfChat> {
        let teller = self.teller.as_mut()?;
        Some(aside(scores, || teller.chat(scores)))
    }
}

impl Form for Chat {
    const OBJECT: &'static str = "chat.completion.chunk";

    fn begin(&self) -> Option<stream::Choice> {
        Some(("delta", json!({ "role": "assistant", "content": "" }), Value::Null))
    }

    fn piece(&mut self, text: &str, scores: &[Score]) -> stream::Choice {
        ("delta", json!({ "content": text }), json!(self.logprobs(scores)))
    }

    fn end(&self) -> stream::Choice {
        ("delta", json!({}), Value::Null)
    }
}
