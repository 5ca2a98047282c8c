//! Series of one run: plain atomics, read when a scrape comes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::collect::{Collect, Series};
use super::count::{Count, TokenCounts};
use super::model::{Model, Models};
use super::table;
use super::totals::Totals;
use super::{Refused, Settled, shown};
use crate::audit::Lag;
use crate::base::metrics::float;
use crate::budget::{Ledger, Tokens};
use crate::observe::printable::Printable;
use crate::protocol::Route;

/// Runs with series of their own. Ours: ten thousand are about 16 MB of text in a scrape.
pub const MAX_RUNS: usize = 10_000;

/// A run's counters. Resolved once per run; counting into it takes no lock, refusals excepted.
#[derive(Debug)]
pub struct Run {
    name: String,
    budget: Mutex<Arc<Ledger>>,
    totals: Arc<Totals>,
    models: Arc<Models>,
    statuses: [Count; STATUS_CLASSES.len()],
    refusals: Mutex<BTreeMap<&'static str, u64>>,
    tokens: TokenCounts,
    cost: Count,
    request_bytes: Count,
    response_bytes: Count,
    in_flight: Count,
    audit_lag_records: Count,
    audit_lag_bytes: Count,
    audit_failing: Count,
}

/// A request being served. It counts as such until this is dropped.
#[derive(Debug)]
pub struct InFlight(Arc<Run>);

/// The runs that have series.
#[derive(Debug)]
pub(super) struct Runs {
    /// In order, as a scrape shows them: the registry sorts, and what is sorted already costs little.
    live: Mutex<BTreeMap<String, Slot>>,
    totals: Arc<Totals>,
    models: Arc<Models>,
}

#[derive(Debug)]
struct Slot {
    run: Arc<Run>,
    /// When the series go away; `None` while the run is served.
    due: Option<Instant>,
}

impl Run {
    /// Counts a request as being served for as long as the guard lives.
    pub fn begin(self: &Arc<Self>) -> InFlight {
        self.in_flight.add(1);
        self.totals.in_flight.inc();
        InFlight(Arc::clone(self))
    }

    /// The counters of a model that the upstream has accepted, made on first sight.
    ///
    /// Past [`super::MAX_MODELS`] it is `other`'s. So that a client cannot fill the table with names it
    /// made up, a name that only the client vouches for goes to [`Run::known_model`].
    pub fn model(&self, name: &str) -> Arc<Model> {
        self.models.get_or_insert(name)
    }

    /// The counters of a model seen before; `other`'s if there are none.
    pub fn known_model(&self, name: &str) -> Arc<Model> {
        self.models.get(name)
    }

    /// Counts a frame of a response body that was passed on; `gap` is the time since the one before.
    pub fn frame(&self, model: Option<&Model>, gap: Option<Duration>, bytes: usize) {
        self.response_bytes.add(bytes as u64);
        if let (Some(model), Some(gap)) = (model, gap) {
            model.frame_gap(gap);
        }
    }

    /// Counts a call that was admitted and has ended.
    pub fn settled(&self, call: &Settled<'_>) {
        self.totals.settled(call);
        call.model.settled(call);
        self.statuses[class_of(call.status)].add(1);
        self.tokens.add(call.usage);
        self.cost.add(call.cost.unwrap_or_default().0);
        self.request_bytes.add(call.request_bytes);
    }

    /// Counts a request that was refused before it reached the upstream.
    pub fn refused(&self, refused: &Refused) {
        self.totals.refused(refused);
        self.statuses[class_of(refused.status)].add(1);
        *self.refusals().entry(refused.code).or_default() += 1;
    }

    /// Counts a field that was left out of a body, by the word for the reason.
    pub fn dropped_field(&self, route: Route, why: &'static str) {
        self.totals.dropped_field(route, why);
    }

    /// Counts a request that ended without a call to settle or a refusal: what we answer ourselves, and
    /// what could not be delivered to the upstream.
    pub fn answered(&self, route: Option<Route>, status: u16) {
        self.totals.request(route, status);
        self.statuses[class_of(status)].add(1);
    }

    /// Counts a failure of the upstream; `kind` is one of our own words.
    pub fn upstream_error(&self, kind: &'static str) {
        self.totals.upstream_errors.with_label_values(&[kind]).inc();
    }

    /// Counts a client that left before there was a call to settle; a settled call with that outcome
    /// is counted by itself.
    pub fn client_gone(&self) {
        self.totals.clients_gone.inc();
    }

    /// Sets how far the run's audit log is behind. For a ticker; once a second will do.
    pub fn audit_lag(&self, lag: &Lag) {
        let Lag { records, bytes, failing } = *lag;
        let before = [
            self.audit_lag_records.swap(records),
            self.audit_lag_bytes.swap(bytes),
            self.audit_failing.swap(failing.into()),
        ];
        self.totals.audit_lag(before, [records, bytes, failing.into()]);
    }

