//! The HTTP API of the service: agents, chats, runs, their costs and their records, for callers that hold a grant.
//!
//! Reading order: [`extract`] identifies the caller and parses the request. [`run_request`] turns a body into a run
//! submission, as far as the grant allows. [`chat`] and [`runs`] start runs, and [`events`] streams the events of a
//! run. [`approvals`] answers questions about tool calls, and [`approval_reply`] takes signed answers; [`standing_approvals`] serves those that count for later calls. [`agent_policies`] shows and replaces the policies of agents. [`run_records`] serves the records of a run, and [`audit`] proves its audit log. A handler parses the
//! request, checks the grant, calls one module below, and answers.
//!
//! The handlers generate the served `OpenAPI` document ([`openapi`]). Error answers that several handlers share are
//! described in [`error_docs`]; results and events, which the service stores as JSON, in [`result_docs`] and
//! [`event_docs`].
//!
//! **Invariant:** only a run's own grant, or an admin, can see, watch or end that run.

#![expect(unused_qualifications, reason = "the macros that describe handlers write whole paths")]

mod agent_policies;
mod agents;
mod approval_reply;
mod approval_terms;
mod approvals;
mod audit;
mod billing;
mod chat;
mod error;
mod error_docs;
mod event_docs;
mod events;
mod extract;
mod health;
mod large_answer;
mod openapi;
mod origin_check;
mod proof_cache;
mod request_log;
mod result_docs;
mod run_records;
mod run_request;
mod runs;
mod server;
mod share_limiter;
mod standing_approvals;
mod work_limiter;

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::extract::DefaultBodyLimit;
use axum::{Router, middleware};
use utoipa::openapi::OpenApi;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

use crate::base::task_group::TaskGroup;
use crate::runner::agents::availability::AvailabilityCache;
use crate::service::auth::{AccessGrant, GrantScope, GrantStore, GrantTerms};
use crate::service::billing::BillingStore;
use crate::service::runs::RunService;
use crate::service::store::RunRow;
use crate::telemetry::metrics::MetricsRegistry;

pub use audit::AuditView;
pub use proof_cache::ProofCache;
pub use server::ApiListener;
pub use share_limiter::GrantShareLimiter;
pub use work_limiter::GrantWorkLimiter;

use error::ApiError;
use extract::AuthenticatedCaller;
use share_limiter::{GrantShareError, GrantShareGuard};

/// The shared state of all request handlers.
pub struct ApiState {
    pub grants: GrantStore,
    /// The grant of every caller that can connect, if the service asks for no grants; `None` if callers need a token.
    pub anonymous_grant: Option<Arc<AccessGrant>>,
    pub run_service: RunService,
    pub billing: BillingStore,
    pub availability: AvailabilityCache,
    pub metrics: Arc<MetricsRegistry>,
    /// The open event streams, counted by grant.
    pub watchers: GrantShareLimiter,
    /// The files that are being sent (audit logs and artifacts of sandboxes), counted by grant.
    pub downloads: GrantShareLimiter,
    /// The long reads (lists of runs, and proofs of audit logs) that grants do at the same time.
    pub long_reads: GrantWorkLimiter,
    pub proofs: ProofCache<AuditView>,
    /// The cost reports that grants send at the same time. Their bodies are large.
    pub reports: GrantWorkLimiter,
    /// The limits for clients.
    pub limits: ApiLimits,
    /// The group of tasks that requests start and that must finish even if the client leaves.
    pub tasks: TaskGroup,
}

/// The limits that apply to each client connection.
#[derive(Clone, Copy, Debug)]
pub struct ApiLimits {
    /// The maximum number of connections at the same time.
    pub connections: usize,
    /// The timeout for reading the head of a request, and for reading its body.
    pub timeout: Duration,
}

impl ApiState {
    /// Returns the router of all routes.
    pub fn api_router(self: &Arc<Self>) -> Router {
        let (router, document) = all_routes();
        let document: Arc<str> = document.to_json().expect("it has texts as keys").into();
        let router = router
            .route(
                openapi::OPENAPI_PATH,
                axum::routing::get(async move || openapi::document_response(&document)),
            )
            .fallback(async || ApiError::NoSuchPath);
        self.with_layers(router)
    }

    /// Returns the router for the reserved connections. It serves health and cost reports, and refuses every other
    /// path.
    fn health_router(self: &Arc<Self>) -> Router {
        self.with_layers(
            health_routes().split_for_parts().0.fallback(async || ApiError::TooManyConnections),
        )
    }

    /// Adds the layers of every request. A request passes them from the last line of this function to the first.
    fn with_layers(self: &Arc<Self>, router: Router<Arc<Self>>) -> Router {
        let router = router
            .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
            .layer(DefaultBodyLimit::max(MAX_REQUEST_BODY_BYTES));
        let router = match &self.anonymous_grant {
            // Without grants, a token does not keep browsers out, so the origin check must.
            Some(_) => router.layer(middleware::from_fn(origin_check::reject_cross_origin)),
            None => router,
        };
        let trace = middleware::from_fn_with_state(Arc::clone(self), request_log::log_request);
        router.layer(trace).with_state(Arc::clone(self))
    }

