//! A run's identity and the handles its calls share.
//!
//! **Invariant:** a run is known by the socket its calls come in on or, where runs share a listener, by
//! a token that the host has signed; never by what the calls say.

pub mod gate;
mod identity;
pub mod token;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Semaphore;

use crate::audit::record::Finished;
use crate::audit::{self, Log};
use crate::budget::Ledger;
use crate::observe::trace::Trace;

pub use gate::Gate;
pub use identity::{Identity, Invalid, NAME_RULE, RequestId, is_name, is_reserved_key};

/// One agent run: who it is, what it may spend, and where it is written down.
pub struct Run {
    pub identity: Identity,
    pub ledger: Arc<Ledger>,
    pub audit: Log,
    pub counts: Counts,
    pub gate: Gate,
    /// Places for calls that are read on after their client has left.
    pub drains: Arc<Semaphore>,
    /// The run's place in its trace, if it has one.
    pub trace: Option<Arc<Trace>>,
}

/// How many requests were let through and how many were not.
#[derive(Debug, Default)]
pub struct Counts {
    pub admitted: AtomicU64,
    pub refused: AtomicU64,
    /// Calls that did not reach the upstream.
    pub unreached: AtomicU64,
}

impl Counts {
    pub fn admitted(&self) -> u64 {
        self.admitted.load(Ordering::Relaxed)
    }

    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    pub fn unreached(&self) -> u64 {
        self.unreached.load(Ordering::Relaxed)
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
            drains: Arc::new(Semaphore::new(MAX_DRAINS)),
            trace: None,
        }
    }

    /// The same run, as a part of a trace.
    #[must_use]
    pub fn traced(self, trace: Option<Arc<Trace>>) -> Self {
        if let Some(trace) = &trace {
            trace.note("cogni.run.id", &*self.identity.run);
            trace.note("cogni.run.attempt", &*self.identity.attempt);
        }
        Self { trace, ..self }
    }

    /// What log lines are within that are about the run.
    pub fn log_span(&self) -> tracing::Span {
        let trace_id = self.trace.as_ref().map(|trace| tracing::field::display(trace.id()));
        tracing::info_span!("run", run = self.identity.run, trace_id)
    }

    /// Closes the run's record, and ends its span.
    ///
    /// # Errors
    /// The log cannot be written.
    pub fn finish(&self) -> Result<(), audit::Error> {
        if let Some(trace) = &self.trace {
            let spent = self.ledger.spent();
            trace.note("gen_ai.usage.input_tokens", spent.input.0);
            trace.note("gen_ai.usage.output_tokens", spent.output.0);
            trace.note("cogni.calls.admitted", self.counts.admitted());
            trace.note("cogni.calls.refused", self.counts.refused());
            trace.end();
        }
        self.audit.finish(&Finished {
            spent: self.ledger.spent(),
            admitted: self.counts.admitted(),
            refused: self.counts.refused(),
        })
    }
}

/// Each holds an upstream connection and little memory; what finds no place is charged as reserved.
const MAX_DRAINS: usize = 64;
