//! The bodies of a request and of its answer, while they pass.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{FutureExt, stream};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::body_judge::BodyJudge;
use super::exchange::{ConnectExchange, SharedReservation, StopSignal};
use super::link_rewriter::LinkRewriter;
use crate::base::streamed_endpoint::StreamedBody;
use crate::llm::budget::ByteDirection;
use crate::telemetry::audit::connect_records::ConnectOutcome;
use crate::tools::run_credentials::EchoGuard;

/// The body of a request on its way to the server. Before a part of it passes, the rules about what the run has seen are
/// asked again, and its bytes are taken from the budget.
pub(super) struct ConnectRequestBody {
    inner: RequestSource,
    reservation: SharedReservation,
    /// `None` if no rule guards the connection.
    judge: Option<BodyJudge>,
    /// The bytes that have passed, for the caller's records.
    passed: Arc<AtomicU64>,
}

/// The place that the bytes of a request's body come from.
enum RequestSource {
    Client(StreamedBody),
    /// The whole body, which has been taken from the budget.
    Collected(Bytes),
    /// A request that is sent again, or a body that has ended.
    Nothing,
}

/// The error of a body that was cut off.
#[derive(Debug, thiserror::Error)]
#[error("the body was cut off: {}", .0.as_str())]
struct CutBodyError(ConnectOutcome);

impl ConnectRequestBody {
    pub(super) fn new(
        inner: StreamedBody,
        (reservation, judge): (SharedReservation, Option<BodyJudge>),
        passed: Arc<AtomicU64>,
    ) -> Self {
        Self { inner: RequestSource::Client(inner), reservation, judge, passed }
    }

    /// Returns a body without bytes, for a request that is sent again.
    pub(super) fn to_empty(&self) -> Self {
        let (inner, reservation) = (RequestSource::Nothing, self.reservation());
        Self { inner, reservation, judge: None, passed: Arc::clone(&self.passed) }
    }

    /// Reads the whole body, which stays here to be sent. The caller has bounded its announced length.
    pub(super) async fn collect_bytes(&mut self) -> Result<Bytes, Box<dyn Error + Send + Sync>> {
        let collected = BodyExt::collect(&mut *self).await?.to_bytes();
        self.inner = RequestSource::Collected(collected.clone());
        Ok(collected)
    }

    pub(super) fn reservation(&self) -> SharedReservation {
        self.reservation.clone()
    }

    /// Asks the rules about what the run has seen. A body whose end is denied does not end in order either.
    fn check_judge(&self) -> Result<(), CutBodyError> {
        if self.judge.as_ref().is_some_and(BodyJudge::denies_rest) {
            self.reservation.note_early_end(ConnectOutcome::Denied);
            return Err(CutBodyError(ConnectOutcome::Denied));
        }
        Ok(())
    }
}

impl Body for ConnectRequestBody {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let next = match &mut self.inner {
            RequestSource::Nothing => return Poll::Ready(None),
            RequestSource::Collected(bytes) => Some(std::mem::take(bytes)),
            RequestSource::Client(inner) => match ready!(poll_data(inner, cx)) {
                None => None,
                Some(Ok(data)) => Some(data),
                Some(Err(error)) => {
                    self.reservation.note_early_end(ConnectOutcome::ClientGone);
                    return Poll::Ready(Some(Err(error)));
                }
            },
        };
        // The bytes are here, so the client has written them before this judgement.
        self.check_judge()?;
        let Some(data) = next else { return Poll::Ready(None) };
        if matches!(self.inner, RequestSource::Collected(_)) {
            self.inner = RequestSource::Nothing;
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if !self.reservation.take_bytes(ByteDirection::Out, data.len() as u64) {
            let error = CutBodyError(ConnectOutcome::BudgetCut);
            return Poll::Ready(Some(Err(error.into())));
        }
        self.passed.fetch_add(data.len() as u64, Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            RequestSource::Client(inner) => inner.is_end_stream(),
            RequestSource::Collected(bytes) => bytes.is_empty(),
            RequestSource::Nothing => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            RequestSource::Client(inner) => inner.size_hint(),
            RequestSource::Collected(bytes) => SizeHint::with_exact(bytes.len() as u64),
            RequestSource::Nothing => SizeHint::with_exact(0),
        }
    }
}

/// Returns the next bytes of a client's body. Trailers are headers that no list has checked, so they do not pass.
fn poll_data(inner: &mut StreamedBody, cx: &mut Context<'_>) -> Poll<NextFrame> {
    loop {
        match ready!(Pin::new(&mut *inner).poll_frame(cx)) {
            None => return Poll::Ready(None),
            Some(Err(error)) => return Poll::Ready(Some(Err(error))),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Poll::Ready(Some(Ok(data)));
                }
            }
        }
    }
}

