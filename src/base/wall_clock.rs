//! A check of the wall clock against the monotonic clock.
//!
//! The wall clock decides the age of stored data, and a wall clock may jump: a machine without a battery, a wrong time
//! server. Data that is deleted because of one wrong reading cannot be restored.
//!
//! **Invariant:** the wall clock is trusted after it has advanced with the monotonic clock for an hour, and no longer
//! after a reading that finds a jump.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// A reading of both clocks at the same moment.
#[derive(Clone, Copy, Debug)]
pub struct ClockReading {
    pub wall: SystemTime,
    pub monotonic: Instant,
}

/// The result of reading both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockCheck {
    Trusted,
    /// The clocks have agreed so far, but not for [`MIN_STEADY_TIME`] yet.
    Waiting,
    /// The wall clock has jumped ahead since the last reading.
    Ahead(Duration),
    /// The wall clock has jumped back since the last reading.
    Behind(Duration),
}

/// The state of a process's wall clock between two readings.
#[derive(Debug)]
pub struct WallClock {
    /// The reference reading: the last reading of a trusted clock, otherwise the first reading since the last jump.
    anchor: ClockReading,
    is_trusted: bool,
}

impl ClockReading {
    pub fn read_clocks() -> Self {
        Self { wall: SystemTime::now(), monotonic: Instant::now() }
    }
}

impl WallClock {
    /// Starts with a first reading. `is_trusted` is true if an earlier process has found the clock trustworthy.
    pub fn new(first: ClockReading, is_trusted: bool) -> Self {
        Self { anchor: first, is_trusted }
    }

    /// Compares a reading with the reference reading.
    pub fn check_clock(&mut self, now: ClockReading) -> ClockCheck {
        let elapsed = now.monotonic.saturating_duration_since(self.anchor.monotonic);
        let jump = match now.wall.duration_since(self.anchor.wall + elapsed) {
            Ok(ahead) => Some(ClockCheck::Ahead(ahead)).filter(|_| ahead > CLOCK_TOLERANCE),
            Err(behind) => {
                let behind = behind.duration();
                Some(ClockCheck::Behind(behind)).filter(|_| behind > CLOCK_TOLERANCE)
            }
        };
        if let Some(jump) = jump {
            *self = Self { anchor: now, is_trusted: false };
            return jump;
        }
        self.is_trusted |= elapsed >= MIN_STEADY_TIME;
        if !self.is_trusted {
            return ClockCheck::Waiting;
        }
        self.anchor = now;
        ClockCheck::Trusted
    }
}

/// A clock for the times of stored rows, from which an age counts. A wall clock that is set back must not make a new row
/// old, so the time is never behind the process's first reading and the time since then.
#[derive(Debug)]
pub struct StampClock(Mutex<ClockReading>);

impl Default for StampClock {
    fn default() -> Self {
        Self(Mutex::new(ClockReading::read_clocks()))
    }
}

impl StampClock {
    /// Creates a clock that is never behind a time at which an earlier process has trusted the wall clock.
    pub fn not_before(known: SystemTime) -> Self {
        let now = ClockReading::read_clocks();
        Self(Mutex::new(ClockReading { wall: now.wall.max(known), ..now }))
    }

    pub fn read_time(&self) -> SystemTime {
        self.stamp_reading(ClockReading::read_clocks())
    }

    fn stamp_reading(&self, now: ClockReading) -> SystemTime {
        let mut anchor = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let expected = anchor.wall + now.monotonic.saturating_duration_since(anchor.monotonic);
        if expected > now.wall + CLOCK_TOLERANCE {
            return expected;
        }
        // The anchor follows a slow correction of the clock, and does not follow a jump ahead, which may be wrong.
        if now.wall <= expected + CLOCK_TOLERANCE {
            *anchor = now;
        }
        now.wall
    }
}

/// Returns true if a clock that reads `now` can be trusted because an earlier process has trusted it at `known`: `now`
/// is at most [`CLOCK_TOLERANCE`] before `known` and at most [`MIN_STEADY_TIME`] after it.
pub fn is_plausible_successor(known: SystemTime, now: SystemTime) -> bool {
    known <= now + CLOCK_TOLERANCE && now <= known + MIN_STEADY_TIME
}

