//! The metrics for operators: per run, per model, per agent, and for the process as a whole (G12).
//!
//! There are four kinds of series, kept apart on purpose:
//! - **Totals** carry only labels with a handful of values and exist as long as the process. Rates and alerts are made
//!   from totals.
//! - **Run** series carry `run`. They are counters and gauges, about fifteen a run. At most [`MAX_RUNS`] runs have
//!   series at a time, and a run's series are removed [`SERIES_RETENTION`] after the run ends.
//! - **Model** series carry the model. The histograms are model series. At most [`MAX_MODELS`] models have series of
//!   their own; the rest share `other`.
//! - **Service** series describe the runs themselves, by agent. At most [`MAX_AGENTS`] agents of the catalog have
//!   series of their own; an agent outside of the catalog is `other`.
//!
//! [`table`] lists every family, with its labels and its meaning.
//!
//! **Invariant:** counting a frame takes no lock, allocates nothing and looks nothing up.

mod approvals;
mod collect;
mod connections;
mod counters;
pub mod deprecated;
mod model;
mod run;
mod run_queue;
mod service;
mod service_state;
mod spans;
pub mod table;
mod tools;
mod totals;
mod upstream;

use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus::Registry;

use crate::base;
use crate::llm::budget::{BudgetLedger, Nanodollars, TokenUsage};
use crate::llm::protocol::GatewayRoute;
use crate::telemetry::audit::records::CallOutcome;

pub use model::{MAX_MODELS, ModelMetrics, operation_name};
pub use run::{InFlightGuard, MAX_RUNS, RunMetrics};
pub use run_queue::RunQueueGauges;
pub use service::{BillingGauges, LiveRunGuard, MAX_AGENTS};
pub use service_state::{ServiceStateGauges, WorkGauges};
pub use spans::SpanCounters;

pub use approvals::OpenApprovalGuard;
pub use connections::SettledConnect;
pub use tools::SettledToolCall;

use approvals::ApprovalMetrics;
use collect::SourceCollector;
use connections::ConnectionMetrics;
use model::ModelMetricsTable;
use run::RunMetricsTable;
use run_queue::RunQueueSource;
use service::ServiceMetrics;
use service_state::ServiceStateSource;
use tools::ToolMetrics;
use totals::TotalMetrics;

/// The metrics of a process. A process has one registry, which every run shares.
#[derive(Debug)]
pub struct MetricsRegistry {
    registry: Registry,
    runs: Arc<RunMetricsTable>,
    totals: Arc<TotalMetrics>,
    service: ServiceMetrics,
    run_queue: Arc<RunQueueSource>,
    service_state: Arc<ServiceStateSource>,
    tools: ToolMetrics,
    connections: ConnectionMetrics,
    approvals: ApprovalMetrics,
}

/// A call that was admitted and has ended, with any outcome.
#[derive(Clone, Copy, Debug)]
pub struct SettledCall<'a> {
    pub route: GatewayRoute,
    pub model: &'a ModelMetrics,
    /// The status that was sent to the client. The value is 0, displayed as 499, if the client left before a status was
    /// sent.
    pub status: u16,
    pub outcome: CallOutcome,
    pub usage: &'a TokenUsage,
    /// The cost of the call that LiteLLM reported, if LiteLLM reported one.
    pub cost: Option<Nanodollars>,
    pub request_bytes: u64,
    pub response_bytes: u64,
    /// The time from the request to the first byte of the response body.
    pub first_byte: Option<Duration>,
    pub duration: Duration,
    pub is_stream: bool,
}

impl SettledCall<'_> {
    /// Returns true if the call was answered completely and without an error status.
    pub(super) fn is_success(&self) -> bool {
        self.outcome == CallOutcome::Completed && self.status < 400
    }
}

/// A request that never reached the upstream.
#[derive(Clone, Copy, Debug)]
pub struct RefusedRequest {
    /// The route of the request; `None` if the path is not served.
    pub route: Option<GatewayRoute>,
    /// The gateway's error code. The code is never text from outside.
    pub code: &'static str,
    /// The status that was sent to the client, as in [`SettledCall::status`].
    pub status: u16,
}

/// The time that a run's series stay after its end: a few scrapes at Prometheus' usual intervals.
pub const SERIES_RETENTION: Duration = Duration::from_mins(5);

