//! What operators see: per run, per model, and for the process as a whole (G12).
//!
//! Four kinds of series, kept apart on purpose:
//! - **Totals** carry only labels with a handful of values and never go away: rates and alerts are
//!   made from these.
//! - **Run** series carry `run`. They are counters and gauges, about fifteen a run, exist for at most
//!   [`MAX_RUNS`] runs at a time and go away [`RETENTION`] after the run ends.
//! - **Model** series carry the model. The histograms are here. At most [`MAX_MODELS`] models have
//!   series of their own; the rest share `other`.
//! - **Service** series are about the runs themselves, by agent: at most [`MAX_AGENTS`] of the catalog's have series of
//!   their own, and what is not in the catalog is `other`.
//!
//! Every family is in [`table`], with its labels and what it means.
//!
//! **Invariant:** what happens once per frame takes no lock, allocates nothing and looks nothing up.

mod collect;
mod count;
mod model;
mod run;
mod service;
pub mod table;
mod totals;

use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus::Registry;

use crate::audit::record::Outcome;
use crate::base;
use crate::budget::{Ledger, Nanodollars, Usage};
use crate::observe::trace;
use crate::protocol::Route;

pub use model::{MAX_MODELS, Model, operation_name};
pub use run::{InFlight, MAX_RUNS, Run};
pub use service::{Billed, Live, MAX_AGENTS};

use collect::Collected;
use model::Models;
use run::Runs;
use service::Service;
use totals::Totals;

/// All metrics of a process. One per process, shared by every run.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    runs: Arc<Runs>,
    totals: Arc<Totals>,
    service: Service,
}

/// A call that was admitted and has ended, whatever became of it.
#[derive(Clone, Copy, Debug)]
pub struct Settled<'a> {
    pub route: Route,
    pub model: &'a Model,
    /// The status sent to the client; 0, shown as 499, where it left before one was.
    pub status: u16,
    pub outcome: Outcome,
    pub usage: &'a Usage,
    /// What LiteLLM said the call cost, where it said so.
    pub cost: Option<Nanodollars>,
    pub request_bytes: u64,
    pub response_bytes: u64,
    /// From the request to the first byte of the response body.
    pub first_byte: Option<Duration>,
    pub duration: Duration,
    pub is_stream: bool,
}

impl Settled<'_> {
    /// Whether it was answered, whole and well.
    pub(super) fn is_success(&self) -> bool {
        self.outcome == Outcome::Completed && self.status < 400
    }
}

/// A request that never reached the upstream.
#[derive(Clone, Copy, Debug)]
pub struct Refused {
    /// `None` where the path is not served.
    pub route: Option<Route>,
    /// One of our own codes, never text from outside.
    pub code: &'static str,
    /// As in [`Settled::status`].
    pub status: u16,
}

/// How long a run's series stay after its end: a few scrapes at Prometheus' usual intervals.
pub const RETENTION: Duration = Duration::from_mins(5);

impl Metrics {
    /// `provider` is the upstream's kind (`litellm`, `openai`, `anthropic`), for the `gen_ai` labels.
    ///
    /// # Errors
    /// A family in the table that Prometheus does not allow: a mistake in this program.
    pub fn new(provider: &str) -> prometheus::Result<Self> {
        let registry = Registry::new();
        registry.register(Box::new(base::metrics::Process::new()?))?;
        let totals = Arc::new(Totals::new(&registry)?);
        let models = Arc::new(Models::new(provider, totals.models_dropped.clone()));
        let runs = Arc::new(Runs::new(Arc::clone(&totals), Arc::clone(&models)));
        registry.register(Box::new(Collected::new(table::MODEL, models)?))?;
        registry.register(Box::new(Collected::new(table::RUN, Arc::clone(&runs))?))?;
        let service = Service::new(&registry)?;
        let agents = Arc::clone(&service.agents);
        registry.register(Box::new(Collected::new(table::AGENT, agents)?))?;
        Ok(Self { registry, runs, totals, service })
    }

