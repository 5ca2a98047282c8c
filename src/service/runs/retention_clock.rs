//! Decides when the service may delete by age: only while the wall clock, which measures the age, is trusted.

use std::time::{Duration, Instant, SystemTime};

use crate::base::db;
use crate::base::timestamp;
use crate::base::wall_clock::{
    ClockCheck, ClockReading, MIN_STEADY_TIME, WallClock, is_plausible_successor,
};
use crate::service::store::{RunFilter, RunStore};

/// The wall clock of a service. The run store stores the last trusted time for the next process.
pub(super) struct RetentionClock {
    run_store: RunStore,
    wall: WallClock,
    noted: Option<Instant>,
    is_distrust_noted: bool,
}

impl RetentionClock {
    pub(super) async fn load(run_store: RunStore) -> Self {
        let first = ClockReading::read_clocks();
        let is_trusted =
            was_trusted_recently(&run_store, first.wall).await.unwrap_or_else(|error| {
                tracing::error!(%error, "cannot read the last trusted time from the run store");
                false
            });
        if !is_trusted {
            tracing::warn!(
                now = %timestamp::format_rfc3339_seconds(first.wall),
                wait = %humantime::format_duration(MIN_STEADY_TIME),
                "the clock is not trusted yet; nothing is deleted by age until it has run steadily for the time in `wait`"
            );
        }
        let wall = WallClock::new(first, is_trusted);
        Self { run_store, wall, noted: None, is_distrust_noted: false }
    }

    /// Returns the present time if the clock is trusted. All ages are measured at that time: a second reading may come from
    /// a clock that has jumped meanwhile.
    pub(super) async fn trusted_time(&mut self) -> Option<SystemTime> {
        let now = ClockReading::read_clocks();
        let check = self.wall.check_clock(now);
        if check == ClockCheck::Trusted {
            self.note_time(now).await;
            self.is_distrust_noted = false;
            return Some(now.wall);
        }
        self.note_distrust().await;
        let (by, jump) = match check {
            ClockCheck::Trusted | ClockCheck::Waiting => return None,
            ClockCheck::Ahead(by) => (by, "the clock has jumped ahead"),
            ClockCheck::Behind(by) => (by, "the clock has jumped back"),
        };
        // Whole seconds, for the log.
        let by = Duration::from_secs(by.as_secs());
        tracing::warn!(
            by = %humantime::format_duration(by),
            wait = %humantime::format_duration(MIN_STEADY_TIME),
            "{jump}; nothing is forgotten by its age meanwhile"
        );
        None
    }

    /// Lets the next process wait for its own hour, even if the clock is right again by then.
    async fn note_distrust(&mut self) {
        self.noted = None;
        if self.is_distrust_noted {
            return;
        }
        match self.run_store.note_distrust().await {
            Ok(()) => self.is_distrust_noted = true,
            Err(error) => {
                tracing::error!(%error, "cannot write into the run store that the clock is not trusted");
            }
        }
    }

    async fn note_time(&mut self, now: ClockReading) {
        if self.noted.is_some_and(|noted| now.monotonic.duration_since(noted) < NOTE_INTERVAL) {
            return;
        }
        match self.run_store.note_time(now.wall).await {
            Ok(()) => self.noted = Some(now.monotonic),
            Err(error) => {
                tracing::error!(%error, "cannot write the trusted time into the run store");
            }
        }
    }
}

/// Writes the time into a new run store. The caller does so before the first run is in the run store. If the run store had a
/// run and no time, the next process could not decide whether to trust the clock.
///
/// # Errors
/// Returns an error if the run store cannot be read or written.
pub(super) async fn note_first(run_store: &RunStore) -> Result<(), db::DatabaseError> {
    if run_store.noted_time().await?.is_none() && is_empty(run_store).await? {
        run_store.note_time(SystemTime::now()).await?;
    }
    Ok(())
}

async fn is_empty(run_store: &RunStore) -> Result<bool, db::DatabaseError> {
    Ok(run_store.list_runs(RunFilter { limit: 1, ..RunFilter::default() }).await?.is_empty())
}

/// Returns true if an earlier process trusted the clock at its end and its noted time confirms the clock, or if the run
/// store is new.
async fn was_trusted_recently(
    run_store: &RunStore,
    now: SystemTime,
) -> Result<bool, db::DatabaseError> {
    match run_store.noted_time().await? {
        Some(known) => {
            Ok(is_plausible_successor(known, now) && run_store.was_clock_trusted().await?)
        }
        None => is_empty(run_store).await,
    }
}

/// The interval between two notes of the trusted time. Our choice: short against the hour by which the clock of a
/// restarted service may be ahead of the note.
const NOTE_INTERVAL: Duration = Duration::from_mins(10);
