//! The places of running runs, and the queue of runs that wait for a place.
//!
//! A free place goes to the grants in turn, and within a grant to the run that was accepted first. A grant that has its
//! own maximum of running runs is passed over, and keeps its turn. The rows of the run store in the state `queued` are the
//! queue; this module has their order in memory, and a new process makes it again from the rows.
//!
//! **Invariant:** no place is free while a run waits that its grant allows to begin.
//!
//! **Invariant:** a run that has begun and has lent its place gets a place before every queued run.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::{oneshot, watch};

use crate::service::auth::{AccessDeniedError, GrantTerms};
use crate::telemetry::metrics::RunQueueGauges;

/// The bounds of the queue of a service.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunQueueLimits {
    /// The maximum number of runs that have a place.
    pub places: usize,
    /// The maximum number of queued runs of all grants.
    pub queued: usize,
    /// The maximum number of queued runs of one grant, if the grant's own terms do not say less.
    pub queued_per_grant: usize,
}

/// The bounds of one grant's runs. `None` is the bound of the service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantRunLimits {
    /// The maximum number of runs that have begun and not ended.
    pub running: Option<u32>,
    /// The maximum number of queued runs.
    pub queued: Option<u32>,
}

/// The refusal of a run for which the queue has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueFullError {
    #[error(
        "{0} runs of this service wait for a place, and no more may wait; try again when some of them have begun"
    )]
    Service(usize),
    #[error(
        "{0} runs of this grant wait for a place, and no more of its runs may wait; try again when some of them have begun"
    )]
    Grant(usize),
}

/// The queue and the places of one service. Clones share the same queue.
#[derive(Clone, Debug)]
pub(super) struct RunQueue(Arc<RunQueueInner>);

#[derive(Debug)]
struct RunQueueInner {
    limits: RunQueueLimits,
    state: Mutex<QueueState>,
}

#[derive(Debug, Default)]
struct QueueState {
    /// True once the runs of an earlier process are in the queue. No run begins before that, so that the runs begin in
    /// their order.
    is_open: bool,
    /// The number of places in use.
    taken: usize,
    /// The number of queued runs of all grants.
    queued: usize,
    /// The grants that have a run here.
    grants: HashMap<String, GrantQueue>,
    /// The runs that have begun and not ended.
    begun: HashSet<String>,
    /// The grants that have queued runs. The first one is next.
    rotation: VecDeque<String>,
    /// The runs that have lent their places and want one back, in the order of their requests.
    returning: VecDeque<oneshot::Sender<()>>,
}

/// The runs of one grant.
#[derive(Debug, Default)]
struct GrantQueue {
    running: u32,
    max_running: Option<u32>,
    /// The queued runs by their ids, which sort by the time of their acceptance.
    queued: BTreeMap<String, QueuedRun>,
}

#[derive(Debug)]
struct QueuedRun {
    since: SystemTime,
    turn: watch::Sender<QueueTurn>,
}

/// The standing of a run in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum QueueTurn {
    /// The run waits. The position is 1 for the run that begins next. The queue reports a new position only if it is at
    /// most half of the last one.
    Waiting { position: usize },
    /// The run has a place.
    Begin,
    /// The run's grant does not allow runs any more.
    Denied(AccessDeniedError),
}

/// The standing of a run, as the API shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueStanding {
    /// The run waits. The position is 1 for the run that begins next.
    Waiting(usize),
    /// The run has taken its place.
    Begun,
}

/// One accepted run, from its admission to the moment when it takes its place. Dropping the entry takes the run out of
/// the queue.
#[derive(Debug)]
pub(super) struct QueueEntry {
    queue: RunQueue,
    grant: String,
    run: String,
    turn: watch::Receiver<QueueTurn>,
    is_taken: bool,
}

/// The place of a run that has begun. Dropping it lets the next run begin.
#[derive(Debug)]
pub(super) struct RunPlace {
    queue: RunQueue,
    grant: String,
    run: String,
    is_lent: bool,
}

impl GrantRunLimits {
    pub fn from_terms(terms: &GrantTerms) -> Self {
        Self { running: terms.max_runs, queued: terms.max_queued_runs }
    }
}

