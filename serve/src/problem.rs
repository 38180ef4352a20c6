//! Why a request fails, as its client is told.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// What kind of failure it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A value that cannot be.
    Invalid,
    /// JSON of another form.
    Form,
    /// More tokens than the model takes.
    Context,
    /// No key, or a wrong one.
    Key,
    /// No such model or page.
    NotFound,
    /// Not with this method.
    Method,
    /// The body did not come.
    Slow,
    /// A body that is too large.
    Large,
    /// A body that is compressed.
    Encoding,
    /// Too many requests wait.
    Busy,
    /// It waited too long for its turn.
    Overdue,
    /// It ran too long.
    Deadline,
    /// The server begins.
    Loading,
    /// The server ends.
    Closing,
    /// The model does not answer.
    Failed,
}

/// Why a request fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) kind: Kind,
    pub(crate) message: String,
}

impl Problem {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Problem {
        Problem { kind, message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Problem {
        Problem::new(Kind::Invalid, message)
    }

    pub(crate) fn failed(message: impl Into<String>) -> Problem {
        Problem::new(Kind::Failed, message)
    }

    /// The thread that had the request is gone.
    pub(crate) fn lost() -> Problem {
        Problem::failed("the model's thread failed; it is started again")
    }

    pub(crate) fn closing() -> Problem {
        Problem::new(Kind::Closing, "the server is shutting down")
    }

    /// What a client may know of a runtime's failure: not where files are.
    pub(crate) fn of_runtime(error: &moh_tasks::Error) -> Problem {
        if matches!(error, moh_tasks::Error::Runtime(moh_runtime::Error::Interrupted { .. })) {
            tracing::info!("{error}: nobody waits for it any more");
            return Problem::failed("the run was broken off");
        }
        if let moh_tasks::Error::Runtime(moh_runtime::Error::Inputs { problems, .. }) = error {
            return Problem::invalid(problems);
        }
        tracing::error!("{error}");
        match error {
            moh_tasks::Error::Runtime(moh_runtime::Error::Run { runtime, reason, .. })
            | moh_tasks::Error::Output { runtime, reason, .. } => {
                Problem::failed(format!("{runtime} failed: {reason}"))
            }
            _ => Problem::failed("the model failed; the server's log says why"),
        }
    }

    pub(crate) fn status(&self) -> StatusCode {
        match self.kind {
            Kind::Invalid | Kind::Context => StatusCode::BAD_REQUEST,
            Kind::Form => StatusCode::UNPROCESSABLE_ENTITY,
            Kind::Key => StatusCode::UNAUTHORIZED,
            Kind::NotFound => StatusCode::NOT_FOUND,
            Kind::Method => StatusCode::METHOD_NOT_ALLOWED,
            Kind::Slow => StatusCode::REQUEST_TIMEOUT,
            Kind::Large => StatusCode::PAYLOAD_TOO_LARGE,
            Kind::Encoding => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Kind::Busy => StatusCode::TOO_MANY_REQUESTS,
            Kind::Overdue | Kind::Loading | Kind::Closing => StatusCode::SERVICE_UNAVAILABLE,
            Kind::Deadline => StatusCode::GATEWAY_TIMEOUT,
            Kind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// A word for programs.
    pub(crate) fn code(&self) -> &'static str {
        match self.kind {
            Kind::Invalid => "invalid_value",
            Kind::Form => "invalid_form",
            Kind::Context => "context_length_exceeded",
            Kind::Key => "invalid_api_key",
            Kind::NotFound => "not_found",
            Kind::Method => "method_not_allowed",
            Kind::Slow => "request_timeout",
            Kind::Large => "request_too_large",
            Kind::Encoding => "unsupported_encoding",
            Kind::Busy => "queue_full",
            Kind::Overdue => "overloaded",
            Kind::Deadline => "deadline_exceeded",
            Kind::Loading => "loading",
            Kind::Closing => "shutting_down",
            Kind::Failed => "model_failed",
        }
    }

    /// Seconds after which it may be tried again.
    pub(crate) fn retry_after(&self) -> Option<u64> {
        match self.kind {
            Kind::Busy => Some(1),
            Kind::Overdue | Kind::Loading | Kind::Closing => Some(5),
            _ => None,
        }
    }

    /// The error object of OpenAI's API.
    pub(crate) fn openai(&self) -> serde_json::Value {
        let class = match self.status().as_u16() {
            401 => "authentication_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            400..500 => "invalid_request_error",
            _ => "server_error",
        };
        json!({ "error": { "message": self.message, "type": class, "param": null, "code": self.code() } })
    }

    /// The response to a request for `path`, in the form of the protocol that it belongs to.
    pub(crate) fn response(&self, path: &str, is_grpc: bool) -> Response {
        if is_grpc {
            return tonic::Status::from(self.clone()).into_http::<Body>();
        }
        let body = if path.starts_with("/v2") { json!({ "error": self.message }) } else { self.openai() };
        let mut response = (self.status(), axum::Json(body)).into_response();
        if let Some(seconds) = self.retry_after() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.kind == Kind::Key {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// A response that the door writes anew, because only that knows the protocol.
impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = self.status().into_response();
        response.extensions_mut().insert(self);
        response
    }
}

impl From<Problem> for tonic::Status {
    fn from(problem: Problem) -> tonic::Status {
        let code = match problem.kind {
            Kind::Invalid | Kind::Form | Kind::Context | Kind::Method | Kind::Encoding => tonic::Code::InvalidArgument,
            Kind::Key => tonic::Code::Unauthenticated,
            Kind::NotFound => tonic::Code::NotFound,
            Kind::Large | Kind::Busy => tonic::Code::ResourceExhausted,
            Kind::Slow | Kind::Deadline => tonic::Code::DeadlineExceeded,
            Kind::Overdue | Kind::Loading | Kind::Closing => tonic::Code::Unavailable,
            Kind::Failed => tonic::Code::Internal,
        };
        tonic::Status::new(code, problem.message)
    }
}
