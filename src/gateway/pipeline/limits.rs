//! Bounds on what requests hold at one time, of one run and of the whole process.
//!
//! A request takes its place before its body is read, and bytes of the body as they arrive. All of it is counters:
//! what cannot be had is refused at once, and nothing waits.
//!
//! Where runs share a process, none of them can keep the others from theirs: the first [`GUARANTEED_RUN_BYTES`] of each run
//! are its own, and beyond them a run holds no more than what is still free for all others together.
//!
//! **Invariant:** what all runs hold beyond their own bytes is within the bound of the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::StatusCode;
use tokio::sync::Notify;

use super::server::HttpServerConfig;
use crate::base::bounded_counter::BoundedCounter;
use crate::base::memory;
use crate::base::task_group::TaskGroup;

/// The bounds of a process.
#[derive(Debug)]
pub struct ProcessCapacity {
    body_bytes: BoundedCounter,
    requests: BoundedCounter,
    is_shared: bool,
    /// Bytes of large bodies that were freed since memory was last given back.
    freed: AtomicU64,
    much_is_freed: Notify,
}

/// The bounds of one run.
#[derive(Debug)]
pub struct RunCapacity {
    body_bytes: BoundedCounter,
    /// Those of them that no other run can take.
    own_bytes: BoundedCounter,
    requests: BoundedCounter,
    process: Arc<ProcessCapacity>,
}

/// A place among the requests in flight, with the bytes of the request's body.
#[derive(Debug)]
pub struct RequestPermit {
    capacity: Arc<RunCapacity>,
    /// From the run's own.
    own_bytes: u64,
    /// From those of all runs.
    shared_bytes: u64,
}

/// A bound that is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverloadError {
    #[error("the run has {limit} requests in flight, which is the limit")]
    RunRequests { limit: u64 },
    #[error("the run's request bodies in flight are at their limit of {limit} bytes")]
    RunBytes { limit: u64 },
    #[error("the gateway has as many requests in flight as it may")]
    ProcessRequests,
    #[error("the gateway holds as many bytes of request bodies as it may")]
    ProcessBytes,
}

impl ProcessCapacity {
    /// `max_requests` is for all runs together; `is_shared` says that there may be more than one.
    pub fn new(config: &HttpServerConfig, max_requests: u64, is_shared: bool) -> Self {
        Self {
            body_bytes: BoundedCounter::new(config.process_body_bytes()),
            requests: BoundedCounter::new(max_requests),
            is_shared,
            freed: AtomicU64::new(0),
            much_is_freed: Notify::new(),
        }
    }

    /// Gives memory back to the kernel each time that much of it was freed, until the tasks end.
    pub async fn trim_freed_memory(self: Arc<Self>, tasks: TaskGroup) {
        let give_back = async {
            loop {
                self.much_is_freed.notified().await;
                // A flood ends with many bodies at a time.
                tokio::time::sleep(TRIM_DELAY).await;
                self.freed.store(0, Ordering::Relaxed);
                let _ = tokio::task::spawn_blocking(memory::give_back).await;
            }
        };
        tasks.shutdown_token().run_until_cancelled(give_back).await;
    }

    fn count_freed_bytes(&self, bytes: u64) {
        if bytes >= LARGE_BODY_BYTES
            && self.freed.fetch_add(bytes, Ordering::Relaxed) + bytes >= TRIM_THRESHOLD_BYTES
        {
            self.much_is_freed.notify_one();
        }
    }
}

impl RunCapacity {
    pub fn new(
        config: &HttpServerConfig,
        max_requests: u64,
        process: Arc<ProcessCapacity>,
    ) -> Self {
        Self {
            body_bytes: BoundedCounter::new(
                config.max_run_body_bytes.min(process.body_bytes.limit()),
            ),
            own_bytes: BoundedCounter::new(if process.is_shared {
                GUARANTEED_RUN_BYTES
            } else {
                0
            }),
            requests: BoundedCounter::new(max_requests),
            process,
        }
    }

    /// Takes a place among the requests in flight.
    ///
    /// # Errors
    /// There is none.
    pub fn admit_request(self: &Arc<Self>) -> Result<RequestPermit, OverloadError> {
        if !self.requests.try_take(1) {
            return Err(OverloadError::RunRequests { limit: self.requests.limit() });
        }
        if !self.process.requests.try_take(1) {
            self.requests.return_count(1);
            return Err(OverloadError::ProcessRequests);
        }
        Ok(RequestPermit { capacity: Arc::clone(self), own_bytes: 0, shared_bytes: 0 })
    }

    /// Takes bytes that all runs share; beyond half of what is left, a run takes none.
    fn take_shared_bytes(&self, count: u64) -> bool {
        let process = &self.process.body_bytes;
        if !process.try_take(count) {
            return false;
        }
        let is_fair = !self.process.is_shared
            || self.body_bytes.held_count()
                <= process.free_count().saturating_add(GUARANTEED_RUN_BYTES);
        if !is_fair {
            process.return_count(count);
        }
        is_fair
    }
}

