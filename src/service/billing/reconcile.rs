//! Compares our calls with LiteLLM's spend logs: the calls that both sides have, the calls that only one side has, and
//! their differences.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use serde::{Serialize, Serializer};

use super::call_usage::serialize_rfc3339;
use super::litellm::{self, LitellmClient, SpendLogRows, SpendLogSource, SpendLogWindow};
use super::store::{CallFilter, IngestOutcome, UnreceiptedCall};
use super::{BillingStore, CallUsage, ChargeNotice};
use crate::llm::budget::{Nanodollars, Tokens};

/// The result of a comparison.
#[derive(Clone, Debug, Serialize)]
pub struct ReconcileReport {
    /// The beginning of the compared time: calls that began at or after it.
    #[serde(serialize_with = "serialize_rfc3339")]
    pub since: SystemTime,
    /// The end of the compared time: calls that began before it.
    #[serde(serialize_with = "serialize_rfc3339")]
    pub until: SystemTime,
    /// The time before which calls were requested but not compared, because some of them are deleted from the billing
    /// store.
    #[serde(
        serialize_with = "serialize_optional_rfc3339",
        skip_serializing_if = "Option::is_none"
    )]
    pub deleted_before: Option<SystemTime>,
    pub way: SpendLogSource,
    /// True if LiteLLM returned only some of its rows, so that a missing call may exist there.
    pub is_partial: bool,
    /// The number of rows that cannot be parsed.
    pub invalid: u64,
    /// The number of calls that both sides have.
    pub matched: u64,
    /// The number of receipts that were written for matched calls.
    pub receipts_written: u64,
    /// Our billable calls that LiteLLM does not have, although their time for a receipt is over.
    pub missing: Vec<UnmatchedCall>,
    /// The number of calls that only one side has, within the time for a receipt.
    pub pending: u64,
    /// Calls that LiteLLM has as ours, and that we do not have. They name our deployment or, from a gateway without
    /// a billing store, a run that has other calls here.
    pub unknown: Vec<UnmatchedCall>,
    /// Calls for which LiteLLM's rows contradict the call's receipt.
    pub conflicting: Vec<UnmatchedCall>,
    /// LiteLLM's input tokens minus ours, over the matched calls.
    pub delta_input: i64,
    pub delta_output: i64,
    /// The amount that LiteLLM charged for the matched calls.
    #[serde(rename = "charged_usd")]
    pub charged: Nanodollars,
    /// LiteLLM's cost minus ours in billionths of a dollar, over the matched calls with a known expected cost.
    pub delta_cost_nanodollars: i64,
    /// The number of matched calls without a known expected cost.
    pub uncompared: u64,
    /// Matched calls that differ in tokens or in cost.
    pub different: Vec<CallDifference>,
}

/// One call that only one side has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnmatchedCall {
    pub call_id: String,
    pub run: String,
    pub account: String,
    pub model: Option<String>,
    pub input: Tokens,
    pub output: Tokens,
    #[serde(rename = "cost_usd")]
    pub cost: Nanodollars,
    #[serde(serialize_with = "serialize_rfc3339")]
    pub started: SystemTime,
}

/// The difference of one call that both sides have: LiteLLM's figures minus ours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CallDifference {
    pub call_id: String,
    pub run: String,
    pub model: Option<String>,
    pub input: i64,
    pub output: i64,
    pub cost_nanodollars: i64,
    /// True if our own tokens are an estimate, so that a difference means little.
    pub is_estimate: bool,
}

