//! The response of the provider while it passes to the client: counted, observed and redacted.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Body, SizeHint};

use super::error_body::{MAX_ERROR_BYTES, UpstreamErrorBody};
use super::silence_timer::SilenceTimer;
use super::{ExchangeContext, SentCall};
use crate::base::header_lines::HeaderLines;
use crate::base::secret_redactor::SecretRedactor;
use crate::gateway::pipeline::dropped_fields;
use crate::gateway::pipeline::limits::{BodyBytes, OverloadError};
use crate::gateway::pipeline::rejection::ABORTED_BY_OPERATOR;
use crate::gateway::upstream::headers::ResponseMetadata;
use crate::gateway::upstream::{self, ProviderAnswer};
use crate::llm::budget::{BudgetReservation, Tokens, UsageSource};
use crate::llm::response::{
    CallAllowance, OUTPUT_LIMIT_REACHED_CODE, ResponseFormat, ResponseObserver, UsageChunkMode,
    first_event_end,
};
use crate::telemetry::audit::records::CallOutcome;
use crate::telemetry::metrics;

/// An error that ended a body early. The client sees a connection that ends without its terminator.
#[derive(Debug, thiserror::Error)]
pub enum ResponseBodyError {
    #[error(transparent)]
    Upstream(#[from] upstream::UpstreamError),
    #[error("the upstream sent an event larger than the limit")]
    Oversize,
    #[error("the stream's unfinished event has no room: {0}")]
    Overloaded(#[from] OverloadError),
    #[error("an operator has aborted the call")]
    Aborted,
    #[error(transparent)]
    Endpoint(Box<dyn std::error::Error + Send + Sync>),
}

type PolledData = Poll<Option<Result<Bytes, ResponseBodyError>>>;

/// A response that has begun, and what is known of it.
pub(super) struct ProviderResponse {
    body: upstream::UpstreamBody,
    pub(super) observer: ResponseObserver,
    pub(super) facts: ResponseMetadata,
    /// The model's metrics, set if the upstream has accepted the model's name.
    pub(super) metered: Option<Arc<metrics::ModelMetrics>>,
    /// False if a client that requested a stream got one JSON body.
    pub(super) is_stream: bool,
    /// True if the observer cannot read the response's format, or lost its place in the response.
    pub(super) is_unreadable: bool,
    pub(super) silence: SilenceTimer,
    pub(super) first_byte: Option<Duration>,
    pub(super) last_frame: Instant,
    pub(super) frames: u64,
    /// The bytes of a large event that is not complete.
    event_bytes: Option<BodyBytes>,
    /// The redactor of the upstream's key, set if the response is an error or may become an error.
    redactor: Option<Box<SecretRedactor>>,
    /// The body of a response that is an error.
    error_body: Option<Box<UpstreamErrorBody>>,
    /// The estimated output tokens in the text of an error.
    pub(super) error_tokens: Tokens,
    /// [`UsageSource::Drained`] if the response was read on after the client had disconnected.
    pub(super) usage_source: UsageSource,
    /// `None` as long as more of the response may pass.
    end: Option<BodyEnd>,
    /// The error that ended the body, until the server has polled for it.
    broken: Option<ResponseBodyError>,
}

/// The end of the upstream's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyEnd {
    /// The body was read to its orderly end.
    Complete,
    /// The body failed, or was cut.
    Early,
}

impl ExchangeContext {
    /// Takes the provider's answer to a call. Returns the header fields for the client, and the response.
    pub(super) fn begin_response(
        &self,
        (reservation, sent): (&BudgetReservation, &SentCall),
        usage_chunk: UsageChunkMode,
        answer: ProviderAnswer,
        facts: ResponseMetadata,
    ) -> (HeaderLines, Box<ProviderResponse>) {
        let ProviderAnswer { status, mut fields, body } = answer;
        // A response of a free route does not prove that the model exists: any name gets one.
        let accepted =
            self.model.as_deref().filter(|_| status.is_success() && sent.route.spends_tokens());
        let format = facts.format;
        let is_error = status.is_client_error() || status.is_server_error();
        let error_body = is_error.then(|| {
            let is_json = format == ResponseFormat::Json;
            Box::new(UpstreamErrorBody::new(self.audience.protocol, status, is_json))
        });
        if let Some(dropped) = &sent.dropped {
            fields.push(dropped_fields::NAME, dropped.as_bytes());
        }
        let mut observer = ResponseObserver::new(sent.route, format, usage_chunk);
        // Without a limit no budget limits the output.
        if let Some(output) = reservation.output_limit() {
            let input = reservation.input_estimate();
            let cutoff = self.policy.config.cutoff;
            observer = observer.with_allowance(CallAllowance { input, output, cutoff });
        }
        let response = Box::new(ProviderResponse {
            body,
            observer,
            facts,
            metered: accepted.map(|model| self.gateway.metrics.model_metrics(model)),
            is_stream: sent.is_stream && format != ResponseFormat::Json,
            is_unreadable: format == ResponseFormat::Opaque,
            silence: SilenceTimer::start_at(sent.sent),
            first_byte: None,
            last_frame: sent.sent,
            frames: 0,
            event_bytes: None,
            redactor: is_error.then(|| Box::new(self.new_redactor())),
            error_body,
            error_tokens: Tokens::ZERO,
            usage_source: UsageSource::Provider,
            end: None,
            broken: None,
        });
        (fields, response)
    }

