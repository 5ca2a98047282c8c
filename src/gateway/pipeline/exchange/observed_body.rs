//! A response body that is watched while it passes.

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

/// Frames on their way to the client. Its end, early or not, is the end of the exchange.
pub struct ObservedBody(Option<Box<ObservedBodyInner>>);

struct ObservedBodyInner {
    body: upstream::UpstreamBody,
    observer: ResponseObserver,
    exchange: Box<GatewayExchange>,
    ended: bool,
    /// Why it broke off, until the server has been told.
    broken: Option<ResponseBodyError>,
}

/// A call's right to be read on when its client has left, and until when.
pub(super) struct DrainPermit {
    pub(super) until: Instant,
    _place: OwnedSemaphorePermit,
}

/// Why a body broke off. The client sees a connection that ends without its terminator.
#[derive(Debug, thiserror::Error)]
pub enum ResponseBodyError {
    #[error(transparent)]
    Upstream(#[from] upstream::UpstreamError),
    #[error("the upstream sent an event larger than the limit")]
    Oversize,
    #[error("an operator has cut the call")]
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

    /// Ready when an operator has cut the call: of the answer no more may go to the client.
    ///
    /// A server asks while it cannot write, when it polls for no frame.
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

    /// Reads to the end what nobody waited for.
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
        if self.exchange.cut.is_cancelled() && !self.ended {
            return Poll::Ready(Some(Err(self.abort_call())));
        }
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
        Poll::Ready(self.broken.take().map(Err))
    }

    /// While the upstream is silent, an operator may still cut the call.
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

    /// Ends with an error, one turn later: a server that hears of it throws away what it has not yet
    /// written, and what came before the break was delivered to us and is paid for.
    fn fail_after_flush(
        &mut self,
        error: upstream::UpstreamError,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        self.broken = Some(self.record_failure(error));
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn observe_frame(&mut self, frame: Frame<Bytes>) -> Result<Option<Bytes>, ResponseBodyError> {
        let Ok(data) = frame.into_data() else { return Ok(None) };
        self.exchange.count_frame(data.len());
        let passed = self.observer.read_frame(data).map_err(|_oversize| {
            self.ended = true;
            self.exchange.is_unreadable = true;
            self.exchange.code = Some("upstream_event_too_large");
            self.exchange.outcome = CallOutcome::UpstreamFailed;
            ResponseBodyError::Oversize
        })?;
        let heard = self.exchange.last_frame;
        self.exchange.silence.record_texts(self.observer.text_count(), heard);
        if self.observer.is_truncated() {
            self.ended = true;
            self.exchange.code = Some(OUTPUT_LIMIT_REACHED_CODE);
            self.exchange.outcome = CallOutcome::CutOff;
        }
        let passed = self.exchange.redact_frame(passed, self.observer.may_be_error());
        let Some(error_body) = &mut self.exchange.error_body else { return Ok(Some(passed)) };
        error_body.push(&passed);
        self.exchange.error_tokens = error_body.tokens();
        Ok(None)
    }

    fn complete(&mut self) -> Option<Bytes> {
        self.ended = true;
        self.exchange.outcome = CallOutcome::Completed;
        let last = self.observer.end_of_body();
        let Some(mut redactor) = self.exchange.redactor.take() else { return last };
        let passed = redactor.redact_frame(&last.unwrap_or_default());
        let rest: Bytes = [passed, redactor.redact_rest()].concat().into();
        let Some(mut error_body) = self.exchange.error_body.take() else { return Some(rest) };
        error_body.push(&rest);
        self.exchange.error_tokens = error_body.tokens();
        Some(error_body.end())
    }

    fn record_failure(&mut self, error: upstream::UpstreamError) -> ResponseBodyError {
        self.ended = true;
        self.exchange.set_upstream_error(&error);
        self.exchange.gateway.metrics.record_upstream_error(error.code());
        self.exchange.gateway.upstream.failures().failed(&error);
        error.into()
    }

    /// The length of the upstream's body, unless it is that of an error that may be cut.
    fn size_hint(&self) -> SizeHint {
        let hint = self.body.size_hint();
        let is_cut = hint.exact().is_none_or(|length| length > MAX_ERROR_BYTES as u64);
        if self.exchange.error_body.is_some() && is_cut { SizeHint::default() } else { hint }
    }

    fn is_client_gone(&self) -> bool {
        !self.ended && !self.body.is_end_stream()
    }

    /// Reads what the client no longer wants, to learn what it cost.
    async fn spawn_drain(mut self: Box<Self>, place: DrainPermit) {
        let cut = self.exchange.gateway.tasks.abort_token().clone();
        let pump = tokio::time::timeout_at(place.until, self.read_remaining());
        let _ = cut.run_until_cancelled(pump).await;
        self.ended = true;
        self.exchange.read_usage(&self.observer, UsageSource::Drained);
    }

    async fn read_remaining(&mut self) {
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
    /// A place of the run's, if one is free.
    pub(super) fn try_acquire(gateway: &RunGateway) -> Option<Self> {
        let place = Arc::clone(&gateway.run.drains).try_acquire_owned().ok()?;
        Some(Self { until: Instant::now() + MAX_DRAIN_TIME, _place: place })
    }
}

impl Drop for ObservedBody {
    fn drop(&mut self) {
        let Some(mut passing) = self.0.take() else { return };
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

    /// Exact where the upstream told the length and nothing will be taken out.
    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Some(passing) if passing.observer.is_passthrough() => passing.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

/// From the client's leaving to the end of the answer: long enough for most. The rest is charged by
/// estimate, and what goes on without us as reserved.
const MAX_DRAIN_TIME: Duration = Duration::from_mins(2);
const MAX_DRAIN_BYTES: u64 = 8 * 1024 * 1024;
