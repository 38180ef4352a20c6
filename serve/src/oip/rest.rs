//! The protocol over REST, with the extension for binary tensors.

use super::infer::{REFUSED, Request, infer, unsupported};
use super::json::Numbers;
use super::{EXTENSIONS, SERVER, VERSION, datatype, json, model, name, shape};
use crate::door::{self, Path, Payload};
use crate::problem::{Kind, Problem};
use crate::server::App;
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use moh_runtime::{Tensor, TensorInfo};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::openapi::path::{ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{Object, Type};
use utoipa::openapi::{PathItem, Required};
use utoipa::{OpenApi, ToSchema};

/// Where the JSON ends and bytes begin.
const HEADER_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");

/// The protocol's pages for `/openapi.json`.
#[derive(OpenApi)]
#[openapi(paths(live, ready, server, metadata, model_ready, run))]
struct Api;

/// A model's paths begin with it.
const MODEL: &str = "/v2/models/{model}";
/// They are there with the model's version, too.
const VERSIONED: &str = "/v2/models/{model}/versions/{version}";

pub(crate) fn pages() -> utoipa::openapi::OpenApi {
    let mut api = Api::openapi();
    let version = ParameterBuilder::new().name("version").parameter_in(ParameterIn::Path).required(Required::True);
    let version = version.schema(Some(Object::with_type(Type::String))).description(Some("Always 1")).build();
    let versioned = |(path, item): (&String, &PathItem)| {
        let (path, mut item) = (format!("{VERSIONED}{}", path.strip_prefix(MODEL)?), item.clone());
        for operation in item.get.iter_mut().chain(&mut item.post) {
            operation.parameters.get_or_insert_default().push(version.clone());
            operation.operation_id = operation.operation_id.as_ref().map(|id| format!("{id}_of_version"));
        }
        Some((path, item))
    };
    let versioned: Vec<(String, PathItem)> = api.paths.paths.iter().filter_map(versioned).collect();
    api.paths.paths.extend(versioned);
    api
}

pub(crate) fn routes() -> Router<Arc<App>> {
    let models = Router::new().route("/", get(metadata)).route("/ready", get(model_ready)).route("/infer", post(run));
    Router::new()
        .route("/v2", get(server))
        .route("/v2/health/live", get(live))
        .route("/v2/health/ready", get(ready))
        .route("/health", get(ready))
        .nest(MODEL, models.clone())
        .nest(VERSIONED, models)
}

/// The model of a path, and its version.
#[derive(Debug, Deserialize)]
struct Named {
    model: String,
    #[serde(default)]
    version: String,
}

#[derive(Debug, Serialize, ToSchema)]
struct Server {
    name: &'static str,
    version: &'static str,
    extensions: [&'static str; 1],
}

#[derive(Debug, Serialize, ToSchema)]
struct Port {
    name: String,
    datatype: &'static str,
    /// -1 where the size varies.
    shape: Vec<i64>,
}

#[derive(Debug, Serialize, ToSchema)]
struct Metadata {
    name: String,
    versions: [&'static str; 1],
    platform: &'static str,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
}

#[derive(Debug, Deserialize, ToSchema)]
struct InferRequest {
    #[serde(default, deserialize_with = "or_default")]
    id: String,
    #[serde(default, deserialize_with = "or_default")]
    parameters: Parameters,
    inputs: Vec<Input>,
    /// All outputs where none is named.
    #[serde(default, deserialize_with = "or_default")]
    outputs: Vec<Wanted>,
}

#[derive(Debug, Deserialize, ToSchema)]
struct Input {
    name: String,
    shape: Vec<i64>,
    /// BOOL, UINT8, INT32, INT64, FP16, BF16, FP32 or FP64.
    datatype: String,
    #[serde(default, deserialize_with = "or_default")]
    parameters: Parameters,
    /// Numbers in row-major order, nested or not; none where `parameters.binary_data_size` bytes follow.
    #[schema(value_type = Option<Vec<f64>>)]
    data: Option<Box<RawValue>>,
}

#[derive(Debug, Deserialize, ToSchema)]
struct Wanted {
    name: String,
    #[serde(default, deserialize_with = "or_default")]
    parameters: Parameters,
}

/// Those of the extension for binary tensors, and those that are refused; others are ignored.
#[derive(Debug, Default, Deserialize, ToSchema)]
struct Parameters {
    binary_data_size: Option<usize>,
    binary_data: Option<bool>,
    binary_data_output: Option<bool>,
    /// Only null or 0.
    #[schema(value_type = Option<u64>)]
    classification: Option<Value>,
    /// Only null, 0 or empty.
    #[schema(value_type = Option<u64>)]
    sequence_id: Option<Value>,
    /// Only null or empty.
    #[schema(value_type = Option<String>)]
    shared_memory_region: Option<Value>,
}

impl Parameters {
    /// Refuses what is not supported. `of`: what has these parameters, as in `output logits: `.
    fn check(&self, of: &str) -> Result<(), Problem> {
        let given = [&self.classification, &self.sequence_id, &self.shared_memory_region];
        for (name, value) in REFUSED.into_iter().zip(given) {
            let found = match value {
                None | Some(Value::Null | Value::Bool(false)) => continue,
                Some(Value::Number(number)) if number.as_f64() == Some(0.0) => continue,
                Some(Value::String(text)) if text.is_empty() => continue,
                Some(found) => found,
            };
            return Err(unsupported(of, name, &found.to_string()));
        }
        Ok(())
    }
}

/// What is optional may be null, as some clients write it.
fn or_default<'de, T: Default + Deserialize<'de>, D: Deserializer<'de>>(value: D) -> Result<T, D::Error> {
    Option::deserialize(value).map(Option::unwrap_or_default)
}

#[derive(Debug, Serialize, ToSchema)]
struct InferResponse {
    model_name: String,
    model_version: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    id: String,
    outputs: Vec<Output>,
}

#[derive(Debug, Serialize, ToSchema)]
struct Output {
    name: String,
    shape: Vec<usize>,
    datatype: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    parameters: BTreeMap<&'static str, usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<f64>>)]
    data: Option<Numbers>,
}

/// Whether the server answers at all.
#[utoipa::path(get, path = "/v2/health/live", operation_id = "server_live", responses((status = 200)))]
async fn live() -> axum::Json<Value> {
    axum::Json(serde_json::json!({ "live": true }))
}

/// Whether all models take requests.
#[utoipa::path(get, path = "/v2/health/ready", operation_id = "server_ready", responses((status = 200), (status = 503)))]
async fn ready(State(app): State<Arc<App>>) -> Response {
    let ready = app.is_ready();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, axum::Json(serde_json::json!({ "ready": ready }))).into_response()
}

/// The server.
#[utoipa::path(get, path = "/v2", operation_id = "server_metadata", responses((status = 200, body = Server)))]
async fn server() -> axum::Json<Server> {
    axum::Json(Server { name: SERVER, version: moh_runtime::short_version(), extensions: EXTENSIONS })
}

/// A model's inputs and outputs.
#[utoipa::path(get, path = "/v2/models/{model}", operation_id = "model_metadata",
    params(("model" = String, Path)), responses((status = 200, body = Metadata), (status = 404), (status = 503)))]
