//! The `OpenAPI` 3.1 document of the service.

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{Components, OpenApi as Document};
use utoipa::{Modify, OpenApi};

use super::error::ErrorBody;
use super::event_docs::RunEventDoc;

/// The path of the document. It is served without a grant.
pub(super) const OPENAPI_PATH: &str = "/api/v1/openapi.json";

#[derive(OpenApi)]
#[openapi(
    info(title = "cogni-gateway", description = API_DESCRIPTION, license(name = "MIT OR Apache-2.0")),
    servers((url = "/", description = "The service that has sent this document.")),
    tags(
        (name = "agents", description = "List the agents that can run on this host."),
        (name = "runs", description = "Start, watch and cancel runs, and read their records."),
        (name = "approvals", description = "Answer questions about calls of tools."),
        (name = "billing", description = "Report and read the costs of calls to models."),
        (name = "service", description = "Check the health of the service.")
    ),
    components(schemas(ErrorBody, RunEventDoc)),
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
            .description(Some(
                "The token of a grant. The operator creates it with `cogni-gateway grant mint`.",
            ))
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
The service runs agents in sandboxes, for callers that hold a grant. A sandbox has no network: it reaches only the gateway, which \
calls models within the budget of the run.

**Words.** A *run* is one execution of an agent. A *grant* says what a caller may do; its token is the bearer token of each request. \
The *result* of a run says how the run ended. *Events* report its progress. A *delivery* brings the commits of a run to a *branch*.

**First steps.** List the agents with `GET /api/v1/ai/agents`. Start a run with `POST /api/v1/runs`. Follow its events with \
`GET /api/v1/runs/{id}/events`, or repeat `GET /api/v1/runs/{id}` until `state` is `ended`; then `result` has the result.

**Errors.** The body of every error is an `ErrorBody`: `code` is for programs and stays the same in later versions, `message` is for \
people. Every response has the header `x-request-id`; the log of the service has the request under the same id. A message that is not \
valid HTTP is refused with 400, 414 or 431 and no body.

**Results.** `RunResult` has three forms. `status` says which: `succeeded`, `failed` or `incomplete`.

**Events.** A stream of events has the format `text/event-stream`. Each event has an `id`, a type (`event`), and `data`: a JSON object \
as text. The schema `RunEvent` describes every type of event after `data` was parsed. A client that has lost its connection sends the \
last `id` as the header `Last-Event-ID` and receives the later events. `final` is the last event of every run.

**Amounts.** Amounts of money are US dollars as decimal texts, because many clients read JSON numbers with rounding errors. Times are \
in RFC 3339, UTC.";
