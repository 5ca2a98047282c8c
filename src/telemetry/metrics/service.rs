//! The series of a service: its runs by agent, its refusals, and its calls without a receipt.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use http::StatusCode;
use prometheus::core::{Collector, Metric as _};
use prometheus::{
    Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry,
};

use super::collect::{SeriesBuilder, SeriesSource};
use super::counters::AtomicCounter;
use super::table::{MetricFamilySpec, service as families};
use crate::base::metrics::count_as_f64;

/// The largest number of agents with series of their own, without `other`. Our choice: a catalogue has a dozen agents,
/// and each agent costs about 25 series.
pub const MAX_AGENTS: usize = 64;

/// A live run. The run counts as live until the guard is dropped.
#[must_use = "dropped at once, the run does not count as live"]
#[derive(Debug)]
pub struct LiveRunGuard(Arc<AgentMetrics>);

/// The series of a service that do not belong to one agent.
#[derive(Debug)]
pub(super) struct ServiceMetrics {
    pub(super) agents: Arc<AgentMetricsTable>,
    sandbox_starts: HistogramVec,
    relay_deliveries: IntCounterVec,
    admissions_refused: IntCounterVec,
    api_requests: IntCounterVec,
    unreceipted_calls: IntGauge,
    unreceipted_runs: IntGauge,
    billing_calls: IntGaugeVec,
    reconcile_failed: IntGauge,
    events_dropped: IntCounter,
    state_writes: Histogram,
    state_failures: IntCounter,
}

/// The state of a service's billing records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BillingGauges {
    /// The number of calls that used tokens and have no receipt although their time is over.
    pub unreceipted_calls: u64,
    /// The number of runs that have such calls.
    pub unreceipted_runs: u64,
    /// The number of calls that used tokens and have no receipt yet.
    pub pending: u64,
    /// The number of calls that used tokens and were charged nothing, because their model has no price.
    pub unpriced: u64,
    /// The number of calls with two accounts that differ.
    pub conflicting: u64,
}

/// The agents of the catalog, and `other` for every agent outside of the catalog.
#[derive(Debug, Default)]
pub(super) struct AgentMetricsTable(RwLock<BTreeMap<String, Arc<AgentMetrics>>>);

#[derive(Debug)]
struct AgentMetrics {
    live: AtomicCounter,
    outcomes: Mutex<BTreeMap<&'static str, u64>>,
    durations: Histogram,
}

impl ServiceMetrics {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counters = |family: &MetricFamilySpec| {
            register_metric(registry, IntCounterVec::new(family.metric_opts(), family.labels)?)
        };
        let counter = |family: &MetricFamilySpec| {
            register_metric(registry, IntCounter::with_opts(family.metric_opts())?)
        };
        let gauge = |family: &MetricFamilySpec| {
            register_metric(registry, IntGauge::with_opts(family.metric_opts())?)
        };
        let starts = &families::SANDBOX_START;
        let (writes, calls) = (&families::STATE_WRITE, &families::BILLING_CALLS);
        Ok(Self {
            agents: Arc::default(),
            sandbox_starts: register_metric(
                registry,
                HistogramVec::new(starts.histogram_opts(), starts.labels)?,
            )?,
            relay_deliveries: counters(&families::RELAY_DELIVERIES)?,
            admissions_refused: counters(&families::ADMISSIONS_REFUSED)?,
            api_requests: counters(&families::API_REQUESTS)?,
            unreceipted_calls: gauge(&families::UNRECEIPTED_CALLS)?,
            unreceipted_runs: gauge(&families::UNRECEIPTED_RUNS)?,
            billing_calls: register_metric(
                registry,
                IntGaugeVec::new(calls.metric_opts(), calls.labels)?,
            )?,
            reconcile_failed: gauge(&families::RECONCILE_FAILED)?,
            events_dropped: counter(&families::EVENTS_DROPPED)?,
            state_writes: register_metric(
                registry,
                Histogram::with_opts(writes.histogram_opts())?,
            )?,
            state_failures: counter(&families::STATE_WRITE_FAILURES)?,
        })
    }

    pub(super) fn record_sandbox_start_time(&self, driver: &'static str, took: Duration) {
        self.sandbox_starts.with_label_values(&[driver]).observe(took.as_secs_f64());
    }

    pub(super) fn record_delivery_verdict(&self, verdict: &'static str) {
        self.relay_deliveries.with_label_values(&[verdict]).inc();
    }

    pub(super) fn record_refused_submission(&self, code: &'static str) {
        self.admissions_refused.with_label_values(&[code]).inc();
    }

    pub(super) fn record_api_request(&self, route: &str, status: u16) {
        let status = StatusCode::from_u16(status);
        let status = status.as_ref().map_or("-", StatusCode::as_str);
        self.api_requests.with_label_values(&[route, status]).inc();
    }

    pub(super) fn set_billing_gauges(&self, billed: &BillingGauges) {
        let gauge = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        self.unreceipted_calls.set(gauge(billed.unreceipted_calls));
        self.unreceipted_runs.set(gauge(billed.unreceipted_runs));
        let BillingGauges { pending, unpriced, conflicting, .. } = *billed;
        for (state, calls) in
            [("pending", pending), ("unpriced", unpriced), ("conflicting", conflicting)]
        {
            self.billing_calls.with_label_values(&[state]).set(gauge(calls));
        }
    }

    pub(super) fn record_reconciliation(&self, is_done: bool) {
        self.reconcile_failed.set((!is_done).into());
    }

    pub(super) fn record_dropped_events(&self, events: u64) {
        self.events_dropped.inc_by(events);
    }

    /// Returns a function that records the duration and the success of each write to the state.
    pub(super) fn state_write_recorder(&self) -> impl FnMut(Duration, bool) + Send + use<> {
        // The counters are shared handles, so the function does not borrow the registry.
        let (writes, failures) = (self.state_writes.clone(), self.state_failures.clone());
        move |took, is_written| {
            writes.observe(took.as_secs_f64());
            failures.inc_by(u64::from(!is_written));
        }
    }
}

