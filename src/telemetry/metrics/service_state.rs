//! The series of a service's work and disks. They are read at each scrape, and absent in a process that has none.

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use super::collect::{SeriesBuilder, SeriesSource};
use super::table::service as families;
use crate::base::disk::DiskSpace;
use crate::base::metrics::count_as_f64;

/// The figures of a service's work and disks at one moment.
#[derive(Clone, Debug, Default)]
pub struct ServiceStateGauges {
    /// The figures of the relay's work; `None` if there is no relay, or if its outbox cannot be read.
    pub work: Option<WorkGauges>,
    /// The space of each directory, by the directory's name in the label. A directory that cannot be read is absent.
    pub disks: Vec<(&'static str, DiskSpace)>,
}

/// The figures of the relay's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkGauges {
    /// The number of works that are still to be delivered.
    pub undelivered: u64,
    /// The age of the oldest work that is still to be delivered; zero if there is none.
    pub oldest_undelivered: Duration,
    /// The number of works that are held, have failed or were left.
    pub kept: u64,
    /// The disk space of these works.
    pub kept_bytes: u64,
    /// The number of kept works at which runs with a branch are refused.
    pub max_kept: u64,
    /// The disk space of kept works at which runs with a branch are refused.
    pub max_kept_bytes: u64,
}

/// The function that reads the state, once the process has a service.
#[derive(Default)]
pub(super) struct ServiceStateSource(OnceLock<Box<dyn Fn() -> ServiceStateGauges + Send + Sync>>);

impl ServiceStateSource {
    /// Sets the function. A second function has no effect, because a process has one service.
    pub(super) fn set(&self, read: impl Fn() -> ServiceStateGauges + Send + Sync + 'static) {
        let _ = self.0.set(Box::new(read));
    }
}

impl SeriesSource for ServiceStateSource {
    fn collect_series(&self, into: &mut SeriesBuilder) {
        let Some(read) = self.0.get() else { return };
        let ServiceStateGauges { work, disks } = read();
        if let Some(work) = work {
            let counts = [
                (&families::UNDELIVERED_WORKS, work.undelivered),
                (&families::KEPT_WORKS, work.kept),
                (&families::KEPT_BYTES, work.kept_bytes),
                (&families::KEPT_WORKS_LIMIT, work.max_kept),
                (&families::KEPT_BYTES_LIMIT, work.max_kept_bytes),
            ];
            for (family, count) in counts {
                into.push_sample(family, &[], count_as_f64(count));
            }
            let age = work.oldest_undelivered.as_secs_f64();
            into.push_sample(&families::UNDELIVERED_OLDEST_AGE, &[], age);
        }
        for (directory, space) in disks {
            let (free, size) = (count_as_f64(space.free_bytes), count_as_f64(space.size_bytes));
            into.push_sample(&families::DISK_FREE, &[directory], free);
            into.push_sample(&families::DISK_SIZE, &[directory], size);
        }
    }
}

impl fmt::Debug for ServiceStateSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ServiceStateSource").field(&self.0.get().is_some()).finish()
    }
}
