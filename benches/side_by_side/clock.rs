//! The one clock that all processes share, and an alarm based on it.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use anyhow::Result;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{self, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::time::ClockId;

/// Returns nanoseconds of `CLOCK_MONOTONIC`, which can be compared between processes of one machine.
pub(crate) fn monotonic_nanos() -> u64 {
    as_nanos(ClockId::CLOCK_MONOTONIC.now().expect("every Linux has this clock"))
}

/// Converts a reading, which is never negative, to nanoseconds.
pub(crate) fn as_nanos(reading: TimeSpec) -> u64 {
    u64::try_from(Duration::from(reading).as_nanos()).expect("less than 584 years")
}

/// Wakes an epoll loop at a point in time; epoll's own timeout is too coarse (milliseconds).
pub(crate) struct PreciseTimer {
    timer: TimerFd,
    due: Option<u64>,
}

impl PreciseTimer {
    pub(crate) fn new() -> Result<Self> {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        Ok(Self { timer: TimerFd::new(timerfd::ClockId::CLOCK_MONOTONIC, flags)?, due: None })
    }

    /// Sets the alarm to `due`, or turns it off. Setting it again also clears a pending wake-up.
    pub(crate) fn set(&mut self, due: Option<u64>) -> Result<()> {
        if self.due == due {
            return Ok(());
        }
        self.due = due;
        match due {
            None => self.timer.unset()?,
            // Zero would disarm the timer.
            Some(due) => {
                let at = TimeSpec::from_duration(Duration::from_nanos(due.max(1)));
                self.timer.set(Expiration::OneShot(at), TimerSetTimeFlags::TFD_TIMER_ABSTIME)?;
            }
        }
        Ok(())
    }
}

impl AsFd for PreciseTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}
