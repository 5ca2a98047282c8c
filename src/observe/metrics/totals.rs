//! Series of the process as a whole.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use http::StatusCode;
use prometheus::core::Collector;
use prometheus::{Gauge, IntCounter, IntCounterVec, IntGauge, Registry};

use super::table::{self, Family};
use super::{Refused, Settled, shown};
use crate::audit::record::Outcome;
use crate::observe::trace;
use crate::protocol::Route;

/// Counters and gauges that every run adds to.
///
/// The labelled ones take only our own words, of fixed sets.
#[derive(Debug)]
pub(super) struct Totals {
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
    pub(super) spans: trace::Counts,
    pub(super) upstream_errors: IntCounterVec,
    access_log_lost: IntCounter,
    access_log_told: AtomicU64,
    requests: IntCounterVec,
    /// Those of `requests` with the usual status, by route, as soon as there is one.
    usual: [OnceLock<IntCounter>; Route::ALL.len()],
}

impl Totals {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let build = table::BUILD_INFO.opts().const_label("version", env!("CARGO_PKG_VERSION"));
        register(registry, Gauge::with_opts(build)?)?.set(1.0);
        let counter = |family: &Family| register(registry, IntCounter::with_opts(family.opts())?);
        let gauge = |family: &Family| register(registry, IntGauge::with_opts(family.opts())?);
        let counters =
            |family: &Family| register(registry, IntCounterVec::new(family.opts(), family.labels)?);
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
            spans: trace::Counts {
                exported: counter(&table::SPANS_EXPORTED)?,
                overflowed: spans_lost.with_label_values(&["queue_full"]),
                refused: spans_lost.with_label_values(&["not_taken"]),
            },
            upstream_errors: counters(&table::UPSTREAM_ERRORS)?,
            access_log_lost: counter(&table::ACCESS_LOG_LOST)?,
            access_log_told: AtomicU64::new(0),
            requests: counters(&table::REQUESTS)?,
            usual: Default::default(),
        })
    }

    pub(super) fn settled(&self, call: &Settled<'_>) {
        self.request(Some(call.route), call.status);
        self.request_bytes.inc_by(call.request_bytes);
        self.response_bytes.inc_by(call.response_bytes);
        if call.outcome == Outcome::ClientGone {
            self.clients_gone.inc();
        }
    }

    pub(super) fn refused(&self, refused: &Refused) {
        self.request(refused.route, refused.status);
        self.refusals.with_label_values(&[refused.code]).inc();
    }

    pub(super) fn dropped_field(&self, route: Route, why: &'static str) {
        self.dropped_fields.with_label_values(&[route.name(), why]).inc();
    }

    pub(super) fn request(&self, route: Option<Route>, status: u16) {
        match (route, status) {
            (Some(route), 200) => {
                self.usual[route as usize].get_or_init(|| self.requests_of(Some(route), 200)).inc();
            }
            _ => self.requests_of(route, status).inc(),
        }
    }

    fn requests_of(&self, route: Option<Route>, status: u16) -> IntCounter {
        let status = StatusCode::from_u16(shown(status));
        let status = status.as_ref().map_or("-", StatusCode::as_str);
        self.requests.with_label_values(&[route.map_or("-", Route::name), status])
    }

    /// Moves the sums over all runs by what one run's records, bytes and failing have changed.
    pub(super) fn audit_lag(&self, before: [u64; 3], now: [u64; 3]) {
        let sums = [&self.audit_lag_records, &self.audit_lag_bytes, &self.audit_failing];
        for ((sum, before), now) in sums.into_iter().zip(before).zip(now) {
            sum.add(now.cast_signed().wrapping_sub(before.cast_signed()));
        }
    }

    pub(super) fn set_runs(&self, runs: usize) {
        self.runs.set(i64::try_from(runs).unwrap_or(i64::MAX));
    }

    pub(super) fn access_log_lost(&self, lines: u64) {
        let told = self.access_log_told.swap(lines, Ordering::Relaxed);
        self.access_log_lost.inc_by(lines.saturating_sub(told));
    }
}

fn register<M: Collector + Clone + 'static>(
    registry: &Registry,
    metric: M,
) -> prometheus::Result<M> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}
