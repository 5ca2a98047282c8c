//! When what is old may be thrown away: while the wall clock can be trusted, by which its age is told.

use std::time::{Duration, Instant, SystemTime};

use crate::base::db;
use crate::base::wall_clock::{
    ClockCheck, ClockReading, MIN_STEADY_TIME, WallClock, is_plausible_successor,
};
use crate::service::store::{RunFilter, RunStore};

/// The wall clock of a service. What it was when it was trusted is in the journal, for the next process.
pub(super) struct RetentionClock {
    journal: RunStore,
    wall: WallClock,
    noted: Option<Instant>,
}

impl RetentionClock {
    pub(super) async fn load(journal: RunStore) -> Self {
        let first = ClockReading::read_clocks();
        let is_trusted = was_trusted_recently(&journal, first.wall).await.unwrap_or_else(|error| {
            tracing::error!(%error, "the journal does not tell what time it was");
            false
        });
        if !is_trusted {
            tracing::warn!(
                now = %humantime::format_rfc3339_seconds(first.wall),
                wait = %humantime::format_duration(MIN_STEADY_TIME),
                "the clock cannot be compared with an earlier one; nothing is forgotten by its age meanwhile"
            );
        }
        Self { journal, wall: WallClock::new(first, is_trusted), noted: None }
    }

    /// Returns whether the clock is trusted now.
    pub(super) async fn check_trusted(&mut self) -> bool {
        let now = ClockReading::read_clocks();
        let (by, jump) = match self.wall.check_clock(now) {
            ClockCheck::Trusted => {
                self.note_time(now).await;
                return true;
            }
            ClockCheck::Waiting => return false,
            ClockCheck::Ahead(by) => (by, "the clock has jumped ahead"),
            ClockCheck::Behind(by) => (by, "the clock has jumped back"),
        };
        let by = Duration::from_secs(by.as_secs());
        tracing::warn!(
            by = %humantime::format_duration(by),
            wait = %humantime::format_duration(MIN_STEADY_TIME),
            "{jump}; nothing is forgotten by its age meanwhile"
        );
        false
    }

    async fn note_time(&mut self, now: ClockReading) {
        if self.noted.is_some_and(|noted| now.monotonic.duration_since(noted) < NOTE_INTERVAL) {
            return;
        }
        match self.journal.note_time(now.wall).await {
            Ok(()) => self.noted = Some(now.monotonic),
            Err(error) => tracing::error!(%error, "the time cannot be written down"),
        }
    }
}

/// Writes the time into a journal that is new. It is called before the first run is in there: with a run and no time, the next
/// process would not know whether to trust the clock.
///
/// # Errors
/// The journal cannot be read or written.
pub(super) async fn note_first(journal: &RunStore) -> Result<(), db::DatabaseError> {
    if journal.noted_time().await?.is_none() && is_empty(journal).await? {
        journal.note_time(SystemTime::now()).await?;
    }
    Ok(())
}

async fn is_empty(journal: &RunStore) -> Result<bool, db::DatabaseError> {
    Ok(journal.list_runs(RunFilter { limit: 1, ..RunFilter::default() }).await?.is_empty())
}

/// Returns whether an earlier process has trusted the clock a moment ago, or there was none.
async fn was_trusted_recently(
    journal: &RunStore,
    now: SystemTime,
) -> Result<bool, db::DatabaseError> {
    match journal.noted_time().await? {
        Some(known) => Ok(is_plausible_successor(known, now)),
        None => is_empty(journal).await,
    }
}

/// Often enough that a service which is started again need not wait.
const NOTE_INTERVAL: Duration = Duration::from_mins(10);
