//! The table of all metric families: name, labels, help, and the corresponding OpenTelemetry metric.
//!
//! Names begin with `cogni_gateway_` and end in their unit. The `gen_ai_*` families follow the OpenTelemetry semantic conventions for generative AI
//! (status: development) in Prometheus' spelling. Dots become underscores, the unit is appended, and attributes become
//! labels. If the conventions change, this file must change, too.

pub mod approvals;
pub mod connections;
pub mod service;
pub mod tools;

use prometheus::{HistogramOpts, Opts};

use approvals::APPROVAL_FAMILIES;
use connections::CONNECTION_FAMILIES;
use service::{AGENT_FAMILIES, QUEUE_FAMILIES, SERVICE_FAMILIES, STATE_FAMILIES};
use tools::TOOL_FAMILIES;

/// One family of series.
#[derive(Clone, Copy, Debug)]
pub struct MetricFamilySpec {
    pub name: &'static str,
    pub kind: MetricKind,
    pub labels: &'static [&'static str],
    pub help: &'static str,
    /// The name in the OpenTelemetry conventions, if there is one.
    pub otel: Option<&'static str>,
}

#[derive(Clone, Copy, Debug)]
pub enum MetricKind {
    Counter,
    Gauge,
    /// A histogram, with the upper bounds of its buckets.
    Histogram(&'static [f64]),
}

/// The series of the process as a whole. They exist as long as the process.
pub static TOTAL_FAMILIES: &[&MetricFamilySpec] = &[
    &ACCESS_LOG_LOST,
    &AUDIT_FAILING,
    &AUDIT_LAG_BYTES,
    &AUDIT_LAG_RECORDS,
    &BUILD_INFO,
    &CLIENTS_GONE,
    &DROPPED_FIELDS,
    &IN_FLIGHT,
    &MODELS_DROPPED,
    &REFUSALS,
    &RELOAD_FAILED,
    &REQUEST_BYTES,
    &REQUESTS,
    &RESPONSE_BYTES,
    &RUNS,
    &RUNS_DROPPED,
    &SPANS_EXPORTED,
    &SPANS_LOST,
    &UPSTREAM_ERRORS,
];

/// The series of one run, all with the label `run`. They are removed some minutes after the run ends.
pub static RUN_FAMILIES: &[&MetricFamilySpec] = &[
    &RUN_AUDIT_LAG_RECORDS,
    &RUN_COST,
    &RUN_COST_LEFT,
    &RUN_IN_FLIGHT,
    &RUN_REFUSALS,
    &RUN_REQUEST_BYTES,
    &RUN_REQUESTS,
    &RUN_RESPONSE_BYTES,
    &RUN_TIME_LEFT,
    &RUN_TOKENS,
    &RUN_TOKENS_LEFT,
    &RUN_TURNS_LEFT,
];

/// The series of one model. A bounded number of models has such series.
pub static MODEL_FAMILIES: &[&MetricFamilySpec] = &[
    &MODEL_CALLS,
    &MODEL_COST,
    &MODEL_FIRST_BYTE,
    &MODEL_FRAME_GAP,
    &MODEL_TOKENS,
    &MODEL_UNPRICED,
    &MODEL_USAGE_SOURCES,
    &GEN_AI_DURATION,
    &GEN_AI_TIME_PER_TOKEN,
    &GEN_AI_TIME_TO_FIRST_TOKEN,
    &GEN_AI_TOKENS,
];

/// The series of the upstream.
pub static UPSTREAM_FAMILIES: &[&MetricFamilySpec] = &[&UPSTREAM_UP];

pub static ACCESS_LOG_LOST: MetricFamilySpec = counter_family(
    "cogni_gateway_access_log_lost_lines_total",
    &[],
    "Counts the access-log lines that could not be written.",
);
pub static RELOAD_FAILED: MetricFamilySpec = gauge_family(
    "cogni_gateway_reload_failed",
    &[],
    "Is 1 if the last reload of the configuration failed, so that an older one is in force.",
);
pub static AUDIT_FAILING: MetricFamilySpec = gauge_family(
    "cogni_gateway_audit_failing_runs",
    &[],
    "Shows the runs whose audit log cannot be written, so that nothing is admitted for them.",
);
pub static AUDIT_LAG_BYTES: MetricFamilySpec = gauge_family(
    "cogni_gateway_audit_lag_bytes",
    &[],
    "Shows the bytes of audit records that are not written yet, over all runs.",
);
pub static AUDIT_LAG_RECORDS: MetricFamilySpec = gauge_family(
    "cogni_gateway_audit_lag_records",
    &[],
    "Shows the audit records that are not written yet, over all runs.",
);
pub static BUILD_INFO: MetricFamilySpec = gauge_family(
    "cogni_gateway_build_info",
    &["version"],
    "Is always 1; the version is in the label.",
);
pub static CLIENTS_GONE: MetricFamilySpec = counter_family(
    "cogni_gateway_clients_gone_total",
    &[],
    "Counts the clients that left before their response was complete.",
);
pub static DROPPED_FIELDS: MetricFamilySpec = counter_family(
    "cogni_gateway_dropped_fields_total",
    &["route", "reason"],
    "Counts the fields of admitted bodies that did not go upstream, by the reason.",
);
pub static IN_FLIGHT: MetricFamilySpec = gauge_family(
    "cogni_gateway_requests_in_flight",
    &[],
    "Shows the requests that are being served, over all runs.",
);
pub static MODELS_DROPPED: MetricFamilySpec = counter_family(
    "cogni_gateway_model_series_dropped_total",
    &[],
    "Counts the calls of models beyond those that have series of their own; they are counted as `other`.",
);
pub static REFUSALS: MetricFamilySpec = counter_family(
    "cogni_gateway_refusals_total",
    &["code"],
    "Counts the requests that were refused before they reached the upstream, by code.",
);
pub static REQUEST_BYTES: MetricFamilySpec = counter_family(
    "cogni_gateway_request_bytes_total",
    &[],
    "Counts the bytes of request bodies of settled calls.",
);
pub static REQUESTS: MetricFamilySpec = counter_family(
    "cogni_gateway_requests_total",
    &["route", "status"],
    "Counts the requests that have ended, by route (`-`: not served) and status sent (499: the client left first).",
);
pub static RESPONSE_BYTES: MetricFamilySpec = counter_family(
    "cogni_gateway_response_bytes_total",
    &[],
    "Counts the bytes of response bodies of settled calls.",
);
pub static RUNS: MetricFamilySpec = gauge_family(
    "cogni_gateway_runs",
    &[],
    "Shows the runs that have series now, including those that ended lately.",
);
pub static RUNS_DROPPED: MetricFamilySpec = counter_family(
    "cogni_gateway_run_series_dropped_total",
    &[],
    "Counts the runs that have no series because too many others have.",
);
pub static SPANS_EXPORTED: MetricFamilySpec = counter_family(
    "cogni_gateway_spans_exported_total",
    &[],
    "Counts the spans that the collector has taken.",
);
pub static SPANS_LOST: MetricFamilySpec = counter_family(
    "cogni_gateway_spans_lost_total",
    &["reason"],
    "Counts the spans that were lost, because too many were waiting or the collector did not take them.",
);
pub static UPSTREAM_ERRORS: MetricFamilySpec = counter_family(
    "cogni_gateway_upstream_errors_total",
    &["kind"],
    "Counts the failures of the upstream, by kind.",
);
pub static UPSTREAM_UP: MetricFamilySpec = gauge_family(
    "cogni_gateway_upstream_up",
    &["host"],
    "Is 1 if the upstream answered the last call or check and accepted the key, else 0; absent before the first.",
);

pub static RUN_AUDIT_LAG_RECORDS: MetricFamilySpec = gauge_family(
    "cogni_gateway_run_audit_lag_records",
    &["run"],
    "Shows the audit records of the run that are not written yet.",
);
pub static RUN_COST: MetricFamilySpec = counter_family(
    "cogni_gateway_run_cost_dollars_total",
    &["run"],
    "Counts the dollars that LiteLLM reported for the run's calls; not every call has a report.",
);
pub static RUN_COST_LEFT: MetricFamilySpec = gauge_family(
    "cogni_gateway_run_cost_left_dollars",
    &["run"],
    "Shows the dollars that the run may still reserve, by our own price table; absent where there is no limit.",
);
pub static RUN_IN_FLIGHT: MetricFamilySpec = gauge_family(
    "cogni_gateway_run_requests_in_flight",
    &["run"],
    "Shows the requests of the run that are being served.",
);
pub static RUN_REFUSALS: MetricFamilySpec = counter_family(
    "cogni_gateway_run_refusals_total",
    &["run", "code"],
    "Counts the requests of the run that were refused, by code.",
);
pub static RUN_REQUEST_BYTES: MetricFamilySpec = counter_family(
    "cogni_gateway_run_request_bytes_total",
    &["run"],
    "Counts the bytes of request bodies of the run's settled calls.",
);
pub static RUN_REQUESTS: MetricFamilySpec = counter_family(
    "cogni_gateway_run_requests_total",
    &["run", "status"],
    "Counts the requests of the run that have ended, by class of the status sent.",
);
pub static RUN_RESPONSE_BYTES: MetricFamilySpec = counter_family(
    "cogni_gateway_run_response_bytes_total",
    &["run"],
    "Counts the bytes of response bodies that were passed on to the run, frame by frame.",
);
pub static RUN_TIME_LEFT: MetricFamilySpec = gauge_family(
    "cogni_gateway_run_time_left_seconds",
    &["run"],
    "Shows the time to the run's deadline; absent where it has none.",
);
pub static RUN_TOKENS: MetricFamilySpec = counter_family(
    "cogni_gateway_run_tokens_total",
    &["run", "kind"],
    "Counts the tokens that the run has used. Cache parts are within input, reasoning is within output.",
);
pub static RUN_TOKENS_LEFT: MetricFamilySpec = gauge_family(
    "cogni_gateway_run_tokens_left",
    &["run", "kind"],
    "Shows the tokens that the run may still reserve; absent where there is no limit.",
);
pub static RUN_TURNS_LEFT: MetricFamilySpec = gauge_family(
    "cogni_gateway_run_turns_left",
    &["run"],
    "Shows the turns that the run may still reserve; absent where there is no limit.",
);

pub static MODEL_CALLS: MetricFamilySpec = counter_family(
    "cogni_gateway_calls_total",
    &["model", "outcome"],
    "Counts the calls that reached the upstream and have ended, by outcome.",
);
pub static MODEL_COST: MetricFamilySpec = counter_family(
    "cogni_gateway_cost_dollars_total",
    &["model"],
    "Counts the dollars that LiteLLM reported for calls; not every call has a report.",
);
pub static MODEL_FIRST_BYTE: MetricFamilySpec = histogram_family(
    "cogni_gateway_time_to_first_byte_seconds",
    &["model"],
    "Measures the time from the request to the first byte of a successful response's body, streamed or not.",
    FIRST_BYTE_BUCKETS,
);
pub static MODEL_FRAME_GAP: MetricFamilySpec = histogram_family(
    "cogni_gateway_frame_gap_seconds",
    &["model"],
    "Measures the time between two frames of a response body that were passed on.",
    FRAME_GAP_BUCKETS,
);
pub static MODEL_TOKENS: MetricFamilySpec = counter_family(
    "cogni_gateway_tokens_total",
    &["model", "kind"],
    "Counts the tokens that calls have used. Cache parts are within input, reasoning is within output.",
);
pub static MODEL_UNPRICED: MetricFamilySpec = counter_family(
    "cogni_gateway_calls_without_cost_total",
    &["model"],
    "Counts the calls without a reported cost, so that the cost counters do not cover them.",
);
pub static MODEL_USAGE_SOURCES: MetricFamilySpec = counter_family(
    "cogni_gateway_usage_reports_total",
    &["model", "source"],
    "Counts the calls by the source of their token counts: the provider, the provider after the client left, or an estimate.",
);

pub static GEN_AI_DURATION: MetricFamilySpec = with_otel_name(
    "gen_ai.client.operation.duration",
    histogram_family(
        "gen_ai_client_operation_duration_seconds",
        &["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "error_type"],
        "Measures the duration of a call; `error_type` is empty where it completed.",
        DURATION_BUCKETS,
    ),
);
pub static GEN_AI_TIME_PER_TOKEN: MetricFamilySpec = with_otel_name(
    "gen_ai.server.time_per_output_token",
    histogram_family(
        "gen_ai_server_time_per_output_token_seconds",
        GEN_AI_LABELS,
        "Measures the time per output token after the first, of completed streams.",
        TIME_PER_TOKEN_BUCKETS,
    ),
);
pub static GEN_AI_TIME_TO_FIRST_TOKEN: MetricFamilySpec = with_otel_name(
    "gen_ai.server.time_to_first_token",
    histogram_family(
        "gen_ai_server_time_to_first_token_seconds",
        GEN_AI_LABELS,
        "Measures the time to the first byte of completed streams.",
        FIRST_BYTE_BUCKETS,
    ),
);
pub static GEN_AI_TOKENS: MetricFamilySpec = with_otel_name(
    "gen_ai.client.token.usage",
    histogram_family(
        "gen_ai_client_token_usage",
        &[
            "gen_ai_operation_name",
            "gen_ai_provider_name",
            "gen_ai_request_model",
            "gen_ai_token_type",
        ],
        "Measures the tokens of a call, where the provider reported them.",
        TOKEN_BUCKETS,
    ),
);

const GEN_AI_LABELS: &[&str] =
    &["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"];

/// The conventions' boundaries.
const TOKEN_BUCKETS: &[f64] = &[
    1.0,
    4.0,
    16.0,
    64.0,
    256.0,
    1024.0,
    4096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
];

/// The conventions' boundaries up to 82 s. The boundaries above are our choice: an agent's calls take minutes.
const DURATION_BUCKETS: &[f64] = &[
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84,
    327.68, 655.36,
];

/// The conventions' boundaries up to 10 s. The boundaries above are our choice: a reasoning model thinks for minutes
/// before it writes, and the default first-byte timeout is ten minutes.
const FIRST_BYTE_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    30.0, 60.0, 120.0, 300.0, 600.0,
];

/// The conventions' boundaries.
const TIME_PER_TOKEN_BUCKETS: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];

