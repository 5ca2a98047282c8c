//! When what is old may be thrown away: while the wall clock can be trusted, by which its age is told.

use std::time::{Duration, Instant, SystemTime};

use crate::base::db;
use crate::base::wall_clock::{Look, Reading, STEADY, WallClock, follows};
use crate::journal::{Filter, Journal};

/// The wall clock of a service. What it was when it was trusted is in the journal, for the next process.
pub(super) struct Clock {
    journal: Journal,
    wall: WallClock,
    noted: Option<Instant>,
}

impl Clock {
    pub(super) async fn begin(journal: Journal) -> Self {
        let first = Reading::now();
        let is_trusted = is_known(&journal, first.wall).await.unwrap_or_else(|error| {
            tracing::error!(%error, "the journal does not tell what time it was");
            false
        });
        if !is_trusted {
            tracing::warn!(
                now = %humantime::format_rfc3339_seconds(first.wall),
                wait = %humantime::format_duration(STEADY),
                "the clock cannot be compared with an earlier one; nothing is forgotten by its age meanwhile"
            );
        }
        Self { journal, wall: WallClock::new(first, is_trusted), noted: None }
    }

    /// Returns whether the clock is trusted now.
    pub(super) async fn look(&mut self) -> bool {
        let now = Reading::now();
        let (by, jump) = match self.wall.look(now) {
            Look::Trusted => {
                self.note(now).await;
                return true;
            }
            Look::Waiting => return false,
            Look::Ahead(by) => (by, "the clock has jumped ahead"),
            Look::Behind(by) => (by, "the clock has jumped back"),
        };
        let by = Duration::from_secs(by.as_secs());
        tracing::warn!(
            by = %humantime::format_duration(by),
            wait = %humantime::format_duration(STEADY),
            "{jump}; nothing is forgotten by its age meanwhile"
        );
        false
    }

    async fn note(&mut self, now: Reading) {
        if self.noted.is_some_and(|noted| now.monotonic.duration_since(noted) < NOTE_EVERY) {
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
pub(super) async fn note_first(journal: &Journal) -> Result<(), db::Error> {
    if journal.noted_time().await?.is_none() && is_empty(journal).await? {
        journal.note_time(SystemTime::now()).await?;
    }
    Ok(())
}

async fn is_empty(journal: &Journal) -> Result<bool, db::Error> {
    Ok(journal.list(Filter { limit: 1, ..Filter::default() }).await?.is_empty())
}

/// Returns whether an earlier process has trusted the clock a moment ago, or there was none.
async fn is_known(journal: &Journal, now: SystemTime) -> Result<bool, db::Error> {
    match journal.noted_time().await? {
        Some(known) => Ok(follows(known, now)),
        None => is_empty(journal).await,
    }
}

/// Often enough that a service which is started again need not wait.
const NOTE_EVERY: Duration = Duration::from_mins(10);
