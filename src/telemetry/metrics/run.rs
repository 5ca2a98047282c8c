//! The series of one run: plain atomics, read at each scrape.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::collect::{SeriesBuilder, SeriesSource};
use super::counters::{AtomicCounter, TokenCounters};
use super::model::{ModelMetrics, ModelMetricsTable};
use super::table;
use super::totals::TotalMetrics;
use super::{RefusedRequest, SettledCall, display_status};
use crate::base::metrics::count_as_f64;
use crate::base::sanitize::SanitizedText;
use crate::llm::budget::{BudgetLedger, Tokens};
use crate::llm::protocol::GatewayRoute;
use crate::telemetry::audit::AuditLag;

/// The largest number of runs with series of their own. Our choice: ten thousand are about 16 MB of text in a scrape.
pub const MAX_RUNS: usize = 10_000;

/// The counters of one run. The run is looked up once; counting takes no lock, except for refusals.
#[derive(Debug)]
pub struct RunMetrics {
    name: String,
    budget: Mutex<Arc<BudgetLedger>>,
    totals: Arc<TotalMetrics>,
    models: Arc<ModelMetricsTable>,
    statuses: [AtomicCounter; STATUS_CLASSES.len()],
    refusals: Mutex<BTreeMap<&'static str, u64>>,
    tokens: TokenCounters,
    cost: AtomicCounter,
    request_bytes: AtomicCounter,
    response_bytes: AtomicCounter,
    in_flight: AtomicCounter,
    audit_lag_records: AtomicCounter,
    audit_lag_bytes: AtomicCounter,
    audit_failing: AtomicCounter,
}

/// A request that is being served. The request counts as in flight until the guard is dropped.
#[derive(Debug)]
pub struct InFlightGuard(Arc<RunMetrics>);

/// The runs that have series.
#[derive(Debug)]
pub(super) struct RunMetricsTable {
    /// The runs in the order of a scrape. The registry sorts series, and sorting sorted series costs little.
    live: Mutex<BTreeMap<String, RunMetricsEntry>>,
    totals: Arc<TotalMetrics>,
    models: Arc<ModelMetricsTable>,
}

#[derive(Debug)]
struct RunMetricsEntry {
    run: Arc<RunMetrics>,
    /// The time when the series are removed; `None` while the run is served.
    due: Option<Instant>,
}

impl RunMetrics {
    /// Counts a request as in flight until the guard is dropped.
    pub fn track_request(self: &Arc<Self>) -> InFlightGuard {
        self.in_flight.add_count(1);
        self.totals.in_flight.inc();
        InFlightGuard(Arc::clone(self))
    }

    /// Returns the counters of a model that the upstream has accepted, made on first use.
    ///
    /// Beyond [`super::MAX_MODELS`] models, the counters are those of `other`. A name that only the client has given
    /// goes to [`RunMetrics::existing_model_metrics`] instead, so that a client cannot fill the table with invented
    /// names.
    pub fn model_metrics(&self, name: &str) -> Arc<ModelMetrics> {
        self.models.get_or_insert(name)
    }

    /// Returns the counters of a known model, or those of `other` for an unknown model.
    pub fn existing_model_metrics(&self, name: &str) -> Arc<ModelMetrics> {
        self.models.get_or_other(name)
    }

    /// Counts a frame of a response body that was passed on. `gap` is the time since the frame before.
    pub fn record_frame(&self, model: Option<&ModelMetrics>, gap: Option<Duration>, bytes: usize) {
        self.response_bytes.add_count(bytes as u64);
        if let (Some(model), Some(gap)) = (model, gap) {
            model.record_frame_gap(gap);
        }
    }

    /// Counts a call that was admitted and has ended.
    pub fn record_settled_call(&self, call: &SettledCall<'_>) {
        self.totals.record_settled_call(call);
        call.model.record_settled_call(call);
        // Response bytes are absent here: `record_frame` has counted them already.
        self.statuses[status_class_index(call.status)].add_count(1);
        self.tokens.add_usage(call.usage);
        self.cost.add_count(call.cost.unwrap_or_default().0);
        self.request_bytes.add_count(call.request_bytes);
    }

