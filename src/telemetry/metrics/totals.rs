//! The series of the process as a whole.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use http::StatusCode;
use prometheus::core::Collector;
use prometheus::{Gauge, IntCounter, IntCounterVec, IntGauge, Registry};

use super::table::{self, MetricFamilySpec};
use super::upstream::UpstreamState;
use super::{RefusedRequest, SettledCall, SpanCounters, display_status};
use crate::llm::protocol::GatewayRoute;
use crate::telemetry::audit::records::CallOutcome;

/// Counters and gauges that every run adds to.
///
/// The labels take only the gateway's own words, from fixed sets.
#[derive(Debug)]
pub(super) struct TotalMetrics {
    audit_failing: IntGauge,
    audit_lag_bytes: IntGauge,
    audit_lag_records: IntGauge,
    pub(super) clients_gone: IntCounter,
    dropped_fields: IntCounterVec,
    pub(super) in_flight: IntGauge,
    pub(super) models_dropped: IntCounter,
    refusals: IntCounterVec,
    pub(super) reload_failed: IntGauge,
    request_bytes: IntCounter,
    response_bytes: IntCounter,
    runs: IntGauge,
    pub(super) runs_dropped: IntCounter,
    pub(super) spans: SpanCounters,
    pub(super) upstream: Arc<UpstreamState>,
    pub(super) upstream_errors: IntCounterVec,
    access_log_lost: IntCounter,
    /// The number of lost lines that `access_log_lost` includes already.
    access_log_lost_reported: AtomicU64,
    requests: IntCounterVec,
    /// The counters of `requests` for the status 200, by route. Each is made with its first request.
    usual: [OnceLock<IntCounter>; GatewayRoute::ALL.len()],
}

impl TotalMetrics {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let build =
            table::BUILD_INFO.metric_opts().const_label("version", env!("CARGO_PKG_VERSION"));
        register_metric(registry, Gauge::with_opts(build)?)?.set(1.0);
        let counter = |family: &MetricFamilySpec| {
            register_metric(registry, IntCounter::with_opts(family.metric_opts())?)
        };
        let gauge = |family: &MetricFamilySpec| {
            register_metric(registry, IntGauge::with_opts(family.metric_opts())?)
        };
        let counters = |family: &MetricFamilySpec| {
            register_metric(registry, IntCounterVec::new(family.metric_opts(), family.labels)?)
        };
        let spans_lost = counters(&table::SPANS_LOST)?;
        Ok(Self {
            audit_failing: gauge(&table::AUDIT_FAILING)?,
            audit_lag_bytes: gauge(&table::AUDIT_LAG_BYTES)?,
            audit_lag_records: gauge(&table::AUDIT_LAG_RECORDS)?,
            clients_gone: counter(&table::CLIENTS_GONE)?,
            dropped_fields: counters(&table::DROPPED_FIELDS)?,
            in_flight: gauge(&table::IN_FLIGHT)?,
            models_dropped: counter(&table::MODELS_DROPPED)?,
            refusals: counters(&table::REFUSALS)?,
            reload_failed: gauge(&table::RELOAD_FAILED)?,
            request_bytes: counter(&table::REQUEST_BYTES)?,
            response_bytes: counter(&table::RESPONSE_BYTES)?,
            runs: gauge(&table::RUNS)?,
            runs_dropped: counter(&table::RUNS_DROPPED)?,
            spans: SpanCounters {
                exported: counter(&table::SPANS_EXPORTED)?,
                overflowed: spans_lost.with_label_values(&["queue_full"]),
                refused: spans_lost.with_label_values(&["not_taken"]),
            },
            upstream: Arc::default(),
            upstream_errors: counters(&table::UPSTREAM_ERRORS)?,
            access_log_lost: counter(&table::ACCESS_LOG_LOST)?,
            access_log_lost_reported: AtomicU64::new(0),
            requests: counters(&table::REQUESTS)?,
            usual: Default::default(),
        })
    }

    pub(super) fn record_settled_call(&self, call: &SettledCall<'_>) {
        self.record_request(Some(call.route), call.status);
        self.request_bytes.inc_by(call.request_bytes);
        self.response_bytes.inc_by(call.response_bytes);
        if call.outcome == CallOutcome::ClientGone {
            self.clients_gone.inc();
        }
    }

    pub(super) fn record_refusal(&self, refused: &RefusedRequest) {
        self.record_request(refused.route, refused.status);
        self.refusals.with_label_values(&[refused.code]).inc();
    }

    pub(super) fn record_dropped_field(&self, route: GatewayRoute, why: &'static str) {
        self.dropped_fields.with_label_values(&[route.name(), why]).inc();
    }

    pub(super) fn record_request(&self, route: Option<GatewayRoute>, status: u16) {
        // Nearly every request has status 200, and its counter is found without a hash lookup.
        match (route, status) {
            (Some(route), 200) => {
                self.usual[route as usize]
                    .get_or_init(|| self.request_counter(Some(route), 200))
                    .inc();
            }
            _ => self.request_counter(route, status).inc(),
        }
    }

    fn request_counter(&self, route: Option<GatewayRoute>, status: u16) -> IntCounter {
        let status = StatusCode::from_u16(display_status(status));
        let status = status.as_ref().map_or("-", StatusCode::as_str);
        self.requests.with_label_values(&[route.map_or("-", GatewayRoute::name), status])
    }

    /// Adjusts the sums over all runs by the change of one run's records, bytes and failure.
    pub(super) fn update_audit_lag(&self, before: [u64; 3], now: [u64; 3]) {
        let sums = [&self.audit_lag_records, &self.audit_lag_bytes, &self.audit_failing];
        for ((sum, before), now) in sums.into_iter().zip(before).zip(now) {
            // The difference may be negative, and a gauge is signed. Wrapping keeps the sum right in any order of
            // updates.
            sum.add(now.cast_signed().wrapping_sub(before.cast_signed()));
        }
    }

    pub(super) fn set_run_count(&self, runs: usize) {
        self.runs.set(i64::try_from(runs).unwrap_or(i64::MAX));
    }

    pub(super) fn set_lost_access_log_lines(&self, lines: u64) {
        // The log reports its total, and a counter takes increments only.
        let reported = self.access_log_lost_reported.swap(lines, Ordering::Relaxed);
        self.access_log_lost.inc_by(lines.saturating_sub(reported));
    }
}

fn register_metric<M: Collector + Clone + 'static>(
    registry: &Registry,
    metric: M,
) -> prometheus::Result<M> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}
