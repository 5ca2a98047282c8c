//! A run's identity and the handles its calls share.
//!
//! **Invariant:** a run is known by the socket its calls come in on or, where runs share a listener, by
//! a token that the host has signed; never by what the calls say.

pub mod gate;
mod identity;
pub mod token;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::audit::record::Finished;
use crate::audit::{self, Log};
use crate::budget::Ledger;

pub use gate::Gate;
pub use identity::{Identity, Invalid, NAME_RULE, RequestId, is_name};

/// One agent run: who it is, what it may spend, and where it is written down.
pub struct Run {
    pub identity: Identity,
    pub ledger: Arc<Ledger>,
    pub audit: Log,
    pub counts: Counts,
    pub gate: Gate,
}

/// How many requests were let through and how many were not.
#[derive(Debug, Default)]
pub struct Counts {
    pub admitted: AtomicU64,
    pub refused: AtomicU64,
}

impl Counts {
    pub fn admitted(&self) -> u64 {
        self.admitted.load(Ordering::Relaxed)
    }

    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

impl Run {
    pub fn new(identity: Identity, ledger: Ledger, audit: Log) -> Self {
        Self {
            identity,
            ledger: Arc::new(ledger),
            audit,
            counts: Counts::default(),
            gate: Gate::default(),
        }
    }

    /// Closes the run's record.
    ///
    /// # Errors
    /// The log cannot be written.
    pub fn finish(&self) -> Result<(), audit::Error> {
        self.audit.finish(&Finished {
            spent: self.ledger.spent(),
            admitted: self.counts.admitted(),
            refused: self.counts.refused(),
        })
    }
}
