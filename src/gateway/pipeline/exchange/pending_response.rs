//! A call on its way, whose client may not wait for the answer.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::StatusCode;

use super::GatewayExchange;
use super::observed_body::DrainPermit;
use crate::gateway::pipeline::RunGateway;
use crate::gateway::pipeline::local_response::{ClientReply, ResponseBody};
use crate::gateway::pipeline::rejection::CallRejection;
use crate::gateway::upstream;
use crate::llm::response::UsageChunkMode;

impl GatewayExchange {
    /// Sends an admitted call and passes its answer on.
    ///
    /// Dropping the future cancels the call, unless it is to be drained and the run has a place for that:
    /// then the answer is waited for and read, which tells its usage. It is boxed, so that a connection
    /// does not keep room for it while the answer streams.
    pub(in crate::gateway::pipeline) fn send_call(
        self: Box<Self>,
        usage_chunk: UsageChunkMode,
        call: upstream::UpstreamCall,
    ) -> impl Future<Output = ClientReply> {
        let drains = self.should_drain().then(|| Arc::clone(&self.gateway));
        PendingResponse { answer: Some(Box::pin(self.on_response(usage_chunk, call))), drains }
    }

    async fn on_response(
        mut self: Box<Self>,
        usage_chunk: UsageChunkMode,
        call: upstream::UpstreamCall,
    ) -> ClientReply {
        let gateway = Arc::clone(&self.gateway);
        let sent = {
            let mut answer = pin!(gateway.upstream.send_call(call));
            let poll = |cx: &mut Context<'_>| match answer.as_mut().poll(cx) {
                Poll::Ready(sent) => Poll::Ready(sent.map_err(CallRejection::from)),
                Poll::Pending => self.cut.poll(cx).map(|()| Err(CallRejection::Cut)),
            };
            poll_fn(poll).await
        };
        // The call's own bytes are sent, or dropped with it.
        self.release_body();
        match sent {
            // What it says to this is about our key, down to parts of it, and for the operator.
            Ok(answer) if is_credential_rejection(answer.status) => {
                gateway.upstream.failures().key_refused(answer.status.as_u16());
                self.finish_rejected(&CallRejection::UpstreamAuth)
            }
            Ok(answer) => self.stream_response(usage_chunk, answer),
            Err(rejection) => self.finish_rejected(&rejection),
        }
    }
}

fn is_credential_rejection(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

/// A call that was sent.
struct PendingResponse {
    answer: Option<Pin<Box<dyn Future<Output = ClientReply> + Send>>>,
    /// Whose call it is, where its answer is waited for when its client does not.
    drains: Option<Arc<RunGateway>>,
}

impl Future for PendingResponse {
    type Output = ClientReply;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = self.answer.as_mut().expect("nobody polls what has answered");
        let response = ready!(answer.as_mut().poll(cx));
        self.answer = None;
        Poll::Ready(response)
    }
}

impl Drop for PendingResponse {
    fn drop(&mut self) {
        let (Some(answer), Some(gateway)) = (self.answer.take(), self.drains.take()) else {
            return;
        };
        let Some(place) = DrainPermit::try_acquire(&gateway) else { return };
        let cut = gateway.tasks.abort_token().clone();
        gateway.tasks.spawn_task(async move {
            let answer = cut.run_until_cancelled(tokio::time::timeout_at(place.until, answer));
            if let Some(Ok(response)) = answer.await
                && let ResponseBody::Followed(body) = response.body
            {
                body.drain_after_disconnect(place).await;
            }
        });
    }
}
