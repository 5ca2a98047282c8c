//! A response body that the gateway observes while the body passes to the client.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::GatewayExchange;
use super::error_body::MAX_ERROR_BYTES;
use crate::gateway::pipeline::RunGateway;
use crate::gateway::pipeline::rejection::ABORTED_BY_OPERATOR;
use crate::gateway::upstream;
use crate::llm::budget::UsageSource;
use crate::llm::response::{OUTPUT_LIMIT_REACHED_CODE, ResponseObserver};
use crate::telemetry::audit::records::CallOutcome;

/// The frames on their way to the client. The end of this body, early or not, ends the exchange.
pub struct ObservedBody(Option<Box<ObservedBodyInner>>);

struct ObservedBodyInner {
    body: upstream::UpstreamBody,
    observer: ResponseObserver,
    exchange: Box<GatewayExchange>,
    ended: bool,
    /// The error that ended the body, until the server has polled for it.
    broken: Option<ResponseBodyError>,
}

/// A permit to read a call's response after the client has disconnected, with the deadline of that
/// reading.
pub(super) struct DrainPermit {
    pub(super) until: Instant,
    _place: OwnedSemaphorePermit,
}

/// An error that ended a body early. The client sees a connection that ends without its terminator.
#[derive(Debug, thiserror::Error)]
pub enum ResponseBodyError {
    #[error(transparent)]
    Upstream(#[from] upstream::UpstreamError),
    #[error("the upstream sent an event larger than the limit")]
    Oversize,
    #[error("an operator has aborted the call")]
    Cut,
}

impl ObservedBody {
    pub(super) fn new(
        body: upstream::UpstreamBody,
        observer: ResponseObserver,
        exchange: Box<GatewayExchange>,
    ) -> Self {
        let passing = ObservedBodyInner { body, observer, exchange, ended: false, broken: None };
        Self(Some(Box::new(passing)))
    }

    /// Returns ready if an operator has aborted the call. No more of the response may go to the client
    /// then.
    ///
    /// The lane's writer calls this function while writing is blocked, because the writer does not poll
    /// for frames then.
    pub(in crate::gateway::pipeline) fn poll_abort(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut self.0 {
            Some(passing) if !passing.ended => {
                ready!(passing.exchange.cut.poll(cx));
                passing.abort_call();
                Poll::Ready(())
            }
            _ => Poll::Pending,
        }
    }

    /// Reads the rest of a response whose client disconnected before the head arrived.
    pub(super) async fn drain_after_disconnect(mut self, place: DrainPermit) {
        if let Some(passing) = self.0.take() {
            passing.spawn_drain(place).await;
        }
    }
}

impl ObservedBodyInner {
    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        // Check first: an aborted call must not deliver a frame that is already here.
        if self.exchange.cut.is_cancelled() && !self.ended {
            return Poll::Ready(Some(Err(self.abort_call())));
        }
        // A frame may yield no data, for example a held error or a dropped usage event. Poll on until
        // there is data or the end.
        while !self.ended {
            let passed = match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => self.observe_frame(frame)?,
                Poll::Ready(Some(Err(error))) => return self.fail_after_flush(error, cx),
                Poll::Ready(None) => self.complete(),
                Poll::Pending => return self.poll_abort_while_silent(cx),
            };
            if let Some(data) = passed.filter(|data| !data.is_empty()) {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
        }
        // The body has ended. Return the deferred error once, if there is one, and then the end.
        Poll::Ready(self.broken.take().map(Err))
    }

    /// Returns an error if an operator aborts the call while the upstream is silent.
    fn poll_abort_while_silent(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        ready!(self.exchange.cut.poll(cx));
        Poll::Ready(Some(Err(self.abort_call())))
    }

    fn abort_call(&mut self) -> ResponseBodyError {
        self.ended = true;
        self.exchange.code = Some(ABORTED_BY_OPERATOR);
        self.exchange.outcome = CallOutcome::ShutDown;
        ResponseBodyError::Cut
    }

    /// Returns the error on the next poll.
    ///
    /// A server discards unwritten data when a body fails, so the frames already received are flushed
    /// first; the run has paid for them.
    fn fail_after_flush(
        &mut self,
        error: upstream::UpstreamError,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        self.broken = Some(self.record_failure(error));
        // Wake the task at once: the next poll comes after the server has written its buffer.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn observe_frame(&mut self, frame: Frame<Bytes>) -> Result<Option<Bytes>, ResponseBodyError> {
        let Ok(data) = frame.into_data() else { return Ok(None) };
        // Trailers are dropped above; only data is counted and passed.
        self.exchange.count_frame(data.len());
        let passed = self.observer.read_frame(data).map_err(|_oversize| {
            // The observer has lost its place, so neither the text nor the usage of the rest can be
            // read.
            self.ended = true;
            self.exchange.is_unreadable = true;
            self.exchange.code = Some("upstream_event_too_large");
            self.exchange.outcome = CallOutcome::UpstreamFailed;
            ResponseBodyError::Oversize
        })?;
        let received_at = self.exchange.last_frame;
        self.exchange.silence.record_texts(self.observer.text_count(), received_at);
        // The frame that exceeded the grant passes in the form that ends the stream for the client.
        if self.observer.is_truncated() {
            self.ended = true;
            self.exchange.code = Some(OUTPUT_LIMIT_REACHED_CODE);
            self.exchange.outcome = CallOutcome::CutOff;
        }
        let passed = self.exchange.redact_frame(passed, self.observer.may_be_error());
        let Some(error_body) = &mut self.exchange.error_body else { return Ok(Some(passed)) };
        // The error is held until it has ended: its length decides whether it passes unchanged.
        error_body.push(&passed);
        self.exchange.error_tokens = error_body.tokens();
        Ok(None)
    }

