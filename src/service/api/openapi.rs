//! The service's description of itself, as `OpenAPI` 3.1.

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{Components, OpenApi as Document};
use utoipa::{Modify, OpenApi};

use super::error::ErrorBody;

/// Where it is served, to everybody.
pub(super) const OPENAPI_PATH: &str = "/api/v1/openapi.json";

#[derive(OpenApi)]
#[openapi(
    info(title = "cogni-gateway", description = API_DESCRIPTION, license(name = "MIT OR Apache-2.0")),
    tags(
        (name = "agents", description = "What can be run here"),
        (name = "runs", description = "Begin runs, watch them, end them, and read what is left of them"),
        (name = "billing", description = "What calls have cost"),
        (name = "service", description = "How the service itself is")
    ),
    components(schemas(ErrorBody)),
    security(("grant" = [])),
    modifiers(&GrantSecurityScheme)
)]
struct ApiDocumentHead;

struct GrantSecurityScheme;

impl Modify for GrantSecurityScheme {
    fn modify(&self, document: &mut Document) {
        let scheme = Http::builder()
            .scheme(HttpAuthScheme::Bearer)
            .bearer_format("cgr_…")
            .description(Some("The token of a grant: `cogni-gateway grant mint` makes one."))
            .build();
        let components = document.components.get_or_insert_with(Components::default);
        components.add_security_scheme("grant", SecurityScheme::Http(scheme));
    }
}

/// The description without its paths, which the router adds.
pub(super) fn base_document() -> Document {
    ApiDocumentHead::openapi()
}

pub(super) fn document_response(document: &str) -> Response {
    ([(CONTENT_TYPE, "application/json")], document.to_owned()).into_response()
}

const API_DESCRIPTION: &str = "\
Runs agents in sandboxes that have no network but an LLM gateway, for programs that hold a grant.

Every error is `{\"error\":{\"code\",\"message\"}}`; codes stay the same, messages are for people. Every answer has an \
`x-request-id`, which the service's log has, too.

A run is watched as server-sent events. Each has an `id`; whoever was cut off asks for the events after the last one by \
`Last-Event-ID`. The names of events, and what their data holds:

| event | data |
|---|---|
| `run_started` | the sandbox is being made |
| `text_delta` | `text`: a part of the answer |
| `tool_call`, `tool_result` | the agent uses a tool of its own |
| `usage_report` | one settled call of a model: `call_id`, `model`, `input`, `output`, `cost_usd` |
| `assistant_final` | `text`: the whole answer |
| `error` | `code`, `message`: the run is not ok |
| `done` | the agent has ended |
| `final` | always the last, and the run's `result`: `run_id`, `ok`, `error_code`, `error`, `relay`, `usage`, `timings` |

In a result, `relay` is there where the run had a repository: `branch`, `step`, `verdict`, `head`, `is_pushed`, \
`pull_request_url` and `why` of its work, `branch` and `why` where there was nothing to deliver, or `skipped`.

What is no request of HTTP is answered before it is one of ours, without a body: 400, 414 and 431.";
