//! An operator's hand on a run: whether new calls may begin, and the end of those that are open.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use tokio_util::sync::CancellationToken;

/// Lets calls begin, or not.
#[derive(Debug, Default)]
pub struct Gate {
    state: AtomicU8,
    /// Cancelled to cut the calls that are open, and then replaced for those to come.
    cut: Mutex<CancellationToken>,
}

/// Whether calls may begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    #[default]
    Open,
    /// Not now; open calls go on.
    Paused,
    /// Never again; open calls go on.
    Draining,
}

/// A call that may not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Shut {
    #[error("an operator has paused this run; try again later")]
    Paused,
    #[error("an operator has ended this run")]
    Ended,
}

impl Gate {
    pub fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            PAUSED => State::Paused,
            DRAINING => State::Draining,
            _ => State::Open,
        }
    }

    /// # Errors
    /// No call may begin.
    pub fn check(&self) -> Result<(), Shut> {
        match self.state() {
            State::Open => Ok(()),
            State::Paused => Err(Shut::Paused),
            State::Draining => Err(Shut::Ended),
        }
    }

    /// Lets calls begin or not, from now on. A run that drains stays so; `false` says that.
    pub fn set(&self, state: State) -> bool {
        let new = match state {
            State::Open => OPEN,
            State::Paused => PAUSED,
            State::Draining => DRAINING,
        };
        let replace = |old| (old != DRAINING || new == DRAINING).then_some(new);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, replace).is_ok()
    }

    /// Ends the calls that are open now.
    pub fn cut(&self) {
        let calls = std::mem::take(&mut *self.token());
        calls.cancel();
    }

    /// Cancelled when a call that begins now is to end.
    pub fn until_cut(&self) -> CancellationToken {
        self.token().clone()
    }

    fn token(&self) -> MutexGuard<'_, CancellationToken> {
        self.cut.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const OPEN: u8 = 0;
const PAUSED: u8 = 1;
const DRAINING: u8 = 2;