    fn new_redactor(&self) -> SecretRedactor {
        self.policy.injected_headers.redactor()
    }
}

impl ProviderResponse {
    /// Polls for the next bytes, like [`UpstreamBody::poll_data`](upstream::UpstreamBody::poll_data).
    pub(super) fn poll_data(
        &mut self,
        context: &mut ExchangeContext,
        cx: &mut Context<'_>,
    ) -> PolledData {
        // Check first: an aborted call must not deliver a frame that is already here.
        if context.abort.is_cancelled() && !self.has_ended() {
            return Poll::Ready(Some(Err(self.abort_call(context))));
        }
        // A frame may yield no data, for example a held error or a dropped usage event. Poll on until
        // there is data or the end.
        while !self.has_ended() {
            let passed = match self.body.poll_data(cx) {
                Poll::Ready(Some(Ok(data))) => self.observe_frame(context, data)?,
                Poll::Ready(Some(Err(error))) => {
                    self.break_after_flush(context, error, cx);
                    return Poll::Pending;
                }
                Poll::Ready(None) => self.complete(context),
                Poll::Pending => {
                    ready!(context.abort.poll(cx));
                    return Poll::Ready(Some(Err(self.abort_call(context))));
                }
            };
            if let Some(data) = passed.filter(|data| !data.is_empty()) {
                return Poll::Ready(Some(Ok(data)));
            }
        }
        // The body has ended. Return the deferred error once, if there is one, and then the end.
        Poll::Ready(self.broken.take().map(Err))
    }

    /// Returns ready if an operator has aborted the call.
    pub(super) fn poll_abort(
        &mut self,
        context: &mut ExchangeContext,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        if self.has_ended() {
            return Poll::Pending;
        }
        ready!(context.abort.poll(cx));
        self.abort_call(context);
        Poll::Ready(())
    }

    fn abort_call(&mut self, context: &mut ExchangeContext) -> ResponseBodyError {
        self.end = Some(BodyEnd::Early);
        context.code = Some(ABORTED_BY_OPERATOR);
        context.outcome = Some(CallOutcome::ShutDown);
        ResponseBodyError::Aborted
    }

    /// Ends the body with an error that the next poll returns.
    ///
    /// A server discards unwritten data when a body fails, so the frames already received are flushed
    /// first; the run has paid for them.
    fn break_after_flush(
        &mut self,
        context: &mut ExchangeContext,
        error: upstream::UpstreamError,
        cx: &mut Context<'_>,
    ) {
        self.end = Some(BodyEnd::Early);
        context.record_upstream_failure(&error);
        self.broken = Some(error.into());
        // Wake the task at once: the next poll comes after the server has written its buffer.
        cx.waker().wake_by_ref();
    }

