//! Divides the process's file descriptors, so that no run uses up those of other runs or of the service.
//!
//! A request holds at most two descriptors beside its connection: one for the upstream, and one while its client does
//! not read.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::gateway::config::GatewayConfig;

/// The limits of each run and of all runs, derived from the descriptors of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorShare {
    /// The largest number of connections of one run, on each worker.
    pub run_connections: usize,
    /// The largest number of requests in flight of one run.
    pub run_requests: u64,
    /// The largest number of requests in flight of all runs.
    pub process_requests: u64,
}

/// Raises the process's limit of open files to its hard limit.
pub fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, raised)
    {
        tracing::warn!(%error, "cannot raise the number of open files");
    }
}

impl DescriptorShare {
    /// Returns the share of each run under the limit in force, and warns if the share is less than configured.
    pub fn from_current_limit(config: &GatewayConfig) -> Self {
        // `None` means that the system sets no limit.
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let share = Self::from_limit(limit, config);
        let configured = (config.server.max_connections, config.server.max_requests);
        if (share.run_connections, share.run_requests) != configured {
            tracing::warn!(
                limit,
                connections = share.run_connections,
                requests = share.run_requests,
                "there are too few descriptors for the configured limits, so each run has less; \
                 raise the limit of open files, or lower `serve.max_runs`, `server.max_connections` or `server.max_requests`"
            );
        }
        share
    }

    /// Returns the share of each run under a limit of open files.
    fn from_limit(limit: u64, config: &GatewayConfig) -> Self {
        let api = config.service_size.map_or(0, |service| service.max_connections as u64);
        // A quarter at most is reserved: under a small limit the runs still get most of the descriptors.
        let reserve = (RESERVED_DESCRIPTORS + api).min(limit / 4);
        let free = limit - reserve;
        // The runs of a shared listener come and go. Eight runs at full load may use all descriptors; a ninth then has
        // none.
        let runs = match (&config.service_size, &config.shared) {
            (Some(service), _) => service.max_runs as u64,
            (None, Some(_)) => MAX_RUNS_AT_FULL_LOAD,
            (None, None) => 1,
        };
        // Each request is counted with the most descriptors that it can hold.
        let requests_per_run = free / runs.max(1) / DESCRIPTORS_PER_REQUEST;
        let workers = config.workers.max(1) as u64;
        // A run has its connections on every worker, so its share is divided by the workers.
        let connections = usize::try_from(requests_per_run / workers).unwrap_or(usize::MAX);
        // The configured limits are upper bounds. The floor keeps every run usable, even if the sum is then too large.
        Self {
            run_connections: config
                .server
                .max_connections
                .min(connections.max(MIN_REQUESTS_PER_RUN)),
            run_requests: config
                .server
                .max_requests
                .min(requests_per_run.max(MIN_REQUESTS_PER_RUN as u64)),
            process_requests: (free / DESCRIPTORS_PER_REQUEST).max(MIN_REQUESTS_PER_RUN as u64),
        }
    }
}

/// The descriptors of one request: its connection, its upstream call, and the second descriptor of a connection that
/// cannot be written to.
const DESCRIPTORS_PER_REQUEST: u64 = 3;

/// The descriptors of the process itself: logs, databases, and programs that the process starts. The value is our
/// choice.
const RESERVED_DESCRIPTORS: u64 = 256;

/// The number of runs on a shared listener that can be at full load at the same time. The value is our choice.
const MAX_RUNS_AT_FULL_LOAD: u64 = 8;

/// The smallest share of a run. An agent must be able to make calls at all.
const MIN_REQUESTS_PER_RUN: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::config::ServiceSize;

    /// G15, S1: a run at its limit leaves descriptors to every other run and to the service.
    #[test]
    fn the_shares_of_all_runs_and_the_reserve_fit() {
        let max_runs = 20;
        let service_size = Some(ServiceSize { max_runs, max_connections: 64 });
        let config = GatewayConfig { service_size, ..GatewayConfig::default() };
        let share = DescriptorShare::from_limit(2000, &config);
        assert_eq!(share.run_connections, (2000 - 256 - 64) / 20 / 3);
        let per_run = share.run_connections as u64 * 2 + share.run_requests;
        assert!(per_run * max_runs as u64 + 256 + 64 <= 2000, "{share:?}");
    }

    #[test]
    fn what_is_configured_holds_where_there_are_enough() {
        let service_size = Some(ServiceSize { max_runs: 64, max_connections: 4096 });
        let config = GatewayConfig { service_size, ..GatewayConfig::default() };
        let share = DescriptorShare::from_limit(1 << 20, &config);
        assert_eq!((share.run_connections, share.run_requests), (1024, 1024));
        let alone = DescriptorShare::from_limit(4096, &GatewayConfig::default());
        assert_eq!((alone.run_connections, alone.run_requests), (1024, 1024));
    }
}
