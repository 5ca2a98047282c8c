//! A run's identity and the handles its calls share.
//!
//! **Invariant:** a run is known by the socket its calls come in on or, where runs share a listener, by
//! a token that the host has signed; never by what the calls say.

pub mod control;
mod identity;
pub mod token;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Semaphore;

use crate::llm::budget::BudgetLedger;
use crate::telemetry::audit::records::RunFinishedRecord;
use crate::telemetry::audit::{self, AuditLog};
use crate::telemetry::trace::RunTrace;

pub use control::RunControl;
pub use identity::{NAME_RULE, RequestId, RunIdentity, RunIdentityError, is_name, is_reserved_key};

/// One agent run: who it is, what it may spend, and where it is written down.
pub struct AgentRun {
    pub identity: RunIdentity,
    pub ledger: Arc<BudgetLedger>,
    pub audit: AuditLog,
    pub counts: CallCounts,
    pub gate: RunControl,
    /// Places for calls that are read on after their client has left.
    pub drains: Arc<Semaphore>,
    /// The run's place in its trace, if it has one.
    pub trace: Option<Arc<RunTrace>>,
}

/// How many requests were let through and how many were not.
#[derive(Debug, Default)]
pub struct CallCounts {
    pub admitted: AtomicU64,
    pub refused: AtomicU64,
    /// Calls that did not reach the upstream.
    pub unreached: AtomicU64,
}

impl CallCounts {
    pub fn admitted_calls(&self) -> u64 {
        self.admitted.load(Ordering::Relaxed)
    }

    pub fn refused_calls(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    pub fn unreached(&self) -> u64 {
        self.unreached.load(Ordering::Relaxed)
    }
}

impl AgentRun {
    pub fn new(identity: RunIdentity, ledger: BudgetLedger, audit: AuditLog) -> Self {
        Self {
            identity,
            ledger: Arc::new(ledger),
            audit,
            counts: CallCounts::default(),
            gate: RunControl::default(),
            drains: Arc::new(Semaphore::new(MAX_DRAINS)),
            trace: None,
        }
    }

    /// The same run, as a part of a trace.
    #[must_use]
    pub fn with_trace(self, trace: Option<Arc<RunTrace>>) -> Self {
        if let Some(trace) = &trace {
            trace.set_attribute("cogni.run.id", &*self.identity.run);
            trace.set_attribute("cogni.run.attempt", &*self.identity.attempt);
        }
        Self { trace, ..self }
    }

    /// What log lines are within that are about the run.
    pub fn log_span(&self) -> tracing::Span {
        let trace_id = self.trace.as_ref().map(|trace| tracing::field::display(trace.trace_id()));
        tracing::info_span!("run", run = self.identity.run, trace_id)
    }

    /// Closes the run's record, and ends its span.
    ///
    /// # Errors
    /// The log cannot be written.
    pub fn finish_run(&self) -> Result<(), audit::AuditError> {
        if let Some(trace) = &self.trace {
            let spent = self.ledger.spent_amount();
            trace.set_attribute("gen_ai.usage.input_tokens", spent.input.0);
            trace.set_attribute("gen_ai.usage.output_tokens", spent.output.0);
            trace.set_attribute("cogni.calls.admitted", self.counts.admitted_calls());
            trace.set_attribute("cogni.calls.refused", self.counts.refused_calls());
            trace.finish_run_span();
        }
        self.audit.finish_log(&RunFinishedRecord {
            spent: self.ledger.spent_amount(),
            admitted: self.counts.admitted_calls(),
            refused: self.counts.refused_calls(),
        })
    }
}

/// Each holds an upstream connection and little memory; what finds no place is charged as reserved.
const MAX_DRAINS: usize = 64;