impl RunQueue {
    pub(super) fn new(limits: RunQueueLimits) -> Self {
        Self(Arc::new(RunQueueInner { limits, state: Mutex::default() }))
    }

    /// Lets runs begin. The runs of an earlier process are in the queue now.
    pub(super) fn open(&self) {
        let mut state = self.lock_state();
        state.is_open = true;
        state.fill_places(self.0.limits.places);
    }

    /// Adds a new run, unless the run would have to wait and the queue has no room for it.
    pub(super) fn enqueue_new(
        &self,
        (grant, run): (&str, &str),
        limits: GrantRunLimits,
    ) -> Result<QueueEntry, QueueFullError> {
        let mut state = self.lock_state();
        let RunQueueLimits { places, queued, queued_per_grant } = self.0.limits;
        // The run waits behind the runs of its grant that wait already, even if a place is free.
        let (waiting, may_begin) = state.grants.get(grant).map_or((0, true), |known| {
            let is_full = limits.running.is_some_and(|most| known.running >= most);
            (known.queued.len(), known.queued.is_empty() && !is_full)
        });
        let begins_now = state.is_open && state.taken < places && may_begin;
        // The bounds are those of the queue, so a run that has a place at once is never refused.
        if !begins_now {
            if state.queued >= queued {
                return Err(QueueFullError::Service(queued));
            }
            let of_grant = limits.queued.map_or(usize::MAX, |most| most as usize);
            let most = of_grant.min(queued_per_grant);
            if waiting >= most {
                return Err(QueueFullError::Grant(most));
            }
        }
        Ok(self.insert_entry(&mut state, (grant, run), limits, SystemTime::now()))
    }

    /// Adds a run that an earlier process accepted at `since`. The run was accepted, so no bound refuses it.
    pub(super) fn enqueue_recovered(
        &self,
        names: (&str, &str),
        limits: GrantRunLimits,
        since: SystemTime,
    ) -> QueueEntry {
        self.insert_entry(&mut self.lock_state(), names, limits, since)
    }

    fn insert_entry(
        &self,
        state: &mut QueueState,
        (grant, run): (&str, &str),
        limits: GrantRunLimits,
        since: SystemTime,
    ) -> QueueEntry {
        let (sender, mut turn) = watch::channel(QueueTurn::Waiting { position: usize::MAX });
        let known = state.grants.entry(grant.to_owned()).or_default();
        // The grant's terms of the newest request count.
        known.max_running = limits.running;
        // The rotation has each grant with queued runs once, so a grant with many runs has no more turns than another.
        if known.queued.is_empty() {
            state.rotation.push_back(grant.to_owned());
        }
        known.queued.insert(run.to_owned(), QueuedRun { since, turn: sender });
        state.queued += 1;
        state.fill_places(self.0.limits.places);
        // The entry's first turn is its standing now, whatever it is.
        turn.mark_changed();
        let (grant, run) = (grant.to_owned(), run.to_owned());
        QueueEntry { queue: self.clone(), grant, run, turn, is_taken: false }
    }

    /// Takes all queued runs of a grant out of the queue.
    pub(super) fn deny_grant(&self, grant: &str, denied: &AccessDeniedError) {
        let mut state = self.lock_state();
        let Some(known) = state.grants.get_mut(grant) else { return };
        // The entries of the runs still exist. Each learns of the denial from its turn, and finds nothing to remove when
        // it is dropped.
        let removed = std::mem::take(&mut known.queued);
        state.queued -= removed.len();
        state.rotation.retain(|name| name != grant);
        state.forget_idle(grant);
        for queued in removed.into_values() {
            queued.turn.send_replace(QueueTurn::Denied(denied.clone()));
        }
        state.tell_positions();
    }

    /// Returns the grants that have queued runs.
    pub(super) fn waiting_grants(&self) -> Vec<String> {
        self.lock_state().rotation.iter().cloned().collect()
    }