/// An answer's body that passes to the client. Its drop settles the request.
pub(super) struct AnswerBody {
    pub(super) inner: Incoming,
    pub(super) guard: Option<EchoGuard>,
    pub(super) links: Option<LinkRewriter>,
    pub(super) exchange: ConnectExchange,
    pub(super) stop: StopSignal,
    /// The longest silence of the server.
    pub(super) timeout: Duration,
    /// The bytes that had come with the head.
    pub(super) first: Option<Bytes>,
    /// True if the body has ended, well or not.
    pub(super) has_ended: bool,
}

/// The next bytes of a body; `None` at its end.
type NextFrame = Option<Result<Bytes, Box<dyn Error + Send + Sync>>>;

impl AnswerBody {
    /// Converts the answer into a body that reads on when the client is ready.
    pub(super) fn into_streamed(self) -> StreamedBody {
        if self.has_ended {
            // Nothing is left to be read, so the request is settled now.
            let whole = Full::new(self.first.unwrap_or_default());
            return whole.map_err(|never| match never {}).boxed_unsync();
        }
        let frames = stream::unfold(self, async |mut own| {
            let frame = own.next_frame().await?;
            if frame.is_err() {
                // hyper sends what has passed when nothing more is ready. Without this pause, a client would see neither.
                tokio::task::yield_now().await;
            }
            Some((frame.map(Frame::data), own))
        });
        StreamBody::new(frames).boxed_unsync()
    }

    /// Reads the bytes that have come with the head, without waiting. So an answer of one piece that must not pass gets an
    /// error with a status.
    ///
    /// # Errors
    /// Returns the outcome of a request whose answer must not pass.
    pub(super) fn read_first(&mut self) -> Result<(), ConnectOutcome> {
        match self.next_frame().now_or_never() {
            Some(Some(Err(_))) => Err(self.exchange.outcome),
            Some(Some(Ok(first))) => {
                self.first = Some(first);
                Ok(())
            }
            Some(None) | None => Ok(()),
        }
    }

    /// Returns the next bytes that may pass; `None` at the end. The future may be dropped at any time.
    async fn next_frame(&mut self) -> NextFrame {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        while !self.has_ended {
            let received = tokio::select! {
                biased;
                outcome = self.stop.wait_stopped() => return Some(Err(self.cut(outcome))),
                frame = self.inner.frame() => frame,
                () = tokio::time::sleep(self.timeout) => return Some(Err(self.cut(ConnectOutcome::TimedOut))),
            };
            let frame = match received {
                None => return self.finish(Bytes::new()),
                Some(Err(_)) => {
                    let outcome = self.exchange.reservation().failed_outcome();
                    return Some(Err(self.cut(outcome)));
                }
                Some(Ok(frame)) => frame,
            };
            // Trailers do not pass: no guard has searched them.
            let Ok(data) = frame.into_data() else { continue };
            let count = data.len() as u64;
            if !self.exchange.reservation().take_bytes(ByteDirection::In, count) {
                return Some(Err(self.cut(ConnectOutcome::BudgetCut)));
            }
            let passed = match &mut self.guard {
                None => Some(data),
                Some(guard) => guard.pass_frame(data),
            };
            let Some(passed) = passed else {
                return Some(Err(self.cut(ConnectOutcome::CredentialEchoed)));
            };
            // The server does not ask for more when all announced bytes have passed, so the end is noted with them.
            if self.inner.is_end_stream() {
                return self.finish(passed);
            }
            let passed = self.rewrite(passed);
            if !passed.is_empty() {
                return Some(Ok(passed));
            }
        }
        None
    }

    fn rewrite(&mut self, passed: Bytes) -> Bytes {
        match &mut self.links {
            None => passed,
            Some(links) => links.rewrite_frame(&passed),
        }
    }

    /// Ends the body well. The bytes that were held back can become no credential any more.
    fn finish(&mut self, passed: Bytes) -> NextFrame {
        self.has_ended = true;
        self.exchange.outcome = ConnectOutcome::Completed;
        let rest = self.guard.take().map(EchoGuard::pass_rest).unwrap_or_default();
        let last = if rest.is_empty() { passed } else { [passed, rest].concat().into() };
        let last = self.rewrite(last);
        let rest = self.links.take().map(LinkRewriter::rewrite_rest).unwrap_or_default();
        let last = if rest.is_empty() { last } else { [last, rest].concat().into() };
        if last.is_empty() { None } else { Some(Ok(last)) }
    }

    /// Ends the body early, and returns the error of its end.
    fn cut(&mut self, outcome: ConnectOutcome) -> Box<dyn Error + Send + Sync> {
        self.has_ended = true;
        self.exchange.outcome = outcome;
        CutBodyError(outcome).into()
    }
}
