//! Traces: which span of whose trace a run and its calls are, and the spans themselves, sent to a collector over OTLP
//! where one is configured.
//!
//! A span is made when what it tells of has ended, and put into a bounded queue; a thread of its own sends what has
//! come together. Nobody waits for it: a collector that is slow or gone costs spans, which are counted.
//!
//! OpenTelemetry's SDK is not used: its messages are. It reads an environment of its own, retries and logs as it likes,
//! and makes spans for a context that follows the thread, where ours are known by the call that they tell of.
//!
//! **Invariant:** no prompt, completion or secret is in a span: it holds ids, counts, codes, names, sizes and times.

mod call;
pub mod collector;
mod export;
mod otlp;

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use http::HeaderValue;
use serde::Deserialize;

use crate::base::secret::SecretString;
use crate::base::trace_context::{SpanId, TraceContext, TraceId, format_traceparent};
use crate::telemetry::metrics::SpanCounters;

pub use call::TracedCall;
pub use otlp::SpanAttributeValue;

use collector::{CollectorClient, CollectorHeaders, CollectorUrl};
use export::SpanExporter;

/// Where spans go; nowhere by default.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TracingConfig {
    /// The collector: OTLP over HTTP, in protobuf. `/v1/traces` is added.
    pub otlp_endpoint: Option<CollectorUrl>,
    /// Sent with each request, as `name=value,…`; come from the environment or a file, never from this configuration.
    #[serde(skip)]
    pub otlp_headers: SecretString,
    /// Who we are, for whoever looks at the spans.
    pub service_name: String,
    /// The share of the runs without a trace of their host's that is recorded; such a trace says so itself.
    pub sample_ratio: f64,
}

/// What makes the traces of a process. Clones share the queue.
#[derive(Clone, Debug, Default)]
pub struct ProcessTracer {
    exporter: Option<SpanExporter>,
    sample_ratio: f64,
    provider: &'static str,
}

/// A run's place in its trace. Its spans, and those of its calls, are told here.
pub struct RunTrace {
    context: TraceContext,
    /// The run's own.
    span: SpanId,
    started: SystemTime,
    provider: &'static str,
    /// `None` where nobody records.
    exporter: Option<SpanExporter>,
    notes: Mutex<RunSpanAttributes>,
}

/// Something that has happened within a run and is over.
#[derive(Clone, Debug)]
pub struct FinishedSpan {
    pub id: SpanId,
    pub name: String,
    pub kind: TraceSpanKind,
    pub started: SystemTime,
    pub ended: SystemTime,
    pub attributes: Vec<(&'static str, SpanAttributeValue)>,
    /// What went wrong: one of our own words, or the upstream's status.
    pub error: Option<Cow<'static, str>>,
}

/// Whose work a span tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceSpanKind {
    Internal,
    /// Something that we have asked of others.
    Client,
}

/// What the run's own span will say.
#[derive(Debug, Default)]
struct RunSpanAttributes {
    attributes: Vec<(&'static str, SpanAttributeValue)>,
    error: Option<Cow<'static, str>>,
    is_over: bool,
}

/// A span with its place, as it waits to be sent.
#[derive(Debug)]
struct QueuedSpan {
    trace: TraceId,
    parent: Option<SpanId>,
    /// The parent is a span of our host's.
    is_parent_remote: bool,
    span: FinishedSpan,
}

impl TracingConfig {
    /// # Errors
    /// What is not valid, and what would be.
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
    /// Without a collector, only what a host says of its traces is passed on. `provider` is the upstream's kind.
    ///
    /// # Errors
    /// The system's authorities cannot be read, or the thread not be started.
    pub fn start_tracer(
        config: &TracingConfig,
        provider: &'static str,
        counts: SpanCounters,
    ) -> io::Result<Self> {
        let start = |address| {
            let collector = CollectorClient::new(address, config)?;
            SpanExporter::start_thread(collector, counts)
        };
        let exporter = config.otlp_endpoint.as_ref().map(start).transpose()?;
        Ok(Self { exporter, sample_ratio: config.sample_ratio, provider })
    }

    /// A run's place in the trace it was given or, where spans are recorded, in one of its own.
    pub fn start_run_trace(&self, given: Option<TraceContext>) -> Option<Arc<RunTrace>> {
        let fresh = || {
            let trace = TraceId::random();
            TraceContext::root_context(trace, trace.is_sampled_at(self.sample_ratio))
        };
        let context = given.or_else(|| self.exporter.is_some().then(fresh))?;
        Some(Arc::new(RunTrace {
            context,
            span: SpanId::random(),
            started: SystemTime::now(),
            provider: self.provider,
            exporter: self.exporter.clone().filter(|_| context.is_sampled),
            notes: Mutex::default(),
        }))
    }

    /// Sends what is waiting. A collector that does not take it in time loses it.
    pub async fn finish_export(&self) {
        if let Some(exporter) = &self.exporter {
            exporter.finish_export().await;
        }
    }
}

impl RunTrace {
    pub fn trace_id(&self) -> &TraceId {
        &self.context.trace
    }

    /// Whether somebody will look at the spans.
    pub fn is_recorded(&self) -> bool {
        self.exporter.is_some()
    }

    /// What a call of the run tells the upstream.
    pub fn traceparent(&self, call: &SpanId) -> HeaderValue {
        format_traceparent(&self.context.trace, call, self.context.is_sampled)
    }

    /// Tells of something that has happened within the run.
    pub fn record_span(&self, span: FinishedSpan) {
        self.enqueue_span(Some(self.span), false, span);
    }

    /// Tells of a call. Whoever minds what that costs asks first whether [anybody records](Self::is_recorded).
    pub fn record_call(&self, call: &TracedCall<'_>) {
        self.record_span(call.to_span(self.provider));
    }

    /// Adds to what the run's own span will say.
    pub fn set_attribute(&self, name: &'static str, value: impl Into<SpanAttributeValue>) {
        if self.is_recorded() {
            self.with_run_attributes(|notes| notes.attributes.push((name, value.into())));
        }
    }

    /// Says that the run has gone wrong.
    pub fn mark_failed(&self, error: &'static str) {
        self.with_run_attributes(|notes| notes.error = Some(error.into()));
    }

    /// Tells of the run itself, which is over; it is told once.
    pub fn finish_run_span(&self) {
        let Some((attributes, error)) = self.with_run_attributes(|notes| {
            let was_over = std::mem::replace(&mut notes.is_over, true);
            (!was_over).then(|| (std::mem::take(&mut notes.attributes), notes.error.take()))
        }) else {
            return;
        };
        let span = FinishedSpan { attributes, error, ..self.span_since("run", self.started) };
        self.enqueue_span(self.context.parent, true, FinishedSpan { id: self.span, ..span });
    }

    /// A span of ours that began at `started` and ends now.
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
        f.debug_struct("Trace").field("context", &self.context).finish_non_exhaustive()
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
