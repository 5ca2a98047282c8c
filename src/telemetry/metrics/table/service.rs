//! The families of a service: its runs by agent, its queue, its database, its relay and its bills.

use super::{MetricFamilySpec, counter_family, gauge_family, histogram_family};

/// The series of a service as a whole. They exist as long as the process.
pub static SERVICE_FAMILIES: &[&MetricFamilySpec] = &[
    &ADMISSIONS_REFUSED,
    &API_REQUESTS,
    &EVENTS_DROPPED,
    &RELAY_DELIVERIES,
    &SANDBOX_START,
    &STATE_WRITE,
    &STATE_WRITE_FAILURES,
    &UNRECEIPTED_CALLS,
    &UNRECEIPTED_RUNS,
    &BILLING_CALLS,
    &RECONCILE_FAILED,
];

/// The series of one agent of the catalog. A bounded number of agents has such series.
pub static AGENT_FAMILIES: &[&MetricFamilySpec] =
    &[&SANDBOX_RUN_DURATION, &SANDBOX_RUNS_LIVE, &SANDBOX_RUNS];

/// The series of a service's queue of runs.
pub static QUEUE_FAMILIES: &[&MetricFamilySpec] =
    &[&PLACES, &PLACES_TAKEN, &QUEUE_CAPACITY, &QUEUE_OLDEST_WAIT, &QUEUED_RUNS];

/// The series of a service's work and disks.
pub static STATE_FAMILIES: &[&MetricFamilySpec] = &[
    &DISK_FREE,
    &DISK_SIZE,
    &KEPT_BYTES,
    &KEPT_BYTES_LIMIT,
    &KEPT_WORKS,
    &KEPT_WORKS_LIMIT,
    &UNDELIVERED_OLDEST_AGE,
    &UNDELIVERED_WORKS,
];

pub static ADMISSIONS_REFUSED: MetricFamilySpec = counter_family(
    "cogni_gateway_runs_refused_total",
    &["code"],
    "Counts the runs that were asked for and not begun, by code.",
);
pub static API_REQUESTS: MetricFamilySpec = counter_family(
    "cogni_gateway_api_requests_total",
    &["route", "status"],
    "Counts the requests to the service, by path as it is described (`-`: none) and status.",
);
pub static EVENTS_DROPPED: MetricFamilySpec = counter_family(
    "cogni_gateway_events_dropped_total",
    &[],
    "Counts the events of runs that a watcher did not get, because it read too slowly or they could not be kept.",
);
pub static RELAY_DELIVERIES: MetricFamilySpec = counter_family(
    "cogni_gateway_relay_deliveries_total",
    &["verdict"],
    "Counts the work of runs that was judged, by what was decided.",
);
pub static SANDBOX_RUN_DURATION: MetricFamilySpec = histogram_family(
    "cogni_gateway_sandbox_run_duration_seconds",
    &["agent"],
    "Measures the time from a run's admission to its end.",
    RUN_DURATION_BUCKETS,
);
pub static SANDBOX_RUNS_LIVE: MetricFamilySpec = gauge_family(
    "cogni_gateway_sandbox_runs_live",
    &["agent"],
    "Shows the runs that have begun and not ended.",
);
pub static SANDBOX_RUNS: MetricFamilySpec = counter_family(
    "cogni_gateway_sandbox_runs_total",
    &["agent", "outcome"],
    "Counts the runs that have ended, by how: ok, or the code of what went wrong.",
);
pub static SANDBOX_START: MetricFamilySpec = histogram_family(
    "cogni_gateway_sandbox_start_seconds",
    &["driver"],
    "Measures the time from asking for a sandbox to its program's start.",
    SANDBOX_START_BUCKETS,
);
pub static STATE_WRITE: MetricFamilySpec = histogram_family(
    "cogni_gateway_state_db_write_seconds",
    &[],
    "Measures the time of a commit to the service's database, which may hold many writes.",
    STATE_WRITE_BUCKETS,
);
pub static STATE_WRITE_FAILURES: MetricFamilySpec = counter_family(
    "cogni_gateway_state_db_write_failures_total",
    &[],
    "Counts the commits to the service's database that failed, so that nothing of them is kept.",
);
pub static UNRECEIPTED_CALLS: MetricFamilySpec = gauge_family(
    "cogni_gateway_billing_unreceipted_calls",
    &[],
    "Shows the calls that should have a receipt by now and have none.",
);
pub static UNRECEIPTED_RUNS: MetricFamilySpec = gauge_family(
    "cogni_gateway_billing_unreceipted_runs",
    &[],
    "Shows the runs with a call that should have a receipt by now and has none.",
);

