//! The tool calls of a run: the open ones, and the ends of the last ones, so that a client can ask again.
//!
//! **Invariant:** the number of open calls and the bytes of kept results are bounded.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::refusal::ToolRefusal;
use crate::llm::budget::Nanodollars;
use crate::telemetry::audit::tool_records::ToolOutcome;

/// The calls of one run.
#[derive(Debug, Default)]
pub struct ToolCallTable(Mutex<ToolCallTableState>);

#[derive(Debug, Default)]
struct ToolCallTableState {
    calls: HashMap<String, Arc<ToolCall>>,
    open: usize,
    /// The ended calls, in the order of their ends.
    ended: VecDeque<String>,
    ended_bytes: usize,
    /// The ids of the calls that were made with an idempotency key.
    keys: HashMap<String, String>,
}

/// One call.
#[derive(Debug)]
pub struct ToolCall {
    pub id: String,
    pub tool: Arc<str>,
    /// The salted digest of the arguments.
    pub arguments_digest: String,
    idempotency_key: Option<String>,
    end: watch::Sender<Option<Arc<ToolCallEnd>>>,
}

/// The end of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCallEnd {
    pub outcome: ToolOutcome,
    /// The code and the message of an error.
    pub error: Option<(&'static str, String)>,
    /// The result as JSON; empty if there is none.
    pub result: String,
    pub charged: Nanodollars,
    pub duration: Duration,
}

/// The place of a call that is about to begin. Dropping the place removes the call, unless the call has begun.
#[derive(Debug)]
pub struct OpenCallSlot {
    table: Arc<ToolCallTable>,
    call: Arc<ToolCall>,
    has_ended: bool,
}

/// The result of asking for a place.
#[derive(Debug)]
pub enum CallSlotOutcome {
    /// A new call may begin.
    Opened(OpenCallSlot),
    /// The same call was made before with the same idempotency key.
    Joined(Arc<ToolCall>),
}

impl ToolCallTable {
    /// Takes a place for a call, or finds the call that was made before with the same idempotency key.
    ///
    /// # Errors
    /// Returns an error if the key belongs to another call, or if too many calls are open.
    pub fn open_call(
        self: &Arc<Self>,
        tool: &Arc<str>,
        arguments_digest: &str,
        idempotency_key: Option<&str>,
    ) -> Result<CallSlotOutcome, ToolRefusal> {
        let mut state = self.lock_state();
        let earlier = idempotency_key.and_then(|key| state.calls.get(state.keys.get(key)?));
        if let Some(call) = earlier {
            let is_same = call.tool == *tool && call.arguments_digest == arguments_digest;
            return if is_same {
                Ok(CallSlotOutcome::Joined(Arc::clone(call)))
            } else {
                Err(ToolRefusal::KeyConflict)
            };
        }
        if state.open >= MAX_OPEN_CALLS {
            return Err(ToolRefusal::Busy { limit: MAX_OPEN_CALLS });
        }
        let call = Arc::new(ToolCall {
            id: format!("tc-{}", uuid::Uuid::now_v7().simple()),
            tool: Arc::clone(tool),
            arguments_digest: arguments_digest.to_owned(),
            idempotency_key: idempotency_key.map(str::to_owned),
            end: watch::Sender::new(None),
        });
        state.open += 1;
        if let Some(key) = idempotency_key {
            state.keys.insert(key.to_owned(), call.id.clone());
        }
        state.calls.insert(call.id.clone(), Arc::clone(&call));
        drop(state);
        let slot = OpenCallSlot { table: Arc::clone(self), call, has_ended: false };
        Ok(CallSlotOutcome::Opened(slot))
    }

    pub fn find_call(&self, id: &str) -> Option<Arc<ToolCall>> {
        self.lock_state().calls.get(id).cloned()
    }

    fn lock_state(&self) -> MutexGuard<'_, ToolCallTableState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ToolCallTableState {
    fn remove_call(&mut self, id: &str) {
        let Some(call) = self.calls.remove(id) else { return };
        if let Some(key) = &call.idempotency_key {
            self.keys.remove(key);
        }
        self.ended_bytes -= call.kept_bytes();
    }

    fn remove_oldest_ends(&mut self) {
        while self.ended.len() > MAX_KEPT_CALLS || self.ended_bytes > MAX_KEPT_BYTES {
            // The newest end stays, whatever its size: its client may be waiting for it.
            if self.ended.len() <= 1 {
                return;
            }
            if let Some(oldest) = self.ended.pop_front() {
                self.remove_call(&oldest);
            }
        }
    }
}

impl ToolCall {
    /// Waits for the end of the call, for at most `wait`.
    pub async fn wait_for_end(&self, wait: Duration) -> Option<Arc<ToolCallEnd>> {
        let mut watched = self.end.subscribe();
        let ended = tokio::time::timeout(wait, watched.wait_for(Option::is_some)).await;
        ended.ok()?.ok()?.clone()
    }

    fn kept_bytes(&self) -> usize {
        self.end.borrow().as_ref().map_or(0, |end| end.result.len())
    }
}

impl OpenCallSlot {
    pub fn call(&self) -> &Arc<ToolCall> {
        &self.call
    }

    /// Keeps the end of the call and wakes the clients that wait for it.
    pub fn end_call(mut self, end: ToolCallEnd) {
        self.has_ended = true;
        let bytes = end.result.len();
        let mut state = self.table.lock_state();
        state.open -= 1;
        state.ended.push_back(self.call.id.clone());
        state.ended_bytes += bytes;
        // The end is set under the lock, so that a kept call always has the bytes that were added for it.
        self.call.end.send_replace(Some(Arc::new(end)));
        state.remove_oldest_ends();
    }
}

impl Drop for OpenCallSlot {
    fn drop(&mut self) {
        if !self.has_ended {
            let mut state = self.table.lock_state();
            state.open -= 1;
            state.remove_call(&self.call.id);
        }
    }
}

/// The most open calls of a run. Our choice: an agent makes a few calls at a time.
pub const MAX_OPEN_CALLS: usize = 8;

/// The most ended calls that are kept. Our choice.
const MAX_KEPT_CALLS: usize = 64;

/// The most bytes of kept results. Our choice: a thousand runs at their worst hold two GiB.
const MAX_KEPT_BYTES: usize = 2 * 1024 * 1024;
