//! Series of one model, and of everything the OpenTelemetry conventions ask for.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use prometheus::core::Metric as _;
use prometheus::{Histogram, IntCounter};

use super::Settled;
use super::collect::{Collect, Series};
use super::count::{Count, TokenCounts};
use super::table::{self, Family};
use crate::audit::record::Outcome;
use crate::base::metrics::float;
use crate::budget::Source;
use crate::observe::printable::Printable;
use crate::protocol::Route;

/// Models with series of their own, `other` not counted. Ours: a catalogue has a few dozen, and each
/// model costs about 200 series.
pub const MAX_MODELS: usize = 64;

/// A model's counters. Resolved once per call; counting into it takes no lock.
#[derive(Debug)]
pub struct Model {
    name: String,
    calls: [Count; Outcome::ALL.len()],
    sources: [Count; Source::ALL.len()],
    tokens: TokenCounts,
    cost: Count,
    without_cost: Count,
    first_byte: Histogram,
    frame_gap: Histogram,
    operations: [OnceLock<Operation>; OPERATIONS.len()],
}

/// The models seen so far, and `other` for those there is no room for.
#[derive(Debug)]
pub(super) struct Models {
    provider: String,
    known: RwLock<BTreeMap<String, Arc<Model>>>,
    dropped: IntCounter,
}

/// The conventions' histograms for one operation of a model.
#[derive(Debug)]
struct Operation {
    input: Histogram,
    output: Histogram,
    completed: Histogram,
    failed: Histogram,
    first_token: Histogram,
    per_token: Histogram,
}

impl Model {
    /// Records the first byte of a successful response's body.
    pub fn first_byte(&self, elapsed: Duration) {
        self.first_byte.observe(elapsed.as_secs_f64());
    }

    pub(super) fn frame_gap(&self, gap: Duration) {
        self.frame_gap.observe(gap.as_secs_f64());
    }

    pub(super) fn settled(&self, call: &Settled<'_>) {
        self.calls[call.outcome as usize].add(1);
        // What is no operation (`models`, `count_tokens`) has neither tokens nor a price.
        let Some(operation) = operation_of(call.route) else { return };
        self.sources[call.usage.source as usize].add(1);
        self.tokens.add(call.usage);
        match call.cost {
            Some(cost) => self.cost.add(cost.0),
            None => self.without_cost.add(1),
        }
        self.operations[operation].get_or_init(Operation::new).settled(call);
    }

    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            calls: Default::default(),
            sources: Default::default(),
            tokens: TokenCounts::default(),
            cost: Count::default(),
            without_cost: Count::default(),
            first_byte: histogram(&table::MODEL_FIRST_BYTE),
            frame_gap: histogram(&table::MODEL_FRAME_GAP),
            operations: Default::default(),
        }
    }

    fn collect(&self, provider: &str, into: &mut Series) {
        let model = self.name.as_str();
        for (outcome, calls) in Outcome::ALL.into_iter().zip(&self.calls) {
            into.put(&table::MODEL_CALLS, &[model, outcome.as_str()], calls.float());
        }
        for (source, calls) in Source::ALL.into_iter().zip(&self.sources) {
            into.put(&table::MODEL_USAGE_SOURCES, &[model, source.as_str()], calls.float());
        }
        for (kind, tokens) in self.tokens.floats() {
            into.put(&table::MODEL_TOKENS, &[model, kind], tokens);
        }
        into.put(&table::MODEL_COST, &[model], self.cost.float() / 1e9);
        into.put(&table::MODEL_UNPRICED, &[model], self.without_cost.float());
        into.put_metric(&table::MODEL_FIRST_BYTE, &[model], self.first_byte.metric());
        into.put_metric(&table::MODEL_FRAME_GAP, &[model], self.frame_gap.metric());
        for (name, operation) in OPERATIONS.into_iter().zip(&self.operations) {
            if let Some(operation) = operation.get() {
                operation.collect([name, provider, model], into);
            }
        }
    }
}

impl Models {
    pub(super) fn new(provider: &str, dropped: IntCounter) -> Self {
        Self { provider: provider.to_owned(), known: RwLock::default(), dropped }
    }

