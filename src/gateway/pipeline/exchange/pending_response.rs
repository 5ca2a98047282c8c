//! A call that was sent upstream and whose client may disconnect before the response.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::StatusCode;

use super::client_reply::{ClientReply, ResponseBody};
use super::observed_body::DrainPermit;
use super::{AdmittedCall, ExchangeState, GatewayExchange};
use crate::gateway::pipeline::RunGateway;
use crate::gateway::pipeline::rejection::CallRejection;
use crate::gateway::upstream::{self, PendingAnswer, UpstreamError};
use crate::llm::response::UsageChunkMode;

impl GatewayExchange {
    /// Sends an admitted call and passes the response to the client.
    ///
    /// Dropping the result cancels the call, except if the call must be drained and the run has a free
    /// drain permit. Then a task waits for the response and reads it, to learn the usage.
    pub(in crate::gateway::pipeline) fn send_call(
        self: Box<Self>,
        call: AdmittedCall,
    ) -> PendingResponse {
        let drains = self.should_drain().then(|| Arc::clone(&self.context.gateway));
        let AdmittedCall { answer, usage_chunk } = call;
        let waiting = WaitingExchange { call: Some((answer, self)), usage_chunk };
        PendingResponse { waiting: Some(waiting), drains }
    }

    /// Ends the wait for an answer.
    fn on_answer(
        mut self: Box<Self>,
        usage_chunk: UsageChunkMode,
        sent: Result<upstream::ProviderAnswer, CallRejection>,
    ) -> ClientReply {
        // The request's bytes are sent, or were dropped together with the call.
        if let ExchangeState::Sent(_, sent, _) = &mut self.state {
            sent.permit.release_bytes();
        }
        let gateway = &self.context.gateway;
        if let Some(is_up) = shows_upstream_up(&sent) {
            gateway.metrics.record_upstream_contact(is_up);
        }
        match sent {
            // The provider's message is about the upstream's key, and may quote parts of the key. The
            // operator's log gets the status; the client gets only a general error.
            Ok(answer) if is_credential_rejection(answer.status) => {
                gateway.upstream.failures().key_refused(answer.status.as_u16());
                self.finish_rejected(&CallRejection::UpstreamAuth)
            }
            Ok(answer) => self.stream_response(usage_chunk, answer),
            Err(rejection) => self.finish_rejected(&rejection),
        }
    }
}

/// Returns whether the upstream answers and accepts the gateway's key; `None` if the call does not show that.
fn shows_upstream_up(sent: &Result<upstream::ProviderAnswer, CallRejection>) -> Option<bool> {
    match sent {
        Ok(answer) => Some(!is_credential_rejection(answer.status)),
        Err(CallRejection::Aborted | CallRejection::Upstream(UpstreamError::Deadline)) => None,
        Err(_) => Some(false),
    }
}

fn is_credential_rejection(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

/// A call that was sent, whose answer has not arrived.
pub(in crate::gateway::pipeline) struct PendingResponse {
    /// `None` after the answer has arrived.
    waiting: Option<WaitingExchange>,
    /// The gateway of the call, if the response is read even after the client has disconnected.
    drains: Option<Arc<RunGateway>>,
}

/// An exchange that waits for the upstream's answer.
struct WaitingExchange {
    /// `None` after the answer has arrived. The answer is dropped first: its connection is closed when the exchange
    /// settles.
    call: Option<(PendingAnswer, Box<GatewayExchange>)>,
    usage_chunk: UsageChunkMode,
}

impl Future for WaitingExchange {
    type Output = ClientReply;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<ClientReply> {
        let (mut answer, exchange) = self.call.take().expect("an answer is awaited once");
        let sent = match Pin::new(&mut answer).poll(cx) {
            Poll::Ready(sent) => sent.map_err(CallRejection::from),
            // The response wins if the response and an abort are ready in the same poll.
            Poll::Pending if exchange.context.abort.poll(cx).is_ready() => {
                Err(CallRejection::Aborted)
            }
            Poll::Pending => {
                self.call = Some((answer, exchange));
                return Poll::Pending;
            }
        };
        // The connection of an aborted call is closed before the exchange ends.
        drop(answer);
        Poll::Ready(exchange.on_answer(self.usage_chunk, sent))
    }
}

impl Future for PendingResponse {
    type Output = ClientReply;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let waiting = self.waiting.as_mut().expect("a finished response is not polled again");
        let response = ready!(Pin::new(waiting).poll(cx));
        self.waiting = None;
        Poll::Ready(response)
    }
}

impl Drop for PendingResponse {
    fn drop(&mut self) {
        let (Some(answer), Some(gateway)) = (self.waiting.take(), self.drains.take()) else {
            return;
        };
        // Without a free permit, `answer` is dropped here: the call is cancelled and settled without a report.
        let Some(place) = DrainPermit::try_acquire(&gateway) else { return };
        let abort = gateway.tasks.abort_token().clone();
        gateway.tasks.spawn_task(async move {
            // On timeout or forced shutdown the future is dropped, which settles the call.
            let answer = abort.run_until_cancelled(tokio::time::timeout_at(place.until, answer));
            if let Some(Ok(response)) = answer.await
                && let ResponseBody::Observed(body) = response.body
            {
                body.drain_after_disconnect(place).await;
            }
        });
    }
}