/// Boundaries of our choice. They reach from a provider that sends as fast as it can (tens of microseconds) to the idle
/// timeout of five minutes, and are dense around the 10 to 100 ms at which models write.
const FRAME_GAP_BUCKETS: &[f64] = &[
    0.0001, 0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0,
];

impl MetricFamilySpec {
    /// Returns every family of the table.
    pub fn all_families() -> impl Iterator<Item = &'static Self> {
        let parts = [
            TOTAL_FAMILIES,
            RUN_FAMILIES,
            MODEL_FAMILIES,
            SERVICE_FAMILIES,
            AGENT_FAMILIES,
            QUEUE_FAMILIES,
            STATE_FAMILIES,
            APPROVAL_FAMILIES,
            CONNECTION_FAMILIES,
            TOOL_FAMILIES,
            UPSTREAM_FAMILIES,
        ];
        parts.into_iter().flatten().copied()
    }

    pub(super) fn metric_opts(&self) -> Opts {
        Opts::new(self.name, self.help)
    }

    pub(super) fn histogram_opts(&self) -> HistogramOpts {
        let opts = HistogramOpts::from(self.metric_opts());
        match self.kind {
            MetricKind::Histogram(buckets) => opts.buckets(buckets.to_vec()),
            MetricKind::Counter | MetricKind::Gauge => opts,
        }
    }
}

const fn counter_family(
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
) -> MetricFamilySpec {
    MetricFamilySpec { name, kind: MetricKind::Counter, labels, help, otel: None }
}

const fn gauge_family(
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
) -> MetricFamilySpec {
    MetricFamilySpec { name, kind: MetricKind::Gauge, labels, help, otel: None }
}

const fn histogram_family(
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
    buckets: &'static [f64],
) -> MetricFamilySpec {
    MetricFamilySpec { name, kind: MetricKind::Histogram(buckets), labels, help, otel: None }
}

const fn with_otel_name(name: &'static str, family: MetricFamilySpec) -> MetricFamilySpec {
    MetricFamilySpec { otel: Some(name), ..family }
}