impl MetricsRegistry {
    /// Creates all metrics of a process. `provider` is the upstream's kind (`litellm`, `openai`, `anthropic`), for the
    /// `gen_ai` labels.
    ///
    /// # Errors
    /// Returns an error if Prometheus does not allow a family of the table, which is a mistake in this program.
    pub fn new(provider: &str) -> prometheus::Result<Self> {
        let registry = Registry::new();
        registry.register(Box::new(base::metrics::ProcessCollector::new()?))?;
        let totals = Arc::new(TotalMetrics::new(&registry)?);
        let models = Arc::new(ModelMetricsTable::new(provider, totals.models_dropped.clone()));
        let runs = Arc::new(RunMetricsTable::new(Arc::clone(&totals), Arc::clone(&models)));
        // Series that come and go have collectors of their own; fixed series register themselves.
        registry.register(Box::new(SourceCollector::new(table::MODEL_FAMILIES, models)?))?;
        registry
            .register(Box::new(SourceCollector::new(table::RUN_FAMILIES, Arc::clone(&runs))?))?;
        let service = ServiceMetrics::new(&registry)?;
        let agents = Arc::clone(&service.agents);
        registry
            .register(Box::new(SourceCollector::new(table::service::AGENT_FAMILIES, agents)?))?;
        let run_queue = Arc::new(RunQueueSource::default());
        let source = Arc::clone(&run_queue);
        registry
            .register(Box::new(SourceCollector::new(table::service::QUEUE_FAMILIES, source)?))?;
        let service_state = Arc::new(ServiceStateSource::default());
        let source = Arc::clone(&service_state);
        registry
            .register(Box::new(SourceCollector::new(table::service::STATE_FAMILIES, source)?))?;
        let upstream = Arc::clone(&totals.upstream);
        registry.register(Box::new(SourceCollector::new(table::UPSTREAM_FAMILIES, upstream)?))?;
        let tools = ToolMetrics::new(&registry)?;
        let connections = ConnectionMetrics::new(&registry)?;
        let approvals = ApprovalMetrics::new(&registry)?;
        Ok(Self {
            registry,
            runs,
            totals,
            service,
            run_queue,
            service_state,
            tools,
            connections,
            approvals,
        })
    }

    /// Returns the handle of a run, made on first use. `budget` is read at each scrape.
    ///
    /// Beyond [`MAX_RUNS`] runs, the handle works in the same way, but only the totals and the models include its
    /// counts.
    pub fn run_metrics(&self, run: &str, budget: &Arc<BudgetLedger>) -> Arc<RunMetrics> {
        self.runs.get_or_insert(run, budget)
    }

    /// Counts a request that was refused before its run was known.
    pub fn record_refusal(&self, refused: &RefusedRequest) {
        self.totals.record_refusal(refused);
    }

    /// Counts a tool call that was admitted and has ended.
    pub fn record_tool_call(&self, call: &SettledToolCall<'_>) {
        self.tools.record_call(call);
    }

    /// Counts a request over a connection that was admitted and has ended.
    pub fn record_connect(&self, request: &SettledConnect<'_>) {
        self.connections.record_request(request);
    }

    /// Counts a request over a connection that was refused, by code.
    pub fn record_connect_refusal(&self, code: &'static str) {
        self.connections.record_refusal(code);
    }

    /// Counts a tool call that was refused, by code.
    pub fn record_tool_refusal(&self, code: &'static str) {
        self.tools.record_refusal(code);
    }

    /// Counts a question about a call or a budget, which waits for a person until the returned guard is dropped.
    pub fn record_approval_request(&self, kind: &'static str) -> OpenApprovalGuard {
        self.approvals.record_request(kind)
    }

    /// Counts a proposal of a denied call.
    pub fn record_approval_proposal(&self) {
        self.approvals.record_proposal();
    }

    /// Counts a call that begins by a standing approval, by its scope.
    pub fn record_standing_use(&self, scope: &'static str) {
        self.approvals.record_use(scope);
    }

    /// Schedules the removal of a run's series at `due`, which is [`SERIES_RETENTION`] after its end. A run that is
    /// served again before that time keeps its series.
    pub fn schedule_removal(&self, run: &str, due: Instant) {
        self.runs.schedule_removal(run, due);
    }