    /// Returns the standings of all runs that wait or have begun.
    pub(super) fn standings(&self) -> HashMap<String, QueueStanding> {
        let state = self.lock_state();
        let waiting = state.in_order().into_iter().map(|(run, _)| run.to_owned());
        let waiting = waiting.zip((1..).map(QueueStanding::Waiting));
        let begun = state.begun.iter().map(|run| (run.clone(), QueueStanding::Begun));
        waiting.chain(begun).collect()
    }

    /// Returns the standing of a run. `None` if the run has ended, or is about to end without having begun.
    pub(super) fn standing_of(&self, run: &str) -> Option<QueueStanding> {
        let state = self.lock_state();
        if state.begun.contains(run) {
            return Some(QueueStanding::Begun);
        }
        // Most runs that a client asks for are not queued, and cost no walk.
        let is_queued = state.grants.values().any(|known| known.queued.contains_key(run));
        let place = is_queued.then(|| state.in_order().iter().position(|(name, _)| *name == run));
        place.flatten().map(|index| QueueStanding::Waiting(index + 1))
    }

    pub(super) fn gauges(&self) -> RunQueueGauges {
        let state = self.lock_state();
        let all = state.grants.values().flat_map(|known| known.queued.values());
        let oldest = all.map(|queued| queued.since).min();
        let waited = oldest.and_then(|since| SystemTime::now().duration_since(since).ok());
        RunQueueGauges {
            queued: state.queued,
            capacity: self.0.limits.queued,
            oldest_wait: waited.unwrap_or_default(),
            places_taken: state.taken,
            places: self.0.limits.places,
        }
    }

    fn lock_state(&self) -> MutexGuard<'_, QueueState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueueEntry {
    /// Returns the run's standing in the queue: immediately at the first call, then at each change that the queue
    /// reports.
    pub(super) async fn next_turn(&mut self) -> QueueTurn {
        // The sender is dropped only after its last turn, which stays readable.
        let _ = self.turn.changed().await;
        self.turn.borrow_and_update().clone()
    }

    /// Returns true if the run has a place already.
    pub(super) fn begins_now(&self) -> bool {
        *self.turn.borrow() == QueueTurn::Begin
    }

    /// Returns the id of the run's grant.
    pub(super) fn grant(&self) -> &str {
        &self.grant
    }

    /// Takes the place of a run whose turn it is. The run has begun then.
    pub(super) fn take_place(mut self) -> RunPlace {
        debug_assert!(self.begins_now(), "the run waits");
        self.is_taken = true;
        self.queue.lock_state().begun.insert(self.run.clone());
        let (grant, run) = (self.grant.clone(), self.run.clone());
        RunPlace { queue: self.queue.clone(), grant, run, is_lent: false }
    }
}

impl Drop for QueueEntry {
    fn drop(&mut self) {
        if self.is_taken {
            return;
        }
        // 1. The run still waits: it leaves the queue, and the runs behind it move up.
        let mut state = self.queue.lock_state();
        if state.remove_queued(&self.grant, &self.run) {
            return state.tell_positions();
        }
        // 2. The run's turn has come, and the run did not take its place: the place goes to the next run.
        // 3. The run was denied: `deny_grant` has removed it already.
        if self.begins_now() {
            state.taken -= 1;
            state.end_run(&self.grant);
            state.fill_places(self.queue.0.limits.places);
        }
    }
}

impl RunPlace {
    /// Gives the place to another run for some time. The run still counts among the running runs of its grant.
    pub(super) fn lend(&mut self) {
        let mut state = self.queue.lock_state();
        // A place that is lent already is not given away twice.
        state.taken -= usize::from(!self.is_lent);
        self.is_lent = true;
        state.fill_places(self.queue.0.limits.places);
    }

    /// Waits until a place is free, and takes it before every queued run.
    pub(super) async fn reclaim(&mut self) {
        let (sender, place) = oneshot::channel();
        let mut waiting = ReturningPlace { queue: self.queue.clone(), place: Some(place) };
        {
            let mut state = self.queue.lock_state();
            state.returning.push_back(sender);
            state.fill_places(self.queue.0.limits.places);
        }
        if let Some(place) = &mut waiting.place {
            // The queue sends before it drops the sender, and it outlives this borrow.
            let _ = place.await;
        }
        waiting.place = None;
        self.is_lent = false;
    }
}

