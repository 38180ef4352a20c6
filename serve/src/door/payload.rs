//! A request's body, within its bounds of size and time.

use crate::deadline::Deadline;
use crate::problem::{Kind, Problem};
use crate::server::App;
use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::header;
use futures_util::StreamExt;
use serde::Deserialize;
use serde_json::error::Category;
use std::sync::Arc;
use std::time::Duration;

/// Of a body that is too large, as much is read and thrown away: a client that is still sending would not see the answer.
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
        let stall = app.limits.stall;
        let slow = || Problem::new(Kind::Slow, format!("nothing of the body came for {} s", stall.as_secs_f64()));
        let mut stream = request.into_body().into_data_stream();
        let mut body = Vec::with_capacity(length.unwrap_or(0).min(app.limits.body));
        if length.is_some_and(|length| length > app.limits.body) {
            return Err(too_large(stream, app.limits.body).await);
        }
        loop {
            let part = tokio::time::timeout(stall.min(deadline.left()), stream.next()).await;
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

async fn too_large(mut stream: axum::body::BodyDataStream, limit: usize) -> Problem {
    let rest = async {
        let mut left = THROWN_AWAY;
        while let Some(Ok(part)) = stream.next().await {
            let Some(less) = left.checked_sub(part.len()) else { return };
            left = less;
        }
    };
    let _ = tokio::time::timeout(THROWING_TIME, rest).await;
    Problem::new(Kind::Large, format!("expected a body of at most {limit} bytes"))
}

/// What a body of JSON says.
///
/// # Errors
/// A [`Problem`] for what is no JSON, or JSON of another form.
pub(crate) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Problem> {
    serde_json::from_slice(body).map_err(|e| match e.classify() {
        Category::Data => Problem::new(Kind::Form, format!("body: {e}")),
        _ => Problem::invalid(format!("body: expected JSON: {e}")),
    })
}
