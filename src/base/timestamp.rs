//! Formats wall-clock time as text, and keeps the text of the current second.

use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use humantime::Rfc3339Timestamp;

/// A formatter that keeps the text of the last second. Within that second it changes only the milliseconds.
#[derive(Clone, Debug, Default)]
pub struct TimestampFormatter {
    second: Option<u64>,
    text: [u8; 24],
}

impl TimestampFormatter {
    /// Returns the present time as RFC 3339 in UTC: `2026-11-21T23:10:33.125Z`.
    pub fn format_now(&mut self) -> &[u8] {
        self.format_time(SystemTime::now())
    }

    /// Returns a time as RFC 3339 in UTC. A time before 1970 or after the year 9999 becomes the first or the last time
    /// between.
    pub fn format_time(&mut self, time: SystemTime) -> &[u8] {
        // A clock before 1970 has not been set yet.
        let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let second = since_epoch.as_secs().min(MAX_UNIX_SECONDS);
        if self.second != Some(second) {
            let time = UNIX_EPOCH + Duration::from_secs(second);
            write!(self.text.as_mut_slice(), "{}", format_rfc3339_millis(time))
                .expect("a time before the year 10000 has 24 characters");
            self.second = Some(second);
        }
        let mut millis = since_epoch.subsec_millis();
        for digit in self.text[20..23].iter_mut().rev() {
            *digit = b'0' + u8::try_from(millis % 10).expect("a digit");
            millis /= 10;
        }
        &self.text
    }
}

/// Formats a time as RFC 3339 in UTC, to the second. A time outside the formattable years becomes the nearest one inside.
pub fn format_rfc3339_seconds(time: SystemTime) -> Rfc3339Timestamp {
    #[expect(clippy::disallowed_methods, reason = "the time is clamped")]
    humantime::format_rfc3339_seconds(clamp_time(time))
}

/// Formats a time as RFC 3339 in UTC, to the millisecond. A time outside the formattable years becomes the nearest one
/// inside.
pub fn format_rfc3339_millis(time: SystemTime) -> Rfc3339Timestamp {
    #[expect(clippy::disallowed_methods, reason = "the time is clamped")]
    humantime::format_rfc3339_millis(clamp_time(time))
}

/// Returns true if the clock shows a time that the `date` header of a response can express. hyper panics at any other time,
/// so a server without such a clock must leave the header out, as RFC 9110, section 6.6.1, demands.
pub fn is_clock_in_range() -> bool {
    let now = SystemTime::now();
    clamp_time(now) == now
}

fn clamp_time(time: SystemTime) -> SystemTime {
    time.clamp(UNIX_EPOCH, UNIX_EPOCH + Duration::from_secs(MAX_UNIX_SECONDS))
}

/// The last second of the year 9999, the last year with four digits, in seconds since 1970.
const MAX_UNIX_SECONDS: u64 = 253_402_300_799;

#[cfg(test)]
mod tests {
    use super::*;

    /// A clock that was never set, and one that is set to nonsense, have a text.
    #[test]
    fn every_time_has_a_text() {
        let early = UNIX_EPOCH - Duration::from_hours(24 * 40);
        let late = UNIX_EPOCH + Duration::from_secs(MAX_UNIX_SECONDS + 1);
        assert_eq!(format_rfc3339_seconds(early).to_string(), "1970-01-01T00:00:00Z");
        assert_eq!(format_rfc3339_millis(early).to_string(), "1970-01-01T00:00:00.000Z");
        assert_eq!(format_rfc3339_seconds(late).to_string(), "9999-12-31T23:59:59Z");
        assert!(is_clock_in_range());
    }

    #[test]
    fn it_writes_what_a_full_formatter_writes() {
        let mut clock = TimestampFormatter::default();
        for millis in [0, 1, 999, 1_000, 951_782_399_999, 951_782_400_000, 1_795_302_633_120] {
            let time = UNIX_EPOCH + Duration::from_millis(millis);
            let full = format_rfc3339_millis(time).to_string();
            assert_eq!(str::from_utf8(clock.format_time(time)).unwrap(), full);
        }
        let late = UNIX_EPOCH + Duration::from_millis(MAX_UNIX_SECONDS * 1000 + 60_999);
        assert_eq!(clock.format_time(late), b"9999-12-31T23:59:59.999Z");
        assert_eq!(
            clock.format_time(UNIX_EPOCH - Duration::from_secs(1)),
            b"1970-01-01T00:00:00.000Z"
        );
    }
}
