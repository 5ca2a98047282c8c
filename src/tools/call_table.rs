//! The tool calls of a run: the open ones, and the ends of the last ones, so that a client can ask again.
//!
//! A call that waits for a person has a place of its own, so that it keeps no other call out. The same call, asked for
//! again, finds the call that waits, or the end that no client has received yet, instead of asking the person again.
//!
//! **Invariant:** the number of open and waiting calls and the bytes of kept results are bounded.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// The number of calls that wait for a person.
    waiting: usize,
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
    /// The question about the call, if a person is asked.
    pub question: Option<CallQuestion>,
    idempotency_key: Option<String>,
    end: watch::Sender<Option<Arc<ToolCallEnd>>>,
}

/// The question about a call.
#[derive(Debug)]
pub struct CallQuestion {
    pub id: String,
    /// The salted digest of the arguments, byte for byte.
    pub exact_arguments: String,
    /// The last moment at which the call may begin, in milliseconds since 1970.
    pub not_after_ms: i64,
    /// True until the question is closed.
    is_waiting: AtomicBool,
    /// True if a client has received the end of the call.
    is_collected: AtomicBool,
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
    is_waiting: bool,
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
        self.add_call((tool, arguments_digest), idempotency_key, None)
    }

    /// Takes a place for a call that waits for a person, or finds the same call: one that waits or runs, or one whose
    /// end no client has received yet. A denied call stays denied as long as its end is kept.
    ///
    /// # Errors
    /// Returns an error if the key belongs to another call, or if too many calls wait.
    pub fn open_waiting_call(
        self: &Arc<Self>,
        call: (&Arc<str>, &str),
        idempotency_key: Option<&str>,
        question: CallQuestion,
    ) -> Result<CallSlotOutcome, ToolRefusal> {
        self.add_call(call, idempotency_key, Some(question))
    }

    fn add_call(
        self: &Arc<Self>,
        (tool, arguments_digest): (&Arc<str>, &str),
        idempotency_key: Option<&str>,
        question: Option<CallQuestion>,
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
        if let Some(call) =
            question.as_ref().and_then(|asked| state.find_same(tool, &asked.exact_arguments))
        {
            return Ok(CallSlotOutcome::Joined(call));
        }
        let is_waiting = question.is_some();
        if is_waiting && state.waiting >= MAX_WAITING_CALLS {
            return Err(ToolRefusal::TooManyQuestions);
        }
        if !is_waiting && state.open >= MAX_OPEN_CALLS {
            return Err(ToolRefusal::Busy { limit: MAX_OPEN_CALLS });
        }
        let call = Arc::new(ToolCall {
            id: format!("tc-{}", uuid::Uuid::now_v7().simple()),
            tool: Arc::clone(tool),
            arguments_digest: arguments_digest.to_owned(),
            question,
            idempotency_key: idempotency_key.map(str::to_owned),
            end: watch::Sender::new(None),
        });
        *state.places(is_waiting) += 1;
        if let Some(key) = idempotency_key {
            state.keys.insert(key.to_owned(), call.id.clone());
        }
        state.calls.insert(call.id.clone(), Arc::clone(&call));
        drop(state);
        let slot = OpenCallSlot { table: Arc::clone(self), call, is_waiting, has_ended: false };
        Ok(CallSlotOutcome::Opened(slot))
    }

    /// Returns the call that was made with an idempotency key, while it or its end is kept.
    pub fn find_keyed_call(&self, key: &str) -> Option<Arc<ToolCall>> {
        let state = self.lock_state();
        state.calls.get(state.keys.get(key)?).cloned()
    }

    /// Returns true if the same call was asked about and still has something to tell.
    pub fn has_same_call(&self, tool: &Arc<str>, exact_arguments: &str) -> bool {
        self.lock_state().find_same(tool, exact_arguments).is_some()
    }

    pub fn find_call(&self, id: &str) -> Option<Arc<ToolCall>> {
        self.lock_state().calls.get(id).cloned()
    }

    fn lock_state(&self) -> MutexGuard<'_, ToolCallTableState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ToolCallTableState {
    /// Finds the call with the same tool and the same argument bytes that still has something to tell.
    fn find_same(&self, tool: &Arc<str>, exact_arguments: &str) -> Option<Arc<ToolCall>> {
        let is_same = |call: &&Arc<ToolCall>| {
            call.tool == *tool
                && call.question.as_ref().is_some_and(|question| {
                    question.exact_arguments == exact_arguments
                        && !question.is_collected.load(Ordering::Relaxed)
                })
        };
        self.calls.values().find(is_same).cloned()
    }

    fn places(&mut self, is_waiting: bool) -> &mut usize {
        if is_waiting { &mut self.waiting } else { &mut self.open }
    }

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

    /// Returns the question about the call if it is not closed yet.
    pub fn open_question(&self) -> Option<&CallQuestion> {
        self.question.as_ref().filter(|question| question.is_waiting.load(Ordering::Relaxed))
    }

    /// Notes that a client has received the end of the call, so that the same call is a new call from now on.
    pub fn mark_collected(&self) {
        if let (Some(question), Some(end)) = (&self.question, &*self.end.borrow()) {
            let is_denied = end.error.as_ref().is_some_and(|(code, _)| *code == DENIED_CODE);
            question.is_collected.fetch_or(!is_denied, Ordering::Relaxed);
        }
    }

    fn kept_bytes(&self) -> usize {
        self.end.borrow().as_ref().map_or(0, |end| end.result.len())
    }
}

impl CallQuestion {
    pub fn new(id: String, exact_arguments: String, not_after_ms: i64) -> Self {
        let (is_waiting, is_collected) = (AtomicBool::new(true), AtomicBool::new(false));
        Self { id, exact_arguments, not_after_ms, is_waiting, is_collected }
    }
}

impl OpenCallSlot {
    pub fn call(&self) -> &Arc<ToolCall> {
        &self.call
    }

    /// Moves a call whose question is closed to the open calls. Such calls may be more than [`MAX_OPEN_CALLS`], by the
    /// number of calls that may wait.
    pub fn stop_waiting(&mut self) {
        if let Some(question) = &self.call.question {
            question.is_waiting.store(false, Ordering::Relaxed);
        }
        let mut state = self.table.lock_state();
        *state.places(self.is_waiting) -= 1;
        state.open += 1;
        self.is_waiting = false;
    }

    /// Keeps the end of the call and wakes the clients that wait for it.
    pub fn end_call(mut self, end: ToolCallEnd) {
        self.has_ended = true;
        let bytes = end.result.len();
        let mut state = self.table.lock_state();
        *state.places(self.is_waiting) -= 1;
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
            *state.places(self.is_waiting) -= 1;
            state.remove_call(&self.call.id);
        }
    }
}

/// The most open calls of a run. Our choice: an agent makes a few calls at a time.
pub const MAX_OPEN_CALLS: usize = 8;

/// The most calls of a run that wait for a person. Our choice: a person answers them one by one.
pub const MAX_WAITING_CALLS: usize = 8;

/// The code of a call that a person has denied.
pub const DENIED_CODE: &str = "approval_denied";

/// The most ended calls that are kept. Our choice.
const MAX_KEPT_CALLS: usize = 64;

/// The most bytes of kept results. Our choice: a thousand runs at their worst hold two GiB.
const MAX_KEPT_BYTES: usize = 2 * 1024 * 1024;
