//! Timeouts, and the longest time that clocks can express.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::error::Elapsed;
use tokio::time::timeout;

/// Waits like tokio's `timeout`, without a timer for a future that is ready at once.
pub async fn timeout_unless_ready<F: Future>(
    limit: Duration,
    future: F,
) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    match poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await {
        Poll::Ready(done) => Ok(done),
        Poll::Pending => timeout(limit, future).await,
    }
}

/// A hundred years. Our choice: a configured time is cut to this value before it is added to a clock, because a clock
/// overflows with larger values.
pub const MAX_TIME: Duration = Duration::from_hours(36_500 * 24);
