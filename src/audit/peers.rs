//! The processes that have connected, of which a sandbox can make as many as it likes.

use std::time::Instant;

use super::flood::Flood;
use super::record::Crowd;
use crate::base::unix::Peer;

/// Those recorded one by one, and the number of connections by others.
#[derive(Debug, Default)]
pub(super) struct Peers {
    recorded: Vec<Peer>,
    flood: Flood,
}

impl Peers {
    /// Counts a connection; `true` if its process has none before and is to be recorded by itself.
    pub(super) fn count(&mut self, peer: Peer) -> bool {
        if self.recorded.contains(&peer) {
            return false;
        }
        let is_recorded = self.flood.count();
        if is_recorded {
            self.recorded.push(peer);
        }
        is_recorded
    }

    /// Takes out what was counted and is due, or `all` of it.
    pub(super) fn due(&mut self, now: Instant, all: bool) -> Option<Crowd> {
        self.flood.due(now, all).map(|repeats| Crowd { repeats })
    }

    /// Whether something was counted that is not recorded yet.
    pub(super) fn is_counting(&self) -> bool {
        self.flood.is_counting()
    }
}
