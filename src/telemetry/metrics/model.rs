//! The series of one model, and the metrics of the OpenTelemetry conventions.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use prometheus::core::Metric as _;
use prometheus::{Histogram, IntCounter};

use super::SettledCall;
use super::collect::{SeriesBuilder, SeriesSource};
use super::counters::{AtomicCounter, TokenCounters};
use super::table::{self, MetricFamilySpec};
use crate::base::metrics::count_as_f64;
use crate::base::sanitize::SanitizedText;
use crate::llm::budget::UsageSource;
use crate::llm::protocol::GatewayRoute;
use crate::telemetry::audit::records::CallOutcome;

/// The largest number of models with series of their own, without `other`. Our choice: a catalogue has a few dozen
/// models, and each model costs about 200 series.
pub const MAX_MODELS: usize = 64;

/// The counters of one model. A call looks its model up once; counting takes no lock.
#[derive(Debug)]
pub struct ModelMetrics {
    name: String,
    calls: [AtomicCounter; CallOutcome::ALL.len()],
    sources: [AtomicCounter; UsageSource::ALL.len()],
    tokens: TokenCounters,
    cost: AtomicCounter,
    without_cost: AtomicCounter,
    first_byte: Histogram,
    frame_gap: Histogram,
    operations: [OnceLock<OperationMetrics>; OPERATION_NAMES.len()],
}

/// The models that have series, and `other` for all further models.
#[derive(Debug)]
pub(super) struct ModelMetricsTable {
    provider: String,
    known: RwLock<BTreeMap<String, Arc<ModelMetrics>>>,
    dropped: IntCounter,
}

/// The conventions' histograms for one operation of a model.
#[derive(Debug)]
struct OperationMetrics {
    input: Histogram,
    output: Histogram,
    completed: Histogram,
    failed: Histogram,
    first_token: Histogram,
    per_token: Histogram,
}

impl ModelMetrics {
    /// Records the first byte of a successful response's body.
    pub fn record_first_byte(&self, elapsed: Duration) {
        self.first_byte.observe(elapsed.as_secs_f64());
    }

    pub(super) fn record_frame_gap(&self, gap: Duration) {
        self.frame_gap.observe(gap.as_secs_f64());
    }

    pub(super) fn record_settled_call(&self, call: &SettledCall<'_>) {
        self.calls[call.outcome as usize].add_count(1);
        // A route that is no operation (`models`, `count_tokens`) has neither tokens nor a price.
        let Some(operation) = operation_index(call.route) else { return };
        self.sources[call.usage.source as usize].add_count(1);
        self.tokens.add_usage(call.usage);
        match call.cost {
            Some(cost) => self.cost.add_count(cost.0),
            None => self.without_cost.add_count(1),
        }
        // The histograms of an operation are made with its first call, so an unused operation has no series.
        self.operations[operation].get_or_init(OperationMetrics::new).record_settled_call(call);
    }

    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            calls: Default::default(),
            sources: Default::default(),
            tokens: TokenCounters::default(),
            cost: AtomicCounter::default(),
            without_cost: AtomicCounter::default(),
            first_byte: new_histogram(&table::MODEL_FIRST_BYTE),
            frame_gap: new_histogram(&table::MODEL_FRAME_GAP),
            operations: Default::default(),
        }
    }

    fn collect_model(&self, provider: &str, into: &mut SeriesBuilder) {
        let model = self.name.as_str();
        for (outcome, calls) in CallOutcome::ALL.into_iter().zip(&self.calls) {
            into.push_sample(&table::MODEL_CALLS, &[model, outcome.as_str()], calls.as_float());
        }
        for (source, calls) in UsageSource::ALL.into_iter().zip(&self.sources) {
            into.push_sample(
                &table::MODEL_USAGE_SOURCES,
                &[model, source.as_str()],
                calls.as_float(),
            );
        }
        for (kind, tokens) in self.tokens.counts_by_kind() {
            into.push_sample(&table::MODEL_TOKENS, &[model, kind], tokens);
        }
        // The counter holds nanodollars.
        into.push_sample(&table::MODEL_COST, &[model], self.cost.as_float() / 1e9);
        into.push_sample(&table::MODEL_UNPRICED, &[model], self.without_cost.as_float());
        into.push_metric(&table::MODEL_FIRST_BYTE, &[model], self.first_byte.metric());
        into.push_metric(&table::MODEL_FRAME_GAP, &[model], self.frame_gap.metric());
        for (name, operation) in OPERATION_NAMES.into_iter().zip(&self.operations) {
            if let Some(operation) = operation.get() {
                operation.collect_operation([name, provider, model], into);
            }
        }
    }
}

impl ModelMetricsTable {
    pub(super) fn new(provider: &str, dropped: IntCounter) -> Self {
        Self { provider: provider.to_owned(), known: RwLock::default(), dropped }
    }

    pub(super) fn get_or_insert(&self, name: &str) -> Arc<ModelMetrics> {
        // The name comes from outside and becomes a label, so it is sanitized first.
        let name = SanitizedText(name).to_text();
        // The read lock is enough for a known model, which is nearly every call.
        if let Some(model) = self.find_model(&name) {
            return model;
        }
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have added the name between the two locks.
        let own = known.len() - usize::from(known.contains_key(OTHER_MODEL));
        let is_room = own < MAX_MODELS || known.contains_key(name.as_ref());
        if !is_room {
            self.dropped.inc();
        }
        let name = if is_room { name.as_ref() } else { OTHER_MODEL };
        Arc::clone(
            known.entry(name.to_owned()).or_insert_with(|| Arc::new(ModelMetrics::new(name))),
        )
    }