async fn metadata(State(app): State<Arc<App>>, Path(named): Path<Named>) -> Result<axum::Json<Metadata>, Problem> {
    let served = model(&app, &named.model, &named.version)?;
    let port =
        |info: &TensorInfo| Port { name: info.name.clone(), datatype: name(info.element_type), shape: shape(info) };
    Ok(axum::Json(Metadata {
        name: served.name.clone(),
        versions: [VERSION],
        platform: served.platform,
        inputs: served.inputs.iter().map(port).collect(),
        outputs: served.outputs.iter().map(port).collect(),
    }))
}

/// Whether a model takes requests.
#[utoipa::path(get, path = "/v2/models/{model}/ready", params(("model" = String, Path)), responses((status = 200), (status = 404), (status = 503)))]
async fn model_ready(State(app): State<Arc<App>>, Path(named): Path<Named>) -> Result<Response, Problem> {
    let served = model(&app, &named.model, &named.version)?;
    let ready = served.health.is_ready();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = serde_json::json!({ "name": served.name, "ready": ready });
    Ok((status, axum::Json(body)).into_response())
}

/// Runs a model on tensors, in JSON or, with `Inference-Header-Content-Length`, in JSON followed by bytes.
#[utoipa::path(post, path = "/v2/models/{model}/infer", operation_id = "infer", params(("model" = String, Path)), request_body = InferRequest,
    responses((status = 200, body = InferResponse), (status = 400), (status = 404), (status = 413), (status = 422),
        (status = 429), (status = 503)))]