    fn complete(&mut self) -> Option<Bytes> {
        // 1. The observer releases data that it held back.
        // 2. The redactor masks that data and releases its own rest.
        // 3. The error body, if there is one, releases the error as a whole.
        self.ended = true;
        self.exchange.outcome = CallOutcome::Completed;
        let last = self.observer.end_of_body();
        self.record_stream_error();
        let Some(mut redactor) = self.exchange.redactor.take() else { return last };
        let passed = redactor.redact_frame(&last.unwrap_or_default());
        let rest: Bytes = [passed, redactor.redact_rest()].concat().into();
        let Some(mut error_body) = self.exchange.error_body.take() else { return Some(rest) };
        error_body.push(&rest);
        self.exchange.error_tokens = error_body.tokens();
        Some(error_body.end())
    }

    /// Counts an error event of a stream. The status was 200 and the body is delivered to its end, so only the event
    /// shows that the provider failed.
    fn record_stream_error(&mut self) {
        if self.exchange.status < 400 && self.observer.has_error() {
            self.exchange.code = Some(STREAM_ERROR_CODE);
            self.exchange.gateway.metrics.record_upstream_error(STREAM_ERROR_CODE);
        }
    }

    fn record_failure(&mut self, error: upstream::UpstreamError) -> ResponseBodyError {
        self.ended = true;
        self.exchange.set_upstream_error(&error);
        self.exchange.gateway.metrics.record_upstream_error(error.code());
        self.exchange.gateway.upstream.failures().failed(&error);
        error.into()
    }

    /// Returns the length of the upstream's body. An error that may be truncated has no known length.
    fn size_hint(&self) -> SizeHint {
        let hint = self.body.size_hint();
        let is_cut = hint.exact().is_none_or(|length| length > MAX_ERROR_BYTES as u64);
        if self.exchange.error_body.is_some() && is_cut { SizeHint::default() } else { hint }
    }

    fn is_client_gone(&self) -> bool {
        !self.ended && !self.body.is_end_stream()
    }

    /// Reads the rest of the response after the client has disconnected, to learn the usage.
    async fn spawn_drain(mut self: Box<Self>, place: DrainPermit) {
        let cut = self.exchange.gateway.tasks.abort_token().clone();
        let pump = tokio::time::timeout_at(place.until, self.read_remaining());
        // Four events end the reading: the end of the response, the byte limit, the permit's deadline and a
        // forced shutdown.
        let _ = cut.run_until_cancelled(pump).await;
        self.ended = true;
        self.exchange.read_usage(&self.observer, UsageSource::Drained);
    }

    async fn read_remaining(&mut self) {
        // Bytes that the client received count, too.
        while self.exchange.response_bytes < MAX_DRAIN_BYTES {
            let Some(frame) = self.body.frame().await else {
                self.observer.end_of_body();
                self.exchange.has_finished = true;
                return;
            };
            if !frame.is_ok_and(|frame| self.observe_frame(frame).is_ok()) || self.ended {
                return;
            }
        }
    }
}

impl DrainPermit {
    /// Acquires one of the run's drain permits, if a permit is free.
    pub(super) fn try_acquire(gateway: &RunGateway) -> Option<Self> {
        let place = Arc::clone(&gateway.run.drain_permits).try_acquire_owned().ok()?;
        Some(Self { until: Instant::now() + MAX_DRAIN_TIME, _place: place })
    }
}

impl Drop for ObservedBody {
    fn drop(&mut self) {
        let Some(mut passing) = self.0.take() else { return };
        // A server may drop a body of known length without polling for its end.
        if !passing.ended && passing.body.is_end_stream() {
            passing.complete();
        }
        if passing.is_client_gone()
            && passing.exchange.should_drain()
            && let Some(place) = DrainPermit::try_acquire(&passing.exchange.gateway)
        {
            let gateway = Arc::clone(&passing.exchange.gateway);
            gateway.tasks.spawn_task(async move { passing.spawn_drain(place).await });
        } else {
            // Nothing is drained. The exchange is dropped after this line and settles with the usage
            // that was seen.
            passing.exchange.read_usage(&passing.observer, UsageSource::Provider);
        }
    }
}

impl Body for ObservedBody {
    type Data = Bytes;
    type Error = ResponseBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        self.0.as_mut().map_or(Poll::Ready(None), |passing| passing.poll_frame(cx))
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(|passing| passing.ended && passing.broken.is_none())
    }

    /// Returns the exact size if the upstream declared the length and the gateway removes nothing.
    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Some(passing) if passing.observer.is_passthrough() => passing.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

/// The code of a call whose stream ended with an error event.
const STREAM_ERROR_CODE: &str = "upstream_stream_error";

/// The longest time from the client's disconnect to the end of the response. Our choice: long enough
/// for most responses.
///
/// After that time the call is charged by estimate, or in full if the upstream continues without a
/// reader.
const MAX_DRAIN_TIME: Duration = Duration::from_mins(2);
/// The largest response, in bytes, of which the rest is still read after the client has disconnected.
/// Our choice.
const MAX_DRAIN_BYTES: u64 = 8 * 1024 * 1024;
