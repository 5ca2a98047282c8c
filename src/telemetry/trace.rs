//! Traces: the spans of a run and its calls, and their export to a collector over OTLP if the configuration names one.
//!
//! A span is made when its work has ended, and is put into a bounded queue. A thread of its own sends the collected
//! spans. No call waits for the export: a slow or unreachable collector costs spans, which are counted.
//!
//! The export uses the messages of OpenTelemetry, but not its SDK. The SDK reads an environment of its own, retries and
//! logs by its own rules, and makes spans for a context that follows the thread. Here a span is known by its call.
//!
//! **Invariant:** no span contains a prompt, a completion or a secret. A span holds ids, counts, codes, names, sizes
//! and times.

mod call;
pub mod collector;
mod export;
mod otlp;

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use serde::Deserialize;

use crate::base::secret::SecretString;
use crate::base::trace_context::{SpanId, TraceContext, TraceId};
use crate::telemetry::metrics::SpanCounters;

pub use call::TracedCall;
pub use otlp::SpanAttributeValue;

use collector::{CollectorClient, CollectorHeaders, CollectorUrl};
use export::SpanExporter;

/// The settings of the export; by default spans are not exported.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TracingConfig {
    /// The collector's URL, for OTLP over HTTP in protobuf. `/v1/traces` is appended.
    pub otlp_endpoint: Option<CollectorUrl>,
    /// The headers of each request, as `name=value,…`. They come from the environment or a file, never from this
    /// configuration.
    #[serde(skip)]
    pub otlp_headers: SecretString,
    /// The name of this service in the spans.
    pub service_name: String,
    /// The share of runs that are recorded, among runs without a trace of their host. A host's trace says itself if it
    /// is recorded.
    pub sample_ratio: f64,
}

/// The source of all traces of a process. Clones share the queue.
#[derive(Clone, Debug, Default)]
pub struct ProcessTracer {
    exporter: Option<SpanExporter>,
    sample_ratio: f64,
    provider: &'static str,
}

/// The span of a run in its trace. The run's span and the spans of its calls are recorded here.
pub struct RunTrace {
    context: TraceContext,
    /// The id of the run's own span.
    span: SpanId,
    started: SystemTime,
    provider: &'static str,
    /// The queue for the spans; `None` if the trace is not recorded.
    exporter: Option<SpanExporter>,
    notes: Mutex<RunSpanAttributes>,
}

/// A piece of work within a run that has ended.
#[derive(Clone, Debug)]
pub struct FinishedSpan {
    pub id: SpanId,
    pub name: String,
    pub kind: TraceSpanKind,
    pub started: SystemTime,
    pub ended: SystemTime,
    pub attributes: Vec<(&'static str, SpanAttributeValue)>,
    /// The cause of a failure: one of the gateway's own words, or the upstream's status.
    pub error: Option<Cow<'static, str>>,
}

/// The kind of work that a span describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceSpanKind {
    Internal,
    /// A request from the gateway to another service.
    Client,
}

/// The attributes of the run's own span, collected until the run ends.
#[derive(Debug, Default)]
struct RunSpanAttributes {
    attributes: Vec<(&'static str, SpanAttributeValue)>,
    error: Option<Cow<'static, str>>,
    is_over: bool,
}

/// A span with its trace and its parent, waiting to be sent.
#[derive(Debug)]
struct QueuedSpan {
    trace: TraceId,
    parent: Option<SpanId>,
    /// True if the parent is a span of the host.
    is_parent_remote: bool,
    span: FinishedSpan,
}

impl TracingConfig {
    /// Checks the settings.
    ///
    /// # Errors
    /// Returns an error that names the invalid setting and the valid values.
    pub fn validate(&self) -> anyhow::Result<()> {
        if !(0.0..=1.0).contains(&self.sample_ratio) {
            anyhow::bail!(
                "`telemetry.sample_ratio` is `{}`; give a share from 0 to 1",
                self.sample_ratio
            );
        }
        CollectorHeaders::parse_headers(&self.otlp_headers).map(drop)
    }
}

impl ProcessTracer {
    /// Starts the export of a process. Without a collector, the gateway only passes on the host's traces. `provider` is
    /// the upstream's kind.
    ///
    /// # Errors
    /// Returns an error if the system's certificate authorities cannot be read, or if the thread cannot be started.
    pub fn start_tracer(
        config: &TracingConfig,
        provider: &'static str,
        counts: SpanCounters,
    ) -> io::Result<Self> {
        // The collector's client reads certificate authorities, so it is made only if there is a collector.
        let start = |address| {
            let collector = CollectorClient::new(address, config)?;
            SpanExporter::start_thread(collector, counts)
        };
        let exporter = config.otlp_endpoint.as_ref().map(start).transpose()?;
        Ok(Self { exporter, sample_ratio: config.sample_ratio, provider })
    }

