//! A call on its way, whose client may not wait for the answer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::Response;

use super::Exchange;
use super::followed::MAX_DRAIN_TIME;
use crate::base::drain::Drain;
use crate::gateway::answer::Answer;
use crate::gateway::policy::OnClientGone;
use crate::gateway::rejection::Rejection;
use crate::stream::UsageChunk;
use crate::upstream;

impl Exchange {
    /// Sends an admitted call and passes its answer on.
    ///
    /// Dropping the future cancels the call, unless the policy is to drain: then the answer is waited
    /// for and drained, which is what tells its usage. It is boxed, so that a connection does not keep
    /// room for it while the answer streams.
    pub(in crate::gateway) fn send(
        self,
        usage_chunk: UsageChunk,
        call: upstream::Call,
    ) -> impl Future<Output = Response<Answer>> {
        let drains = self.policy.config.on_client_gone == OnClientGone::Drain;
        let drain = drains.then(|| self.gateway.tasks.clone());
        Sent { answer: Some(Box::pin(self.answered(usage_chunk, call))), drain }
    }

    async fn answered(self, usage_chunk: UsageChunk, call: upstream::Call) -> Response<Answer> {
        let (gateway, until_cut) = (Arc::clone(&self.gateway), self.until_cut.clone());
        let sent = tokio::select! {
            biased;
            sent = gateway.upstream.send(call) => sent.map_err(Rejection::from),
            () = until_cut.cancelled() => Err(Rejection::Cut),
        };
        match sent {
            Ok(response) => self.follow(usage_chunk, response).map(Answer::Followed),
            Err(rejection) => self.reject(&rejection).map(Answer::text),
        }
    }
}

/// A call that was sent. With a drain, its answer is waited for when nobody else does any more.
struct Sent {
    answer: Option<Pin<Box<dyn Future<Output = Response<Answer>> + Send>>>,
    drain: Option<Drain>,
}

impl Future for Sent {
    type Output = Response<Answer>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = self.answer.as_mut().expect("nobody polls what has answered");
        let response = ready!(answer.as_mut().poll(cx));
        self.answer = None;
        Poll::Ready(response)
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let (Some(answer), Some(drain)) = (self.answer.take(), self.drain.take()) else { return };
        let cut = drain.cut().clone();
        drain.spawn(async move {
            let answer = tokio::time::timeout(MAX_DRAIN_TIME, answer);
            // Its body, dropped here, is drained like any that a client has left.
            drop(cut.run_until_cancelled(answer).await);
        });
    }
}
