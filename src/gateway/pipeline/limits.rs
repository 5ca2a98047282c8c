//! Limits on the memory that requests hold at one time, for one run and for the whole process.
//!
//! A request takes its permit before its body is read, and takes bytes as the body arrives. All limits
//! are counters: a request beyond a limit is rejected at once and never waits. So no request can be
//! overtaken in a queue. A rejected request takes nothing from another run, not even for a moment.
//!
//! If runs share a process, no run can take the share of another run. The first
//! [`GUARANTEED_RUN_BYTES`] of each run are reserved for that run. Beyond them, a run holds at most as
//! many bytes as remain free for all other runs together.
//!
//! **Invariant:** the bytes that all runs hold beyond their guaranteed bytes are within the limit of
//! the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use tokio::sync::Notify;

use super::server_config::HttpServerConfig;
use crate::base::bounded_counter::BoundedCounter;
use crate::base::memory;
use crate::base::task_group::TaskGroup;

/// The limits of a process.
#[derive(Debug)]
pub struct ProcessCapacity {
    body_bytes: BoundedCounter,
    requests: BoundedCounter,
    is_shared: bool,
    /// The bytes of large bodies that were freed since memory was last returned to the kernel.
    freed: AtomicU64,
    much_is_freed: Notify,
}

/// The limits of one run.
#[derive(Debug)]
pub struct RunCapacity {
    body_bytes: BoundedCounter,
    /// The part of `body_bytes` that no other run can take.
    own_bytes: BoundedCounter,
    requests: BoundedCounter,
    process: Arc<ProcessCapacity>,
}

/// A permit for one request in flight, with the bytes of the request's body.
#[derive(Debug)]
pub struct RequestPermit(BodyBytes);

/// Bytes of one body that a run holds. Dropping the value releases them.
#[derive(Debug)]
pub struct BodyBytes {
    capacity: Arc<RunCapacity>,
    /// Bytes taken from the run's guaranteed bytes.
    own_bytes: u64,
    /// Bytes taken from the bytes that all runs share.
    shared_bytes: u64,
}

/// The text of a reply, with the permit that is returned when the last byte was sent.
struct HeldReply {
    text: String,
    _permit: RequestPermit,
}

/// A frame of a response, with its bytes that are returned when the client has taken the frame.
struct HeldFrame {
    frame: Bytes,
    _bytes: BodyBytes,
}

/// A limit that is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverloadError {
    #[error("the run has {limit} requests in flight, which is the limit")]
    RunRequests { limit: u64 },
    #[error("the run's bodies in flight are at their limit of {limit} bytes")]
    RunBytes { limit: u64 },
    #[error("the gateway has too many requests in flight: the limit of the process is reached")]
    ProcessRequests,
    #[error("the gateway holds too many bytes of bodies: the limit of the process is reached")]
    ProcessBytes,
}

impl ProcessCapacity {
    /// Creates the limits. `max_requests` applies to all runs together; `is_shared` is true if several
    /// runs may share the process.
    pub fn new(config: &HttpServerConfig, max_requests: u64, is_shared: bool) -> Self {
        Self {
            body_bytes: BoundedCounter::new(config.process_body_bytes()),
            requests: BoundedCounter::new(max_requests),
            is_shared,
            freed: AtomicU64::new(0),
            much_is_freed: Notify::new(),
        }
    }