    pub(super) fn get_or_other(&self, name: &str) -> Arc<ModelMetrics> {
        self.find_model(&SanitizedText(name).to_text()).unwrap_or_else(|| self.other_model())
    }

    fn find_model(&self, name: &str) -> Option<Arc<ModelMetrics>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    fn other_model(&self) -> Arc<ModelMetrics> {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(
            known
                .entry(OTHER_MODEL.to_owned())
                .or_insert_with(|| Arc::new(ModelMetrics::new(OTHER_MODEL))),
        )
    }
}

impl SeriesSource for ModelMetricsTable {
    fn collect_series(&self, into: &mut SeriesBuilder) {
        let known: Vec<_> =
            self.known.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        // The lock is released here: a scrape of many models must not stop calls that use a new model.
        for model in known {
            model.collect_model(&self.provider, into);
        }
    }
}

impl OperationMetrics {
    fn new() -> Self {
        Self {
            input: new_histogram(&table::GEN_AI_TOKENS),
            output: new_histogram(&table::GEN_AI_TOKENS),
            completed: new_histogram(&table::GEN_AI_DURATION),
            failed: new_histogram(&table::GEN_AI_DURATION),
            first_token: new_histogram(&table::GEN_AI_TIME_TO_FIRST_TOKEN),
            per_token: new_histogram(&table::GEN_AI_TIME_PER_TOKEN),
        }
    }

    fn record_settled_call(&self, call: &SettledCall<'_>) {
        let (usage, is_success) = (call.usage, call.is_success());
        // The conventions forbid reporting tokens that were only estimated.
        let is_counted = usage.source != UsageSource::Estimated;
        if is_counted {
            self.input.observe(count_as_f64(usage.input.0));
            self.output.observe(count_as_f64(usage.output.0));
        }
        let duration = if is_success { &self.completed } else { &self.failed };
        duration.observe(call.duration.as_secs_f64());
        // Only a complete stream tells how fast the model writes.
        if let Some(first) = call.first_byte.filter(|_| is_success && call.is_stream) {
            self.first_token.observe(first.as_secs_f64());
            let writing = call.duration.saturating_sub(first).as_secs_f64();
            // The first token is part of the time to the first token, so the rest is divided by one token less.
            if is_counted && usage.output.0 > 1 {
                self.per_token.observe(writing / count_as_f64(usage.output.0 - 1));
            }
        }
    }

    fn collect_operation(&self, labels: [&str; 3], into: &mut SeriesBuilder) {
        let [name, provider, model] = labels;
        let mut push = |family, last, histogram: &Histogram| {
            into.push_metric(family, &[name, provider, model, last], histogram.metric());
        };
        push(&table::GEN_AI_TOKENS, "input", &self.input);
        push(&table::GEN_AI_TOKENS, "output", &self.output);
        push(&table::GEN_AI_DURATION, NO_ERROR_TYPE, &self.completed);
        push(&table::GEN_AI_DURATION, OTHER_ERROR_TYPE, &self.failed);
        into.push_metric(&table::GEN_AI_TIME_TO_FIRST_TOKEN, &labels, self.first_token.metric());
        into.push_metric(&table::GEN_AI_TIME_PER_TOKEN, &labels, self.per_token.metric());
    }
}

fn new_histogram(family: &MetricFamilySpec) -> Histogram {
    Histogram::with_opts(family.histogram_opts())
        .expect("the table's buckets ascend, a test sees to it")
}

/// Returns the index in [`OPERATION_NAMES`] of a route's operation, if the conventions name the operation.
fn operation_index(route: GatewayRoute) -> Option<usize> {
    match route {
        GatewayRoute::ChatCompletions | GatewayRoute::Responses | GatewayRoute::Messages => Some(0),
        GatewayRoute::Completions => Some(1),
        GatewayRoute::Embeddings => Some(2),
        GatewayRoute::CountTokens
        | GatewayRoute::Models
        | GatewayRoute::Model
        | GatewayRoute::Health
        | GatewayRoute::RunStatus => None,
    }
}

/// Returns the conventions' name of a route's operation, if there is one.
pub fn operation_name(route: GatewayRoute) -> Option<&'static str> {
    operation_index(route).map(|operation| OPERATION_NAMES[operation])
}

/// The values of `gen_ai.operation.name`.
const OPERATION_NAMES: [&str; 3] = ["chat", "text_completion", "embeddings"];

/// The value for a call without an error. Prometheus treats an empty label as an absent one.
const NO_ERROR_TYPE: &str = "";

/// The conventions' value for an error that has no value of its own. The exact error is in `cogni_gateway_calls_total`
/// and `cogni_gateway_upstream_errors_total`.
const OTHER_ERROR_TYPE: &str = "_OTHER";

/// The name that stands for every model beyond the limit, and for names that no upstream has accepted.
const OTHER_MODEL: &str = "other";