    fn observe_frame(
        &mut self,
        context: &mut ExchangeContext,
        data: Bytes,
    ) -> Result<Option<Bytes>, ResponseBodyError> {
        self.count_frame(context, data.len());
        let passed = self.observer.read_frame(data).map_err(|_oversize| {
            // The observer has lost its place, so neither the text nor the usage of the rest can be
            // read.
            self.end = Some(BodyEnd::Early);
            self.is_unreadable = true;
            context.code = Some("upstream_event_too_large");
            context.outcome = Some(CallOutcome::UpstreamFailed);
            ResponseBodyError::Oversize
        })?;
        self.count_event_bytes(context)?;
        self.silence.record_texts(self.observer.text_count(), self.last_frame);
        // The frame that exceeded the grant passes in the form that ends the stream for the client.
        if self.observer.is_truncated() {
            self.end = Some(BodyEnd::Early);
            context.code = Some(OUTPUT_LIMIT_REACHED_CODE);
            context.outcome = Some(CallOutcome::CutOff);
        }
        let passed = self.redact_frame(context, passed);
        // An event that was held back passes as one frame, which the client may leave unread.
        let passed = if passed.len() > MAX_UNCOUNTED_BYTES {
            let taken = context.gateway.capacity.take_bytes(passed.len());
            taken.map_err(|error| self.end_overloaded(context, error))?.hold_frame(passed)
        } else {
            passed
        };
        let Some(error_body) = &mut self.error_body else { return Ok(Some(passed)) };
        // The error is held until it has ended: its length decides whether it passes unchanged.
        error_body.push(&passed);
        self.error_tokens = error_body.tokens();
        Ok(None)
    }

    /// Counts the buffer of a large event that is not complete among the run's bytes in flight. Usual events are small and
    /// cost nothing.
    fn count_event_bytes(
        &mut self,
        context: &mut ExchangeContext,
    ) -> Result<(), ResponseBodyError> {
        let buffered = self.observer.buffer_bytes();
        if buffered <= MAX_UNCOUNTED_BYTES {
            self.event_bytes = None;
            return Ok(());
        }
        let counted = self.event_bytes.as_ref().map_or(0, BodyBytes::count);
        if counted != buffered as u64 {
            // The old bytes go back first: the buffer replaces them.
            self.event_bytes = None;
            let taken = context.gateway.capacity.take_bytes(buffered);
            self.event_bytes = Some(taken.map_err(|error| self.end_overloaded(context, error))?);
        }
        Ok(())
    }

    /// Ends a stream for whose bytes the run or the process has no room.
    fn end_overloaded(
        &mut self,
        context: &mut ExchangeContext,
        error: OverloadError,
    ) -> ResponseBodyError {
        self.end = Some(BodyEnd::Early);
        // The rest of the event is not read, so its text and usage are unknown.
        self.is_unreadable = true;
        context.code = Some(error.code());
        context.outcome = Some(CallOutcome::UpstreamFailed);
        error.into()
    }

    /// Counts a frame that the upstream sent.
    fn count_frame(&mut self, context: &mut ExchangeContext, length: usize) {
        let now = self.body.arrival_time();
        // The first frame has no gap; the time before that frame is recorded as the time to the first
        // byte.
        let gap = self.first_byte.map(|_| now.duration_since(self.last_frame));
        let model = self.metered.as_deref();
        if gap.is_none() {
            let elapsed = now.duration_since(context.started);
            self.first_byte = Some(elapsed);
            if let Some(model) = model {
                model.record_first_byte(elapsed);
            }
        }
        context.gateway.metrics.record_frame(model, gap, length);
        self.last_frame = now;
        self.frames += 1;
        context.response_bytes += length as u64;
    }