    /// Returns the grant that every caller has if the service asks for none. It allows everything.
    pub fn anonymous_grant() -> AccessGrant {
        let pattern = |text: &str| text.parse().expect("it is a pattern");
        let terms = GrantTerms {
            access: GrantScope::ALL.into(),
            allow_sandbox: true,
            agents: vec![pattern("*")],
            // The first account pays if the request names no account.
            accounts: vec![pattern("anonymous"), pattern("*")],
            repositories: vec![pattern("*")],
            ..GrantTerms::default()
        };
        let (id, name) = ("anonymous".to_owned(), "anonymous".to_owned());
        let created = UNIX_EPOCH;
        AccessGrant { id, name, terms, created, expires: None, revoked: None, used: None }
    }

    /// Returns the `OpenAPI` document that is served at [`openapi::OPENAPI_PATH`].
    pub fn openapi_document() -> OpenApi {
        all_routes().1
    }

    /// Counts one more event stream of the caller's grant.
    fn acquire_watcher(&self, caller: &AuthenticatedCaller) -> Result<GrantShareGuard, ApiError> {
        self.watchers.acquire_share(&caller.0.id).map_err(|full| match full {
            GrantShareError::GrantLimit(most) => ApiError::TooManyWatchers(most),
            GrantShareError::TotalLimit => ApiError::TooManyConnections,
        })
    }

    /// Returns the run that a request is about, if the caller may see the run. The request's log line then names it.
    async fn requested_run(
        &self,
        caller: &AuthenticatedCaller,
        id: &str,
    ) -> Result<RunRow, ApiError> {
        let row = self.visible_run(caller, id).await?;
        request_log::name_run(&row.id);
        Ok(row)
    }

    /// Returns a run that the caller may see. The answer is "not found" for a run of another grant as well, so that a
    /// caller cannot find out which run ids exist.
    async fn visible_run(
        &self,
        caller: &AuthenticatedCaller,
        id: &str,
    ) -> Result<RunRow, ApiError> {
        let row = self.run_service.run_store().find_run(id).await?;
        let may_see = |row: &RunRow| row.grant == caller.0.id || caller.0.is_admin();
        row.filter(may_see).ok_or_else(|| ApiError::no_such_run(id))
    }

    /// Refuses a request for the records of a run whose records were removed.
    async fn require_records(&self, run: &str) -> Result<(), ApiError> {
        if self.run_service.run_store().has_lost_records(run).await? {
            return Err(ApiError::RecordsRemoved(run.to_owned()));
        }
        Ok(())
    }
}

fn all_routes() -> (Router<Arc<ApiState>>, OpenApi) {
    OpenApiRouter::with_openapi(openapi::base_document())
        .merge(health_routes())
        .routes(routes!(agents::list_agents))
        .routes(routes!(agent_policies::show_agent_policy, agent_policies::replace_agent_policy))
        .routes(routes!(chat::start_chat))
        .routes(routes!(runs::create_run, runs::list_runs))
        .routes(routes!(runs::show_run))
        .routes(routes!(runs::cancel_run))
        .routes(routes!(billing::show_receipts))
        .routes(routes!(billing::list_flagged_runs))
        .routes(routes!(events::watch_run))
        .routes(routes!(approvals::list_approvals))
        .routes(routes!(approvals::show_approval))
        .routes(routes!(approvals::decide_approval))
        .routes(routes!(standing_approvals::list_standing_approvals))
        .routes(routes!(standing_approvals::show_standing_approval))
        .routes(routes!(standing_approvals::grant_proposal))
        .routes(routes!(standing_approvals::revoke_standing_approval))
        .routes(
            routes!(approval_reply::take_reply)
                .layer(DefaultBodyLimit::max(approval_reply::MAX_REPLY_BYTES)),
        )
        .routes(routes!(run_records::show_output))
        .routes(routes!(audit::show_audit))
        .routes(routes!(run_records::list_deliveries))
        .routes(routes!(run_records::list_artifacts))
        .routes(routes!(run_records::download_artifact))
        .split_for_parts()
}

/// Returns the routes that are also served on the reserved connections: health and cost reports. Their clients must
/// not have to wait until other clients leave.
fn health_routes() -> OpenApiRouter<Arc<ApiState>> {
    OpenApiRouter::new()
        .routes(routes!(health::show_liveness))
        .routes(routes!(health::show_readiness))
        .routes(
            // Cost reports hold up to 512 calls, so they have a larger limit than other bodies.
            routes!(billing::ingest_notices)
                .layer(DefaultBodyLimit::max(billing::MAX_NOTICES_BYTES)),
        )
}

/// The maximum size of a request body, in bytes. Our choice: a long conversation is some hundred kilobytes.
const MAX_REQUEST_BODY_BYTES: usize = 1 << 20;
