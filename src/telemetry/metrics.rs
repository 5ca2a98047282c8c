//! What operators see: per run, per model, and for the process as a whole (G12).
//!
//! Four kinds of series, kept apart on purpose:
//! - **Totals** carry only labels with a handful of values and never go away: rates and alerts are
//!   made from these.
//! - **Run** series carry `run`. They are counters and gauges, about fifteen a run, exist for at most
//!   [`MAX_RUNS`] runs at a time and go away [`SERIES_RETENTION`] after the run ends.
//! - **Model** series carry the model. The histograms are here. At most [`MAX_MODELS`] models have
//!   series of their own; the rest share `other`.
//! - **Service** series are about the runs themselves, by agent: at most [`MAX_AGENTS`] of the catalog's have series of
//!   their own, and what is not in the catalog is `other`.
//!
//! Every family is in [`table`], with its labels and what it means.
//!
//! **Invariant:** what happens once per frame takes no lock, allocates nothing and looks nothing up.

mod collect;
mod counters;
mod model;
mod run;
mod service;
mod spans;
pub mod table;
mod totals;

use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus::Registry;

use crate::base;
use crate::llm::budget::{BudgetLedger, Nanodollars, TokenUsage};
use crate::llm::protocol::GatewayRoute;
use crate::telemetry::audit::records::CallOutcome;

pub use model::{MAX_MODELS, ModelMetrics, operation_name};
pub use run::{InFlightGuard, MAX_RUNS, RunMetrics};
pub use service::{BillingGauges, LiveRunGuard, MAX_AGENTS};
pub use spans::SpanCounters;

use collect::SourceCollector;
use model::ModelMetricsTable;
use run::RunMetricsTable;
use service::ServiceMetrics;
use totals::TotalMetrics;

/// All metrics of a process. One per process, shared by every run.
#[derive(Debug)]
pub struct MetricsRegistry {
    registry: Registry,
    runs: Arc<RunMetricsTable>,
    totals: Arc<TotalMetrics>,
    service: ServiceMetrics,
}

/// A call that was admitted and has ended, whatever became of it.
#[derive(Clone, Copy, Debug)]
pub struct SettledCall<'a> {
    pub route: GatewayRoute,
    pub model: &'a ModelMetrics,
    /// The status sent to the client; 0, shown as 499, where it left before one was.
    pub status: u16,
    pub outcome: CallOutcome,
    pub usage: &'a TokenUsage,
    /// What LiteLLM said the call cost, where it said so.
    pub cost: Option<Nanodollars>,
    pub request_bytes: u64,
    pub response_bytes: u64,
    /// From the request to the first byte of the response body.
    pub first_byte: Option<Duration>,
    pub duration: Duration,
    pub is_stream: bool,
}

impl SettledCall<'_> {
    /// Whether it was answered, whole and well.
    pub(super) fn is_success(&self) -> bool {
        self.outcome == CallOutcome::Completed && self.status < 400
    }
}

/// A request that never reached the upstream.
#[derive(Clone, Copy, Debug)]
pub struct RefusedRequest {
    /// `None` where the path is not served.
    pub route: Option<GatewayRoute>,
    /// One of our own codes, never text from outside.
    pub code: &'static str,
    /// As in [`SettledCall::status`].
    pub status: u16,
}

/// How long a run's series stay after its end: a few scrapes at Prometheus' usual intervals.
pub const SERIES_RETENTION: Duration = Duration::from_mins(5);

impl MetricsRegistry {
    /// `provider` is the upstream's kind (`litellm`, `openai`, `anthropic`), for the `gen_ai` labels.
    ///
    /// # Errors
    /// A family in the table that Prometheus does not allow: a mistake in this program.
    pub fn new(provider: &str) -> prometheus::Result<Self> {
        let registry = Registry::new();
        registry.register(Box::new(base::metrics::ProcessCollector::new()?))?;
        let totals = Arc::new(TotalMetrics::new(&registry)?);
        let models = Arc::new(ModelMetricsTable::new(provider, totals.models_dropped.clone()));
        let runs = Arc::new(RunMetricsTable::new(Arc::clone(&totals), Arc::clone(&models)));
        registry.register(Box::new(SourceCollector::new(table::MODEL_FAMILIES, models)?))?;
        registry
            .register(Box::new(SourceCollector::new(table::RUN_FAMILIES, Arc::clone(&runs))?))?;
        let service = ServiceMetrics::new(&registry)?;
        let agents = Arc::clone(&service.agents);
        registry.register(Box::new(SourceCollector::new(table::AGENT_FAMILIES, agents)?))?;
        Ok(Self { registry, runs, totals, service })
    }

