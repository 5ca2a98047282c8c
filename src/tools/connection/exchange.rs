//! One admitted request over a connection: it is settled and recorded once, however it ends.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use tokio_util::sync::CancellationToken;

use super::ConnectionParts;
use crate::llm::budget::{ByteDirection, ConnectionReservation, ConnectionSpending};
use crate::telemetry::audit::connect_records::{ConnectOutcome, ConnectSettledRecord};
use crate::telemetry::metrics::SettledConnect;

/// An admitted request. Its drop settles the budget, then writes the record and the metrics. A request that was not sent
/// is charged nothing, and belongs to the refusals.
pub(super) struct ConnectExchange {
    pub(super) parts: Arc<ConnectionParts>,
    pub(super) request: String,
    pub(super) connection: Arc<str>,
    pub(super) reservation: SharedReservation,
    pub(super) started: Instant,
    /// The status of the server's answer; 0 before it.
    pub(super) status: u16,
    /// The outcome if the exchange ended now. A client that leaves drops the exchange as it is.
    pub(super) outcome: ConnectOutcome,
}

/// The budget of a request, which the bodies of both directions take from, and what has ended the request's body early.
#[derive(Clone)]
pub(super) struct SharedReservation {
    reservation: Arc<Mutex<ConnectionReservation>>,
    early_end: Arc<OnceLock<ConnectOutcome>>,
}

/// The events that end a request early.
pub(super) struct StopSignal {
    pub(super) run: CancellationToken,
    pub(super) process: CancellationToken,
    /// The time at which the run must end.
    pub(super) deadline: Option<Instant>,
}

impl SharedReservation {
    pub(super) fn new(reservation: ConnectionReservation) -> Self {
        let reservation = Arc::new(Mutex::new(reservation));
        Self { reservation, early_end: Arc::default() }
    }

    /// Takes bytes that are about to pass. Returns false, and takes nothing, if the budget does not allow them.
    pub(super) fn take_bytes(&self, direction: ByteDirection, count: u64) -> bool {
        let is_taken = self.lock().take_bytes(direction, count).is_ok();
        if !is_taken {
            self.note_early_end(ConnectOutcome::BudgetCut);
        }
        is_taken
    }

    /// Notes what has ended the request's body before its end. The first cause stays.
    pub(super) fn note_early_end(&self, outcome: ConnectOutcome) {
        self.early_end.get_or_init(|| outcome);
    }

    /// Returns the outcome of a request that has failed. The server has failed only if nothing else has ended the request's
    /// body early: an agent must not make up failures of a server.
    pub(super) fn failed_outcome(&self) -> ConnectOutcome {
        self.early_end.get().copied().unwrap_or(ConnectOutcome::UpstreamFailed)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, ConnectionReservation> {
        // No code under this lock panics, and a charge must not be lost.
        self.reservation.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StopSignal {
    /// Waits until the request must end, and returns its outcome.
    pub(super) async fn wait_stopped(&self) -> ConnectOutcome {
        let deadline = async {
            match self.deadline {
                Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.run.cancelled() => ConnectOutcome::ShutDown,
            () = self.process.cancelled() => ConnectOutcome::ShutDown,
            () = deadline => ConnectOutcome::TimedOut,
        }
    }
}

impl ConnectExchange {
    pub(super) fn reservation(&self) -> &SharedReservation {
        &self.reservation
    }
}

impl Drop for ConnectExchange {
    fn drop(&mut self) {
        let is_sent = self.outcome != ConnectOutcome::NotSent;
        let (charged, passed) = {
            let mut reservation = self.reservation.lock();
            let charged =
                if is_sent { reservation.settle_request() } else { reservation.release_request() };
            (charged, reservation.passed_bytes())
        };
        let duration = self.started.elapsed();
        let ConnectionSpending { bytes_out, bytes_in, .. } = passed;
        self.parts.audit.record_connect_settlement(&ConnectSettledRecord {
            request: &self.request,
            connection: &self.connection,
            outcome: self.outcome,
            status: self.status,
            bytes_out,
            bytes_in,
            charged,
            duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
        });
        if !is_sent {
            return;
        }
        self.parts.metrics.record_connect(&SettledConnect {
            connection: &self.connection,
            outcome: self.outcome,
            spent: ConnectionSpending { requests: 1, bytes_out, bytes_in, cost: charged.cost },
            duration,
        });
    }
}
