//! A request's body, within its bounds of size and time.

use crate::deadline::Deadline;
use crate::problem::{Kind, Problem};
use crate::server::App;
use axum::Json;
use axum::body::{BodyDataStream, Bytes};
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, HeaderValue, header};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

/// Of a body that is refused, as much is read and thrown away: a client that is still sending would not see the answer.
const THROWN_AWAY: usize = 256 << 20;
const THROWING_TIME: Duration = Duration::from_secs(5);

/// A whole body, and the time of its request.
pub(crate) struct Payload {
    pub(crate) body: Bytes,
    pub(crate) deadline: Deadline,
}

impl FromRequest<Arc<App>> for Payload {
    type Rejection = Problem;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Payload, Problem> {
        let deadline = Deadline::after(app.limits.timeout);
        app.check_open()?;
        let length = request.headers().get(header::CONTENT_LENGTH);
        let length: Option<usize> = length.and_then(|length| length.to_str().ok()?.parse().ok());
        let encoded = check_encoding(request.headers());
        let stall = app.limits.stall;
        let slow = || Problem::new(Kind::Slow, format!("nothing of the body came for {} s", stall.as_secs_f64()));
        let mut stream = request.into_body().into_data_stream();
        let mut body = Vec::with_capacity(length.unwrap_or(0).min(app.limits.body));
        if let Err(problem) = encoded {
            throw_away(stream).await;
            return Err(problem);
        }
        if length.is_some_and(|length| length > app.limits.body) {
            return Err(too_large(stream, app.limits.body).await);
        }
        loop {
            let part = tokio::select! {
                part = tokio::time::timeout(stall.min(deadline.left()), stream.next()) => part,
                () = app.closed() => return Err(Problem::closing()),
            };
            let part = part.map_err(|_| if deadline.has_passed() { deadline.arrived() } else { slow() })?;
            let Some(part) = part else { break };
            let part = part.map_err(|_| Problem::invalid("the body broke off"))?;
            if body.len() + part.len() > app.limits.body {
                return Err(too_large(stream, app.limits.body).await);
            }
            body.extend_from_slice(&part);
        }
        Ok(Payload { body: body.into(), deadline })
    }
}

/// Refuses bodies that are not sent as they are.
fn check_encoding(headers: &HeaderMap) -> Result<(), Problem> {
    let is_plain = |name: &HeaderValue| name.is_empty() || name.as_bytes().eq_ignore_ascii_case(b"identity");
    match headers.get_all(header::CONTENT_ENCODING).iter().find(|name| !is_plain(name)) {
        None => Ok(()),
        Some(name) => {
            let found: String = String::from_utf8_lossy(name.as_bytes()).chars().take(40).collect();
            let message = format!("Content-Encoding: expected identity, found {found:?}: send the body uncompressed");
            Err(Problem::new(Kind::Encoding, message))
        }
    }
}

async fn too_large(stream: BodyDataStream, limit: usize) -> Problem {
    throw_away(stream).await;
    Problem::new(Kind::Large, format!("expected a body of at most {limit} bytes"))
}

async fn throw_away(mut stream: BodyDataStream) {
    let rest = async {
        let mut left = THROWN_AWAY;
        while let Some(Ok(part)) = stream.next().await {
            let Some(less) = left.checked_sub(part.len()) else { return };
            left = less;
        }
    };
    let _ = tokio::time::timeout(THROWING_TIME, rest).await;
}

/// What a body of JSON says.
///
/// # Errors
/// A [`Problem`] for what is no JSON, or JSON of another form; it names the field, unless that is of a flattened part.
pub(crate) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    // It would be read as the fields in their order.
    if body.trim_ascii_start().starts_with(b"[") {
        return Err(Problem::new(Kind::Form, "body: expected a JSON object, found an array"));
    }
    // axum's reader keeps the path to what is wrong.
    let rejection = match Json::from_bytes(body) {
        Ok(Json(value)) => return Ok(value),
        Err(rejection) => rejection,
    };
    let reason = rejection.source().map_or_else(|| rejection.body_text(), ToString::to_string);
    Err(match rejection {
        JsonRejection::JsonDataError(_) => Problem::new(Kind::Form, format!("body: {}", plain(&reason))),
        _ => Problem::invalid(format!("body: expected JSON: {reason}")),
    })
}

/// What serde says, with words for the names of Rust's types.
fn plain(reason: &str) -> String {
    let Some((before, rest)) = reason.rsplit_once(", expected ") else { return reason.to_owned() };
    let (expected, place) = rest.split_at(rest.find(" at line ").unwrap_or(rest.len()));
    let expected = match expected {
        "usize" | "u64" => "a 64-bit integer of 0 or more",
        "i64" => "a 64-bit integer",
        "f64" => "a number",
        other if other.starts_with("struct ") => "a JSON object",
        other => other,
    };
    format!("{before}, expected {expected}{place}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[allow(dead_code, reason = "only read")]
    struct Body {
        count: Option<usize>,
        parts: Vec<Part>,
    }

    #[derive(Debug, Deserialize)]
    #[allow(dead_code, reason = "only read")]
    struct Part {
        seed: i64,
        share: f64,
    }

    #[test]
    fn the_field_is_named_and_no_type_of_rust() {
        let refused = |body: &str| {
            let problem = parse::<Body>(body.as_bytes()).unwrap_err();
            (problem.status().as_u16(), problem.message.split(" at line ").next().unwrap().to_owned())
        };
        for (body, expected) in [
            (r#"{"count": -1}"#, "count: invalid value: integer `-1`, expected a 64-bit integer of 0 or more"),
            (
                r#"{"parts": [{"seed": 1.5}]}"#,
                "parts[0].seed: invalid type: floating point `1.5`, expected a 64-bit integer",
            ),
            (
                r#"{"parts": [{"share": ", expected u64"}]}"#,
                r#"parts[0].share: invalid type: string ", expected u64", expected a number"#,
            ),
            (r#"{"parts": [5]}"#, "parts[0]: invalid type: integer `5`, expected a JSON object"),
            ("{}", "missing field `parts`"),
            ("null", "invalid type: null, expected a JSON object"),
            (" [1, []]", "expected a JSON object, found an array"),
        ] {
            assert_eq!(refused(body), (422, format!("body: {expected}")));
        }
        assert_eq!(refused("{"), (400, "body: expected JSON: EOF while parsing an object".to_owned()));
    }
}
