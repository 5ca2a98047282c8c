//! A response body that is watched while it passes.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::Exchange;
use crate::audit::record::Outcome;
use crate::budget::Source;
use crate::gateway::policy::OnClientGone;
use crate::gateway::rejection::CUT;
use crate::stream::{OUTPUT_LIMIT_REACHED, Observer};
use crate::upstream;

/// Frames on their way to the client. Its end, early or not, is the end of the exchange.
pub struct Followed(Option<Box<Passing>>);

struct Passing {
    body: upstream::Body,
    observer: Observer,
    exchange: Exchange,
    /// Rings when an operator cuts the call.
    until_cut: Pin<Box<WaitForCancellationFutureOwned>>,
    ended: bool,
    /// Why it broke off, until the server has been told.
    broken: Option<Broken>,
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
    pub(super) fn new(body: upstream::Body, observer: Observer, exchange: Exchange) -> Self {
        let until_cut = Box::pin(exchange.until_cut.clone().cancelled_owned());
        let passing = Passing { body, observer, exchange, until_cut, ended: false, broken: None };
        Self(Some(Box::new(passing)))
    }
}

impl Passing {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if self.exchange.until_cut.is_cancelled() && !self.ended {
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
        ready!(self.until_cut.as_mut().poll(cx));
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
            self.exchange.code = Some("upstream_event_too_large");
            self.exchange.outcome = Outcome::UpstreamFailed;
            Broken::Oversize
        })?;
        if self.observer.is_cut() {
            self.ended = true;
            self.exchange.code = Some(OUTPUT_LIMIT_REACHED);
            self.exchange.outcome = Outcome::CutOff;
        }
        Ok(Some(passed))
    }

    fn end(&mut self) -> Option<Bytes> {
        self.ended = true;
        self.exchange.outcome = Outcome::Completed;
        self.observer.end()
    }

    fn fail(&mut self, error: upstream::Error) -> Broken {
        self.ended = true;
        self.exchange.fail(&error);
        self.exchange.gateway.metrics.upstream_error(error.code());
        error.into()
    }

    fn is_abandoned(&self) -> bool {
        !self.ended && !self.body.is_end_stream()
    }

    /// Reads what the client no longer wants, to learn what it cost.
    async fn drain(mut self: Box<Self>) {
        let cut = self.exchange.gateway.tasks.cut().clone();
        let pump = tokio::time::timeout(MAX_DRAIN_TIME, self.pump());
        let _ = cut.run_until_cancelled(pump).await;
        self.ended = true;
        self.exchange.reported(&self.observer, Source::Drained);
    }

    async fn pump(&mut self) {
        while self.exchange.response_bytes < MAX_DRAIN_BYTES {
            let Some(frame) = self.body.frame().await else {
                self.observer.end();
                return;
            };
            if !frame.is_ok_and(|frame| self.observe(frame).is_ok()) || self.ended {
                return;
            }
        }
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        let Some(mut passing) = self.0.take() else { return };
        if !passing.ended && passing.body.is_end_stream() {
            passing.end();
        }
        let gateway = std::sync::Arc::clone(&passing.exchange.gateway);
        if passing.is_abandoned()
            && passing.exchange.policy.config.on_client_gone == OnClientGone::Drain
        {
            gateway.tasks.spawn(passing.drain());
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
            Some(passing) if passing.observer.is_transparent() => passing.body.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

/// Long enough for the end of most answers; the rest is charged by estimate. An answer that has not
/// begun has as long to begin.
pub(super) const MAX_DRAIN_TIME: Duration = Duration::from_secs(30);
const MAX_DRAIN_BYTES: u64 = 8 * 1024 * 1024;