impl RequestPermit {
    /// Takes bytes of the body that have arrived.
    ///
    /// # Errors
    /// There is no room for them.
    pub fn take_bytes(&mut self, count: usize) -> Result<(), OverloadError> {
        let (capacity, count) = (&*self.capacity, count as u64);
        if !capacity.body_bytes.try_take(count) {
            return Err(OverloadError::RunBytes { limit: capacity.body_bytes.limit() });
        }
        if capacity.own_bytes.try_take(count) {
            self.own_bytes += count;
        } else if capacity.take_shared_bytes(count) {
            self.shared_bytes += count;
        } else {
            capacity.body_bytes.return_count(count);
            return Err(OverloadError::ProcessBytes);
        }
        Ok(())
    }

    /// Gives the bytes of a body back that is held no more.
    pub fn release_bytes(&mut self) {
        let (own, shared) =
            (std::mem::take(&mut self.own_bytes), std::mem::take(&mut self.shared_bytes));
        if own + shared > 0 {
            let capacity = &*self.capacity;
            capacity.body_bytes.return_count(own + shared);
            capacity.own_bytes.return_count(own);
            capacity.process.body_bytes.return_count(shared);
            capacity.process.count_freed_bytes(own + shared);
        }
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        self.release_bytes();
        self.capacity.requests.return_count(1);
        self.capacity.process.requests.return_count(1);
    }
}

impl OverloadError {
    pub fn code(self) -> &'static str {
        "overloaded"
    }

    /// The status says whether the run or the gateway as a whole has too much at a time.
    pub fn status(self) -> StatusCode {
        match self {
            Self::RunRequests { .. } | Self::RunBytes { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::ProcessRequests | Self::ProcessBytes => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

/// Bytes that each run may hold whatever the others do. Ours: more than most requests have, and for a
/// thousand runs at their worst a gigabyte.
pub const GUARANTEED_RUN_BYTES: u64 = 1024 * 1024;

/// Bodies of this size are rare, and what they leave free is worth giving back.
const LARGE_BODY_BYTES: u64 = 1024 * 1024;

/// Freed bytes that are worth the milliseconds that giving them back takes.
const TRIM_THRESHOLD_BYTES: u64 = 16 * 1024 * 1024;

/// From the first of many large bodies that end to the last.
const TRIM_DELAY: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    fn process(mib: u64, is_shared: bool) -> Arc<ProcessCapacity> {
        let max_process_body_bytes = Some(mib * MIB as u64);
        let config = HttpServerConfig { max_process_body_bytes, ..HttpServerConfig::default() };
        Arc::new(ProcessCapacity::new(&config, 10, is_shared))
    }

    fn run(process: &Arc<ProcessCapacity>, mib: u64) -> Arc<RunCapacity> {
        let config = HttpServerConfig {
            max_run_body_bytes: mib * MIB as u64,
            ..HttpServerConfig::default()
        };
        Arc::new(RunCapacity::new(&config, 4, Arc::clone(process)))
    }

    #[test]
    fn what_is_taken_is_given_back() {
        let process = process(100, false);
        let run = run(&process, 3);
        let mut permits: Vec<_> = (0..4).map(|_| run.admit_request().unwrap()).collect();
        assert_eq!(run.admit_request().unwrap_err(), OverloadError::RunRequests { limit: 4 });
        permits[0].take_bytes(2 * MIB).unwrap();
        permits[1].take_bytes(MIB).unwrap();
        let limit = 3 * MIB as u64;
        assert_eq!(permits[2].take_bytes(1), Err(OverloadError::RunBytes { limit }));
        permits[0].release_bytes();
        permits[2].take_bytes(2 * MIB).unwrap();
        drop(permits);
        assert_eq!((run.body_bytes.held_count(), run.requests.held_count()), (0, 0));
        assert_eq!((process.body_bytes.held_count(), process.requests.held_count()), (0, 0));
    }

    /// G15: however many runs take what they can, the next one has room.
    #[test]
    fn runs_that_take_all_they_can_leave_room_for_another() {
        let process = process(64, true);
        let mut held = vec![];
        for _ in 0..9 {
            let mut permit = run(&process, 32).admit_request().unwrap();
            while permit.take_bytes(MIB / 64).is_ok() {}
            held.push(permit);
        }
        assert!(process.body_bytes.held_count() <= 64 * MIB as u64);
        run(&process, 32).admit_request().unwrap().take_bytes(MIB).unwrap();
        let first = held[0].own_bytes + held[0].shared_bytes;
        assert_eq!(first, 32 * MIB as u64, "a run alone has what its own bound allows");
        drop(held);
        assert_eq!(process.body_bytes.held_count(), 0);
    }

    #[test]
    fn the_process_has_a_bound_of_its_own() {
        let process = process(10, false);
        let runs: Vec<_> = (0..3).map(|_| run(&process, 6)).collect();
        let mut first = runs[0].admit_request().unwrap();
        let mut second = runs[1].admit_request().unwrap();
        first.take_bytes(6 * MIB).unwrap();
        assert_eq!(second.take_bytes(4 * MIB + 1), Err(OverloadError::ProcessBytes));
        second.take_bytes(4 * MIB).unwrap();
        let more = || {
            runs.iter()
                .flat_map(|run| [run.admit_request(), run.admit_request(), run.admit_request()])
        };
        let _eight: Vec<_> = more().flatten().take(8).collect();
        assert_eq!(runs[2].admit_request().unwrap_err(), OverloadError::ProcessRequests);
    }

    const MIB: usize = 1024 * 1024;
}
