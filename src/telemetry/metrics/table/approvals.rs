//! The metric families of approvals.

use super::{MetricFamilySpec, counter_family, gauge_family, histogram_family};

/// The series of questions to people and of standing approvals.
pub static APPROVAL_FAMILIES: &[&MetricFamilySpec] = &[
    &APPROVALS_REQUESTED,
    &APPROVALS_RESOLVED,
    &APPROVALS_WAITING,
    &APPROVAL_WAIT,
    &STANDING_USES,
];

pub static APPROVALS_REQUESTED: MetricFamilySpec = counter_family(
    "cogni_gateway_approvals_requested_total",
    &["kind"],
    "Counts the questions to people, by kind: a call, a budget, or the proposal of a denied call.",
);
pub static APPROVALS_RESOLVED: MetricFamilySpec = counter_family(
    "cogni_gateway_approvals_resolved_total",
    &["outcome"],
    "Counts the questions about calls and budgets that are closed, by outcome.",
);
pub static APPROVALS_WAITING: MetricFamilySpec = gauge_family(
    "cogni_gateway_approvals_waiting",
    &[],
    "Shows the questions about calls and budgets that wait for a person.",
);
pub static APPROVAL_WAIT: MetricFamilySpec = histogram_family(
    "cogni_gateway_approval_wait_seconds",
    &["outcome"],
    "Measures the time from a question about a call or a budget to its end, by outcome.",
    &[1.0, 5.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 86_400.0],
);
pub static STANDING_USES: MetricFamilySpec = counter_family(
    "cogni_gateway_standing_approval_uses_total",
    &["scope"],
    "Counts the calls that began by a standing approval, by its scope.",
);