    /// Removes the series of runs that were due at `now`. The caller should do that every half minute.
    pub fn remove_due_runs(&self, now: Instant) {
        self.runs.remove_due_runs(now);
    }

    /// Removes a run's series at once. A handle that is still held keeps counting into the totals.
    pub fn remove_run(&self, run: &str) {
        self.runs.remove_run(run);
    }

    /// Records the result of reading the configuration again: true if the new configuration is in force.
    pub fn set_reload_status(&self, is_in_force: bool) {
        self.totals.reload_failed.set(i64::from(!is_in_force));
    }

    /// Sets the total number of lines that the access log has lost so far.
    pub fn set_lost_access_log_lines(&self, lines: u64) {
        self.totals.set_lost_access_log_lines(lines);
    }

    /// Returns the counters of exported and lost spans.
    pub fn span_counters(&self) -> SpanCounters {
        self.totals.spans.clone()
    }

    /// Sets the function that reads the queue of runs at each scrape.
    pub fn set_run_queue_source(&self, read: impl Fn() -> RunQueueGauges + Send + Sync + 'static) {
        self.run_queue.set(read);
    }

    /// Sets the function that reads the service's work and disks at each scrape.
    pub fn set_service_state_source(
        &self,
        read: impl Fn() -> ServiceStateGauges + Send + Sync + 'static,
    ) {
        self.service_state.set(read);
    }

    /// Sets the address of the process's upstream, which is the label `host` of its series.
    pub fn set_upstream_host(&self, host: &str) {
        self.totals.upstream.set_host(host);
    }

    /// Records the result of a check that was no run's call: true if the upstream has answered and accepts the
    /// gateway's key.
    pub fn record_upstream_contact(&self, is_up: bool) {
        self.totals.upstream.record_contact(is_up);
    }

    /// Gives the agents of the catalog series of their own, which start at zero.
    pub fn register_agents<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        names.into_iter().for_each(|name| self.service.agents.register_agent(name));
    }

    /// Counts a run as live until the returned guard is dropped.
    pub fn record_run_started(&self, agent: &str) -> LiveRunGuard {
        self.service.agents.record_run_started(agent)
    }

    /// Counts a run that has ended; `outcome` is `ok` or one of the gateway's own codes.
    pub fn record_run_ended(&self, agent: &str, outcome: &'static str, duration: Duration) {
        self.service.agents.record_run_ended(agent, outcome, duration);
    }

    /// Counts the time from the request for a sandbox to the start of its program.
    pub fn record_sandbox_start_time(&self, driver: &'static str, took: Duration) {
        self.service.record_sandbox_start_time(driver, took);
    }

    /// Counts a judged piece of a run's work, by the verdict.
    pub fn record_delivery_verdict(&self, verdict: &'static str) {
        self.service.record_delivery_verdict(verdict);
    }

    /// Counts a run that was requested and refused, by error code.
    pub fn record_refused_submission(&self, code: &'static str) {
        self.service.record_refused_submission(code);
    }

    /// Counts a request to the service, by one of the service's own paths.
    pub fn record_api_request(&self, route: &str, status: u16) {
        self.service.record_api_request(route, status);
    }

    /// Sets the numbers of calls, and of runs with calls, that should have a receipt by now and have none.
    pub fn set_billing_gauges(&self, billed: &BillingGauges) {
        self.service.set_billing_gauges(billed);
    }

    /// Records the result of asking LiteLLM for its charges: true if LiteLLM has answered.
    pub fn record_reconciliation(&self, is_done: bool) {
        self.service.record_reconciliation(is_done);
    }

    /// Counts events of runs that a watcher will not receive.
    pub fn record_dropped_events(&self, events: u64) {
        self.service.record_dropped_events(events);
    }

    /// Returns a function that a database calls to report each of its writes.
    pub fn state_write_recorder(&self) -> impl FnMut(Duration, bool) + Send + use<> {
        self.service.state_write_recorder()
    }

    /// Returns all metrics as Prometheus text, the renamed ones also under their former names.
    pub fn render_text(&self) -> Vec<u8> {
        let mut families = self.registry.gather();
        deprecated::add_deprecated_copies(&mut families);
        base::metrics::render_text(&families)
    }
}

/// Returns the status as the access log displays it: nginx's 499 for a client that left before there was a response.
fn display_status(status: u16) -> u16 {
    if status == 0 { 499 } else { status }
}
