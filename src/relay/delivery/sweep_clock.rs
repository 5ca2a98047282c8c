//! Decides whether a sweep may delete work by its age: only while the wall clock, which measures the age, is trusted.
//!
//! A sweep ends at once and cannot watch the clock. So each sweep compares the clock with the note of an earlier one.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::base::wall_clock::{ClockCheck, ClockReading, WallClock, is_plausible_successor};

/// Both clocks at the time of a sweep.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ClockNote {
    wall: SystemTime,
    /// The id of the machine's start. Times since different starts cannot be compared.
    boot: String,
    since_boot: Duration,
    is_trusted: bool,
}

/// Returns true if the wall clock is trusted: it has advanced with the machine's other clock for an hour since the note
/// of an earlier sweep. Writes the note for the next sweep.
///
/// # Errors
/// Returns an error if the note cannot be read or written, or if the machine's start is not known.
pub fn check_wall_clock(state: &Path) -> io::Result<bool> {
    let path = state.join(NOTE_FILE);
    let known = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        // A note that cannot be parsed counts as missing: the clock is not trusted, and the note is written anew.
        text => serde_json::from_slice(&text?).ok(),
    };
    let note = ClockNote::read_clocks()?.after(known);
    let temporary = path.with_extension("new");
    fs::write(&temporary, serde_json::to_vec(&note)?)?;
    fs::rename(&temporary, &path)?;
    Ok(note.is_trusted)
}

impl ClockNote {
    fn read_clocks() -> io::Result<Self> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let since_boot = clock_gettime(ClockId::Boottime).try_into().unwrap_or_default();
        Ok(Self { wall: SystemTime::now(), boot, since_boot, is_trusted: false })
    }

    /// Compares this reading with an earlier note, and returns the note for the next sweep.
    fn after(self, known: Option<Self>) -> Self {
        let Some(known) = known else { return self };
        if known.boot != self.boot {
            let is_trusted = known.is_trusted && is_plausible_successor(known.wall, self.wall);
            return Self { is_trusted, ..self };
        }
        // Only the difference of the two readings counts, so any moment can stand for the machine's start.
        let start = Instant::now();
        let reading =
            |note: &Self| ClockReading { wall: note.wall, monotonic: start + note.since_boot };
        let mut clock = WallClock::new(reading(&known), known.is_trusted);
        match clock.check_clock(reading(&self)) {
            ClockCheck::Trusted => Self { is_trusted: true, ..self },
            // The hour counts from the first note.
            ClockCheck::Waiting => known,
            ClockCheck::Ahead(_) | ClockCheck::Behind(_) => self,
        }
    }
}

/// The name of the note's file in the state directory.
const NOTE_FILE: &str = "sweep-clock.json";

#[cfg(test)]
mod tests {
    use super::*;

    fn note(minutes: u64, days_ahead: u64) -> ClockNote {
        let since_boot = Duration::from_mins(minutes);
        let wall = SystemTime::UNIX_EPOCH + Duration::from_hours(24 * (20_000 + days_ahead));
        ClockNote { wall: wall + since_boot, boot: "one".to_owned(), since_boot, is_trusted: false }
    }

    /// L5: A clock that has jumped ahead makes no work old. A steady clock is trusted after an hour.
    #[test]
    fn a_clock_is_trusted_after_an_hour_in_step() {
        let first = note(0, 0).after(None);
        assert!(!first.is_trusted);
        let second = note(30, 0).after(Some(first.clone()));
        assert_eq!(second, first, "the hour counts from the first note");
        let third = note(61, 0).after(Some(second));
        assert!(third.is_trusted);
        assert!(
            note(24 * 60, 0).after(Some(third.clone())).is_trusted,
            "the sweep of the next day"
        );
        let jumped = note(62, 100).after(Some(third));
        assert!(!jumped.is_trusted);
        assert!(!note(63, 100).after(Some(jumped.clone())).is_trusted);
        assert!(!note(63, 0).after(Some(jumped)).is_trusted);
    }

    /// L5: After a restart of the machine, only a recent note confirms the clock.
    #[test]
    fn a_restart_of_the_machine_begins_anew() {
        let trusted = ClockNote { is_trusted: true, ..note(61, 0) };
        let restarted = |minutes| ClockNote { boot: "two".to_owned(), ..note(minutes, 0) };
        assert!(restarted(70).after(Some(trusted.clone())).is_trusted);
        assert!(!restarted(61 + 70).after(Some(trusted)).is_trusted);
        assert!(!restarted(70).after(Some(note(61, 0))).is_trusted);
    }

    #[test]
    fn the_note_outlives_the_sweep() {
        let state = tempfile::tempdir().expect("there is a place for it");
        assert!(!check_wall_clock(state.path()).expect("the note is written"));
        let first = fs::read(state.path().join(NOTE_FILE)).expect("it is there");
        assert!(!check_wall_clock(state.path()).expect("the note is read"));
        assert_eq!(fs::read(state.path().join(NOTE_FILE)).expect("it is there"), first);
        fs::write(state.path().join(NOTE_FILE), "damaged").expect("written");
        assert!(!check_wall_clock(state.path()).expect("the note is written anew"));
    }
}
