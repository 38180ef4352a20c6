//! What a request's path names.

use crate::problem::Problem;
use crate::server::App;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// The parameters of a path. As axum's, whose refusals, such as of `%FF`, would not have the form of other errors.
pub(crate) struct Path<T>(pub(crate) T);

impl<T: DeserializeOwned + Send> FromRequestParts<Arc<App>> for Path<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Path<T>, Problem> {
        let named = axum::extract::Path::from_request_parts(parts, app).await;
        named.map(|named| Path(named.0)).map_err(|rejection| Problem::invalid(rejection.body_text()))
    }
}
