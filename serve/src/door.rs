//! What every request passes: its id and key, its body, the form of errors, the log.

mod path;
mod payload;

pub(crate) use path::Path;
pub(crate) use payload::{Payload, parse};

use crate::measure;
use crate::problem::{Kind, Problem};
use crate::server::App;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use std::sync::Arc;
use std::time::Instant;
use tracing::Instrument;
use utoipa::openapi::OpenApi;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use uuid::Uuid;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longer ones are not for logs.
const LONGEST_ID: usize = 128;
/// The status, for the log and measurements, of a request whose client left before the answer, as nginx has it.
const LEFT: &str = "499";
/// What anybody may ask: whether the server is there.
const OPEN: [&str; 5] = [
    "/v2/health/live",
    "/v2/health/ready",
    "/health",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
];

/// The id of a request, for its answer's id.
#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub(crate) String);

/// Around every request.
pub(crate) async fn pass(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    request.extensions_mut().insert(RequestId(id.clone()));
    let path = request.uri().path().to_owned();
    let route = request.extensions().get::<MatchedPath>().map_or("unknown", MatchedPath::as_str).to_owned();
    let method = request.method().clone();
    let is_grpc = header_is(request.headers(), header::CONTENT_TYPE, |value| value.starts_with("application/grpc"));
    let span = tracing::info_span!("request", id);
    let visit = Visit { began: Instant::now(), method, route, span: span.clone(), is_answered: false };
    let mut response = match authorize(&app, &path, request.headers()) {
        Ok(()) => next.run(request).instrument(span.clone()).await,
        Err(problem) => problem.response(&path, is_grpc),
    };
    if let Some(problem) = response.extensions_mut().remove::<Problem>() {
        span.in_scope(|| tracing::info!(code = problem.code(), "refused: {}", problem.message));
        let allow = response.headers().get(header::ALLOW).cloned();
        response = problem.response(&path, is_grpc);
        response.headers_mut().extend(allow.map(|allow| (header::ALLOW, allow)));
    }
    if is_grpc && is_unexplained(&response) {
        let path: String = path.chars().take(100).collect();
        response = tonic::Status::unimplemented(format!("there is no method {path}")).into_http();
    }
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    visit.answer(&status(&response));
    response
}

/// A request that is not answered yet, for the log and measurements. It is dropped without an answer where its client leaves.
struct Visit {
    began: Instant,
    method: Method,
    route: String,
    span: tracing::Span,
    is_answered: bool,
}

impl Visit {
    fn answer(mut self, status: &str) {
        self.is_answered = true;
        // Probes would fill the log.
        self.tell(status, self.method != Method::GET || status != "200", "answered");
    }

    fn tell(&self, status: &str, is_logged: bool, what: &str) {
        let (Visit { method, route, .. }, time) = (self, self.began.elapsed());
        measure::request(route, status, time);
        if is_logged {
            let ms = time.as_millis() as u64;
            self.span.in_scope(|| tracing::info!(%method, route, status, ms, "{what}"));
        }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        if !self.is_answered {
            self.tell(LEFT, true, "the client left before the answer");
        }
    }
}

/// Whether it is of a method of gRPC that is none, which tonic answers without a word.
fn is_unexplained(response: &Response) -> bool {
    let headers = response.headers();
    headers.get(tonic::Status::GRPC_STATUS).is_some_and(|code| code == "12")
        && !headers.contains_key(tonic::Status::GRPC_MESSAGE)
}

/// The status for the log and measurements: HTTP's, but gRPC's for its errors, which HTTP has as 200.
fn status(response: &Response) -> String {
    match response.headers().get("grpc-status").and_then(|code| code.to_str().ok()) {
        Some(code) if code != "0" => format!("grpc {code}"),
        _ => response.status().as_u16().to_string(),
    }
}

/// For a path that is none.
pub(crate) async fn nowhere(request: Request) -> Problem {
    let path: String = request.uri().path().chars().take(100).collect();
    Problem::new(Kind::NotFound, format!("there is no {path}: /openapi.json tells what there is"))
}

/// For a path that is there, with another method.
pub(crate) async fn no_method(method: Method, request: Request<Body>) -> Problem {
    let path: String = request.uri().path().chars().take(100).collect();
    Problem::new(Kind::Method, format!("{path} does not take {method}"))
}

/// For a handler that panicked.
pub(crate) fn panicked(_: Box<dyn std::any::Any + Send>) -> Response {
    use axum::response::IntoResponse;
    Problem::failed("the server failed at this request; its log says why").into_response()
}

/// The client's id, if that is fit for logs, or a new one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let fits = |id: &&str| !id.is_empty() && id.len() <= LONGEST_ID && id.bytes().all(|byte| byte.is_ascii_graphic());
    given.filter(fits).map_or_else(|| Uuid::new_v4().simple().to_string(), str::to_owned)
}

fn authorize(app: &App, path: &str, headers: &HeaderMap) -> Result<(), Problem> {
    let Some(keys) = app.keys.as_ref().filter(|_| !OPEN.contains(&path)) else { return Ok(()) };
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let key = given.and_then(|value| value.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    match key {
        Some((_, key)) if keys.contain(key.trim()) => Ok(()),
        Some(_) => Err(Problem::new(Kind::Key, "this API key is not known here")),
        None => Err(Problem::new(Kind::Key, "expected an API key, as the header `Authorization: Bearer KEY`")),
    }
}

/// Tells `/openapi.json` that keys are asked for.
pub(crate) fn describe_keys(api: &mut OpenApi) {
    const SCHEME: &str = "api_key";
    let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    api.components.get_or_insert_default().add_security_scheme(SCHEME, scheme);
    api.security = Some(vec![SecurityRequirement::new::<_, [&str; 0], _>(SCHEME, [])]);
    let open = api.paths.paths.iter_mut().filter(|(path, _)| OPEN.contains(&path.as_str()));
    for operation in open.filter_map(|(_, page)| page.get.as_mut()) {
        operation.security = Some(Vec::new());
    }
}

fn header_is(headers: &HeaderMap, name: HeaderName, is: impl Fn(&str) -> bool) -> bool {
    headers.get(name).and_then(|value| value.to_str().ok()).is_some_and(is)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_request_that_is_not_answered_is_counted_once() {
        let handle = measure::handle();
        let visit = |route: &str| {
            let (method, route) = (Method::POST, route.to_owned());
            Visit { began: Instant::now(), method, route, span: tracing::Span::none(), is_answered: false }
        };
        visit("/answered").answer("200");
        drop(visit("/left"));
        let page = handle.render();
        let counts: Vec<&str> = page.lines().filter(|line| line.starts_with("moh_requests_total{")).collect();
        for line in ["{path=\"/answered\",status=\"200\"} 1", "{path=\"/left\",status=\"499\"} 1"] {
            assert!(counts.contains(&&*format!("moh_requests_total{line}")), "{counts:?}");
        }
        assert!(!page.contains("path=\"/answered\",status=\"499\""), "{page}");
    }

    #[test]
    fn ids_that_are_not_fit_for_logs_are_replaced() {
        let id = |given: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_bytes(given).unwrap());
            request_id(&headers)
        };
        assert_eq!(id(b"abc-1"), "abc-1");
        for bad in [&b""[..], b"a b", b"\xff", &[b'a'; 129]] {
            assert_eq!(id(bad).len(), 32, "{bad:?}");
        }
        assert_ne!(id(b""), id(b""));
    }
}