    /// Returns memory to the kernel each time that much memory was freed, until shutdown begins.
    pub async fn trim_freed_memory(self: Arc<Self>, tasks: TaskGroup) {
        let give_back = async {
            loop {
                self.much_is_freed.notified().await;
                // Many bodies end together after a flood: wait, so that one trim covers most of them.
                tokio::time::sleep(TRIM_DELAY).await;
                self.freed.store(0, Ordering::Relaxed);
                // The call takes milliseconds, so it must not block a worker's runtime.
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

    /// Takes a permit among the requests in flight.
    ///
    /// # Errors
    /// Returns an error if the run or the process has no free permit.
    pub fn admit_request(self: &Arc<Self>) -> Result<RequestPermit, OverloadError> {
        if !self.requests.try_take(1) {
            return Err(OverloadError::RunRequests { limit: self.requests.limit() });
        }
        if !self.process.requests.try_take(1) {
            self.requests.return_count(1);
            return Err(OverloadError::ProcessRequests);
        }
        Ok(RequestPermit(BodyBytes::new(self)))
    }

    /// Takes bytes that are held for the run.
    ///
    /// # Errors
    /// Returns an error if the run or the process has no room for the bytes.
    pub fn take_bytes(self: &Arc<Self>, count: usize) -> Result<BodyBytes, OverloadError> {
        let mut bytes = BodyBytes::new(self);
        bytes.take_bytes(count)?;
        Ok(bytes)
    }

    /// Takes bytes that all runs share. Returns false if the process has no room, or if the run would
    /// hold more than remains free for all other runs.
    fn take_shared_bytes(&self, count: u64) -> bool {
        let process = &self.process.body_bytes;
        // The run's own counter has the bytes already. So of two requests that take at the same time, the later
        // one sees the bytes of the earlier one in both counters.
        process.try_take_if(count, |held| {
            // `held_count` includes the run's guaranteed bytes, so the other side of the comparison
            // includes them, too.
            let fair_share = (process.limit() - held).saturating_add(GUARANTEED_RUN_BYTES);
            !self.process.is_shared || self.body_bytes.held_count() <= fair_share
        })
    }
}

impl RequestPermit {
    /// Takes the bytes of a piece of the body that has arrived.
    ///
    /// # Errors
    /// Returns an error if the run or the process has no room for the bytes.
    pub fn take_bytes(&mut self, count: usize) -> Result<(), OverloadError> {
        self.0.take_bytes(count)
    }

    /// Releases the bytes of a body that is no longer held.
    pub fn release_bytes(&mut self) {
        self.0.release_bytes();
    }

    /// Takes bytes that may be held longer than the request, for a copy of its body.
    ///
    /// # Errors
    /// Returns an error if the run or the process has no room for the bytes.
    pub fn take_lasting_bytes(&self, count: usize) -> Result<BodyBytes, OverloadError> {
        self.0.capacity.take_bytes(count)
    }

    /// Converts a reply of the gateway itself to bytes that hold the permit, and their own number of bytes. A client may
    /// read as slowly as it likes, so the permit is returned when the reply was sent, and not when it was made.
    ///
    /// # Errors
    /// Returns an error if the run or the process has no room for the bytes.
    pub fn hold_reply(mut self, text: String) -> Result<Bytes, OverloadError> {
        self.release_bytes();
        self.take_bytes(text.len())?;
        Ok(Bytes::from_owner(HeldReply { text, _permit: self }))
    }
}

impl BodyBytes {
    /// Returns the number of bytes.
    pub fn count(&self) -> u64 {
        self.own_bytes + self.shared_bytes
    }

    /// Converts a frame of as many bytes to one that holds them until the client has taken it.
    pub fn hold_frame(self, frame: Bytes) -> Bytes {
        Bytes::from_owner(HeldFrame { frame, _bytes: self })
    }

    fn new(capacity: &Arc<RunCapacity>) -> Self {
        Self { capacity: Arc::clone(capacity), own_bytes: 0, shared_bytes: 0 }
    }

    fn take_bytes(&mut self, count: usize) -> Result<(), OverloadError> {
        let (capacity, count) = (&*self.capacity, count as u64);
        if !capacity.body_bytes.try_take(count) {
            return Err(OverloadError::RunBytes { limit: capacity.body_bytes.limit() });
        }
        // The guaranteed bytes come first. A piece is never split between the two counters.
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

    fn release_bytes(&mut self) {
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

impl AsRef<[u8]> for HeldFrame {
    fn as_ref(&self) -> &[u8] {
        &self.frame
    }
}

impl AsRef<[u8]> for HeldReply {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

impl Drop for BodyBytes {
    fn drop(&mut self) {
        self.release_bytes();
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        let capacity = &self.0.capacity;
        capacity.requests.return_count(1);
        capacity.process.requests.return_count(1);
    }
}

impl OverloadError {
    pub fn code(self) -> &'static str {
        "overloaded"
    }

    /// Returns 429 if the run has reached its own limit, and 503 if the process has reached its limit.
    pub fn status(self) -> StatusCode {
        match self {
            Self::RunRequests { .. } | Self::RunBytes { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::ProcessRequests | Self::ProcessBytes => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

/// The bytes that each run may hold at any time, whatever other runs hold. Our choice: more than most
/// requests have, and one gigabyte for a thousand runs at their worst.
pub const GUARANTEED_RUN_BYTES: u64 = 1024 * 1024;

/// The size, in bytes, from which a freed body counts for trimming. Our choice: bodies of this size are
/// rare.
const LARGE_BODY_BYTES: u64 = 1024 * 1024;

/// The freed bytes that trigger a trim. Our choice: returning this much memory is worth the
/// milliseconds of a trim.
const TRIM_THRESHOLD_BYTES: u64 = 16 * 1024 * 1024;

/// The delay from the notification to the trim. Our choice: most bodies of a flood end within this
/// time.
const TRIM_DELAY: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

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
        permits[2].take_bytes(MIB).unwrap();
        // What outlasts its request is held until it is dropped.
        let lasting = permits[2].take_lasting_bytes(MIB).unwrap();
        assert_eq!(
            permits[2].take_lasting_bytes(1).unwrap_err(),
            OverloadError::RunBytes { limit }
        );
        drop(permits);
        assert_eq!((run.body_bytes.held_count(), run.requests.held_count()), (MIB as u64, 0));
        drop(lasting);
        assert_eq!((run.body_bytes.held_count(), run.requests.held_count()), (0, 0));
        assert_eq!((process.body_bytes.held_count(), process.requests.held_count()), (0, 0));
    }

    /// G15: a new run can take bytes, even if many runs hold as many bytes as they can.
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
        let first = held[0].0.own_bytes + held[0].0.shared_bytes;
        assert_eq!(first, 32 * MIB as u64, "a run alone has what its own bound allows");
        drop(held);
        assert_eq!(process.body_bytes.held_count(), 0);
    }

    /// G15: a run that asks for more than its share takes nothing from another run, not even while its request is refused.
    #[test]
    fn a_run_that_is_refused_is_in_no_other_runs_way() {
        let process = process(64, true);
        let (greedy, modest) = (run(&process, 64), run(&process, 64));
        let mut held = greedy.admit_request().unwrap();
        (0..33).for_each(|_| held.take_bytes(MIB).unwrap());
        let mut permit = modest.admit_request().unwrap();
        let is_over = AtomicBool::new(false);
        let taken = thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert_eq!(held.take_bytes(16 * MIB), Err(OverloadError::ProcessBytes));
                }
            });
            let take_share = |_: &u32| {
                let is_taken =
                    permit.take_bytes(MIB).is_ok() && permit.take_bytes(15 * MIB).is_ok();
                permit.release_bytes();
                is_taken
            };
            let taken = (0..ROUNDS).filter(take_share).count();
            is_over.store(true, Ordering::Relaxed);
            taken
        });
        assert_eq!(taken, ROUNDS as usize);
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
    const ROUNDS: u32 = 100_000;
}