    /// Removes the upstream's key from the parts of a frame that belong to an error's body, or to an event that is or may
    /// become an error.
    ///
    /// Behind an error event the whole response is redacted. Before one, only an event that two frames share may become an
    /// error: its beginning is redacted at the end of a frame, and the rest at the beginning of the next frame.
    fn redact_frame(&mut self, context: &ExchangeContext, frame: Bytes) -> Bytes {
        let is_error = self.error_body.is_some() || self.observer.has_error();
        let open = self.observer.open_event_bytes();
        if self.redactor.is_none() && !is_error && open == 0 {
            return frame;
        }
        let redactor = self.redactor.get_or_insert_with(|| Box::new(context.new_redactor()));
        if is_error {
            return redactor.redact_frame(frame);
        }
        let head = if redactor.has_begun() { first_event_end(&frame) } else { Some(0) };
        let Some(head) = head else { return redactor.redact_frame(frame) };
        let tail = frame.len().saturating_sub(open).max(head);
        redactor.redact_ends(&frame, head..tail)
    }

    fn complete(&mut self, context: &mut ExchangeContext) -> Option<Bytes> {
        // 1. The observer releases data that it held back.
        // 2. The redactor masks that data and releases its own rest.
        // 3. The error body, if there is one, releases the error as a whole.
        self.end = Some(BodyEnd::Complete);
        context.outcome = Some(CallOutcome::Completed);
        let last = self.observer.end_of_body();
        self.record_stream_error(context);
        let Some(mut redactor) = self.redactor.take() else { return last };
        let passed = redactor.redact_frame(last.unwrap_or_default());
        let rest: Bytes = [passed, redactor.take_rest()].concat().into();
        let Some(mut error_body) = self.error_body.take() else { return Some(rest) };
        error_body.push(&rest);
        self.error_tokens = error_body.tokens();
        Some(error_body.end())
    }

    /// Completes a response whose end was not polled for. A server may drop a body of known length so.
    pub(super) fn complete_if_at_end(&mut self, context: &mut ExchangeContext) {
        if !self.has_ended() && self.body.is_end_stream() {
            self.complete(context);
        }
    }

    /// Counts an error event of a stream. The status was 200 and the body is delivered to its end, so only the event
    /// shows that the provider failed.
    fn record_stream_error(&self, context: &mut ExchangeContext) {
        if context.status < 400 && self.observer.has_error() {
            context.code = Some(STREAM_ERROR_CODE);
            context.gateway.metrics.record_upstream_error(STREAM_ERROR_CODE);
        }
    }

    /// Reads the rest for the usage alone, up to `max_bytes` of the whole response.
    pub(super) async fn read_remaining(&mut self, context: &mut ExchangeContext, max_bytes: u64) {
        // Bytes that the client received count, too.
        while context.response_bytes < max_bytes {
            let Some(data) = poll_fn(|cx| self.body.poll_data(cx)).await else {
                self.observer.end_of_body();
                self.end = Some(BodyEnd::Complete);
                return;
            };
            if !data.is_ok_and(|data| self.observe_frame(context, data).is_ok()) || self.has_ended()
            {
                return;
            }
        }
    }

    /// Returns true once no more of the response passes.
    pub(super) fn has_ended(&self) -> bool {
        self.end.is_some()
    }

    /// Returns true once the upstream's body was read to its orderly end.
    pub(super) fn is_complete(&self) -> bool {
        self.end == Some(BodyEnd::Complete)
    }

    /// Returns true once the server has nothing more to poll for.
    pub(super) fn is_end_stream(&self) -> bool {
        self.has_ended() && self.broken.is_none()
    }

    /// Returns the exact size if the upstream declared the length and the gateway changes nothing.
    pub(super) fn size_hint(&self) -> SizeHint {
        if !self.observer.is_passthrough() {
            return SizeHint::default();
        }
        let hint = self.body.size_hint();
        // An error that may be truncated has no known length.
        let is_cut = hint.exact().is_none_or(|length| length > MAX_ERROR_BYTES as u64);
        if self.error_body.is_some() && is_cut { SizeHint::default() } else { hint }
    }
}

/// The bytes that a stream may hold for an event or a frame without being counted. Our choice: usual events are far
/// smaller, and a frame of a socket is not larger.
const MAX_UNCOUNTED_BYTES: usize = 64 * 1024;

/// The code of a call whose stream ended with an error event.
const STREAM_ERROR_CODE: &str = "upstream_stream_error";
