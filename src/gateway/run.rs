//! The state of one agent run that all calls of the run share.
//!
//! **Invariant:** the gateway knows a run by the socket of its calls or, if runs share a listener, by a token that the
//! host has signed. The gateway never trusts the content of a call for that.

pub mod control;
mod identity;
pub mod token;
mod tool_settings;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use tokio::sync::Semaphore;

use crate::llm::budget::{BudgetAsker, BudgetLedger};
use crate::telemetry::audit::records::RunFinishedRecord;
use crate::telemetry::audit::{self, AuditLog};
use crate::telemetry::trace::RunTrace;

pub use control::RunControl;
pub use identity::{NAME_RULE, RequestId, RunIdentity, RunIdentityError, is_name, is_reserved_key};
pub use tool_settings::{AgentToolSettings, ToolEndpoints, ToolOpener, ToolProcess, ToolSettings};

/// One agent run: its identity, its budget and its records.
pub struct AgentRun {
    pub identity: RunIdentity,
    pub ledger: Arc<BudgetLedger>,
    pub audit: Arc<AuditLog>,
    pub counts: CallCounts,
    pub control: RunControl,
    /// Permits for calls that the gateway reads to the end after the client has left.
    pub drain_permits: Arc<Semaphore>,
    /// The run's span in its trace, if the run belongs to a trace.
    pub trace: Option<Arc<RunTrace>>,
    /// The way to ask a person for a larger budget; empty if a spent limit refuses at once.
    budget_asker: OnceLock<Arc<dyn BudgetAsker>>,
}

/// The numbers of admitted and refused requests of a run.
#[derive(Debug, Default)]
pub struct CallCounts {
    pub admitted: AtomicU64,
    pub refused: AtomicU64,
    /// The number of calls that did not reach the upstream.
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
            audit: Arc::new(audit),
            counts: CallCounts::default(),
            control: RunControl::default(),
            drain_permits: Arc::new(Semaphore::new(MAX_DRAINS)),
            trace: None,
            budget_asker: OnceLock::new(),
        }
    }

    /// Lets calls that a spent limit refuses ask a person. Only the first asker of a run counts.
    pub fn set_budget_asker(&self, asker: Arc<dyn BudgetAsker>) {
        if self.budget_asker.set(asker).is_ok() {
            self.ledger.defer_refusals();
        }
    }

    pub fn budget_asker(&self) -> Option<&Arc<dyn BudgetAsker>> {
        self.budget_asker.get()
    }

    /// Returns the run as a part of a trace.
    #[must_use]
    pub fn with_trace(self, trace: Option<Arc<RunTrace>>) -> Self {
        if let Some(trace) = &trace {
            trace.set_attribute("cogni.run.id", &*self.identity.run);
            trace.set_attribute("cogni.run.attempt", &*self.identity.attempt);
        }
        Self { trace, ..self }
    }

    /// Returns the span for log lines about the run.
    pub fn log_span(&self) -> tracing::Span {
        let trace_id = self.trace.as_ref().map(|trace| tracing::field::display(trace.trace_id()));
        tracing::info_span!("run", run = self.identity.run, trace_id)
    }

    /// Closes the run's records, and ends its span.
    ///
    /// # Errors
    /// Returns an error if the audit log cannot be written.
    pub fn finish_run(&self) -> Result<(), audit::AuditError> {
        // The span ends first. It is exported even if the audit log cannot be written.
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

/// The largest number of calls that are read on at the same time after their clients have left. Each holds an upstream
/// connection and little memory. A call without a permit is charged as reserved.
const MAX_DRAINS: usize = 64;
