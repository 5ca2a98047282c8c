//! The service over HTTP: agents, chats, runs and what they cost, for those who hold a grant.
//!
//! Reading order: [`extract`] is who asks and what for; [`ask`] turns a body into what the supervisor wants, as far as
//! the grant allows; [`chat`] and [`runs`] begin runs, [`events`] is how they are watched, [`records`] what is left of
//! them, [`audit`] what proves it. A handler parses, asks the grant, calls one room below, and answers.
//!
//! The description of all this ([`document`]) is made from the handlers themselves, and served; the answers that several
//! of them have in common stand in [`refusal`].
//!
//! **Invariant:** nobody sees, watches or ends a run of another's grant, but an admin.

#![expect(unused_qualifications, reason = "the macros that describe handlers write whole paths")]

mod agents;
mod ask;
mod audit;
mod billing;
mod browser;
mod chat;
mod document;
mod error;
mod events;
mod extract;
mod health;
mod proofs;
mod records;
mod refusal;
mod runs;
mod server;
mod shares;
mod trace;
mod turns;

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::extract::DefaultBodyLimit;
use axum::{Router, middleware};
use utoipa::openapi::OpenApi;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

use crate::base::drain::Drain;
use crate::billing::Books;
use crate::catalog::available::Availability;
use crate::grant::{Access, Grant, Grants, Terms};
use crate::journal::Row;
use crate::observe::metrics::Metrics;
use crate::supervisor::Supervisor;

pub use audit::Audit;
pub use proofs::Proofs;
pub use server::Listener;
pub use shares::Shares;
pub use turns::Turns;

use error::Error;
use extract::Caller;
use shares::{ShareGuard, SharesFull};

/// What the handlers work on.
pub struct Api {
    pub grants: Grants,
    /// What everybody may do who can connect, where no grant is asked for.
    pub anybody: Option<Arc<Grant>>,
    pub supervisor: Supervisor,
    pub books: Books,
    pub availability: Availability,
    pub metrics: Arc<Metrics>,
    /// Streams of events.
    pub watchers: Shares,
    /// Files that are being sent: audit logs, and what came out of sandboxes.
    pub downloads: Shares,
    /// Reads that take long: lists of runs, and proofs of audit logs.
    pub long_reads: Turns,
    pub proofs: Proofs<Audit>,
    /// Reports of costs, whose bodies are large.
    pub reports: Turns,
    /// What clients are given.
    pub limits: Limits,
    /// What requests leave behind, and must not be lost.
    pub tasks: Drain,
}

/// What clients are given.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at the same time.
    pub connections: usize,
    /// For a head, and for a body.
    pub patience: Duration,
}

impl Api {
    /// All routes.
    pub fn router(self: &Arc<Self>) -> Router {
        let (router, document) = routes();
        let document: Arc<str> = document.to_json().expect("it has texts as keys").into();
        let router = router
            .route(document::PATH, axum::routing::get(async move || document::answer(&document)))
            .fallback(async || Error::NoSuchPath);
        self.within(router)
    }

    /// What is answered where there are too many connections for all else.
    fn vital(self: &Arc<Self>) -> Router {
        self.within(vital().split_for_parts().0.fallback(async || Error::Crowded))
    }

    /// With what every request goes through, from the last line to the first.
    fn within(self: &Arc<Self>, router: Router<Arc<Self>>) -> Router {
        let router = router
            .method_not_allowed_fallback(async || Error::Method)
            .layer(DefaultBodyLimit::max(MAX_BODY_BYTES));
        let router = match &self.anybody {
            Some(_) => router.layer(middleware::from_fn(browser::keep_out)),
            None => router,
        };
        let trace = middleware::from_fn_with_state(Arc::clone(self), trace::trace);
        router.layer(trace).with_state(Arc::clone(self))
    }

    /// The grant of everybody, where none is asked for.
    pub fn anybody() -> Grant {
        let pattern = |text: &str| text.parse().expect("it is a pattern");
        let terms = Terms {
            access: Access::ALL.into(),
            allow_sandbox: true,
            agents: vec![pattern("*")],
            // The first pays where nobody is named.
            accounts: vec![pattern("anybody"), pattern("*")],
            repositories: vec![pattern("*")],
            ..Terms::default()
        };
        let (id, name) = ("anybody".to_owned(), "anybody".to_owned());
        let created = UNIX_EPOCH;
        Grant { id, name, terms, created, expires: None, revoked: None, used: None }
    }

    /// What is served at [`document::PATH`].
    pub fn document() -> OpenApi {
        routes().1
    }

    /// Counts one more watcher of a caller's.
    fn watch(&self, caller: &Caller) -> Result<ShareGuard, Error> {
        self.watchers.enter(&caller.0.id).map_err(|full| match full {
            SharesFull::Grant(most) => Error::TooManyWatchers(most),
            SharesFull::All => Error::Crowded,
        })
    }

    /// A run that the caller may see.
    async fn run_of(&self, caller: &Caller, id: &str) -> Result<Row, Error> {
        let row = self.supervisor.journal().run(id).await?;
        let may_see = |row: &Row| row.grant == caller.0.id || caller.0.is_admin();
        row.filter(may_see).ok_or_else(|| Error::no_such_run(id))
    }
}

fn routes() -> (Router<Arc<Api>>, OpenApi) {
    OpenApiRouter::with_openapi(document::head())
        .merge(vital())
        .routes(routes!(agents::list))
        .routes(routes!(chat::chat))
        .routes(routes!(runs::create, runs::list))
        .routes(routes!(runs::show))
        .routes(routes!(runs::cancel))
        .routes(routes!(billing::receipts))
        .routes(routes!(billing::flagged))
        .routes(routes!(events::of_run))
        .routes(routes!(records::output))
        .routes(routes!(audit::audit))
        .routes(routes!(records::relay))
        .routes(routes!(records::artifacts))
        .routes(routes!(records::artifact))
        .split_for_parts()
}

/// How the service is, and what calls have cost: whoever asks that must not have to wait for others to leave.
fn vital() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::new()
        .routes(routes!(health::alive))
        .routes(routes!(health::ready))
        .routes(routes!(billing::ingest).layer(DefaultBodyLimit::max(billing::MAX_NOTICES_BYTES)))
}

/// Of one request. Ours: a long conversation is some hundred kilobytes.
const MAX_BODY_BYTES: usize = 1 << 20;
