//! The service over HTTP: agents, chats, runs and what they cost, for those who hold a grant.
//!
//! Reading order: [`extract`] is who asks and what for; [`run_request`] turns a body into what the supervisor wants, as far as
//! the grant allows; [`chat`] and [`runs`] begin runs, [`events`] is how they are watched, [`run_records`] what is left of
//! them, [`audit`] what proves it. A handler parses, asks the grant, calls one room below, and answers.
//!
//! The description of all this ([`openapi`]) is made from the handlers themselves, and served; the answers that several
//! of them have in common stand in [`error_docs`].
//!
//! **Invariant:** nobody sees, watches or ends a run of another's grant, but an admin.

#![expect(unused_qualifications, reason = "the macros that describe handlers write whole paths")]

mod agents;
mod audit;
mod billing;
mod chat;
mod error;
mod error_docs;
mod events;
mod extract;
mod health;
mod openapi;
mod origin_check;
mod proof_cache;
mod request_log;
mod run_records;
mod run_request;
mod runs;
mod server;
mod share_limiter;
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

/// What the handlers work on.
pub struct ApiState {
    pub grants: GrantStore,
    /// What everybody may do who can connect, where no grant is asked for.
    pub anybody: Option<Arc<AccessGrant>>,
    pub supervisor: RunService,
    pub books: BillingStore,
    pub availability: AvailabilityCache,
    pub metrics: Arc<MetricsRegistry>,
    /// Streams of events.
    pub watchers: GrantShareLimiter,
    /// Files that are being sent: audit logs, and what came out of sandboxes.
    pub downloads: GrantShareLimiter,
    /// Reads that take long: lists of runs, and proofs of audit logs.
    pub long_reads: GrantWorkLimiter,
    pub proofs: ProofCache<AuditView>,
    /// Reports of costs, whose bodies are large.
    pub reports: GrantWorkLimiter,
    /// What clients are given.
    pub limits: ApiLimits,
    /// What requests leave behind, and must not be lost.
    pub tasks: TaskGroup,
}

/// What clients are given.
#[derive(Clone, Copy, Debug)]
pub struct ApiLimits {
    /// Connections at the same time.
    pub connections: usize,
    /// For a head, and for a body.
    pub patience: Duration,
}

impl ApiState {
    /// All routes.
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

    /// What is answered where there are too many connections for all else.
    fn health_router(self: &Arc<Self>) -> Router {
        self.with_layers(health_routes().split_for_parts().0.fallback(async || ApiError::Crowded))
    }

    /// With what every request goes through, from the last line to the first.
    fn with_layers(self: &Arc<Self>, router: Router<Arc<Self>>) -> Router {
        let router = router
            .method_not_allowed_fallback(async || ApiError::Method)
            .layer(DefaultBodyLimit::max(MAX_REQUEST_BODY_BYTES));
        let router = match &self.anybody {
            Some(_) => router.layer(middleware::from_fn(origin_check::reject_cross_origin)),
            None => router,
        };
        let trace = middleware::from_fn_with_state(Arc::clone(self), request_log::log_request);
        router.layer(trace).with_state(Arc::clone(self))
    }

    /// The grant of everybody, where none is asked for.
    pub fn anonymous_grant() -> AccessGrant {
        let pattern = |text: &str| text.parse().expect("it is a pattern");
        let terms = GrantTerms {
            access: GrantScope::ALL.into(),
            allow_sandbox: true,
            agents: vec![pattern("*")],
            // The first pays where nobody is named.
            accounts: vec![pattern("anybody"), pattern("*")],
            repositories: vec![pattern("*")],
            ..GrantTerms::default()
        };
        let (id, name) = ("anybody".to_owned(), "anybody".to_owned());
        let created = UNIX_EPOCH;
        AccessGrant { id, name, terms, created, expires: None, revoked: None, used: None }
    }

    /// What is served at [`openapi::OPENAPI_PATH`].
    pub fn openapi_document() -> OpenApi {
        all_routes().1
    }

    /// Counts one more watcher of a caller's.
    fn acquire_watcher(&self, caller: &AuthenticatedCaller) -> Result<GrantShareGuard, ApiError> {
        self.watchers.acquire_share(&caller.0.id).map_err(|full| match full {
            GrantShareError::Grant(most) => ApiError::TooManyWatchers(most),
            GrantShareError::All => ApiError::Crowded,
        })
    }

    /// A run that the caller may see.
    async fn visible_run(
        &self,
        caller: &AuthenticatedCaller,
        id: &str,
    ) -> Result<RunRow, ApiError> {
        let row = self.supervisor.run_store().find_run(id).await?;
        let may_see = |row: &RunRow| row.grant == caller.0.id || caller.0.is_admin();
        row.filter(may_see).ok_or_else(|| ApiError::no_such_run(id))
    }
}

fn all_routes() -> (Router<Arc<ApiState>>, OpenApi) {
    OpenApiRouter::with_openapi(openapi::base_document())
        .merge(health_routes())
        .routes(routes!(agents::list_agents))
        .routes(routes!(chat::start_chat))
        .routes(routes!(runs::create_run, runs::list_runs))
        .routes(routes!(runs::show_run))
        .routes(routes!(runs::cancel_run))
        .routes(routes!(billing::show_receipts))
        .routes(routes!(billing::list_flagged_runs))
        .routes(routes!(events::watch_run))
        .routes(routes!(run_records::show_output))
        .routes(routes!(audit::show_audit))
        .routes(routes!(run_records::list_deliveries))
        .routes(routes!(run_records::list_artifacts))
        .routes(routes!(run_records::download_artifact))
        .split_for_parts()
}

/// How the service is, and what calls have cost: whoever asks that must not have to wait for others to leave.
fn health_routes() -> OpenApiRouter<Arc<ApiState>> {
    OpenApiRouter::new()
        .routes(routes!(health::show_liveness))
        .routes(routes!(health::show_readiness))
        .routes(
            routes!(billing::ingest_notices)
                .layer(DefaultBodyLimit::max(billing::MAX_NOTICES_BYTES)),
        )
}

/// Of one request. Ours: a long conversation is some hundred kilobytes.
const MAX_REQUEST_BODY_BYTES: usize = 1 << 20;
