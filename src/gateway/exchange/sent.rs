//! A call on its way, whose client may not wait for the answer.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::StatusCode;

use super::Exchange;
use super::followed::Place;
use crate::gateway::Gateway;
use crate::gateway::answer::{Answer, ClientReply};
use crate::gateway::rejection::Rejection;
use crate::stream::UsageChunk;
use crate::upstream;

impl Exchange {
    /// Sends an admitted call and passes its answer on.
    ///
    /// Dropping the future cancels the call, unless it is to be drained and the run has a place for that:
    /// then the answer is waited for and read, which tells its usage. It is boxed, so that a connection
    /// does not keep room for it while the answer streams.
    pub(in crate::gateway) fn send(
        self: Box<Self>,
        usage_chunk: UsageChunk,
        call: upstream::Call,
    ) -> impl Future<Output = ClientReply> {
        let drains = self.is_drained().then(|| Arc::clone(&self.gateway));
        Sent { answer: Some(Box::pin(self.answered(usage_chunk, call))), drains }
    }

    async fn answered(
        mut self: Box<Self>,
        usage_chunk: UsageChunk,
        call: upstream::Call,
    ) -> ClientReply {
        let gateway = Arc::clone(&self.gateway);
        let sent = {
            let mut answer = pin!(gateway.upstream.send(call));
            let poll = |cx: &mut Context<'_>| match answer.as_mut().poll(cx) {
                Poll::Ready(sent) => Poll::Ready(sent.map_err(Rejection::from)),
                Poll::Pending => self.cut.poll(cx).map(|()| Err(Rejection::Cut)),
            };
            poll_fn(poll).await
        };
        // The call's own bytes are sent, or dropped with it.
        self.release_body();
        match sent {
            // What it says to this is about our key, down to parts of it, and for the operator.
            Ok(answer) if is_about_our_key(answer.status) => {
                gateway.upstream.failures().key_refused(answer.status.as_u16());
                self.reject(&Rejection::UpstreamAuth)
            }
            Ok(answer) => self.follow(usage_chunk, answer),
            Err(rejection) => self.reject(&rejection),
        }
    }
}

fn is_about_our_key(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

/// A call that was sent.
struct Sent {
    answer: Option<Pin<Box<dyn Future<Output = ClientReply> + Send>>>,
    /// Whose call it is, where its answer is waited for when its client does not.
    drains: Option<Arc<Gateway>>,
}

impl Future for Sent {
    type Output = ClientReply;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = self.answer.as_mut().expect("nobody polls what has answered");
        let response = ready!(answer.as_mut().poll(cx));
        self.answer = None;
        Poll::Ready(response)
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let (Some(answer), Some(gateway)) = (self.answer.take(), self.drains.take()) else {
            return;
        };
        let Some(place) = Place::take(&gateway) else { return };
        let cut = gateway.tasks.cut().clone();
        gateway.tasks.spawn(async move {
            let answer = cut.run_until_cancelled(tokio::time::timeout_at(place.until, answer));
            if let Some(Ok(response)) = answer.await
                && let Answer::Followed(body) = response.body
            {
                body.drain(place).await;
            }
        });
    }
}
