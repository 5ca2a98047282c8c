//! The series that says whether the upstream answers. It is absent until the first call or check.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use super::collect::{SeriesBuilder, SeriesSource};
use super::table;

/// The state of the process's upstream, by the last call or check.
#[derive(Debug, Default)]
pub(super) struct UpstreamState {
    host: OnceLock<String>,
    /// One of [`UNKNOWN`], [`DOWN`] and [`UP`].
    state: AtomicU8,
}

impl UpstreamState {
    /// Sets the value of the label `host`. A second host has no effect, because a process has one upstream.
    pub(super) fn set_host(&self, host: &str) {
        let _ = self.host.set(host.to_owned());
    }

    /// Records whether the upstream has answered and accepts the gateway's key.
    pub(super) fn record_contact(&self, is_up: bool) {
        let state = if is_up { UP } else { DOWN };
        // Nearly every call finds the state that it would write, and a read takes the cache line from no other thread.
        if self.state.load(Ordering::Relaxed) != state {
            self.state.store(state, Ordering::Relaxed);
        }
    }
}

impl SeriesSource for UpstreamState {
    fn collect_series(&self, into: &mut SeriesBuilder) {
        let state = self.state.load(Ordering::Relaxed);
        if let Some(host) = self.host.get()
            && state != UNKNOWN
        {
            into.push_sample(&table::UPSTREAM_UP, &[host], f64::from(u8::from(state == UP)));
        }
    }
}

const UNKNOWN: u8 = 0;
const DOWN: u8 = 1;
const UP: u8 = 2;
