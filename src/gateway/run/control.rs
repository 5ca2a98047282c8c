//! An operator's hand on a run: whether new calls may begin, and the end of those that are open.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use tokio_util::sync::CancellationToken;

/// Lets calls begin, or not.
#[derive(Debug, Default)]
pub struct RunControl {
    state: AtomicU8,
    /// Cancelled to cut the calls that are open, and then replaced for those to come.
    cut: Mutex<CancellationToken>,
}

/// Whether calls may begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunControlState {
    #[default]
    Open,
    /// Not now; open calls go on.
    Paused,
    /// Never again; open calls go on.
    Draining,
}

/// A call that may not begin.
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

    /// # Errors
    /// No call may begin.
    pub fn check_accepting(&self) -> Result<(), NotAcceptingError> {
        match self.state() {
            RunControlState::Open => Ok(()),
            RunControlState::Paused => Err(NotAcceptingError::Paused),
            RunControlState::Draining => Err(NotAcceptingError::Ended),
        }
    }

    /// Lets calls begin or not, from now on. A run that drains stays so; `false` says that.
    pub fn set_state(&self, state: RunControlState) -> bool {
        let new = match state {
            RunControlState::Open => STATE_OPEN,
            RunControlState::Paused => STATE_PAUSED,
            RunControlState::Draining => STATE_DRAINING,
        };
        let replace = |old| (old != STATE_DRAINING || new == STATE_DRAINING).then_some(new);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, replace).is_ok()
    }

    /// Ends the calls that are open now.
    pub fn abort_calls(&self) {
        let calls = std::mem::take(&mut *self.lock_token());
        calls.cancel();
    }

    /// Cancelled when a call that begins now is to end.
    pub fn abort_token(&self) -> CancellationToken {
        self.lock_token().clone()
    }

    fn lock_token(&self) -> MutexGuard<'_, CancellationToken> {
        self.cut.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const STATE_OPEN: u8 = 0;
const STATE_PAUSED: u8 = 1;
const STATE_DRAINING: u8 = 2;
