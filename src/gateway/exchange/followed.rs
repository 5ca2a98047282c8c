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

use super::Exchange;
use super::error_body::MAX_ERROR_BYTES;
use crate::audit::record::Outcome;
use crate::budget::Source;
use crate::gateway::Gateway;
use crate::gateway::rejection::CUT;
use crate::stream::{OUTPUT_LIMIT_REACHED, Observer};
use crate::upstream;

/// Frames on their way to the client. Its end, early or not, is the end of the exchange.
pub struct Followed(Option<Box<Passing>>);

struct Passing {
    body: upstream::Body,
    observer: Observer,
    exchange: Box<Exchange>,
    ended: bool,
    /// Why it broke off, until the server has been told.
    broken: Option<Broken>,
}

/// A call's right to be read on when its client has left, and until when.
pub(super) struct Place {
    pub(super) until: Instant,
    _place: OwnedSemaphorePermit,
}

/// Why a body broke off. The client sees a connection that ends without its terminator.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    #[error(transparent)]
    Upstream(#[from] upstream::Error),
    #[error("the upstream sent an event larger than the limit")]
    Oversize,
    #[error("an operator has cut the call")]
    Cut,
}

impl Followed {
    pub(super) fn new(body: upstream::Body, observer: Observer, exchange: Box<Exchange>) -> Self {
        let passing = Passing { body, observer, exchange, ended: false, broken: None };
        Self(Some(Box::new(passing)))
    }

    /// Ready when an operator has cut the call: of the answer no more may go to the client.
    ///
    /// A server asks while it cannot write, when it polls for no frame.
    pub(in crate::gateway) fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut self.0 {
            Some(passing) if !passing.ended => {
                ready!(passing.exchange.cut.poll(cx));
                passing.cut();
                Poll::Ready(())
            }
            _ => Poll::Pending,
        }
    }

    /// Reads to the end what nobody waited for.
    pub(super) async fn drain(mut self, place: Place) {
        if let Some(passing) = self.0.take() {
            passing.drain(place).await;
        }
    }
}

