//! The processes that have connected. A sandbox can start any number of them.

use std::time::Instant;

use super::flood_limiter::RecordFloodLimiter;
use super::records::ManyPeersRecord;
use crate::base::unix::PeerCredentials;

/// The peers that are recorded one by one, and the number of further connections.
#[derive(Debug, Default)]
pub(super) struct PeerTracker {
    recorded: Vec<PeerCredentials>,
    flood: RecordFloodLimiter,
}

impl PeerTracker {
    /// Counts a connection. Returns true if it is the first one of its process and is to be recorded by itself.
    pub(super) fn count_connection(&mut self, peer: PeerCredentials, has_room: bool) -> bool {
        if self.recorded.contains(&peer) {
            return false;
        }
        let is_recorded = self.flood.count_one(has_room);
        if is_recorded {
            self.recorded.push(peer);
        }
        is_recorded
    }

    /// Returns the record of counted connections, if it is due or `all` is true.
    pub(super) fn take_due(&mut self, now: Instant, all: bool) -> Option<ManyPeersRecord> {
        self.flood.take_due(now, all).map(|repeats| ManyPeersRecord { repeats })
    }

    /// Returns true if a connection was counted and is not recorded yet.
    pub(super) fn is_counting(&self) -> bool {
        self.flood.is_counting()
    }
}
