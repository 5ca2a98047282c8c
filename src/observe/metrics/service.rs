//! Series of a service: its runs by agent, what it turns away, and what waits for a receipt.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use http::StatusCode;
use prometheus::core::{Collector, Metric as _};
use prometheus::{
    Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry,
};

use super::collect::{Collect, Series};
use super::count::Count;
use super::table::{self, Family};
use crate::base::metrics::float;

/// Agents with series of their own, `other` not counted. Ours: a catalogue has a dozen, and each agent costs about 25
/// series.
pub const MAX_AGENTS: usize = 64;

/// A run that is live. It counts as such until this is dropped.
#[must_use = "dropped at once, the run does not count as live"]
#[derive(Debug)]
pub struct Live(Arc<Agent>);

/// What a service counts that is not about one agent.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) agents: Arc<Agents>,
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

/// How a service's books stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Billed {
    /// Calls that used tokens and have no receipt although their time is over.
    pub unreceipted_calls: u64,
    /// Runs that have such calls.
    pub unreceipted_runs: u64,
    /// Calls that used tokens and have no receipt yet.
    pub pending: u64,
    /// Calls that used tokens and were charged nothing: their model has no price.
    pub unpriced: u64,
    /// Calls of which two accounts differ.
    pub conflicting: u64,
}

/// The agents of the catalog, and `other` for whatever is not in it.
#[derive(Debug, Default)]
pub(super) struct Agents(RwLock<BTreeMap<String, Arc<Agent>>>);

#[derive(Debug)]
struct Agent {
    live: Count,
    outcomes: Mutex<BTreeMap<&'static str, u64>>,
    durations: Histogram,
}

impl Service {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counters = |family: &Family| {
            registered(registry, IntCounterVec::new(family.opts(), family.labels)?)
        };
        let counter = |family: &Family| registered(registry, IntCounter::with_opts(family.opts())?);
        let gauge = |family: &Family| registered(registry, IntGauge::with_opts(family.opts())?);
        let starts = &table::SANDBOX_START;
        let (writes, calls) = (&table::STATE_WRITE, &table::BILLING_CALLS);
        Ok(Self {
            agents: Arc::default(),
            sandbox_starts: registered(
                registry,
                HistogramVec::new(starts.histogram_opts(), starts.labels)?,
            )?,
            relay_deliveries: counters(&table::RELAY_DELIVERIES)?,
            admissions_refused: counters(&table::ADMISSIONS_REFUSED)?,
            api_requests: counters(&table::API_REQUESTS)?,
            unreceipted_calls: gauge(&table::UNRECEIPTED_CALLS)?,
            unreceipted_runs: gauge(&table::UNRECEIPTED_RUNS)?,
            billing_calls: registered(registry, IntGaugeVec::new(calls.opts(), calls.labels)?)?,
            reconcile_failed: gauge(&table::RECONCILE_FAILED)?,
            events_dropped: counter(&table::EVENTS_DROPPED)?,
            state_writes: registered(registry, Histogram::with_opts(writes.histogram_opts())?)?,
            state_failures: counter(&table::STATE_WRITE_FAILURES)?,
        })
    }

    pub(super) fn sandbox_start(&self, driver: &'static str, took: Duration) {
        self.sandbox_starts.with_label_values(&[driver]).observe(took.as_secs_f64());
    }

    pub(super) fn delivered(&self, verdict: &'static str) {
        self.relay_deliveries.with_label_values(&[verdict]).inc();
    }

    pub(super) fn turned_away(&self, code: &'static str) {
        self.admissions_refused.with_label_values(&[code]).inc();
    }

    pub(super) fn api_request(&self, route: &str, status: u16) {
        let status = StatusCode::from_u16(status);
        let status = status.as_ref().map_or("-", StatusCode::as_str);
        self.api_requests.with_label_values(&[route, status]).inc();
    }

    pub(super) fn billed(&self, billed: &Billed) {
        let gauge = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        self.unreceipted_calls.set(gauge(billed.unreceipted_calls));
        self.unreceipted_runs.set(gauge(billed.unreceipted_runs));
        let Billed { pending, unpriced, conflicting, .. } = *billed;
        for (state, calls) in
            [("pending", pending), ("unpriced", unpriced), ("conflicting", conflicting)]
        {
            self.billing_calls.with_label_values(&[state]).set(gauge(calls));
        }
    }

    pub(super) fn reconciled(&self, is_done: bool) {
        self.reconcile_failed.set((!is_done).into());
    }

    pub(super) fn events_dropped(&self, events: u64) {
        self.events_dropped.inc_by(events);
    }

    /// What is to be told of each write to the state.
    pub(super) fn state_writes(&self) -> impl FnMut(Duration, bool) + Send + use<> {
        let (writes, failures) = (self.state_writes.clone(), self.state_failures.clone());
        move |took, is_written| {
            writes.observe(took.as_secs_f64());
            failures.inc_by(u64::from(!is_written));
        }
    }
}

impl Agents {
    /// Gives an agent series of its own, from zero on, while there is room.
    pub(super) fn know(&self, name: &str) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let count = known.len() - usize::from(known.contains_key(OTHER));
        if count < MAX_AGENTS {
            known.entry(name.to_owned()).or_insert_with(|| Arc::new(Agent::new()));
        }
    }

    pub(super) fn started(&self, name: &str) -> Live {
        let agent = self.find(name);
        agent.live.add(1);
        Live(agent)
    }

    pub(super) fn ended(&self, name: &str, outcome: &'static str, duration: Duration) {
        let agent = self.find(name);
        *agent.outcomes().entry(outcome).or_default() += 1;
        agent.durations.observe(duration.as_secs_f64());
    }

    fn find(&self, name: &str) -> Arc<Agent> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(agent) = known.get(name) {
            return Arc::clone(agent);
        }
        drop(known);
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry(OTHER.to_owned()).or_insert_with(|| Arc::new(Agent::new())))
    }
}

impl Agent {
    fn new() -> Self {
        let durations = Histogram::with_opts(table::SANDBOX_DURATION.histogram_opts());
        Self {
            live: Count::default(),
            outcomes: Mutex::new(BTreeMap::from([("ok", 0)])),
            durations: durations.expect("the table's buckets ascend, a test sees to it"),
        }
    }

    fn outcomes(&self) -> MutexGuard<'_, BTreeMap<&'static str, u64>> {
        self.outcomes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0.live.sub(1);
    }
}

impl Collect for Agents {
    fn collect(&self, into: &mut Series) {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        for (name, agent) in known {
            for (outcome, runs) in agent.outcomes().iter() {
                into.put(&table::SANDBOX_RUNS, &[&name, outcome], float(*runs));
            }
            into.put(&table::SANDBOX_LIVE, &[&name], agent.live.float());
            into.put_metric(&table::SANDBOX_DURATION, &[&name], agent.durations.metric());
        }
    }
}

fn registered<M: Collector + Clone + 'static>(
    registry: &Registry,
    metric: M,
) -> prometheus::Result<M> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

/// Stands for every agent that is not in the catalog.
const OTHER: &str = "other";