    /// The handle of a run, made on first sight. `budget` is read at each scrape.
    ///
    /// Past [`MAX_RUNS`] the handle works the same, but only the totals and the models show it.
    pub fn run_metrics(&self, run: &str, budget: &Arc<BudgetLedger>) -> Arc<RunMetrics> {
        self.runs.get_or_insert(run, budget)
    }

    /// Counts a request that was refused before it was known whose it is.
    pub fn record_refusal(&self, refused: &RefusedRequest) {
        self.totals.record_refusal(refused);
    }

    /// Marks a run's series to go away at `due`, which is [`SERIES_RETENTION`] after its end. A run that is
    /// served again before that keeps them.
    pub fn schedule_removal(&self, run: &str, due: Instant) {
        self.runs.schedule_removal(run, due);
    }

    /// Forgets the runs that were due at `now`. For a ticker; every half a minute will do.
    pub fn remove_due_runs(&self, now: Instant) {
        self.runs.remove_due_runs(now);
    }

    /// Removes a run's series at once. A handle still held goes on counting into the totals.
    pub fn remove_run(&self, run: &str) {
        self.runs.remove_run(run);
    }

    /// Tells whether the configuration that was read again is in force.
    pub fn set_reload_status(&self, is_in_force: bool) {
        self.totals.reload_failed.set(i64::from(!is_in_force));
    }

    /// Tells how many lines the access log has lost so far, in all.
    pub fn set_lost_access_log_lines(&self, lines: u64) {
        self.totals.set_lost_access_log_lines(lines);
    }

    /// Where what becomes of spans is counted.
    pub fn span_counters(&self) -> SpanCounters {
        self.totals.spans.clone()
    }

    /// Gives the agents of the catalog series of their own, from zero on.
    pub fn register_agents<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        names.into_iter().for_each(|name| self.service.agents.register_agent(name));
    }

    /// Counts a run as live for as long as what this returns lives.
    pub fn record_run_started(&self, agent: &str) -> LiveRunGuard {
        self.service.agents.record_run_started(agent)
    }

    /// Counts a run that has ended; `outcome` is `ok` or one of our own codes.
    pub fn record_run_ended(&self, agent: &str, outcome: &'static str, duration: Duration) {
        self.service.agents.record_run_ended(agent, outcome, duration);
    }

    /// Counts how long a sandbox took from being asked for to its program's start.
    pub fn record_sandbox_start_time(&self, driver: &'static str, took: Duration) {
        self.service.record_sandbox_start_time(driver, took);
    }

    /// Counts a run's work that was judged, by the word for the verdict.
    pub fn record_delivery_verdict(&self, verdict: &'static str) {
        self.service.record_delivery_verdict(verdict);
    }

    /// Counts a run that was asked for and not begun, by one of our own codes.
    pub fn record_refused_submission(&self, code: &'static str) {
        self.service.record_refused_submission(code);
    }

    /// Counts a request to the service, by one of its own paths.
    pub fn record_api_request(&self, route: &str, status: u16) {
        self.service.record_api_request(route, status);
    }

    /// Tells how many calls, and calls of how many runs, should have a receipt by now and have none.
    pub fn set_billing_gauges(&self, billed: &BillingGauges) {
        self.service.set_billing_gauges(billed);
    }

    /// Whether LiteLLM could be asked for what it has charged.
    pub fn record_reconciliation(&self, is_done: bool) {
        self.service.record_reconciliation(is_done);
    }

    /// Counts events of runs that a watcher will not see.
    pub fn record_dropped_events(&self, events: u64) {
        self.service.record_dropped_events(events);
    }

    /// What a database is given to tell of each of its writes.
    pub fn state_write_recorder(&self) -> impl FnMut(Duration, bool) + Send + use<> {
        self.service.state_write_recorder()
    }

    /// The whole as Prometheus text.
    pub fn render_text(&self) -> Vec<u8> {
        base::metrics::render_text(&self.registry)
    }
}

/// As the access log shows it: nginx's status for a client that left before there was an answer.
fn display_status(status: u16) -> u16 {
    if status == 0 { 499 } else { status }
}