/// The time for which both clocks must advance together. Our choice: it is long enough for a time server to correct a
/// clock.
pub const MIN_STEADY_TIME: Duration = Duration::from_hours(1);

/// The largest difference between the clocks that is no jump. Our choice: it is more than a slow clock or a leap second
/// causes between two readings.
const CLOCK_TOLERANCE: Duration = Duration::from_mins(1);

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine whose wall clock is wrong by some days. It is read twice a minute.
    struct Machine {
        begun: ClockReading,
        elapsed: Duration,
        clock: WallClock,
    }

    impl Machine {
        fn new(is_trusted: bool) -> Self {
            let begun = ClockReading::read_clocks();
            Self { begun, elapsed: Duration::ZERO, clock: WallClock::new(begun, is_trusted) }
        }

        fn look(&mut self, days_ahead: u64) -> ClockCheck {
            self.elapsed += Duration::from_secs(30);
            let off = Duration::from_hours(24 * days_ahead);
            let wall = self.begun.wall + self.elapsed + off;
            self.clock
                .check_clock(ClockReading { wall, monotonic: self.begun.monotonic + self.elapsed })
        }

        /// Returns the number of readings after which the clock is trusted.
        fn wait(&mut self, days_ahead: u64) -> usize {
            (0..1000).take_while(|_| self.look(days_ahead) == ClockCheck::Waiting).count()
        }
    }

    #[test]
    fn a_clock_that_jumps_for_a_moment_is_never_believed() {
        let mut machine = Machine::new(true);
        assert_eq!(machine.look(0), ClockCheck::Trusted);
        let days = Duration::from_hours(24 * 100);
        assert_eq!(machine.look(100), ClockCheck::Ahead(days));
        assert_eq!(machine.look(100), ClockCheck::Waiting, "in step with itself for half a minute");
        assert_eq!(machine.look(0), ClockCheck::Behind(days));
        let waited = machine.wait(0);
        assert_eq!(waited, 119, "an hour of half minutes");
        assert_eq!(machine.look(0), ClockCheck::Trusted);
    }

    #[test]
    fn a_clock_that_stays_where_it_jumped_is_believed_after_an_hour() {
        let mut machine = Machine::new(true);
        assert!(matches!(machine.look(100), ClockCheck::Ahead(_)));
        let waited = machine.wait(100);
        assert_eq!(waited, 119);
    }

    #[test]
    fn a_process_that_knows_of_no_earlier_one_waits_an_hour() {
        let mut machine = Machine::new(false);
        let waited = machine.wait(0);
        assert_eq!(waited, 119);
    }

    /// A new row is never old, whatever the wall clock reads meanwhile; and a clock that was ahead for a moment does not
    /// move later rows.
    #[test]
    fn a_stamp_is_never_behind_the_process() {
        let first = ClockReading::read_clocks();
        let clock = StampClock(Mutex::new(first));
        let minute = Duration::from_mins(1);
        let days = Duration::from_hours(24 * 40);
        let stamp = |minutes, wall: fn(SystemTime, Duration) -> SystemTime, by| {
            let monotonic = first.monotonic + minute * minutes;
            let wall = wall(first.wall + minute * minutes, by);
            clock.stamp_reading(ClockReading { wall, monotonic }).duration_since(first.wall)
        };
        let back = |time: SystemTime, by| time - by;
        let ahead = |time: SystemTime, by| time + by;
        assert_eq!(stamp(1, back, days).unwrap(), minute);
        assert_eq!(stamp(2, ahead, days).unwrap(), minute * 2 + days);
        assert_eq!(
            stamp(3, back, Duration::from_secs(2)).unwrap(),
            Duration::from_secs(3 * 60 - 2)
        );
        assert_eq!(stamp(4, back, days).unwrap(), Duration::from_secs(4 * 60 - 2));
    }

    #[test]
    fn what_an_earlier_process_has_trusted_counts_for_an_hour() {
        let known = SystemTime::now();
        for (after, expected) in [(0, true), (59, true), (61, false), (24 * 60 * 100, false)] {
            assert_eq!(
                is_plausible_successor(known, known + Duration::from_mins(after)),
                expected,
                "{after} min"
            );
        }
        assert!(
            !is_plausible_successor(known, known - Duration::from_mins(2)),
            "the clock was ahead, or is behind"
        );
    }
}