    pub(super) fn get_or_insert(&self, name: &str) -> Arc<Model> {
        let name = Printable(name).text();
        if let Some(model) = self.find(&name) {
            return model;
        }
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let is_room = known.len() < MAX_MODELS || known.contains_key(name.as_ref());
        if !is_room {
            self.dropped.inc();
        }
        let name = if is_room { name.as_ref() } else { OTHER };
        Arc::clone(known.entry(name.to_owned()).or_insert_with(|| Arc::new(Model::new(name))))
    }

    pub(super) fn get(&self, name: &str) -> Arc<Model> {
        self.find(&Printable(name).text()).unwrap_or_else(|| self.other())
    }

    fn find(&self, name: &str) -> Option<Arc<Model>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    fn other(&self) -> Arc<Model> {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry(OTHER.to_owned()).or_insert_with(|| Arc::new(Model::new(OTHER))))
    }
}

impl Collect for Models {
    fn collect(&self, into: &mut Series) {
        let known: Vec<_> =
            self.known.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        for model in known {
            model.collect(&self.provider, into);
        }
    }
}

impl Operation {
    fn new() -> Self {
        Self {
            input: histogram(&table::GEN_AI_TOKENS),
            output: histogram(&table::GEN_AI_TOKENS),
            completed: histogram(&table::GEN_AI_DURATION),
            failed: histogram(&table::GEN_AI_DURATION),
            first_token: histogram(&table::GEN_AI_TIME_TO_FIRST_TOKEN),
            per_token: histogram(&table::GEN_AI_TIME_PER_TOKEN),
        }
    }

    fn settled(&self, call: &Settled<'_>) {
        let (usage, is_success) = (call.usage, call.is_success());
        // The conventions forbid to report tokens that nobody counted.
        let is_counted = usage.source != Source::Estimated;
        if is_counted {
            self.input.observe(float(usage.input.0));
            self.output.observe(float(usage.output.0));
        }
        let duration = if is_success { &self.completed } else { &self.failed };
        duration.observe(call.duration.as_secs_f64());
        if let Some(first) = call.first_byte.filter(|_| is_success && call.is_stream) {
            self.first_token.observe(first.as_secs_f64());
            let writing = call.duration.saturating_sub(first).as_secs_f64();
            if is_counted && usage.output.0 > 1 {
                self.per_token.observe(writing / float(usage.output.0 - 1));
            }
        }
    }

    fn collect(&self, labels: [&str; 3], into: &mut Series) {
        let [name, provider, model] = labels;
        let mut put = |family, last, histogram: &Histogram| {
            into.put_metric(family, &[name, provider, model, last], histogram.metric());
        };
        put(&table::GEN_AI_TOKENS, "input", &self.input);
        put(&table::GEN_AI_TOKENS, "output", &self.output);
        put(&table::GEN_AI_DURATION, COMPLETED, &self.completed);
        put(&table::GEN_AI_DURATION, FAILED, &self.failed);
        into.put_metric(&table::GEN_AI_TIME_TO_FIRST_TOKEN, &labels, self.first_token.metric());
        into.put_metric(&table::GEN_AI_TIME_PER_TOKEN, &labels, self.per_token.metric());
    }
}

fn histogram(family: &Family) -> Histogram {
    Histogram::with_opts(family.histogram_opts())
        .expect("the table's buckets ascend, a test sees to it")
}

/// The index in [`OPERATIONS`] of what a route does, if the conventions have a word for it.
fn operation_of(route: Route) -> Option<usize> {
    match route {
        Route::ChatCompletions | Route::Responses | Route::Messages => Some(0),
        Route::Completions => Some(1),
        Route::Embeddings => Some(2),
        Route::CountTokens | Route::Models | Route::Model | Route::Health | Route::RunStatus => {
            None
        }
    }
}

/// What the conventions call what a route does, if they have a word for it.
pub fn operation_name(route: Route) -> Option<&'static str> {
    operation_of(route).map(|operation| OPERATIONS[operation])
}

/// Values of `gen_ai.operation.name`.
const OPERATIONS: [&str; 3] = ["chat", "text_completion", "embeddings"];

/// An empty `error_type` is an absent one.
const COMPLETED: &str = "";

/// The conventions' word for an error without a value of its own; which error it was is in
/// `cogni_gateway_calls_total` and `cogni_gateway_upstream_errors_total`.
const FAILED: &str = "_OTHER";

/// Stands for every model there is no room for, and for names no upstream has accepted.
const OTHER: &str = "other";
