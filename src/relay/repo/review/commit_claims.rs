//! What a commit says of itself, and only the relay may say; and what nobody would say.

use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::normalize::fold_case_and_invisible;
use crate::relay::repo::quarantine::TRAILER_NAMES;
use crate::relay::repo::quarantine::commit::ParsedCommit;

/// Whether the message has a line that looks like one of the relay's trailers.
pub(super) fn claims_run_trailer(commit: &ParsedCommit) -> bool {
    let message = fold_case_and_invisible(&commit.message);
    message.split(LINE_ENDS).any(|line| {
        let name = line.split([':', '\u{ff1a}']).next().unwrap_or_default().trim();
        let name: String =
            name.chars().map(|letter| if is_dash(letter) { '-' } else { letter }).collect();
        TRAILER_NAMES.iter().any(|ours| name.eq_ignore_ascii_case(ours))
    })
}

/// Whether the author has the name or the address of `committer`, who is the relay.
pub(super) fn claims_committer_identity(commit: &ParsedCommit, committer: &str) -> bool {
    let parts = |who: &[u8]| {
        let who = fold_case_and_invisible(who);
        let (name, address) = who.split_once('<').unwrap_or((&who, ""));
        (name.trim().to_owned(), address.trim_end_matches('>').trim().to_owned())
    };
    let (name, address) = parts(commit.author_and_date().0);
    let (our_name, our_address) = parts(committer.as_bytes());
    name == our_name || address == our_address
}

/// Whether the author's name or address has characters that move what a terminal shows.
pub(super) fn hides_author(commit: &ParsedCommit) -> bool {
    String::from_utf8_lossy(&commit.author).chars().any(char::is_control)
}

/// Whether its time is none that somebody may have worked at, or its zone none on Earth.
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
        || zone.abs() % 100 >= 60
}

/// Whether other readers see other text in it than this one does, who reads UTF-8.
pub(super) fn is_in_foreign_encoding(commit: &ParsedCommit) -> bool {
    let is_text = |bytes: &[u8]| str::from_utf8(bytes).is_ok();
    commit.encoding.is_some() || !is_text(&commit.author) || !is_text(&commit.message)
}

fn is_dash(letter: char) -> bool {
    matches!(letter, '\u{2010}'..='\u{2015}' | '\u{2212}' | '\u{fe58}' | '\u{fe63}' | '\u{ff0d}')
}

/// What ends a line, to one reader or another.
const LINE_ENDS: [char; 7] = ['\n', '\r', '\u{b}', '\u{c}', '\u{85}', '\u{2028}', '\u{2029}'];

/// The first of January 2000. Work may be older than its commit, if somebody has it from elsewhere.
const MIN_COMMIT_SECONDS: u64 = 946_684_800;

/// Clocks differ.
const MAX_CLOCK_SKEW: Duration = Duration::from_hours(24);

/// Hours and minutes, as git writes them.
const VALID_ZONES: RangeInclusive<i32> = -1200..=1400;
