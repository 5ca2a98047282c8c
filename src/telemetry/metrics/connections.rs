//! The series of requests over connections.

use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{CounterVec, HistogramVec, IntCounterVec, Registry};

use super::table::connections as families;
use crate::llm::budget::ConnectionSpending;
use crate::telemetry::audit::connect_records::ConnectOutcome;

/// A request over a connection that was admitted and has ended, with any outcome.
#[derive(Clone, Copy, Debug)]
pub struct SettledConnect<'a> {
    pub connection: &'a str,
    pub outcome: ConnectOutcome,
    pub spent: ConnectionSpending,
    pub duration: Duration,
}

/// The counters of connections.
#[derive(Debug)]
pub(super) struct ConnectionMetrics {
    requests: IntCounterVec,
    bytes: IntCounterVec,
    cost: CounterVec,
    durations: HistogramVec,
    refusals: IntCounterVec,
}

impl ConnectionMetrics {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let (requests, bytes) = (&families::CONNECTION_REQUESTS, &families::CONNECTION_BYTES);
        let (cost, durations) = (&families::CONNECTION_COST, &families::CONNECTION_DURATION);
        let refusals = &families::CONNECTION_REFUSALS;
        let metrics = Self {
            requests: IntCounterVec::new(requests.metric_opts(), requests.labels)?,
            bytes: IntCounterVec::new(bytes.metric_opts(), bytes.labels)?,
            cost: CounterVec::new(cost.metric_opts(), cost.labels)?,
            durations: HistogramVec::new(durations.histogram_opts(), durations.labels)?,
            refusals: IntCounterVec::new(refusals.metric_opts(), refusals.labels)?,
        };
        let collectors: [Box<dyn Collector>; 5] = [
            Box::new(metrics.requests.clone()),
            Box::new(metrics.bytes.clone()),
            Box::new(metrics.cost.clone()),
            Box::new(metrics.durations.clone()),
            Box::new(metrics.refusals.clone()),
        ];
        collectors.into_iter().try_for_each(|collector| registry.register(collector))?;
        Ok(metrics)
    }

    pub(super) fn record_request(&self, request: &SettledConnect<'_>) {
        let SettledConnect { connection, outcome, spent, duration } = *request;
        self.requests.with_label_values(&[connection, outcome.as_str()]).inc();
        self.bytes.with_label_values(&[connection, "out"]).inc_by(spent.bytes_out);
        self.bytes.with_label_values(&[connection, "in"]).inc_by(spent.bytes_in);
        self.cost.with_label_values(&[connection]).inc_by(spent.cost.to_dollars());
        self.durations.with_label_values(&[connection]).observe(duration.as_secs_f64());
    }

    pub(super) fn record_refusal(&self, code: &'static str) {
        self.refusals.with_label_values(&[code]).inc();
    }
}