impl Drop for RunPlace {
    fn drop(&mut self) {
        let mut state = self.queue.lock_state();
        state.taken -= usize::from(!self.is_lent);
        state.begun.remove(&self.run);
        state.end_run(&self.grant);
        state.fill_places(self.queue.0.limits.places);
    }
}

/// A request for a place by a run that has begun. Dropping it before the place is taken gives the place back.
struct ReturningPlace {
    queue: RunQueue,
    place: Option<oneshot::Receiver<()>>,
}

impl Drop for ReturningPlace {
    fn drop(&mut self) {
        let Some(mut place) = self.place.take() else { return };
        let mut state = self.queue.lock_state();
        // After `close` no place can be sent; one that was sent before is returned.
        place.close();
        if place.try_recv().is_ok() {
            state.taken -= 1;
            state.fill_places(self.queue.0.limits.places);
        }
    }
}

impl QueueState {
    /// Gives the free places to runs, and reports their positions to the runs that still wait.
    fn fill_places(&mut self, places: usize) {
        while self.is_open && self.taken < places {
            if let Some(back) = self.returning.pop_front() {
                // The request of a run that was cancelled meanwhile takes no place.
                self.taken += usize::from(back.send(()).is_ok());
                continue;
            }
            let Some(next) = self.take_next() else { break };
            self.taken += 1;
            next.turn.send_replace(QueueTurn::Begin);
        }
        self.tell_positions();
    }

    /// Takes the next run out of the queue that its grant allows to begin.
    fn take_next(&mut self) -> Option<QueuedRun> {
        let may_begin = |grant: &String| {
            let known = &self.grants[grant];
            known.max_running.is_none_or(|most| known.running < most)
        };
        // A grant at its maximum is passed over and stays in front, so it is next when one of its runs ends.
        let index = self.rotation.iter().position(may_begin)?;
        let grant = self.rotation.remove(index)?;
        let known = self.grants.get_mut(&grant)?;
        let (_, run) = known.queued.pop_first()?;
        known.running += 1;
        self.queued -= 1;
        // With further runs the grant goes to the end: every other grant has its turn before.
        if !known.queued.is_empty() {
            self.rotation.push_back(grant);
        }
        Some(run)
    }

    /// Removes a run that waits. Returns false if the run does not wait.
    fn remove_queued(&mut self, grant: &str, run: &str) -> bool {
        let Some(known) = self.grants.get_mut(grant) else { return false };
        if known.queued.remove(run).is_none() {
            return false;
        }
        self.queued -= 1;
        if known.queued.is_empty() {
            self.rotation.retain(|name| name != grant);
        }
        self.forget_idle(grant);
        true
    }

    fn end_run(&mut self, grant: &str) {
        if let Some(known) = self.grants.get_mut(grant) {
            known.running -= 1;
        }
        self.forget_idle(grant);
    }

    /// Forgets a grant that has no run here.
    fn forget_idle(&mut self, grant: &str) {
        if self.grants.get(grant).is_some_and(|known| known.running == 0 && known.queued.is_empty())
        {
            self.grants.remove(grant);
        }
    }

    /// Returns the queued runs in the order in which they begin if each grant may begin its runs.
    fn in_order(&self) -> Vec<(&str, &QueuedRun)> {
        // The walk does what `take_next` does, one run of each grant in turn, without changing anything.
        let mut order = Vec::with_capacity(self.queued);
        let mut turns: VecDeque<_> =
            self.rotation.iter().map(|grant| self.grants[grant].queued.iter()).collect();
        while let Some(mut runs) = turns.pop_front() {
            if let Some((run, queued)) = runs.next() {
                order.push((run.as_str(), queued));
                turns.push_back(runs);
            }
        }
        order
    }

    /// Reports to each run its position, if the position is at most half of the last reported one. A run receives about
    /// ten positions at most, however long the queue is.
    fn tell_positions(&self) {
        for ((_, queued), now) in self.in_order().into_iter().zip(1..) {
            queued.turn.send_if_modified(|turn| match turn {
                QueueTurn::Waiting { position } if now <= *position / 2 => {
                    *position = now;
                    true
                }
                _ => false,
            });
        }
    }
}
