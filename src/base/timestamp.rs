//! Formats wall-clock time as text, and keeps the text of the current second.

use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

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
            write!(self.text.as_mut_slice(), "{}", humantime::format_rfc3339_millis(time))
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

/// The last second of the year 9999, the last year with four digits, in seconds since 1970.
const MAX_UNIX_SECONDS: u64 = 253_402_300_799;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_writes_what_a_full_formatter_writes() {
        let mut clock = TimestampFormatter::default();
        for millis in [0, 1, 999, 1_000, 951_782_399_999, 951_782_400_000, 1_795_302_633_120] {
            let time = UNIX_EPOCH + Duration::from_millis(millis);
            let full = humantime::format_rfc3339_millis(time).to_string();
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