impl Passing {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if self.exchange.cut.is_cancelled() && !self.ended {
            return Poll::Ready(Some(Err(self.cut())));
        }
        while !self.ended {
            let passed = match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => self.observe(frame)?,
                Poll::Ready(Some(Err(error))) => return self.break_off(error, cx),
                Poll::Ready(None) => self.end(),
                Poll::Pending => return self.wait(cx),
            };
            if let Some(data) = passed.filter(|data| !data.is_empty()) {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
        }
        Poll::Ready(self.broken.take().map(Err))
    }

    /// While the upstream is silent, an operator may still cut the call.
    fn wait(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        ready!(self.exchange.cut.poll(cx));
        Poll::Ready(Some(Err(self.cut())))
    }

    fn cut(&mut self) -> Broken {
        self.ended = true;
        self.exchange.code = Some(CUT);
        self.exchange.outcome = Outcome::ShutDown;
        Broken::Cut
    }

    /// Ends with an error, one turn later: a server that hears of it throws away what it has not yet
    /// written, and what came before the break was delivered to us and is paid for.
    fn break_off(
        &mut self,
        error: upstream::Error,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        self.broken = Some(self.fail(error));
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn observe(&mut self, frame: Frame<Bytes>) -> Result<Option<Bytes>, Broken> {
        let Ok(data) = frame.into_data() else { return Ok(None) };
        self.exchange.frame(data.len());
        let passed = self.observer.frame(data).map_err(|_oversize| {
            self.ended = true;
            self.exchange.is_unreadable = true;
            self.exchange.code = Some("upstream_event_too_large");
            self.exchange.outcome = Outcome::UpstreamFailed;
            Broken::Oversize
        })?;
        let heard = self.exchange.last_frame;
        self.exchange.silence.heard(self.observer.texts(), heard);
        if self.observer.is_cut() {
            self.ended = true;
            self.exchange.code = Some(OUTPUT_LIMIT_REACHED);
            self.exchange.outcome = Outcome::CutOff;
        }
        let passed = self.exchange.redact(passed, self.observer.may_be_error());
        let Some(error_body) = &mut self.exchange.error_body else { return Ok(Some(passed)) };
        error_body.push(&passed);
        self.exchange.error_tokens = error_body.tokens();
        Ok(None)
    }

    fn end(&mut self) -> Option<Bytes> {
        self.ended = true;
        self.exchange.outcome = Outcome::Completed;
        let last = self.observer.end();
        let Some(mut redactor) = self.exchange.redactor.take() else { return last };
        let passed = redactor.frame(&last.unwrap_or_default());
        let rest: Bytes = [passed, redactor.end()].concat().into();
        let Some(mut error_body) = self.exchange.error_body.take() else { return Some(rest) };
        error_body.push(&rest);
        self.exchange.error_tokens = error_body.tokens();
        Some(error_body.end())
    }

    fn fail(&mut self, error: upstream::Error) -> Broken {
        self.ended = true;
        self.exchange.fail(&error);
        self.exchange.gateway.metrics.upstream_error(error.code());
        self.exchange.gateway.upstream.failures().failed(&error);
        error.into()
    }

    /// The length of the upstream's body, unless it is that of an error that may be cut.
    fn size_hint(&self) -> SizeHint {
        let hint = self.body.size_hint();
        let is_cut = hint.exact().is_none_or(|length| length > MAX_ERROR_BYTES as u64);
        if self.exchange.error_body.is_some() && is_cut { SizeHint::default() } else { hint }
    }

    fn is_abandoned(&self) -> bool {
        !self.ended && !self.body.is_end_stream()
    }

    /// Reads what the client no longer wants, to learn what it cost.
    async fn drain(mut self: Box<Self>, place: Place) {
        let cut = self.exchange.gateway.tasks.cut().clone();
        let pump = tokio::time::timeout_at(place.until, self.pump());
        let _ = cut.run_until_cancelled(pump).await;
        self.ended = true;
        self.exchange.reported(&self.observer, Source::Drained);
    }

    async fn pump(&mut self) {
        while self.exchange.response_bytes < MAX_DRAIN_BYTES {
            let Some(frame) = self.body.frame().await else {
                self.observer.end();
                self.exchange.has_finished = true;
                return;
            };
            if !frame.is_ok_and(|frame| self.observe(frame).is_ok()) || self.ended {
                return;
            }
        }
    }
}

impl Place {
    /// A place of the run's, if one is free.
    pub(super) fn take(gateway: &Gateway) -> Option<Self> {
        let place = Arc::clone(&gateway.run.drains).try_acquire_owned().ok()?;
        Some(Self { until: Instant::now() + MAX_DRAIN_TIME, _place: place })
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        let Some(mut passing) = self.0.take() else { return };
        if !passing.ended && passing.body.is_end_stream() {
            passing.end();
        }
        if passing.is_abandoned()
            && passing.exchange.is_drained()
            && let Some(place) = Place::take(&passing.exchange.gateway)
        {
            let gateway = Arc::clone(&passing.exchange.gateway);
            gateway.tasks.spawn(async move { passing.drain(place).await });
        } else {
            passing.exchange.reported(&passing.observer, Source::Provider);
        }
    }
}

impl Body for Followed {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        self.0.as_mut().map_or(Poll::Ready(None), |passing| passing.poll_frame(cx))
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(|passing| passing.ended && passing.broken.is_none())
    }

    /// Exact where the upstream told the length and nothing will be taken out.
    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Some(passing) if passing.observer.is_transparent() => passing.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

/// From the client's leaving to the end of the answer: long enough for most. The rest is charged by
/// estimate, and what goes on without us as reserved.
const MAX_DRAIN_TIME: Duration = Duration::from_mins(2);
const MAX_DRAIN_BYTES: u64 = 8 * 1024 * 1024;