    /// Counts a request that was refused before it reached the upstream.
    pub fn record_refusal(&self, refused: &RefusedRequest) {
        self.totals.record_refusal(refused);
        self.statuses[status_class_index(refused.status)].add_count(1);
        *self.lock_refusals().entry(refused.code).or_default() += 1;
    }

    /// Counts a field that was dropped from a body, by the reason.
    pub fn record_dropped_field(&self, route: GatewayRoute, why: &'static str) {
        self.totals.record_dropped_field(route, why);
    }

    /// Counts a request that ended without a settled call and without a refusal: the gateway answered it, or could not
    /// deliver it to the upstream.
    pub fn record_local_answer(&self, route: Option<GatewayRoute>, status: u16) {
        self.totals.record_request(route, status);
        self.statuses[status_class_index(status)].add_count(1);
    }

    /// Counts a failure of the upstream. `kind` is one of the gateway's own words.
    pub fn record_upstream_error(&self, kind: &'static str) {
        self.totals.upstream_errors.with_label_values(&[kind]).inc();
    }

    /// Records whether the upstream has answered and accepts the gateway's key.
    pub fn record_upstream_contact(&self, is_up: bool) {
        self.totals.upstream.record_contact(is_up);
    }

    /// Counts a client that left before there was a call to settle. A settled call with that outcome is counted with
    /// the call.
    pub fn record_client_gone(&self) {
        self.totals.clients_gone.inc();
    }

    /// Sets the lag of the run's audit log. The caller should do that about once a second.
    pub fn set_audit_lag(&self, lag: &AuditLag) {
        let AuditLag { records, bytes, failing } = *lag;
        // Each swap returns the value that this run has contributed so far, so the sums stay right with several
        // callers.
        let before = [
            self.audit_lag_records.replace_count(records),
            self.audit_lag_bytes.replace_count(bytes),
            self.audit_failing.replace_count(failing.into()),
        ];
        self.totals.update_audit_lag(before, [records, bytes, failing.into()]);
    }

    fn collect_run(&self, into: &mut SeriesBuilder) {
        let run = self.name.as_str();
        for (class, requests) in STATUS_CLASSES.into_iter().zip(&self.statuses) {
            // An absent series is cheaper than a zero, but a rate needs a zero before the first increase.
            if requests.as_float() > 0.0 || LABELS_SHOWN_AT_ZERO.contains(&class) {
                into.push_sample(&table::RUN_REQUESTS, &[run, class], requests.as_float());
            }
        }
        for (code, requests) in self.lock_refusals().iter() {
            into.push_sample(&table::RUN_REFUSALS, &[run, code], count_as_f64(*requests));
        }
        for (kind, tokens) in self.tokens.counts_by_kind() {
            if tokens > 0.0 || LABELS_SHOWN_AT_ZERO.contains(&kind) {
                into.push_sample(&table::RUN_TOKENS, &[run, kind], tokens);
            }
        }
        into.push_sample(&table::RUN_COST, &[run], self.cost.as_float() / 1e9);
        into.push_sample(&table::RUN_REQUEST_BYTES, &[run], self.request_bytes.as_float());
        into.push_sample(&table::RUN_RESPONSE_BYTES, &[run], self.response_bytes.as_float());
        into.push_sample(&table::RUN_IN_FLIGHT, &[run], self.in_flight.as_float());
        into.push_sample(&table::RUN_AUDIT_LAG_RECORDS, &[run], self.audit_lag_records.as_float());
        self.collect_budget(into);
    }

    fn collect_budget(&self, into: &mut SeriesBuilder) {
        let run = self.name.as_str();
        // The lock is not held while the ledger computes its status.
        let budget = Arc::clone(&self.budget.lock().unwrap_or_else(PoisonError::into_inner));
        let status = budget.budget_status();
        if let Some(turns) = status.turns_left {
            into.push_sample(&table::RUN_TURNS_LEFT, &[run], count_as_f64(turns));
        }
        let tokens = [
            ("input", status.input_tokens_left),
            ("output", status.output_tokens_left),
            ("total", status.total_tokens_left),
        ];
        for (kind, left) in tokens {
            if let Some(Tokens(left)) = left {
                into.push_sample(&table::RUN_TOKENS_LEFT, &[run, kind], count_as_f64(left));
            }
        }
        if let Some(left) = status.cost_left_usd {
            into.push_sample(&table::RUN_COST_LEFT, &[run], left.to_dollars());
        }
        if let Some(left) = status.time_left {
            into.push_sample(&table::RUN_TIME_LEFT, &[run], left.as_secs_f64());
        }
    }

