//! `/v1/chat/completions`: answers a conversation.

use super::generation::{Generation, Source, Usual};
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
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use utoipa::ToSchema;

#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatRequest)]
pub(super) struct Request {
    model: String,
    messages: Vec<Message>,
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
    choices: [Choice; 1],
    usage: Usage,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ChatChoice)]
struct Choice {
    index: usize,
    message: Said,
    #[schema(value_type = Option<Object>)]
    logprobs: Value,
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
    let Request { model, messages, options } = parse(&body)?;
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
    let generation = Generation::begin(&app, found, source, options, Usual::Chat(found.1.usual), deadline).await?;
    let (id, created) = (format!("chatcmpl-{id}"), now());
    if is_stream {
        return Ok(stream::answer(generation, Chunks { form: Chat, id, created, model, include_usage }));
    }
    let prompt_tokens = generation.prompt_tokens;
    let (content, finish, tokens) = generation.whole().await?;
    let message = Said { role: "assistant", content };
    let choice = Choice { index: 0, message, logprobs: Value::Null, finish_reason: finish.name() };
    let usage = Usage::new(prompt_tokens, tokens);
    let answer = Answer { id, object: "chat.completion", created, model, choices: [choice], usage };
    Ok(axum::Json(answer).into_response())
}

/// Chats' events.
struct Chat;

impl Form for Chat {
    const OBJECT: &'static str = "chat.completion.chunk";

    fn begin(&self) -> Option<stream::Choice> {
        Some(("delta", json!({ "role": "assistant", "content": "" })))
    }

    fn piece(&self, text: &str, is_end: bool) -> stream::Choice {
        ("delta", if is_end { json!({}) } else { json!({ "content": text }) })
    }
}
