//! The former names of metrics, under which the exposition shows each renamed metric once more.
//!
//! The names in [`DEPRECATED_NAMES`] are shown in version 0.1 and removed in version 0.2. Only the scrape copies
//! series; nothing is counted twice.

use prometheus::proto::MetricFamily;

use super::table::{MetricFamilySpec, service};

/// The former names, each with the family that replaces it.
pub static DEPRECATED_NAMES: &[(&str, &MetricFamilySpec)] = &[
    ("api_requests_total", &service::API_REQUESTS),
    ("billing_calls", &service::BILLING_CALLS),
    ("billing_reconcile_failed", &service::RECONCILE_FAILED),
    ("billing_unreceipted_calls", &service::UNRECEIPTED_CALLS),
    ("billing_unreceipted_runs", &service::UNRECEIPTED_RUNS),
    ("events_dropped_total", &service::EVENTS_DROPPED),
    ("relay_deliveries_total", &service::RELAY_DELIVERIES),
    ("sandbox_run_duration_seconds", &service::SANDBOX_RUN_DURATION),
    ("sandbox_runs_live", &service::SANDBOX_RUNS_LIVE),
    ("sandbox_runs_total", &service::SANDBOX_RUNS),
    ("sandbox_start_seconds", &service::SANDBOX_START),
    ("state_db_write_failures_total", &service::STATE_WRITE_FAILURES),
    ("state_db_write_seconds", &service::STATE_WRITE),
    ("supervisor_admissions_refused_total", &service::ADMISSIONS_REFUSED),
];

/// Adds a copy under the former name for each renamed family that has series.
pub(super) fn add_deprecated_copies(families: &mut Vec<MetricFamily>) {
    let copy = |&(old, new): &(&str, &MetricFamilySpec)| {
        let family = families.iter().find(|family| family.name() == new.name)?;
        let mut copied = family.clone();
        copied.set_name(old.to_owned());
        copied.set_help(format!("Deprecated: use {}.", new.name));
        Some(copied)
    };
    let copies: Vec<_> = DEPRECATED_NAMES.iter().filter_map(copy).collect();
    families.extend(copies);
}
