//! The `date` header of a response, formatted once a second.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use crate::base::timestamp;

/// The current time in HTTP's format, with the second for which the text was made.
#[derive(Debug, Default)]
pub(super) struct HttpDateCache(Mutex<(u64, String)>);

impl HttpDateCache {
    /// Appends the time in the format that RFC 9110, section 5.6.7, prefers.
    pub(super) fn write_date(&self, out: &mut Vec<u8>) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if cached.0 != now.as_secs() || cached.1.is_empty() {
            *cached = (now.as_secs(), format_imf_fixdate(now.as_secs()));
        }
        out.extend_from_slice(cached.1.as_bytes());
    }
}

fn format_imf_fixdate(seconds: u64) -> String {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    // The text is like `2026-11-23T02:01:29Z`; the slices below take its parts.
    let text = timestamp::format_rfc3339_seconds(time).to_string();
    let (year, day, clock) = (&text[..4], &text[8..10], &text[11..19]);
    let month = text[5..7].parse().map_or("", |month: usize| MONTHS[month - 1]);
    let weekday = WEEKDAYS[usize::try_from(seconds / 86_400 % 7).unwrap_or_default()];
    format!("{weekday}, {day} {month} {year} {clock} GMT")
}

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// The days of the week, beginning with the day of 1 January 1970.
const WEEKDAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];

#[cfg(test)]
mod tests {
    use super::format_imf_fixdate;

    #[test]
    fn a_date_is_as_the_standard_writes_it() {
        assert_eq!(format_imf_fixdate(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(format_imf_fixdate(0), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(format_imf_fixdate(951_782_399), "Mon, 28 Feb 2000 23:59:59 GMT");
        assert_eq!(format_imf_fixdate(951_782_400), "Tue, 29 Feb 2000 00:00:00 GMT");
    }
}
