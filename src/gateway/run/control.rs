//! The operator's control over a run: may new calls start, and must open calls end?

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use tokio_util::sync::CancellationToken;

/// The switch that admits or rejects new calls of a run, and aborts open ones.
#[derive(Debug, Default)]
pub struct RunControl {
    state: AtomicU8,
    /// The token of the open calls. To abort the calls, the token is replaced for later calls and then cancelled.
    abort: Mutex<CancellationToken>,
}

/// The operator's decision about new calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunControlState {
    #[default]
    Open,
    /// New calls are refused until the operator resumes the run. Open calls go on.
    Paused,
    /// New calls are refused for good. Open calls go on.
    Draining,
}

/// The reason why a call may not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAcceptingError {
    #[error("an operator has paused this run; try again later")]
    Paused,
    #[error("an operator has ended this run")]
    Ended,
}

impl RunControl {
    pub fn state(&self) -> RunControlState {
        match self.state.load(Ordering::Acquire) {
            STATE_PAUSED => RunControlState::Paused,
            STATE_DRAINING => RunControlState::Draining,
            _ => RunControlState::Open,
        }
    }

    /// Checks that a new call may start.
    ///
    /// # Errors
    /// Returns an error if the run is paused or has ended.
    pub fn check_accepting(&self) -> Result<(), NotAcceptingError> {
        match self.state() {
            RunControlState::Open => Ok(()),
            RunControlState::Paused => Err(NotAcceptingError::Paused),
            RunControlState::Draining => Err(NotAcceptingError::Ended),
        }
    }

    /// Sets the state for new calls from now on. A draining run stays draining; the function returns `false` if it
    /// refuses the change.
    pub fn set_state(&self, state: RunControlState) -> bool {
        let new = match state {
            RunControlState::Open => STATE_OPEN,
            RunControlState::Paused => STATE_PAUSED,
            RunControlState::Draining => STATE_DRAINING,
        };
        // Draining is final: an operator's late resume must not reopen a run whose records are being closed.
        let replace = |old| (old != STATE_DRAINING || new == STATE_DRAINING).then_some(new);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, replace).is_ok()
    }

    /// Aborts the calls that are open now.
    pub fn abort_calls(&self) {
        // The token is replaced under the lock and cancelled after it, so a call that starts now gets the new token.
        let calls = std::mem::take(&mut *self.lock_token());
        calls.cancel();
    }

    /// Returns a token that is cancelled when a call that starts now must end.
    pub fn abort_token(&self) -> CancellationToken {
        self.lock_token().clone()
    }

    fn lock_token(&self) -> MutexGuard<'_, CancellationToken> {
        self.abort.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const STATE_OPEN: u8 = 0;
const STATE_PAUSED: u8 = 1;
const STATE_DRAINING: u8 = 2;
