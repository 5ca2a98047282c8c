//! The metric families of tool calls.

use super::{MetricFamilySpec, counter_family, histogram_family};

/// The series of tool calls. The label `tool` has the names that operators grant.
pub static TOOL_FAMILIES: &[&MetricFamilySpec] =
    &[&TOOL_CALLS, &TOOL_COST, &TOOL_DURATION, &TOOL_REFUSALS];

pub static TOOL_CALLS: MetricFamilySpec = counter_family(
    "cogni_gateway_tool_calls_total",
    &["tool", "outcome"],
    "Counts the tool calls that were admitted and have ended, by outcome.",
);
pub static TOOL_COST: MetricFamilySpec = counter_family(
    "cogni_gateway_tool_cost_dollars_total",
    &["tool"],
    "Counts the dollars that tool calls were charged.",
);
pub static TOOL_DURATION: MetricFamilySpec = histogram_family(
    "cogni_gateway_tool_duration_seconds",
    &["tool"],
    "Measures the time from the start of a tool to its end.",
    &[0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0],
);
pub static TOOL_REFUSALS: MetricFamilySpec = counter_family(
    "cogni_gateway_tool_refusals_total",
    &["code"],
    "Counts the tool calls that were refused before the tool ran, by code.",
);
