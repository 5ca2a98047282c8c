//! The series of a service's queue of runs. They are read at each scrape, and absent in a process that has no queue.

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use super::collect::{SeriesBuilder, SeriesSource};
use super::table::service as families;
use crate::base::metrics::count_as_f64;

/// The figures of the queue of runs at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunQueueGauges {
    /// The number of runs that wait for a place.
    pub queued: usize,
    /// The maximum number of runs that may wait.
    pub capacity: usize,
    /// The time that the oldest waiting run has waited; zero if no run waits.
    pub oldest_wait: Duration,
    /// The number of places in use.
    pub places_taken: usize,
    /// The number of places.
    pub places: usize,
}

/// The function that reads the queue, once the process has a queue.
#[derive(Default)]
pub(super) struct RunQueueSource(OnceLock<Box<dyn Fn() -> RunQueueGauges + Send + Sync>>);

impl RunQueueSource {
    /// Sets the function. A second function has no effect, because a process has one queue.
    pub(super) fn set(&self, read: impl Fn() -> RunQueueGauges + Send + Sync + 'static) {
        let _ = self.0.set(Box::new(read));
    }
}

impl SeriesSource for RunQueueSource {
    fn collect_series(&self, into: &mut SeriesBuilder) {
        let Some(read) = self.0.get() else { return };
        let RunQueueGauges { queued, capacity, oldest_wait, places_taken, places } = read();
        let counts = [
            (&families::QUEUED_RUNS, queued),
            (&families::QUEUE_CAPACITY, capacity),
            (&families::PLACES_TAKEN, places_taken),
            (&families::PLACES, places),
        ];
        for (family, count) in counts {
            into.push_sample(family, &[], count_as_f64(count as u64));
        }
        into.push_sample(&families::QUEUE_OLDEST_WAIT, &[], oldest_wait.as_secs_f64());
    }
}

impl fmt::Debug for RunQueueSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RunQueueSource").field(&self.0.get().is_some()).finish()
    }
}
