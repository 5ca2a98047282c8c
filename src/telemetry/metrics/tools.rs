//! The series of tool calls.

use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{CounterVec, HistogramVec, IntCounterVec, Registry};

use super::table::tools as families;
use crate::llm::budget::Nanodollars;
use crate::telemetry::audit::tool_records::ToolOutcome;

/// A tool call that was admitted and has ended, with any outcome.
#[derive(Clone, Copy, Debug)]
pub struct SettledToolCall<'a> {
    pub tool: &'a str,
    pub outcome: ToolOutcome,
    pub cost: Nanodollars,
    pub duration: Duration,
}

/// The counters of tool calls.
#[derive(Debug)]
pub(super) struct ToolMetrics {
    calls: IntCounterVec,
    cost: CounterVec,
    durations: HistogramVec,
    refusals: IntCounterVec,
}

impl ToolMetrics {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let (calls, cost) = (&families::TOOL_CALLS, &families::TOOL_COST);
        let (durations, refusals) = (&families::TOOL_DURATION, &families::TOOL_REFUSALS);
        let metrics = Self {
            calls: IntCounterVec::new(calls.metric_opts(), calls.labels)?,
            cost: CounterVec::new(cost.metric_opts(), cost.labels)?,
            durations: HistogramVec::new(durations.histogram_opts(), durations.labels)?,
            refusals: IntCounterVec::new(refusals.metric_opts(), refusals.labels)?,
        };
        let collectors: [Box<dyn Collector>; 4] = [
            Box::new(metrics.calls.clone()),
            Box::new(metrics.cost.clone()),
            Box::new(metrics.durations.clone()),
            Box::new(metrics.refusals.clone()),
        ];
        collectors.into_iter().try_for_each(|collector| registry.register(collector))?;
        Ok(metrics)
    }

    pub(super) fn record_call(&self, call: &SettledToolCall<'_>) {
        self.calls.with_label_values(&[call.tool, call.outcome.as_str()]).inc();
        self.cost.with_label_values(&[call.tool]).inc_by(call.cost.to_dollars());
        self.durations.with_label_values(&[call.tool]).observe(call.duration.as_secs_f64());
    }

    pub(super) fn record_refusal(&self, code: &'static str) {
        self.refusals.with_label_values(&[code]).inc();
    }
}
