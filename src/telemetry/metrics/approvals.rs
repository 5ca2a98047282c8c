//! The series of approvals.

use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{HistogramVec, IntCounterVec, IntGauge, Registry};

use super::table::approvals as families;

/// The counters of approvals.
#[derive(Clone, Debug)]
pub(super) struct ApprovalMetrics {
    requested: IntCounterVec,
    resolved: IntCounterVec,
    waiting: IntGauge,
    waits: HistogramVec,
    uses: IntCounterVec,
}

/// A question that waits for a person. Dropping the guard ends the wait.
#[derive(Debug)]
pub struct OpenApprovalGuard(ApprovalMetrics);

impl ApprovalMetrics {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let (requested, resolved) = (&families::APPROVALS_REQUESTED, &families::APPROVALS_RESOLVED);
        let (waits, uses) = (&families::APPROVAL_WAIT, &families::STANDING_USES);
        let metrics = Self {
            requested: IntCounterVec::new(requested.metric_opts(), requested.labels)?,
            resolved: IntCounterVec::new(resolved.metric_opts(), resolved.labels)?,
            waiting: IntGauge::with_opts(families::APPROVALS_WAITING.metric_opts())?,
            waits: HistogramVec::new(waits.histogram_opts(), waits.labels)?,
            uses: IntCounterVec::new(uses.metric_opts(), uses.labels)?,
        };
        let collectors: [Box<dyn Collector>; 5] = [
            Box::new(metrics.requested.clone()),
            Box::new(metrics.resolved.clone()),
            Box::new(metrics.waiting.clone()),
            Box::new(metrics.waits.clone()),
            Box::new(metrics.uses.clone()),
        ];
        collectors.into_iter().try_for_each(|collector| registry.register(collector))?;
        Ok(metrics)
    }

    pub(super) fn record_request(&self, kind: &'static str) -> OpenApprovalGuard {
        self.requested.with_label_values(&[kind]).inc();
        self.waiting.inc();
        OpenApprovalGuard(self.clone())
    }

    pub(super) fn record_proposal(&self) {
        self.requested.with_label_values(&["proposal"]).inc();
    }

    pub(super) fn record_use(&self, scope: &'static str) {
        self.uses.with_label_values(&[scope]).inc();
    }
}

impl OpenApprovalGuard {
    /// Counts the end of the question.
    pub fn record_result(self, outcome: &'static str, waited: Duration) {
        self.0.resolved.with_label_values(&[outcome]).inc();
        self.0.waits.with_label_values(&[outcome]).observe(waited.as_secs_f64());
    }
}

impl Drop for OpenApprovalGuard {
    fn drop(&mut self) {
        self.0.waiting.dec();
    }
}
