//! Our facts beside LiteLLM's spend logs: what both have, what only one of them has, and by how much they differ.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use serde::{Serialize, Serializer};

use super::books::{Fate, Filter, Open};
use super::facts::rfc3339;
use super::litellm::{self, Client, Rows, Way, Window};
use super::{Books, Fact, Notice};
use crate::budget::{Nanodollars, Tokens};

/// What came of a comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Calls that began from here…
    #[serde(serialize_with = "rfc3339")]
    pub since: SystemTime,
    /// …to before here.
    #[serde(serialize_with = "rfc3339")]
    pub until: SystemTime,
    /// Calls that began before here were asked for, and are not compared: some of them are deleted from the books.
    #[serde(serialize_with = "optional_rfc3339", skip_serializing_if = "Option::is_none")]
    pub deleted_before: Option<SystemTime>,
    pub way: Way,
    /// LiteLLM gave only some of its rows, so what is missing may be there.
    pub is_partial: bool,
    /// Rows that cannot be used.
    pub invalid: u64,
    /// Calls that both have.
    pub matched: u64,
    /// Receipts that were written for some of them.
    pub receipts_written: u64,
    /// Billable calls of ours that LiteLLM does not know, and should by now.
    pub missing: Vec<Item>,
    /// Calls that only one side has, within the bound.
    pub pending: u64,
    /// Calls that LiteLLM knows as ours, and we do not: they name our deployment or, from a gateway without books, a run that
    /// has other calls here.
    pub unknown: Vec<Item>,
    /// Calls for which LiteLLM's rows contradict what has a receipt.
    pub conflicting: Vec<Item>,
    /// Theirs less ours, over the matched calls.
    pub delta_input: i64,
    pub delta_output: i64,
    /// What LiteLLM has charged for the matched calls.
    #[serde(rename = "charged_usd")]
    pub charged: Nanodollars,
    /// Theirs less ours in billionths of a dollar, over the matched calls of which we know what they should cost.
    pub delta_cost_nanodollars: i64,
    /// Matched calls of which we do not.
    pub uncompared: u64,
    /// Matched calls that differ in tokens or in cost.
    pub different: Vec<Difference>,
}

/// One call that only one side has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Item {
    pub call_id: String,
    pub run: String,
    pub account: String,
    pub model: Option<String>,
    pub input: Tokens,
    pub output: Tokens,
    #[serde(rename = "cost_usd")]
    pub cost: Nanodollars,
    #[serde(serialize_with = "rfc3339")]
    pub started: SystemTime,
}

