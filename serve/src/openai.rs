//! OpenAI's API: texts.

mod chat;
mod completions;
mod generation;
mod logprobs;
mod options;
mod stream;

use crate::door::Path;
use crate::model::{Served, TextModel, Work};
use crate::problem::{Kind, Problem};
use crate::server::App;
use axum::Router;
use axum::extract::State;
use axum::routing::{get, post};
use serde::Serialize;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use utoipa::{OpenApi, ToSchema};

/// The API's pages for `/openapi.json`.
#[derive(OpenApi)]
#[openapi(paths(models, model, completions::complete, chat::complete))]
pub(crate) struct Api;

pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{model}", get(model))
        .route("/v1/completions", post(completions::complete))
        .route("/v1/chat/completions", post(chat::complete))
}

#[derive(Debug, Serialize, ToSchema)]
struct ModelList {
    object: &'static str,
    data: Vec<ModelObject>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ModelObject {
    id: String,
    object: &'static str,
    /// Unix seconds.
    created: u64,
    owned_by: &'static str,
}

impl ModelObject {
    fn of(served: &Served) -> ModelObject {
        ModelObject { id: served.name.clone(), object: "model", created: served.loaded, owned_by: "moh" }
    }
}

/// The language models; the others are served by the Open Inference Protocol only.
#[utoipa::path(get, path = "/v1/models", responses((status = 200, body = ModelList), (status = 503)))]
async fn models(State(app): State<Arc<App>>) -> Result<axum::Json<ModelList>, Problem> {
    let texts = app.models()?.values().filter(|served| matches!(served.work, Work::Text(_)));
    let data = texts.map(ModelObject::of).collect();
    Ok(axum::Json(ModelList { object: "list", data }))
}

/// A language model.
#[utoipa::path(get, path = "/v1/models/{model}", params(("model" = String, Path)), responses((status = 200, body = ModelObject), (status = 400), (status = 404), (status = 503)))]
async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<axum::Json<ModelObject>, Problem> {
    let (served, _) = text_model(&app, &name)?;
    Ok(axum::Json(ModelObject::of(served)))
}

/// A model of that name that generates texts.
fn text_model<'a>(app: &'a App, name: &str) -> Result<(&'a Served, &'a TextModel), Problem> {
    let served = app.model(name)?;
    match &served.work {
        Work::Text(model) => Ok((served, model)),
        Work::Tensors(_) => Err(Problem::invalid(format!(
            "model {name}: not a language model with a tokenizer; /v2/models/{name}/infer runs it on tensors"
        ))),
    }
}

/// Prompt, generated and all tokens.
#[derive(Debug, Clone, Copy, Default, Serialize, ToSchema)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
}

impl Usage {
    /// Adds those of a text.
    fn add(&mut self, prompt: usize, generated: usize) {
        self.prompt_tokens += prompt;
        self.completion_tokens += generated;
        self.total_tokens += prompt + generated;
    }
}

/// Unix seconds.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// For what is asked for and not there.
fn unsupported(what: &str, expected: &str) -> Problem {
    Problem::new(Kind::Invalid, format!("{what}: not supported here; expected {expected}"))
}