    fn lock_refusals(&self) -> MutexGuard<'_, BTreeMap<&'static str, u64>> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RunMetrics {
    fn drop(&mut self) {
        // The sums over all runs still include this run's lag. Setting the lag to zero removes it from them.
        self.set_audit_lag(&AuditLag::default());
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.in_flight.sub_count(1);
        self.0.totals.in_flight.dec();
    }
}

impl RunMetricsTable {
    pub(super) fn new(totals: Arc<TotalMetrics>, models: Arc<ModelMetricsTable>) -> Self {
        Self { live: Mutex::default(), totals, models }
    }

    pub(super) fn get_or_insert(&self, name: &str, budget: &Arc<BudgetLedger>) -> Arc<RunMetrics> {
        // The name becomes a label, so it is sanitized, here and in the functions below.
        let name = SanitizedText(name).to_text();
        let mut live = self.lock_runs();
        if let Some(slot) = live.get_mut(name.as_ref()) {
            // The run is served again before its removal: the old series go on, with the new ledger.
            slot.due = None;
            *slot.run.budget.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(budget);
            return Arc::clone(&slot.run);
        }
        let run = Arc::new(self.new_run_metrics(&name, budget));
        if live.len() < MAX_RUNS {
            live.insert(name.into_owned(), RunMetricsEntry { run: Arc::clone(&run), due: None });
            self.totals.set_run_count(live.len());
        // The run works without series of its own, and its calls still count into the totals.
        } else {
            self.totals.runs_dropped.inc();
        }
        run
    }

    pub(super) fn schedule_removal(&self, name: &str, due: Instant) {
        if let Some(slot) = self.lock_runs().get_mut(SanitizedText(name).to_text().as_ref()) {
            slot.due = Some(due);
        }
    }

    pub(super) fn remove_due_runs(&self, now: Instant) {
        let mut live = self.lock_runs();
        live.retain(|_, slot| slot.due.is_none_or(|due| due > now));
        self.totals.set_run_count(live.len());
    }

    pub(super) fn remove_run(&self, name: &str) {
        let mut live = self.lock_runs();
        live.remove(SanitizedText(name).to_text().as_ref());
        self.totals.set_run_count(live.len());
    }

    fn new_run_metrics(&self, name: &str, budget: &Arc<BudgetLedger>) -> RunMetrics {
        RunMetrics {
            name: name.to_owned(),
            budget: Mutex::new(Arc::clone(budget)),
            totals: Arc::clone(&self.totals),
            models: Arc::clone(&self.models),
            statuses: Default::default(),
            refusals: Mutex::default(),
            tokens: TokenCounters::default(),
            cost: AtomicCounter::default(),
            request_bytes: AtomicCounter::default(),
            response_bytes: AtomicCounter::default(),
            in_flight: AtomicCounter::default(),
            audit_lag_records: AtomicCounter::default(),
            audit_lag_bytes: AtomicCounter::default(),
            audit_failing: AtomicCounter::default(),
        }
    }

    fn lock_runs(&self) -> MutexGuard<'_, BTreeMap<String, RunMetricsEntry>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SeriesSource for RunMetricsTable {
    fn collect_series(&self, into: &mut SeriesBuilder) {
        // The lock is released before the runs are asked, so a scrape does not stop runs that start.
        let live: Vec<_> = self.lock_runs().values().map(|slot| Arc::clone(&slot.run)).collect();
        for run in live {
            run.collect_run(into);
        }
    }
}

/// Returns the index in [`STATUS_CLASSES`].
fn status_class_index(status: u16) -> usize {
    usize::from(display_status(status) / 100).clamp(1, STATUS_CLASSES.len()) - 1
}

/// The values of the label `status` of a run's requests. The exact status is in the totals.
const STATUS_CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// The label values that are shown at zero, so that a rate sees the first increase. Other series appear with their
/// first count.
const LABELS_SHOWN_AT_ZERO: [&str; 5] = ["2xx", "4xx", "5xx", "input", "output"];
