//! Claims in commits that only the relay may make, and values that no real commit has.

use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::normalize::fold_case_and_invisible;
use crate::relay::repo::quarantine::TRAILER_NAMES;
use crate::relay::repo::quarantine::commit::ParsedCommit;

/// Returns true if the message has a line that looks like one of the relay's trailers.
pub(super) fn claims_run_trailer(commit: &ParsedCommit) -> bool {
    let message = fold_case_and_invisible(&commit.message);
    message.split(LINE_ENDS).any(|line| {
        // A full-width colon and other dashes look like the real trailer to people.
        let name = line.split([':', '\u{ff1a}']).next().unwrap_or_default().trim();
        let name: String =
            name.chars().map(|letter| if is_dash(letter) { '-' } else { letter }).collect();
        TRAILER_NAMES.iter().any(|trailer| name.eq_ignore_ascii_case(trailer))
    })
}

/// Returns true if the author has the name or the address of `committer`, which is the relay's.
pub(super) fn claims_committer_identity(commit: &ParsedCommit, committer: &str) -> bool {
    let parts = |identity: &[u8]| {
        let identity = fold_case_and_invisible(identity);
        let (name, address) = identity.split_once('<').unwrap_or((&identity, ""));
        (name.trim().to_owned(), address.trim_end_matches('>').trim().to_owned())
    };
    let (name, address) = parts(commit.author_and_date().0);
    let (our_name, our_address) = parts(committer.as_bytes());
    name == our_name || address == our_address
}

/// Returns true if the author's name or address has control characters, which change what a terminal shows.
pub(super) fn hides_author(commit: &ParsedCommit) -> bool {
    String::from_utf8_lossy(&commit.author).chars().any(char::is_control)
}

/// Returns true if the commit's date is before 2000, in the future, or in an invalid time zone.
pub(super) fn has_implausible_date(commit: &ParsedCommit, now: SystemTime) -> bool {
    let (_, date) = commit.author_and_date();
    let parsed = str::from_utf8(date).ok().and_then(|date| date.split_once(' '));
    let Some((seconds, zone)) = parsed else { return true };
    let (Ok(seconds), Ok(zone)) = (seconds.parse::<u64>(), zone.parse::<i32>()) else {
        return true;
    };
    let latest = now.duration_since(UNIX_EPOCH).unwrap_or_default() + MAX_CLOCK_SKEW;
    !(MIN_COMMIT_SECONDS..=latest.as_secs()).contains(&seconds)
        || !VALID_ZONES.contains(&zone)
        // The zone's last two digits are minutes.
        || zone.abs() % 100 >= 60
}

/// Returns true if other programs may show other text than the review, which reads UTF-8, has seen.
pub(super) fn is_in_foreign_encoding(commit: &ParsedCommit) -> bool {
    let is_text = |bytes: &[u8]| str::from_utf8(bytes).is_ok();
    commit.encoding.is_some() || !is_text(&commit.author) || !is_text(&commit.message)
}

fn is_dash(letter: char) -> bool {
    matches!(letter, '\u{2010}'..='\u{2015}' | '\u{2212}' | '\u{fe58}' | '\u{fe63}' | '\u{ff0d}')
}

/// The characters that end a line for one program or another.
const LINE_ENDS: [char; 7] = ['\n', '\r', '\u{b}', '\u{c}', '\u{85}', '\u{2028}', '\u{2029}'];

/// The earliest plausible date: the first of January 2000. Work from elsewhere may be older than its commit.
const MIN_COMMIT_SECONDS: u64 = 946_684_800;

/// The tolerated difference of clocks. Our choice.
const MAX_CLOCK_SKEW: Duration = Duration::from_hours(24);

/// The valid time zones as git writes them, hours and minutes in one number.
const VALID_ZONES: RangeInclusive<i32> = -1200..=1400;