    fn collect(&self, into: &mut Series) {
        let run = self.name.as_str();
        for (class, requests) in STATUS_CLASSES.into_iter().zip(&self.statuses) {
            if requests.float() > 0.0 || ALWAYS_SHOWN.contains(&class) {
                into.put(&table::RUN_REQUESTS, &[run, class], requests.float());
            }
        }
        for (code, requests) in self.refusals().iter() {
            into.put(&table::RUN_REFUSALS, &[run, code], float(*requests));
        }
        for (kind, tokens) in self.tokens.floats() {
            if tokens > 0.0 || ALWAYS_SHOWN.contains(&kind) {
                into.put(&table::RUN_TOKENS, &[run, kind], tokens);
            }
        }
        into.put(&table::RUN_COST, &[run], self.cost.float() / 1e9);
        into.put(&table::RUN_REQUEST_BYTES, &[run], self.request_bytes.float());
        into.put(&table::RUN_RESPONSE_BYTES, &[run], self.response_bytes.float());
        into.put(&table::RUN_IN_FLIGHT, &[run], self.in_flight.float());
        into.put(&table::RUN_AUDIT_LAG_RECORDS, &[run], self.audit_lag_records.float());
        self.collect_budget(into);
    }

    fn collect_budget(&self, into: &mut Series) {
        let run = self.name.as_str();
        let budget = Arc::clone(&self.budget.lock().unwrap_or_else(PoisonError::into_inner));
        let status = budget.status();
        if let Some(turns) = status.turns_left {
            into.put(&table::RUN_TURNS_LEFT, &[run], float(turns));
        }
        let tokens = [
            ("input", status.input_tokens_left),
            ("output", status.output_tokens_left),
            ("total", status.total_tokens_left),
        ];
        for (kind, left) in tokens {
            if let Some(Tokens(left)) = left {
                into.put(&table::RUN_TOKENS_LEFT, &[run, kind], float(left));
            }
        }
        if let Some(left) = status.cost_left_usd {
            into.put(&table::RUN_COST_LEFT, &[run], left.dollars());
        }
        if let Some(left) = status.time_left {
            into.put(&table::RUN_TIME_LEFT, &[run], left.as_secs_f64());
        }
    }

    fn refusals(&self) -> MutexGuard<'_, BTreeMap<&'static str, u64>> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.audit_lag(&Lag::default());
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.sub(1);
        self.0.totals.in_flight.dec();
    }
}

impl Runs {
    pub(super) fn new(totals: Arc<Totals>, models: Arc<Models>) -> Self {
        Self { live: Mutex::default(), totals, models }
    }

    pub(super) fn get_or_insert(&self, name: &str, budget: &Arc<Ledger>) -> Arc<Run> {
        let name = Printable(name).text();
        let mut live = self.live();
        if let Some(slot) = live.get_mut(name.as_ref()) {
            slot.due = None;
            *slot.run.budget.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(budget);
            return Arc::clone(&slot.run);
        }
        let run = Arc::new(self.make(&name, budget));
        if live.len() < MAX_RUNS {
            live.insert(name.into_owned(), Slot { run: Arc::clone(&run), due: None });
            self.totals.set_runs(live.len());
        } else {
            self.totals.runs_dropped.inc();
        }
        run
    }

    pub(super) fn retire(&self, name: &str, due: Instant) {
        if let Some(slot) = self.live().get_mut(Printable(name).text().as_ref()) {
            slot.due = Some(due);
        }
    }

    pub(super) fn sweep(&self, now: Instant) {
        let mut live = self.live();
        live.retain(|_, slot| slot.due.is_none_or(|due| due > now));
        self.totals.set_runs(live.len());
    }

    pub(super) fn forget(&self, name: &str) {
        let mut live = self.live();
        live.remove(Printable(name).text().as_ref());
        self.totals.set_runs(live.len());
    }

    fn make(&self, name: &str, budget: &Arc<Ledger>) -> Run {
        Run {
            name: name.to_owned(),
            budget: Mutex::new(Arc::clone(budget)),
            totals: Arc::clone(&self.totals),
            models: Arc::clone(&self.models),
            statuses: Default::default(),
            refusals: Mutex::default(),
            tokens: TokenCounts::default(),
            cost: Count::default(),
            request_bytes: Count::default(),
            response_bytes: Count::default(),
            in_flight: Count::default(),
            audit_lag_records: Count::default(),
            audit_lag_bytes: Count::default(),
            audit_failing: Count::default(),
        }
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collect for Runs {
    fn collect(&self, into: &mut Series) {
        let live: Vec<_> = self.live().values().map(|slot| Arc::clone(&slot.run)).collect();
        for run in live {
            run.collect(into);
        }
    }
}

/// The index in [`STATUS_CLASSES`].
fn class_of(status: u16) -> usize {
    usize::from(shown(status) / 100).clamp(1, STATUS_CLASSES.len()) - 1
}

/// Values of the label `status` of a run's requests. The exact status is in the totals.
const STATUS_CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// Shown at zero, so that a rate sees the first increase; the rest appears with its first count.
const ALWAYS_SHOWN: [&str; 5] = ["2xx", "4xx", "5xx", "input", "output"];
