//! The limits of a run's connections, and of what the runs hold in memory.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::base::memory;

/// The limits of a run's connections.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HttpServerConfig {
    /// The most open connections, for each run on each worker. A further connection receives a 503.
    pub max_connections: usize,
    /// The longest time that a client may take to send the head of a request.
    #[serde(with = "humantime_serde")]
    pub header_timeout: Duration,
    /// The longest time for which a client may block the gateway's writes.
    #[serde(with = "humantime_serde")]
    pub write_timeout: Duration,
    /// The most bytes that are read ahead or not yet written, for each connection.
    pub buffer_bytes: usize,
    /// The most header fields of one request.
    pub max_headers: usize,
    /// The most requests in flight, for each run. HTTP/2 streams and calls that are drained count, too.
    /// A further request receives a 429.
    pub max_requests: u64,
    /// The most bytes of request bodies that each run holds at one time.
    pub max_run_body_bytes: u64,
    /// The most bytes of request bodies that all runs hold at one time. The default is a quarter of the
    /// memory, from 50 to 512 MiB.
    pub max_process_body_bytes: Option<u64>,
    /// The server of plain calls on a run's socket.
    pub lane: LaneMode,
}

/// The server of plain calls on a run's socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaneMode {
    /// The gateway's own loop, in front of hyper.
    #[default]
    On,
    /// hyper, which also serves everything else.
    Off,
}

/// A limit that is too low to serve a request, or higher than the gateway supports.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`server.{name}` is `{value}`; give {min} to {max}")]
pub struct HttpServerConfigError {
    name: &'static str,
    value: u64,
    min: u64,
    max: u64,
}

impl HttpServerConfig {
    /// Checks all limits.
    ///
    /// # Errors
    /// Returns the first limit that is too low or too high.
    pub fn validate(&self) -> Result<(), HttpServerConfigError> {
        let limits = [
            ("max_connections", self.max_connections as u64, 1, MAX_COUNT),
            ("buffer_bytes", self.buffer_bytes as u64, MIN_BUFFER_BYTES, MAX_BUFFER_BYTES),
            ("max_headers", self.max_headers as u64, 1, MAX_HEADERS),
            ("max_requests", self.max_requests, 1, MAX_COUNT),
            ("max_run_body_bytes", self.max_run_body_bytes, MIN_BODY_BYTES, MAX_BODY_BYTES),
            ("max_process_body_bytes", self.process_body_bytes(), MIN_BODY_BYTES, MAX_BODY_BYTES),
        ];
        let invalid = limits.into_iter().find(|(_, value, min, max)| !(min..=max).contains(&value));
        invalid.map_or(Ok(()), |(name, value, min, max)| {
            Err(HttpServerConfigError { name, value, min, max })
        })
    }

    /// Returns the most bytes of request bodies that all runs together may hold.
    pub fn process_body_bytes(&self) -> u64 {
        self.max_process_body_bytes.unwrap_or_else(|| {
            let quarter =
                memory::available_memory().map_or(DEFAULT_PROCESS_BODY_BYTES, |bytes| bytes / 4);
            // The largest body that the default policy allows must fit.
            quarter.clamp(MIN_PROCESS_BODY_BYTES, DEFAULT_PROCESS_BODY_BYTES)
        })
    }
}

impl Default for HttpServerConfig {
    fn default() -> Self {
        Self {
            // An agent opens a handful of connections; the limit leaves room for agents that fan out.
            max_connections: 1024,
            header_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_mins(1),
            buffer_bytes: 64 * 1024,
            // The default of hyper.
            max_headers: 100,
            // One request for each connection.
            max_requests: 1024,
            // Two of the largest bodies that the default policy allows.
            max_run_body_bytes: 100 * 1024 * 1024,
            max_process_body_bytes: None,
            lane: LaneMode::default(),
        }
    }
}

/// The upper bound for configured counts of connections and requests: more than the descriptors of a
/// machine, and within the range of a semaphore. The service's configuration has the same bound.
pub const MAX_COUNT: u64 = 1_000_000;

/// The smallest buffer of a connection, in bytes: hyper's minimum. With a smaller buffer hyper panics.
const MIN_BUFFER_BYTES: u64 = 8192;

/// The largest buffer of a connection, in bytes. Our choice: in HTTP/2, hyper panics above 4 GiB.
const MAX_BUFFER_BYTES: u64 = 16 * 1024 * 1024;

/// The upper bound for header fields. hyper allocates room for all fields for each head, and panics
/// above 32,768.
const MAX_HEADERS: u64 = 4096;

/// The smallest limit for body bytes: one read of a body must fit.
const MIN_BODY_BYTES: u64 = 64 * 1024;

/// The largest limit for body bytes: more than a machine's memory, so no sum of such limits overflows.
const MAX_BODY_BYTES: u64 = 1 << 48;

/// The body bytes of all runs, if the machine has at least four times as much memory.
const DEFAULT_PROCESS_BODY_BYTES: u64 = 512 * 1024 * 1024;

/// The smallest default for the body bytes of all runs: one body of the largest default size.
const MIN_PROCESS_BODY_BYTES: u64 = 50 * 1024 * 1024;