impl AgentMetricsTable {
    /// Gives an agent series of its own, which start at zero, unless the limit is reached.
    pub(super) fn register_agent(&self, name: &str) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        // `other` takes no place from the catalog.
        let count = known.len() - usize::from(known.contains_key(OTHER_AGENT));
        if count < MAX_AGENTS {
            known.entry(name.to_owned()).or_insert_with(|| Arc::new(AgentMetrics::new()));
        }
    }

    pub(super) fn record_run_started(&self, name: &str) -> LiveRunGuard {
        let agent = self.find_agent(name);
        agent.live.add_count(1);
        LiveRunGuard(agent)
    }

    pub(super) fn record_run_ended(&self, name: &str, outcome: &'static str, duration: Duration) {
        let agent = self.find_agent(name);
        *agent.lock_outcomes().entry(outcome).or_default() += 1;
        agent.durations.observe(duration.as_secs_f64());
    }

    fn find_agent(&self, name: &str) -> Arc<AgentMetrics> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(agent) = known.get(name) {
            return Arc::clone(agent);
        }
        // The read lock must be released before the write lock is taken, or this thread would wait for itself.
        drop(known);
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(
            known.entry(OTHER_AGENT.to_owned()).or_insert_with(|| Arc::new(AgentMetrics::new())),
        )
    }
}

impl AgentMetrics {
    fn new() -> Self {
        let durations = Histogram::with_opts(families::SANDBOX_RUN_DURATION.histogram_opts());
        Self {
            live: AtomicCounter::default(),
            // The series of successful runs starts at zero, so that a rate sees the first one.
            outcomes: Mutex::new(BTreeMap::from([("ok", 0)])),
            durations: durations.expect("the table's buckets ascend, a test sees to it"),
        }
    }

    fn lock_outcomes(&self) -> MutexGuard<'_, BTreeMap<&'static str, u64>> {
        self.outcomes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LiveRunGuard {
    fn drop(&mut self) {
        self.0.live.sub_count(1);
    }
}

impl SeriesSource for AgentMetricsTable {
    fn collect_series(&self, into: &mut SeriesBuilder) {
        // The map is copied, so that counting goes on during a scrape.
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        for (name, agent) in known {
            for (outcome, runs) in agent.lock_outcomes().iter() {
                into.push_sample(&families::SANDBOX_RUNS, &[&name, outcome], count_as_f64(*runs));
            }
            into.push_sample(&families::SANDBOX_RUNS_LIVE, &[&name], agent.live.as_float());
            into.push_metric(&families::SANDBOX_RUN_DURATION, &[&name], agent.durations.metric());
        }
    }
}

fn register_metric<M: Collector + Clone + 'static>(
    registry: &Registry,
    metric: M,
) -> prometheus::Result<M> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

/// The name that stands for every agent outside of the catalog.
const OTHER_AGENT: &str = "other";
