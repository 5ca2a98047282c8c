//! The metric families of requests over connections.

use super::{MetricFamilySpec, counter_family, histogram_family};

/// The series of connections. The label `connection` has the names that operators configure.
pub static CONNECTION_FAMILIES: &[&MetricFamilySpec] = &[
    &CONNECTION_BYTES,
    &CONNECTION_COST,
    &CONNECTION_DURATION,
    &CONNECTION_REFUSALS,
    &CONNECTION_REQUESTS,
];

pub static CONNECTION_BYTES: MetricFamilySpec = counter_family(
    "cogni_gateway_connection_bytes_total",
    &["connection", "direction"],
    "Counts the bytes of bodies that passed over connections, by direction: out, to the server, or in.",
);
pub static CONNECTION_COST: MetricFamilySpec = counter_family(
    "cogni_gateway_connection_cost_dollars_total",
    &["connection"],
    "Counts the dollars that requests over connections were charged.",
);
pub static CONNECTION_DURATION: MetricFamilySpec = histogram_family(
    "cogni_gateway_connection_duration_seconds",
    &["connection"],
    "Measures the time from the admission of a request over a connection to its end.",
    &[0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0],
);
pub static CONNECTION_REFUSALS: MetricFamilySpec = counter_family(
    "cogni_gateway_connection_refusals_total",
    &["code"],
    "Counts the requests over connections that were refused before anything was sent, by code.",
);
pub static CONNECTION_REQUESTS: MetricFamilySpec = counter_family(
    "cogni_gateway_connection_requests_total",
    &["connection", "outcome"],
    "Counts the requests over connections that were admitted and have ended, by outcome.",
);
