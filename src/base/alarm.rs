//! Alarms for waits that nearly always end before their deadline. A running timer is handed from one wait to the next.
//! It is reset only if it fires too early, or would fire too late.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use tokio::time::{Instant, Sleep, sleep_until};

/// The running timers of one worker that no task waits for.
#[derive(Debug, Default)]
pub struct TimerPool(Mutex<Vec<Pin<Box<Sleep>>>>);

/// The timer of one task's waits. It takes a running timer from the pool when the first wait begins, and returns the
/// timer when it is dropped.
#[derive(Debug)]
pub struct Alarm {
    pool: Arc<TimerPool>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Alarm {
    pub fn new(pool: &Arc<TimerPool>) -> Self {
        Self { pool: Arc::clone(pool), timer: None }
    }

    /// Returns ready when `due` has passed.
    pub fn poll(&mut self, due: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let timer = match &mut self.timer {
            Some(timer) => timer,
            none => none.insert(self.pool.take().unwrap_or_else(|| Box::pin(sleep_until(due)))),
        };
        // A timer from the pool may fire too late for this wait.
        if timer.deadline() > due {
            timer.as_mut().reset(due);
        }
        loop {
            // A timer that fires too early is reset and waited for again.
            ready!(timer.as_mut().poll(cx));
            if due <= Instant::now() {
                return Poll::Ready(());
            }
            timer.as_mut().reset(due);
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Some(timer) = self.timer.take() {
            self.pool.put(timer);
        }
    }
}

impl TimerPool {
    fn take(&self) -> Option<Pin<Box<Sleep>>> {
        self.timers().pop()
    }

    fn put(&self, mut timer: Pin<Box<Sleep>>) {
        // The timer's waker does nothing, so the timer keeps no ended task alive.
        let is_running = timer.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending();
        let mut timers = self.timers();
        if is_running && timers.len() < MAX_TIMERS {
            timers.push(timer);
        }
    }

    fn timers(&self) -> MutexGuard<'_, Vec<Pin<Box<Sleep>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The largest number of timers that a worker keeps. Our choice: more waits at the same time are rare, and each creates
/// a timer of its own.
const MAX_TIMERS: usize = 64;

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use tokio::runtime::Builder;

    use super::*;

    fn waits(alarm: &mut Alarm, due: Instant) -> bool {
        alarm.poll(due, &mut Context::from_waker(Waker::noop())).is_pending()
    }

    #[test]
    fn a_timer_is_handed_on_and_rings_when_it_is_due() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (pool, begun) = (Arc::default(), Instant::now());
            let (soon, late) = (begun + Duration::from_millis(50), begun + Duration::from_hours(1));
            for (first, then) in [(begun + Duration::from_millis(5), soon), (late, soon)] {
                let mut alarm = Alarm::new(&pool);
                if waits(&mut alarm, first) {
                    drop(alarm);
                    assert_eq!(pool.timers().len(), 1);
                }
                let mut alarm = Alarm::new(&pool);
                poll_fn(|cx| alarm.poll(then, cx)).await;
                assert!(pool.timers().is_empty());
                assert!((then..late).contains(&Instant::now()));
            }
        });
    }

    /// G15: many tasks that wait at the same time do not leave all their timers in the pool.
    #[test]
    fn no_more_timers_are_kept_than_the_pool_has_places() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (pool, late) = (Arc::default(), Instant::now() + Duration::from_hours(1));
            let mut crowd: Vec<_> = (0..2 * MAX_TIMERS).map(|_| Alarm::new(&pool)).collect();
            assert!(crowd.iter_mut().all(|alarm| waits(alarm, late)));
            drop(crowd);
            assert_eq!(pool.timers().len(), MAX_TIMERS);
        });
    }
}