async fn run(
    State(app): State<Arc<App>>,
    Path(named): Path<Named>,
    headers: HeaderMap,
    Payload { body, deadline }: Payload,
) -> Result<Response, Problem> {
    let length = header_length(&headers)?;
    if length.is_some_and(|length| length > body.len()) {
        let (length, found) = (length.unwrap_or_default(), body.len());
        return Err(Problem::invalid(format!("{HEADER_LENGTH}: {length} bytes of JSON, in a body of {found}")));
    }
    let (text, bytes) = body.split_at(length.unwrap_or(body.len()));
    // Megabytes of JSON take a while: other requests' tasks go to another thread.
    let (request, inputs) = tokio::task::block_in_place(|| decode(text, bytes))?;
    let outputs = request.outputs.iter().map(|wanted| wanted.name.clone()).collect();
    let asked = Request { model: &named.model, version: &named.version, inputs, outputs, deadline };
    let found = infer(&app, asked).await?;
    let all = request.parameters.binary_data_output.unwrap_or(false);
    let is_binary = |i: usize| request.outputs.get(i).and_then(|wanted| wanted.parameters.binary_data).unwrap_or(all);
    let mut bytes = Vec::new();
    let found = found.into_iter().enumerate();
    let outputs = found.map(|(i, (name, tensor))| output(name, tensor, is_binary(i), &mut bytes));
    let (model_name, id) = (named.model, request.id);
    let answer = InferResponse { model_name, model_version: VERSION, id, outputs: outputs.collect() };
    if bytes.is_empty() {
        return Ok(axum::Json(answer).into_response());
    }
    let mut text = serde_json::to_vec(&answer).map_err(|e| Problem::failed(e.to_string()))?;
    let length = HeaderValue::from(text.len());
    text.append(&mut bytes);
    let binary = HeaderValue::from_static("application/octet-stream");
    Ok(([(header::CONTENT_TYPE, binary), (HEADER_LENGTH, length)], text).into_response())
}

/// A request, and the tensors in its JSON or after it.
fn decode(text: &[u8], mut bytes: &[u8]) -> Result<(InferRequest, Vec<(String, Tensor)>), Problem> {
    let request: InferRequest = door::parse(text)?;
    request.parameters.check("")?;
    for wanted in &request.outputs {
        wanted.parameters.check(&format!("output {}: ", wanted.name))?;
    }
    let mut inputs = Vec::with_capacity(request.inputs.len());
    for input in &request.inputs {
        input.parameters.check(&format!("input {}: ", input.name))?;
        inputs.push((input.name.clone(), tensor(input, &mut bytes)?));
    }
    if !bytes.is_empty() {
        return Err(Problem::invalid(format!("{} bytes are left after the inputs'", bytes.len())));
    }
    Ok((request, inputs))
}

fn header_length(headers: &HeaderMap) -> Result<Option<usize>, Problem> {
    let Some(value) = headers.get(HEADER_LENGTH) else { return Ok(None) };
    let length = value.to_str().ok().and_then(|value| value.parse().ok());
    length.map(Some).ok_or_else(|| Problem::invalid(format!("{HEADER_LENGTH}: expected a number of bytes")))
}

/// An input, whose bytes are the next of `bytes` if they are not in the JSON.
fn tensor(input: &Input, bytes: &mut &[u8]) -> Result<Tensor, Problem> {
    let name = &input.name;
    let ty = datatype::parse(name, &input.datatype)?;
    let Some(size) = input.parameters.binary_data_size else {
        let data = input.data.as_ref().ok_or_else(|| {
            Problem::new(Kind::Form, format!("input {name}: expected data, or parameters.binary_data_size"))
        })?;
        return json::tensor(name, ty, &input.shape, data);
    };
    let (shape, count) = datatype::elements(name, &input.shape)?;
    let Some((own, rest)) = bytes.split_at_checked(size) else {
        let message = format!("input {name}: expected {size} bytes after the JSON, found {}", bytes.len());
        return Err(Problem::invalid(message));
    };
    *bytes = rest;
    binary(name, ty, shape, count, own)
}

/// A tensor of little-endian bytes.
pub(super) fn binary(
    name: &str,
    ty: moh_runtime::ElementType,
    shape: Vec<usize>,
    count: usize,
    bytes: &[u8],
) -> Result<Tensor, Problem> {
    let expected = count * ty.size();
    let data = ty.read(bytes).filter(|_| bytes.len() == expected);
    let data = data.ok_or_else(|| {
        let message = format!("input {name}: expected {expected} bytes for shape {shape:?}, found {}", bytes.len());
        Problem::invalid(message)
    })?;
    Tensor::from_data(shape, data).map_err(|e| Problem::invalid(format!("input {name}: {e}")))
}

fn output(name: String, tensor: Tensor, is_binary: bool, bytes: &mut Vec<u8>) -> Output {
    let (shape, datatype) = (tensor.shape().to_vec(), super::name(tensor.element_type()));
    let mut parameters = BTreeMap::new();
    if !is_binary {
        return Output { name, shape, datatype, parameters, data: Some(Numbers(tensor)) };
    }
    let mut own = tensor.data().to_bytes();
    parameters.insert("binary_data_size", own.len());
    bytes.append(&mut own);
    Output { name, shape, datatype, parameters, data: None }
}
