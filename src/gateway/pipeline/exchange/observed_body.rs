//! A response body that the gateway observes while the body passes to the client.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::provider_response::{ProviderResponse, ResponseBodyError};
use super::{ExchangeContext, ExchangeState, GatewayExchange};
use crate::gateway::pipeline::RunGateway;
use crate::gateway::upstream::own_small_frame;
use crate::llm::budget::UsageSource;

/// The frames on their way to the client. The end of this body, early or not, ends the exchange.
pub struct ObservedBody(Option<Box<GatewayExchange>>);

/// A permit to read a call's response after the client has disconnected, with the deadline of that
/// reading.
pub(super) struct DrainPermit {
    pub(super) until: Instant,
    _place: OwnedSemaphorePermit,
}

impl ObservedBody {
    /// Creates the body of an exchange whose response has begun.
    pub(super) fn new(exchange: Box<GatewayExchange>) -> Self {
        Self(Some(exchange))
    }

    /// Polls for the next bytes, like [`UpstreamBody::poll_data`](crate::gateway::upstream::UpstreamBody::poll_data).
    pub(super) fn poll_data(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, ResponseBodyError>>> {
        match self.streaming() {
            Some((context, response)) => response.poll_data(context, cx),
            None => Poll::Ready(None),
        }
    }

    /// Returns ready if an operator has aborted the call. No more of the response may go to the client
    /// then.
    ///
    /// The lane's writer calls this function while writing is blocked, because the writer does not poll
    /// for frames then.
    pub(in crate::gateway::pipeline) fn poll_abort(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self.streaming() {
            Some((context, response)) => response.poll_abort(context, cx),
            None => Poll::Pending,
        }
    }

    /// Reads the rest of a response whose client disconnected before the head arrived.
    pub(super) async fn drain_after_disconnect(mut self, place: DrainPermit) {
        if let Some(exchange) = self.0.take() {
            exchange.drain(place).await;
        }
    }

    fn streaming(&mut self) -> Option<(&mut ExchangeContext, &mut ProviderResponse)> {
        self.0.as_mut()?.streaming()
    }

    fn response(&self) -> Option<&ProviderResponse> {
        match &self.0.as_ref()?.state {
            ExchangeState::Sent(_, _, response) => response.as_deref(),
            _ => None,
        }
    }
}

impl GatewayExchange {
    fn streaming(&mut self) -> Option<(&mut ExchangeContext, &mut ProviderResponse)> {
        match &mut self.state {
            ExchangeState::Sent(_, _, Some(response)) => Some((&mut self.context, response)),
            _ => None,
        }
    }

    /// Reads the rest of the response after the client has disconnected, to learn the usage.
    async fn drain(mut self: Box<Self>, place: DrainPermit) {
        let abort = self.gateway().tasks.abort_token().clone();
        let Some((context, response)) = self.streaming() else { return };
        response.usage_source = UsageSource::Drained;
        let pump = response.read_remaining(context, MAX_DRAIN_BYTES);
        // Four events end the reading: the end of the response, the byte limit, the permit's deadline and a
        // forced shutdown.
        let _ = abort.run_until_cancelled(tokio::time::timeout_at(place.until, pump)).await;
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
        let Some(mut exchange) = self.0.take() else { return };
        let Some((context, response)) = exchange.streaming() else { return };
        response.complete_if_at_end(context);
        // Without a drain the exchange is dropped at the end of this function, and settles with the usage that
        // was seen.
        if !response.has_ended()
            && exchange.should_drain()
            && let Some(place) = DrainPermit::try_acquire(exchange.gateway())
        {
            let gateway = Arc::clone(&exchange.context.gateway);
            gateway.tasks.spawn_task(exchange.drain(place));
        }
    }
}

impl Body for ObservedBody {
    type Data = Bytes;
    type Error = ResponseBodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        // hyper queues the frames of a slow reader.
        self.get_mut().poll_data(cx).map_ok(|data| Frame::data(own_small_frame(data)))
    }

    fn is_end_stream(&self) -> bool {
        self.response().is_none_or(ProviderResponse::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.response().map_or_else(SizeHint::default, ProviderResponse::size_hint)
    }
}

/// The longest time from the client's disconnect to the end of the response. Our choice: long enough
/// for most responses.
///
/// After that time the call is charged by estimate, or in full if the upstream continues without a
/// reader.
const MAX_DRAIN_TIME: Duration = Duration::from_mins(2);
/// The largest response, in bytes, of which the rest is still read after the client has disconnected.
/// Our choice.
const MAX_DRAIN_BYTES: u64 = 8 * 1024 * 1024;