/// One call that both have, each in its own way; theirs less ours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    pub call_id: String,
    pub run: String,
    pub model: Option<String>,
    pub input: i64,
    pub output: i64,
    pub cost_nanodollars: i64,
    /// Our own tokens are an estimate, so that they differ says little.
    pub is_estimate: bool,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Books(#[from] super::Error),
    #[error(transparent)]
    Litellm(#[from] litellm::Error),
}

impl Report {
    /// Whether both sides have the same calls, as far as they can by now.
    pub fn is_clean(&self) -> bool {
        self.missing.is_empty()
            && self.unknown.is_empty()
            && self.conflicting.is_empty()
            && !self.is_partial
    }
}

impl Books {
    /// Asks LiteLLM for the calls that a filter lets through, compares them with ours, and writes the receipts that were
    /// missing.
    ///
    /// # Errors
    /// LiteLLM does not answer, or the books cannot be read or written.
    pub async fn reconcile(
        &self,
        client: &Client,
        filter: &Filter,
        now: SystemTime,
    ) -> Result<Report, Error> {
        let deleted_before = self.complete_since().await?.filter(|time| *time > filter.since);
        let since = deleted_before.unwrap_or(filter.since).min(filter.until);
        let filter = &Filter { since, ..filter.clone() };
        // Theirs first, and with a margin: what was begun since is not missing, and their clock may be another.
        let window = Window {
            since: filter.since.checked_sub(MARGIN).unwrap_or(filter.since),
            until: filter.until + MARGIN,
            account: filter.account.clone(),
        };
        let mut rows = client.rows(&window).await?;
        rows.notices.retain(|row| filter.run.is_none() || row.run == filter.run);
        let facts = self.select(filter).await?;
        let ids = rows.notices.iter().map(|row| row.call_id.clone()).collect();
        let known = self.known(ids).await?;
        let fates = self.take_known(&rows, &known).await?;
        let runs = rows.notices.iter().filter(|row| row.deployment.is_none());
        let runs = self.runs(runs.filter_map(|row| row.run.clone()).collect()).await?;
        let deployment = self.deployment().await?;
        let beside = Beside { known, runs, deployment, now, bound: self.bound() };
        Ok(Report { deleted_before, ..compare(filter, &facts, rows, &fates, &beside) })
    }

    /// Asks LiteLLM for single calls, by their ids; returns those that it does not know, or `None` where it cannot be asked
    /// so.
    ///
    /// # Errors
    /// As of [`reconcile`](Self::reconcile).
    pub async fn ask(&self, client: &Client, calls: &[Open]) -> Result<Option<Vec<Open>>, Error> {
        let mut strange = vec![];
        for call in calls {
            let Some(rows) = client.call(&call.call_id, call.started).await? else {
                return Ok(None);
            };
            // Where LiteLLM shows only failed attempts, or no price, it does not know yet what the call was charged.
            if rows.iter().all(Notice::names_no_charge) {
                strange.push(call.clone());
            }
            self.take(rows).await?;
        }
        Ok(Some(strange))
    }

    /// What becomes of the rows whose calls are in the books, by call id. Those of others are not kept: nothing would ever
    /// come to them.
    async fn take_known(
        &self,
        rows: &Rows,
        known: &HashSet<String>,
    ) -> Result<HashMap<String, Vec<Fate>>, super::Error> {
        let ours = rows.notices.iter().filter(|row| known.contains(&row.call_id));
        let ours: Vec<Notice> = ours.cloned().collect();
        let ids: Vec<_> = ours.iter().map(|row| row.call_id.clone()).collect();
        let mut fates: HashMap<_, Vec<_>> = HashMap::new();
        for (id, fate) in ids.into_iter().zip(self.take(ours).await?) {
            fates.entry(id).or_default().push(fate);
        }
        Ok(fates)
    }
}

/// What the comparison has to know beside the two sides.
struct Beside {
    known: HashSet<String>,
    runs: HashSet<String>,
    deployment: String,
    now: SystemTime,
    bound: Duration,
}

impl Beside {
    /// Whether a row should stand in these books.
    fn is_ours(&self, row: &Notice) -> bool {
        match (&row.deployment, &row.run) {
            (Some(named), _) => *named == self.deployment,
            (None, Some(run)) => self.runs.contains(run),
            (None, None) => false,
        }
    }
}

fn compare(
    filter: &Filter,
    facts: &[Fact],
    rows: Rows,
    fates: &HashMap<String, Vec<Fate>>,
    at: &Beside,
) -> Report {
    let mut report = Report::new(filter, &rows);
    // The row that counts most comes first among a call's, and so is put in last.
    let rows = rows.notices.into_iter().rev();
    let mut theirs: HashMap<String, Notice> = rows.map(|row| (row.call_id.clone(), row)).collect();
    for fact in facts {
        match theirs.remove(&fact.call_id).filter(|row| row.is_charge_for(fact)) {
            Some(row) => {
                report.matched(fact, &row);
                let fates = fates.get(&fact.call_id).map_or(&[][..], Vec::as_slice);
                report.receipts_written += u64::from(fates.contains(&Fate::New));
                if fates.contains(&Fate::Conflicting) {
                    report.conflicting.push(Item::of_row(row));
                }
            }
            None if !fact.is_billable() || !fact.is_billed_by_litellm() => {}
            None if fact.settled + at.bound >= at.now => report.pending += 1,
            None => report.missing.push(Item::of_fact(fact)),
        }
    }
    let is_asked_for = |row: &Notice| (filter.since..filter.until).contains(&row.started);
    let is_unknown = |row: &Notice| !at.known.contains(&row.call_id) && at.is_ours(row);
    let strangers = theirs.into_values().filter(|row| is_unknown(row) && is_asked_for(row));
    // Our own record of a call may be a moment later than LiteLLM's.
    let (late, unknown): (Vec<_>, Vec<_>) =
        strangers.partition(|row| row.ended + at.bound >= at.now);
    report.pending += late.len() as u64;
    report.unknown = unknown.into_iter().map(Item::of_row).collect();
    report.unknown.sort_by(|one, other| one.call_id.cmp(&other.call_id));
    report
}

impl Report {
    fn new(filter: &Filter, rows: &Rows) -> Self {
        Self {
            since: filter.since,
            until: filter.until,
            deleted_before: None,
            way: rows.way,
            is_partial: rows.is_partial,
            invalid: rows.invalid,
            matched: 0,
            receipts_written: 0,
            missing: vec![],
            pending: 0,
            unknown: vec![],
            conflicting: vec![],
            delta_input: 0,
            delta_output: 0,
            charged: Nanodollars::ZERO,
            delta_cost_nanodollars: 0,
            uncompared: 0,
            different: vec![],
        }
    }

    fn matched(&mut self, fact: &Fact, row: &Notice) {
        self.matched += 1;
        self.charged = self.charged + row.amount;
        let input = less(row.input.0, fact.usage.input.0);
        let output = less(row.output.0, fact.usage.output.0);
        let cost = match fact.expected_cost() {
            Some(expected) => less(row.amount.0, expected.0),
            None if !fact.is_billable() => less(row.amount.0, 0),
            None => {
                self.uncompared += 1;
                0
            }
        };
        // A billionth is what rounding does.
        let cost = if cost.abs() <= 1 { 0 } else { cost };
        self.delta_input = self.delta_input.saturating_add(input);
        self.delta_output = self.delta_output.saturating_add(output);
        self.delta_cost_nanodollars = self.delta_cost_nanodollars.saturating_add(cost);
        if (input, output, cost) != (0, 0, 0) {
            self.different.push(Difference {
                call_id: fact.call_id.clone(),
                run: fact.run.clone(),
                model: fact.model.clone(),
                input,
                output,
                cost_nanodollars: cost,
                is_estimate: fact.usage.source == crate::budget::Source::Estimated,
            });
        }
    }
}

impl Item {
    fn of_fact(fact: &Fact) -> Self {
        Self {
            call_id: fact.call_id.clone(),
            run: fact.run.clone(),
            account: fact.account.clone(),
            model: fact.model.clone(),
            input: fact.usage.input,
            output: fact.usage.output,
            cost: fact.expected_cost().unwrap_or_default(),
            started: fact.started,
        }
    }

    fn of_row(row: Notice) -> Self {
        Self {
            call_id: row.call_id,
            run: row.run.unwrap_or_default(),
            account: row.account.unwrap_or_default(),
            model: row.model,
            input: row.input,
            output: row.output,
            cost: row.amount,
            started: row.started,
        }
    }
}

#[expect(clippy::ref_option, reason = "serde hands a field to its function by reference")]
fn optional_rfc3339<S: Serializer>(
    time: &Option<SystemTime>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => rfc3339(time, serializer),
        None => serializer.serialize_none(),
    }
}

fn less(theirs: u64, ours: u64) -> i64 {
    i64::try_from(i128::from(theirs) - i128::from(ours)).unwrap_or(i64::MAX)
}

/// How much earlier or later than we LiteLLM may say that a call began.
const MARGIN: Duration = Duration::from_mins(10);