    /// The handle of a run, made on first sight. `budget` is read at each scrape.
    ///
    /// Past [`MAX_RUNS`] the handle works the same, but only the totals and the models show it.
    pub fn run(&self, run: &str, budget: &Arc<Ledger>) -> Arc<Run> {
        self.runs.get_or_insert(run, budget)
    }

    /// Counts a request that was refused before it was known whose it is.
    pub fn refused(&self, refused: &Refused) {
        self.totals.refused(refused);
    }

    /// Marks a run's series to go away at `due`, which is [`RETENTION`] after its end. A run that is
    /// served again before that keeps them.
    pub fn retire(&self, run: &str, due: Instant) {
        self.runs.retire(run, due);
    }

    /// Forgets the runs that were due at `now`. For a ticker; every half a minute will do.
    pub fn sweep(&self, now: Instant) {
        self.runs.sweep(now);
    }

    /// Removes a run's series at once. A handle still held goes on counting into the totals.
    pub fn forget(&self, run: &str) {
        self.runs.forget(run);
    }

    /// Tells whether the configuration that was read again is in force.
    pub fn reloaded(&self, is_in_force: bool) {
        self.totals.reload_failed.set(i64::from(!is_in_force));
    }

    /// Tells how many lines the access log has lost so far, in all.
    pub fn access_log_lost(&self, lines: u64) {
        self.totals.access_log_lost(lines);
    }

    /// Where what becomes of spans is counted.
    pub fn spans(&self) -> trace::Counts {
        self.totals.spans.clone()
    }

    /// Gives the agents of the catalog series of their own, from zero on.
    pub fn know_agents<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        names.into_iter().for_each(|name| self.service.agents.know(name));
    }

    /// Counts a run as live for as long as what this returns lives.
    pub fn sandbox_started(&self, agent: &str) -> Live {
        self.service.agents.started(agent)
    }

    /// Counts a run that has ended; `outcome` is `ok` or one of our own codes.
    pub fn sandbox_ended(&self, agent: &str, outcome: &'static str, duration: Duration) {
        self.service.agents.ended(agent, outcome, duration);
    }

    /// Counts how long a sandbox took from being asked for to its program's start.
    pub fn sandbox_start(&self, driver: &'static str, took: Duration) {
        self.service.sandbox_start(driver, took);
    }

    /// Counts a run's work that was judged, by the word for the verdict.
    pub fn relay_delivered(&self, verdict: &'static str) {
        self.service.delivered(verdict);
    }

    /// Counts a run that was asked for and not begun, by one of our own codes.
    pub fn admission_refused(&self, code: &'static str) {
        self.service.turned_away(code);
    }

    /// Counts a request to the service, by one of its own paths.
    pub fn api_request(&self, route: &str, status: u16) {
        self.service.api_request(route, status);
    }

    /// Tells how many calls, and calls of how many runs, should have a receipt by now and have none.
    pub fn billed(&self, billed: &Billed) {
        self.service.billed(billed);
    }

    /// Whether LiteLLM could be asked for what it has charged.
    pub fn reconciled(&self, is_done: bool) {
        self.service.reconciled(is_done);
    }

    /// Counts events of runs that a watcher will not see.
    pub fn events_dropped(&self, events: u64) {
        self.service.events_dropped(events);
    }

    /// What a database is given to tell of each of its writes.
    pub fn state_writes(&self) -> impl FnMut(Duration, bool) + Send + use<> {
        self.service.state_writes()
    }

    /// The whole as Prometheus text.
    pub fn render(&self) -> Vec<u8> {
        base::metrics::render(&self.registry)
    }
}

/// As the access log shows it: nginx's status for a client that left before there was an answer.
fn shown(status: u16) -> u16 {
    if status == 0 { 499 } else { status }
}