pub static BILLING_CALLS: MetricFamilySpec = gauge_family(
    "cogni_gateway_billing_calls",
    &["state"],
    "Shows the calls that used tokens: `pending` their receipt, charged nothing for want of a price, or with two accounts that differ.",
);
pub static RECONCILE_FAILED: MetricFamilySpec = gauge_family(
    "cogni_gateway_billing_reconcile_failed",
    &[],
    "Is 1 while LiteLLM does not show its spend logs.",
);

pub static PLACES: MetricFamilySpec = gauge_family(
    "cogni_gateway_places",
    &[],
    "Shows the runs that the service lets run at the same time.",
);
pub static PLACES_TAKEN: MetricFamilySpec =
    gauge_family("cogni_gateway_places_taken", &[], "Shows the runs that have a place now.");
pub static QUEUE_CAPACITY: MetricFamilySpec = gauge_family(
    "cogni_gateway_queue_capacity_runs",
    &[],
    "Shows the runs that may wait for a place; further runs are refused.",
);
pub static QUEUE_OLDEST_WAIT: MetricFamilySpec = gauge_family(
    "cogni_gateway_queue_oldest_wait_seconds",
    &[],
    "Shows the time that the oldest waiting run has waited; 0 if no run waits.",
);
pub static QUEUED_RUNS: MetricFamilySpec =
    gauge_family("cogni_gateway_queued_runs", &[], "Shows the runs that wait for a place.");

pub static DISK_FREE: MetricFamilySpec = gauge_family(
    "cogni_gateway_disk_free_bytes",
    &["directory"],
    "Shows the bytes that can still be written to the file system of the directory: `state` or `run`.",
);
pub static DISK_SIZE: MetricFamilySpec = gauge_family(
    "cogni_gateway_disk_size_bytes",
    &["directory"],
    "Shows all bytes of the file system of the directory: `state` or `run`.",
);
pub static KEPT_BYTES: MetricFamilySpec = gauge_family(
    "cogni_gateway_kept_bytes",
    &[],
    "Shows the disk space of work that is held, has failed or was left.",
);
pub static KEPT_BYTES_LIMIT: MetricFamilySpec = gauge_family(
    "cogni_gateway_kept_limit_bytes",
    &[],
    "Shows the disk space of kept work at which runs with a branch are refused.",
);
pub static KEPT_WORKS: MetricFamilySpec = gauge_family(
    "cogni_gateway_kept_works",
    &[],
    "Shows the works that are held, have failed or were left, and wait for a person.",
);
pub static KEPT_WORKS_LIMIT: MetricFamilySpec = gauge_family(
    "cogni_gateway_kept_limit_works",
    &[],
    "Shows the number of kept works at which runs with a branch are refused.",
);
pub static UNDELIVERED_OLDEST_AGE: MetricFamilySpec = gauge_family(
    "cogni_gateway_undelivered_oldest_age_seconds",
    &[],
    "Shows the time since the oldest undelivered work came out of its sandbox; 0 if there is none.",
);
pub static UNDELIVERED_WORKS: MetricFamilySpec = gauge_family(
    "cogni_gateway_undelivered_works",
    &[],
    "Shows the works whose delivery to their branch goes on.",
);

/// Boundaries of our choice, from an immediate answer to the two hours of a long task.
const RUN_DURATION_BUCKETS: &[f64] =
    &[1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0];

/// Boundaries of our choice. A reused sandbox takes milliseconds, an embedded one tens of milliseconds, a container
/// hundreds.
const SANDBOX_START_BUCKETS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// Boundaries of our choice, from a disk with a battery-backed cache to the ten seconds that a write waits for another
/// process.
const STATE_WRITE_BUCKETS: &[f64] =
    &[0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0];
