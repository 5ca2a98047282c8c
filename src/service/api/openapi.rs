//! The `OpenAPI` 3.1 document of the service.

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{Components, OpenApi as Document};
use utoipa::{Modify, OpenApi};

use super::error::ErrorBody;

/// The path of the document. It is served without a grant.
pub(super) const OPENAPI_PATH: &str = "/api/v1/openapi.json";

#[derive(OpenApi)]
#[openapi(
    info(title = "cogni-gateway", description = API_DESCRIPTION, license(name = "MIT OR Apache-2.0")),
    tags(
        (name = "agents", description = "Agents that can run here"),
        (name = "runs", description = "Start, watch and end runs, and read their records"),
        (name = "billing", description = "Costs of model calls"),
        (name = "service", description = "Health of the service")
    ),
    components(schemas(ErrorBody)),
    security(("grant" = [])),
    modifiers(&GrantSecurityScheme)
)]
/// The part of the document that does not come from a handler.
struct ApiDocumentHead;

/// Adds the bearer token of a grant to the document as its security scheme.
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

/// Returns the document without its paths; the router adds them.
pub(super) fn base_document() -> Document {
    ApiDocumentHead::openapi()
}

pub(super) fn document_response(document: &str) -> Response {
    ([(CONTENT_TYPE, "application/json")], document.to_owned()).into_response()
}

const API_DESCRIPTION: &str = "\
Runs agents in sandboxes for programs that hold a grant. A sandbox has no network, only an LLM gateway.

Every error is `{\"error\":{\"code\",\"message\"}}`; codes stay the same, messages are for people. Every answer has an \
`x-request-id`, which the service's log has, too.

A run is watched as server-sent events. Each has an `id`; a client that was cut off asks for the events after the last one by \
`Last-Event-ID`. The names of events, and what their data holds:

| event | data |
|---|---|
| `queued` | `position`: the run waits for a place; told again when the position has halved |
| `run_started` | the sandbox is being made |
| `text_delta` | `text`: a part of the answer |
| `tool_call`, `tool_result` | the agent uses a tool of its own |
| `usage_report` | one settled call of a model: `call_id`, `model`, `input`, `output`, `cost_usd` |
| `assistant_final` | `text`: the whole answer |
| `error` | `code`, `message`: the run has failed |
| `done` | the agent has ended |
| `final` | always the last event, with the run's `result`: `run_id`, `ok`, `error_code`, `error`, `relay`, `usage`, `timings` |

A result has `relay` if the run had a repository: `branch`, `step`, `verdict`, `head`, `is_pushed`, \
`pull_request_url` and `why` of its work, `branch` and `why` where there was nothing to deliver, or `skipped`.

A message that is not valid HTTP is refused without a body: 400, 414 and 431.";
