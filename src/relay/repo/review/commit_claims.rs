//! Claims in commits that only the relay may make, and values that no real commit has.

use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::lookalikes::LookalikeFolder;
use crate::base::hidden_characters::reorders_text;
use crate::relay::repo::quarantine::TRAILER_NAMES;
use crate::relay::repo::quarantine::commit::ParsedCommit;

/// Returns true if the message has a line that looks like one of the relay's trailers.
pub(super) fn claims_run_trailer(commit: &ParsedCommit, folder: &LookalikeFolder) -> bool {
    let message = String::from_utf8_lossy(&commit.message);
    let trailers = TRAILER_NAMES.map(|trailer| folder.fold_text(trailer.as_bytes()));
    message.split(LINE_ENDS).any(|line| {
        let line = folder.fold_text(line.as_bytes());
        let name = line.split(':').next().unwrap_or_default().trim();
        trailers.iter().any(|trailer| name == trailer)
    })
}

/// Returns true if the author has the name or the address of `committer`, which is the relay's, or one that looks like
/// it.
pub(super) fn claims_committer_identity(
    commit: &ParsedCommit,
    committer: &str,
    folder: &LookalikeFolder,
) -> bool {
    let parts = |identity: &[u8]| {
        let at = memchr::memchr(b'<', identity).unwrap_or(identity.len());
        let (name, address) = identity.split_at(at);
        [folder.fold_identity(name), folder.fold_identity(address)]
    };
    let ours = parts(committer.as_bytes());
    // The relay's address in the place of a name is a claim, too. Without any letter there is nothing to claim.
    parts(commit.author_and_date().0).iter().any(|part| !part.is_empty() && ours.contains(part))
}

/// Returns true if the author's name or address has characters that change what a terminal shows: control characters
/// and those that reorder text.
pub(super) fn hides_author(commit: &ParsedCommit) -> bool {
    let author = String::from_utf8_lossy(&commit.author);
    author.chars().any(|letter| letter.is_control() || reorders_text(letter))
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

/// The characters that end a line for one program or another.
const LINE_ENDS: [char; 7] = ['\n', '\r', '\u{b}', '\u{c}', '\u{85}', '\u{2028}', '\u{2029}'];

/// The earliest plausible date: the first of January 2000. Work from elsewhere may be older than its commit.
const MIN_COMMIT_SECONDS: u64 = 946_684_800;

/// The tolerated difference of clocks. Our choice.
const MAX_CLOCK_SKEW: Duration = Duration::from_hours(24);

/// The valid time zones as git writes them, hours and minutes in one number.
const VALID_ZONES: RangeInclusive<i32> = -1200..=1400;