    /// Places a run in the host's trace or, if spans are exported, in a new trace. Returns `None` if there is neither.
    pub fn start_run_trace(&self, given: Option<TraceContext>) -> Option<Arc<RunTrace>> {
        let context = choose_context(given, self.exporter.is_some(), self.sample_ratio)?;
        Some(Arc::new(RunTrace {
            context,
            span: SpanId::random(),
            started: SystemTime::now(),
            provider: self.provider,
            // A trace that is not sampled is passed on to the upstream, but its spans are not exported.
            exporter: self.exporter.clone().filter(|_| context.is_sampled),
            notes: Mutex::default(),
        }))
    }

    /// Sends the waiting spans. Spans that the collector does not take in time are lost.
    pub async fn finish_export(&self) {
        if let Some(exporter) = &self.exporter {
            exporter.finish_export().await;
        }
    }
}

/// Returns the host's trace or, if spans are exported, a new trace; `None` if there is neither.
pub fn choose_context(
    given: Option<TraceContext>,
    is_exported: bool,
    sample_ratio: f64,
) -> Option<TraceContext> {
    let fresh = || {
        let trace = TraceId::random();
        // The decision depends on the trace's id alone, so every service of the trace decides alike.
        TraceContext::root_context(trace, trace.is_sampled_at(sample_ratio))
    };
    given.or_else(|| is_exported.then(fresh))
}

impl RunTrace {
    pub fn trace_id(&self) -> &TraceId {
        &self.context.trace
    }

    /// Returns true if the spans of this trace are exported.
    pub fn is_recorded(&self) -> bool {
        self.exporter.is_some()
    }

    /// Returns the trace, which the calls of the run name to the upstream.
    pub fn context(&self) -> &TraceContext {
        &self.context
    }

    /// Records a piece of work within the run.
    pub fn record_span(&self, span: FinishedSpan) {
        self.enqueue_span(Some(self.span), false, span);
    }

    /// Records a call. A caller for whom making the span is too expensive checks [`is_recorded`](Self::is_recorded)
    /// first.
    pub fn record_call(&self, call: &TracedCall<'_>) {
        self.record_span(call.to_span(self.provider));
    }

    /// Adds an attribute to the run's own span.
    pub fn set_attribute(&self, name: &'static str, value: impl Into<SpanAttributeValue>) {
        if self.is_recorded() {
            self.with_run_attributes(|notes| notes.attributes.push((name, value.into())));
        }
    }

    /// Marks the run's own span as failed.
    pub fn mark_failed(&self, error: &'static str) {
        self.with_run_attributes(|notes| notes.error = Some(error.into()));
    }

    /// Ends and exports the run's own span. Further calls do nothing.
    pub fn finish_run_span(&self) {
        // The flag is set under the lock, so of several calls exactly one exports the span.
        let Some((attributes, error)) = self.with_run_attributes(|notes| {
            let was_over = std::mem::replace(&mut notes.is_over, true);
            (!was_over).then(|| (std::mem::take(&mut notes.attributes), notes.error.take()))
        }) else {
            return;
        };
        // The run's span keeps the id that its children named as their parent; the id of `span_since` is replaced.
        let span = FinishedSpan { attributes, error, ..self.span_since("run", self.started) };
        self.enqueue_span(self.context.parent, true, FinishedSpan { id: self.span, ..span });
    }

    /// Returns a span of the gateway that started at `started` and ends now.
    pub fn span_since(&self, name: &str, started: SystemTime) -> FinishedSpan {
        FinishedSpan {
            id: SpanId::random(),
            name: name.to_owned(),
            kind: TraceSpanKind::Internal,
            started,
            ended: SystemTime::now(),
            attributes: vec![],
            error: None,
        }
    }

    fn enqueue_span(&self, parent: Option<SpanId>, is_parent_remote: bool, span: FinishedSpan) {
        if let Some(exporter) = &self.exporter {
            exporter.enqueue_span(QueuedSpan {
                trace: self.context.trace,
                parent,
                is_parent_remote,
                span,
            });
        }
    }

    fn with_run_attributes<T>(&self, work: impl FnOnce(&mut RunSpanAttributes) -> T) -> T {
        work(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl fmt::Debug for RunTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunTrace").field("context", &self.context).finish_non_exhaustive()
    }
}

impl Default for TracingConfig {
    fn default() -> Self {
        Self {
            otlp_endpoint: None,
            otlp_headers: SecretString::default(),
            service_name: "cogni-gateway".to_owned(),
            sample_ratio: 1.0,
        }
    }
}
