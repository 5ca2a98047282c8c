//! Answers in GitHub's format.

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Response, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};

/// An answer: a status, a body, and the headers that are not on every answer.
#[derive(Clone, Debug)]
pub struct FakeResponse {
    status: StatusCode,
    headers: Vec<(HeaderName, HeaderValue)>,
    body: Bytes,
}

impl FakeResponse {
    pub(super) fn json(status: StatusCode, body: &Value) -> Self {
        let json = HeaderValue::from_static("application/json; charset=utf-8");
        Self { status, headers: vec![(CONTENT_TYPE, json)], body: body.to_string().into() }
    }

    pub(super) fn ok(body: &Value) -> Self {
        Self::json(StatusCode::OK, body)
    }

    pub(super) fn bytes(
        status: StatusCode,
        headers: Vec<(HeaderName, HeaderValue)>,
        body: Bytes,
    ) -> Self {
        Self { status, headers, body }
    }

    pub(super) fn error(status: StatusCode, message: &str) -> Self {
        Self::json(status, &error_json(status, message))
    }

    /// Returns the answer for a missing repository, and for a token without access to it.
    pub(super) fn not_found() -> Self {
        Self::error(StatusCode::NOT_FOUND, "Not Found")
    }

    pub(super) fn bad_credentials() -> Self {
        Self::error(StatusCode::UNAUTHORIZED, "Bad credentials")
    }

    /// Returns the error for a field with an invalid value.
    pub(super) fn invalid(resource: &str, field: &str) -> Self {
        Self::unprocessable(&json!({ "resource": resource, "field": field, "code": "invalid" }))
    }

    /// Returns the error for a request that violates a rule as a whole.
    pub(super) fn refused(resource: &str, message: &str) -> Self {
        Self::unprocessable(&json!({ "resource": resource, "code": "custom", "message": message }))
    }

    /// Returns an error of a GraphQL query. The status is a success.
    pub(super) fn graphql_error(kind: &str, message: &str) -> Self {
        let error =
            json!({ "type": kind, "path": ["convertPullRequestToDraft"], "message": message });
        Self::ok(&json!({ "data": null, "errors": [error] }))
    }

    fn unprocessable(reason: &Value) -> Self {
        let status = StatusCode::UNPROCESSABLE_ENTITY;
        let mut body = error_json(status, "Validation Failed");
        body["errors"] = json!([reason]);
        Self::json(status, &body)
    }

    /// Adds a header.
    #[must_use]
    pub(super) fn with_header(mut self, name: &'static str, value: String) -> Self {
        let value = HeaderValue::try_from(value).expect("the fake server's headers are printable");
        self.headers.push((HeaderName::from_static(name), value));
        self
    }

    pub(super) fn into_response(self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::new(self.body));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert("server", HeaderValue::from_static("github.com"));
        headers.insert("x-github-media-type", HeaderValue::from_static("github.v3; format=json"));
        // GitHub sends its limits on every answer; a client must not stop because of these values.
        headers.insert("x-ratelimit-limit", HeaderValue::from_static("5000"));
        headers.insert("x-ratelimit-remaining", HeaderValue::from_static("4999"));
        // A header of the answer replaces the general one, such as the remaining requests.
        for (name, value) in self.headers {
            headers.insert(name, value);
        }
        response
    }
}

fn error_json(status: StatusCode, message: &str) -> Value {
    json!({
        "message": message,
        "documentation_url": "https://docs.github.com/rest",
        "status": status.as_str(),
    })
}