/// An error of a comparison.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    #[error(transparent)]
    Billing(#[from] super::BillingError),
    #[error(transparent)]
    Litellm(#[from] litellm::LitellmError),
}

impl ReconcileReport {
    /// Returns true if both sides have the same calls, apart from pending calls.
    pub fn is_clean(&self) -> bool {
        self.missing.is_empty()
            && self.unknown.is_empty()
            && self.conflicting.is_empty()
            && !self.is_partial
    }
}

impl BillingStore {
    /// Reads from LiteLLM the calls that match a filter, compares them with ours, and writes the missing receipts.
    ///
    /// # Errors
    /// Returns an error if LiteLLM does not answer, or the billing store cannot be read or written.
    pub async fn reconcile(
        &self,
        client: &LitellmClient,
        filter: &CallFilter,
        now: SystemTime,
    ) -> Result<ReconcileReport, ReconcileError> {
        let deleted_before = self.complete_since().await?.filter(|time| *time > filter.since);
        // Calls before this time may be deleted here, and would look unknown.
        let since = deleted_before.unwrap_or(filter.since).min(filter.until);
        let filter = &CallFilter { since, ..filter.clone() };
        // LiteLLM's rows are read before ours, so that a call that begins in between is not reported as missing. The
        // margin allows for a different clock.
        let window = SpendLogWindow {
            since: filter.since.checked_sub(TIME_MARGIN).unwrap_or(filter.since),
            until: filter.until + TIME_MARGIN,
            account: filter.account.clone(),
        };
        let mut rows = client.fetch_rows(&window).await?;
        rows.notices.retain(|row| filter.run.is_none() || row.run == filter.run);
        let facts = self.find_calls(filter).await?;
        let ids = rows.notices.iter().map(|row| row.call_id.clone()).collect();
        // Only rows of recorded calls are written. The other rows are judged by their deployment, or by their run.
        let known = self.known_call_ids(ids).await?;
        let fates = self.ingest_known(&rows, &known).await?;
        let runs = rows.notices.iter().filter(|row| row.deployment.is_none());
        let runs = self.known_runs(runs.filter_map(|row| row.run.clone()).collect()).await?;
        let deployment = self.deployment_id().await?;
        let beside = ReconcileContext { known, runs, deployment, now, bound: self.receipt_bound() };
        Ok(ReconcileReport {
            deleted_before,
            ..build_report(filter, &facts, rows, &fates, &beside)
        })
    }

    /// Reads single calls from LiteLLM by their ids. Returns the calls that LiteLLM does not have, or `None` if LiteLLM
    /// cannot filter by an id.
    ///
    /// # Errors
    /// Returns an error under the same conditions as [`reconcile`](Self::reconcile).
    pub async fn query_calls(
        &self,
        client: &LitellmClient,
        calls: &[UnreceiptedCall],
    ) -> Result<Option<Vec<UnreceiptedCall>>, ReconcileError> {
        let mut strange = vec![];
        for call in calls {
            let Some(rows) = client.fetch_call(&call.call_id, call.started).await? else {
                return Ok(None);
            };
            // If LiteLLM has only failed attempts or no price, LiteLLM does not know the call's charge yet.
            if rows.iter().all(ChargeNotice::names_no_charge) {
                strange.push(call.clone());
            }
            self.ingest_notices(rows).await?;
        }
        Ok(Some(strange))
    }

    /// Ingests the rows whose calls are in the billing store, and returns the outcomes by call id. Other rows are not
    /// stored, because no usage would ever match them.
    async fn ingest_known(
        &self,
        rows: &SpendLogRows,
        known: &HashSet<String>,
    ) -> Result<HashMap<String, Vec<IngestOutcome>>, super::BillingError> {
        let ours = rows.notices.iter().filter(|row| known.contains(&row.call_id));
        let ours: Vec<ChargeNotice> = ours.cloned().collect();
        let ids: Vec<_> = ours.iter().map(|row| row.call_id.clone()).collect();
        let mut fates: HashMap<_, Vec<_>> = HashMap::new();
        for (id, fate) in ids.into_iter().zip(self.ingest_notices(ours).await?) {
            fates.entry(id).or_default().push(fate);
        }
        Ok(fates)
    }
}

/// The facts that the comparison needs in addition to the two sides.
struct ReconcileContext {
    known: HashSet<String>,
    runs: HashSet<String>,
    deployment: String,
    now: SystemTime,
    bound: Duration,
}

impl ReconcileContext {
    /// Returns true if a row belongs to this billing store.
    fn is_ours(&self, row: &ChargeNotice) -> bool {
        match (&row.deployment, &row.run) {
            (Some(named), _) => *named == self.deployment,
            (None, Some(run)) => self.runs.contains(run),
            (None, None) => false,
        }
    }
}

fn build_report(
    filter: &CallFilter,
    facts: &[CallUsage],
    rows: SpendLogRows,
    fates: &HashMap<String, Vec<IngestOutcome>>,
    at: &ReconcileContext,
) -> ReconcileReport {
    let mut report = ReconcileReport::new(filter, &rows);
    // Among the rows of a call, the row with the highest precedence comes first. The reversed order inserts that row
    // last, so the map keeps it.
    let rows = rows.notices.into_iter().rev();
    let mut theirs: HashMap<String, ChargeNotice> =
        rows.map(|row| (row.call_id.clone(), row)).collect();
    for fact in facts {
        // A row that names no charge does not match a call that used tokens: that call stays pending or missing.
        match theirs.remove(&fact.call_id).filter(|row| row.is_charge_for(fact)) {
            Some(row) => {
                report.add_match(fact, &row);
                let fates = fates.get(&fact.call_id).map_or(&[][..], Vec::as_slice);
                report.receipts_written += u64::from(fates.contains(&IngestOutcome::New));
                if fates.contains(&IngestOutcome::Conflicting) {
                    report.conflicting.push(UnmatchedCall::from_notice(row));
                }
            }
            // Only billable calls of LiteLLM can be missing; the others have no row there.
            None if !fact.is_billable() || !fact.is_billed_by_litellm() => {}
            None if fact.settled + at.bound >= at.now => report.pending += 1,
            None => report.missing.push(UnmatchedCall::from_usage(fact)),
        }
    }
    // The query had a margin on both sides; rows in the margin are compared but never reported as unknown.
    let is_asked_for = |row: &ChargeNotice| (filter.since..filter.until).contains(&row.started);
    let is_unknown = |row: &ChargeNotice| !at.known.contains(&row.call_id) && at.is_ours(row);
    let strangers = theirs.into_values().filter(|row| is_unknown(row) && is_asked_for(row));
    // Our own record of a call may come a moment after LiteLLM's, so a recent call is pending, not unknown.
    let (late, unknown): (Vec<_>, Vec<_>) =
        strangers.partition(|row| row.ended + at.bound >= at.now);
    report.pending += late.len() as u64;
    report.unknown = unknown.into_iter().map(UnmatchedCall::from_notice).collect();
    report.unknown.sort_by(|one, other| one.call_id.cmp(&other.call_id));
    report
}

impl ReconcileReport {
    fn new(filter: &CallFilter, rows: &SpendLogRows) -> Self {
        Self {
            since: filter.since,
            until: filter.until,
            deleted_before: None,
            way: rows.source,
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

    fn add_match(&mut self, fact: &CallUsage, row: &ChargeNotice) {
        self.matched += 1;
        self.charged = self.charged + row.amount;
        let input = signed_difference(row.input.0, fact.usage.input.0);
        let output = signed_difference(row.output.0, fact.usage.output.0);
        let cost = match fact.expected_cost() {
            // Three cases: a known price is compared; a call that must be free is compared with 0; a call without a
            // price of ours cannot be compared.
            Some(expected) => signed_difference(row.amount.0, expected.0),
            None if !fact.is_billable() => signed_difference(row.amount.0, 0),
            None => {
                self.uncompared += 1;
                0
            }
        };
        // Rounding may differ by a billionth of a dollar.
        let cost = if cost.abs() <= 1 { 0 } else { cost };
        self.delta_input = self.delta_input.saturating_add(input);
        self.delta_output = self.delta_output.saturating_add(output);
        self.delta_cost_nanodollars = self.delta_cost_nanodollars.saturating_add(cost);
        if (input, output, cost) != (0, 0, 0) {
            self.different.push(CallDifference {
                call_id: fact.call_id.clone(),
                run: fact.run.clone(),
                model: fact.model.clone(),
                input,
                output,
                cost_nanodollars: cost,
                is_estimate: fact.usage.source == crate::llm::budget::UsageSource::Estimated,
            });
        }
    }
}

impl UnmatchedCall {
    fn from_usage(fact: &CallUsage) -> Self {
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

    fn from_notice(row: ChargeNotice) -> Self {
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
fn serialize_optional_rfc3339<S: Serializer>(
    time: &Option<SystemTime>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => serialize_rfc3339(time, serializer),
        None => serializer.serialize_none(),
    }
}

fn signed_difference(theirs: u64, ours: u64) -> i64 {
    i64::try_from(i128::from(theirs) - i128::from(ours)).unwrap_or(i64::MAX)
}

/// The maximum difference between LiteLLM's and our time of a call's beginning. Our choice.
const TIME_MARGIN: Duration = Duration::from_mins(10);
