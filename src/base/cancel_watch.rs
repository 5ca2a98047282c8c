//! Waits for a cancellation in a task that polls many times before the cancellation comes.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// A watch on a cancellation token. The watch is registered with the token once, and not at each poll; from then on, a
/// look at it takes no lock of the token. Only the task that polled last is woken, so tasks do not share a watch.
pub struct CancelWatch {
    token: CancellationToken,
    /// Set by the first poll.
    registration: OnceLock<Registration>,
}

struct Registration {
    signal: Arc<CancelSignal>,
    /// The future that wakes the signal. It is never polled again.
    _waiting: Pin<Box<WaitForCancellationFutureOwned>>,
}

/// A flag that the token sets, and the task that it wakes.
#[derive(Default)]
struct CancelSignal {
    is_cancelled: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl CancelWatch {
    pub fn new(token: CancellationToken) -> Self {
        Self { token, registration: OnceLock::new() }
    }

    pub fn is_cancelled(&self) -> bool {
        match self.registration.get() {
            Some(registration) => registration.signal.is_cancelled(),
            None => self.token.is_cancelled(),
        }
    }

    /// Returns ready when the token is cancelled.
    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        let Registration { signal, .. } = self.registration.get_or_init(|| self.register());
        if signal.is_cancelled() {
            return Poll::Ready(());
        }
        let mut task = signal.lock_task();
        if task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            return Poll::Pending;
        }
        *task = Some(cx.waker().clone());
        drop(task);
        // A cancellation before the task was stored has woken no task.
        if signal.is_cancelled() { Poll::Ready(()) } else { Poll::Pending }
    }

    fn register(&self) -> Registration {
        let signal = Arc::new(CancelSignal::default());
        let mut waiting = Box::pin(self.token.clone().cancelled_owned());
        let waker = Waker::from(Arc::clone(&signal));
        if waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            signal.wake_by_ref();
        }
        Registration { signal, _waiting: waiting }
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

impl CancelSignal {
    fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    fn lock_task(&self) -> MutexGuard<'_, Option<Waker>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for CancelSignal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_cancelled.store(true, Ordering::Release);
        // The lock is released before the task is woken.
        let task = self.lock_task().take();
        if let Some(task) = task {
            task.wake();
        }
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
