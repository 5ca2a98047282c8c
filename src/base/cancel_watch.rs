//! Waits for a cancellation in a task that polls many times before the cancellation comes.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// A watch on a cancellation token. The task is registered with the token once, and not at each poll. Only the task
/// that polled last is woken, so tasks do not share a watch.
pub struct CancelWatch {
    token: CancellationToken,
    waiting: Mutex<Option<(Pin<Box<WaitForCancellationFutureOwned>>, Waker)>>,
}

impl CancelWatch {
    pub fn new(token: CancellationToken) -> Self {
        Self { token, waiting: Mutex::new(None) }
    }

    pub fn is_cancelled(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Returns ready when the token is cancelled.
    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_cancelled() {
            return Poll::Ready(());
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        // The future registers the task when it is polled. It is polled again only for another waker.
        let (waiting, waker) = match &mut *waiting {
            Some((_, waker)) if waker.will_wake(cx.waker()) => return Poll::Pending,
            Some(waiting) => waiting,
            none => {
                none.insert((Box::pin(self.token.clone().cancelled_owned()), cx.waker().clone()))
            }
        };
        waker.clone_from(cx.waker());
        waiting.as_mut().poll(cx)
    }

    /// Waits for a future, or for the cancellation. Returns `None` if the cancellation comes first.
    pub async fn run_until_cancelled<F: Future + Unpin>(&self, mut future: F) -> Option<F::Output> {
        poll_fn(|cx| match Pin::new(&mut future).poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending => self.poll(cx).map(|()| None),
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::Builder;
    use tokio_util::sync::CancellationToken;

    use super::*;

    #[test]
    fn a_task_that_polled_before_is_woken() {
        let runtime = Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let token = CancellationToken::new();
            let watch = CancelWatch::new(token.clone());
            let another_task = &mut Context::from_waker(Waker::noop());
            assert!(watch.poll(another_task).is_pending());
            let mut polls = 0;
            poll_fn(|cx| {
                polls += 1;
                if polls == 3 {
                    token.cancel();
                } else if polls < 3 {
                    cx.waker().wake_by_ref();
                }
                let polled = watch.poll(cx);
                assert_eq!(polled.is_ready(), polls >= 3);
                polled
            })
            .await;
            assert!(watch.is_cancelled());
        });
    }
}
