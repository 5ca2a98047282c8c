//! Questions about a spent budget: a person raises the limit, and the calls that wait go on.
//!
//! 1. The first call that a limit refuses writes the question. A task of the run waits for its end.
//! 2. Further calls that the same limit refuses wait for the end of the same question.
//! 3. If the person raises the limit, the task uses the answer up, records the raise, and raises the ledger's limits.
//! 4. Each call then reserves again. Without a raise, each call ends with its first refusal, and the same limit is not
//!    asked about again.
//!
//! **Invariant:** the ledger's limits rise only after the transaction that uses the answer up, and after the record.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, watch};

use super::store::ApprovalStore;
use super::{
    ApprovalRow, ApprovalState, BUDGET_TOOL, BudgetQuestion, BudgetSubject, format_unix_millis,
    to_unix_millis,
};
use crate::base::db::DatabaseError;
use crate::base::task_group::TaskGroup;
use crate::llm::budget::{
    BudgetAnswer, BudgetAsker, BudgetError, BudgetLedger, Nanodollars, SpendingLimit,
    SpendingLimits,
};
use crate::telemetry::audit::AuditLog;
use crate::telemetry::audit::approval_records::{
    ApprovalResolvedRecord, BudgetQuestionRecord, BudgetRaisedRecord,
};
use crate::telemetry::metrics::MetricsRegistry;
use crate::tools::rule_facts::ToolRunFacts;

/// The questions about the budget of one run.
pub struct BudgetQuestions(Arc<BudgetQuestionsShared>);

/// The parts of a run that its questions about a budget need.
pub struct BudgetQuestionParts {
    pub run: ToolRunFacts,
    /// The digest of the policy about the run's tools.
    pub policy: String,
    pub store: ApprovalStore,
    /// The time for an answer.
    pub ttl: Duration,
    pub ledger: Arc<BudgetLedger>,
    pub audit: Arc<AuditLog>,
    pub metrics: Arc<MetricsRegistry>,
    pub tasks: TaskGroup,
}

struct BudgetQuestionsShared {
    parts: BudgetQuestionParts,
    /// Permits for the calls of the run that wait.
    held: Semaphore,
    /// The last question about each limit.
    asked: Mutex<BTreeMap<SpendingLimit, AskedLimit>>,
}

/// The question about one value of a limit.
struct AskedLimit {
    id: String,
    value: u64,
    /// True when the question has ended.
    has_ended: watch::Receiver<bool>,
}

impl BudgetQuestions {
    pub fn new(parts: BudgetQuestionParts) -> Self {
        let held = Semaphore::new(MAX_HELD_CALLS);
        Self(Arc::new(BudgetQuestionsShared { parts, held, asked: Mutex::default() }))
    }
}

impl BudgetAsker for BudgetQuestions {
    fn ask_for_budget(&self, refusal: BudgetError) -> BudgetAnswer<'_> {
        Box::pin(async move {
            let Some((limit, value)) = refusal.spent_limit() else { return Err(refusal) };
            let parts = &self.0.parts;
            // A call without a place is told to come again. It must not end the run while others wait for the person.
            let places = (self.0.held.try_acquire().ok(), parts.store.hold_unfunded_call());
            let (Some(_of_run), Some(_of_process)) = places else {
                return Err(BudgetError::Reserved { kind: refusal.limit_kind() });
            };
            let mut has_ended = self.0.join_question(limit, value);
            // A sender that is gone has told the end as well.
            let _ = has_ended.wait_for(|ended| *ended).await;
            // The ledger has the last word: another answer may have raised this limit, too.
            if parts.ledger.spending_limits().is_above(limit, value) {
                Ok(())
            } else {
                Err(refusal)
            }
        })
    }
}

impl BudgetQuestionsShared {
    /// Joins the question about a value of a limit, or asks it.
    fn join_question(self: &Arc<Self>, limit: SpendingLimit, value: u64) -> watch::Receiver<bool> {
        let mut asked = self.lock_asked();
        // The limit is read under the lock: a raise that comes later finds the question in the map.
        let limits = self.parts.ledger.spending_limits();
        if limits.is_above(limit, value) {
            return watch::channel(true).1;
        }
        if let Some(last) = asked.get(&limit).filter(|last| last.value == value) {
            return last.has_ended.clone();
        }
        let id = format!("apr-{}", uuid::Uuid::now_v7().simple());
        let (sender, has_ended) = watch::channel(false);
        asked.insert(limit, AskedLimit { id: id.clone(), value, has_ended: has_ended.clone() });
        drop(asked);
        let budget = BudgetQuestion { limit, limits, spent: self.parts.ledger.spent_amount() };
        let own = Arc::clone(self);
        // The question outlives its first call, whose client may leave.
        self.parts.tasks.spawn_task(async move {
            if let Err(error) = Box::pin(own.ask_and_wait(&id, budget)).await {
                tracing::error!(%error, "a question about a budget cannot be asked");
                own.lock_asked().remove(&limit);
            }
            sender.send_replace(true);
        });
        has_ended
    }

    async fn ask_and_wait(&self, id: &str, budget: BudgetQuestion) -> Result<(), DatabaseError> {
        let BudgetQuestionParts { store, audit, metrics, tasks, ledger, ttl, .. } = &self.parts;
        let (asked, now) = (Instant::now(), store.read_time());
        // A question lives no longer than its run.
        let left = ledger.deadline().map(|end| end.saturating_duration_since(asked));
        let not_after_ms = to_unix_millis(now + left.map_or(*ttl, |left| left.min(*ttl)));
        let row = self.question_row(id, budget, (to_unix_millis(now), not_after_ms));
        let Some(mut watch) = store.ask(row.clone()).await? else {
            tracing::warn!("a run has asked too often to ask about its budget");
            return Ok(());
        };
        record_question(audit, &row);
        let open = metrics.record_approval_request("budget");
        let run_ends = tasks.shutdown_token().cancelled();
        let resolved = store.wait_resolved(&mut watch, not_after_ms, run_ends).await;
        let (state, decision, by, raise) = match &resolved {
            Ok(Some(row)) => (row.state, row.decision(), row.by.as_deref(), row.raised),
            // A question that cannot be read counts as one without an answer.
            Ok(None) | Err(_) => (ApprovalState::Withdrawn, ApprovalState::Withdrawn, None, None),
        };
        open.record_result(decision.as_str(), asked.elapsed());
        audit.record_approval_result(&ApprovalResolvedRecord {
            approval: id,
            digest: &row.digest,
            decision: decision.as_str(),
            by,
            after_ms: u64::try_from(asked.elapsed().as_millis()).unwrap_or(u64::MAX),
        });
        if let (ApprovalState::Approved, Some(raise)) = (state, raise)
            && store.consume(id, &row.digest, None, store.read_time()).await?
        {
            self.raise_limits((id, by), &raise).await;
        }
        resolved.map(|_| ())
    }

    /// Records a raise, puts it in force, and closes the other questions that it answers.
    async fn raise_limits(&self, (id, by): (&str, Option<&str>), raise: &SpendingLimits) {
        let BudgetQuestionParts { ledger, audit, store, .. } = &self.parts;
        audit.record_budget_raise(&BudgetRaisedRecord { approval: id, by, raised: raise });
        let limits = ledger.raise_limits(raise);
        let answered: Vec<_> = self
            .lock_asked()
            .iter()
            .filter(|(limit, other)| other.id != id && limits.is_above(**limit, other.value))
            .map(|(_, other)| other.id.clone())
            .collect();
        for other in answered {
            let end = (ApprovalState::Withdrawn, RAISED_BY_OTHER);
            if let Err(error) = store.close(&other, end, store.read_time()).await {
                tracing::error!(%error, "a question about a budget cannot be closed");
            }
        }
    }

    fn question_row(
        &self,
        id: &str,
        budget: BudgetQuestion,
        (requested_ms, not_after_ms): (i64, i64),
    ) -> ApprovalRow {
        let BudgetQuestionParts { run, policy, .. } = &self.parts;
        let subject = BudgetSubject {
            run: &run.id,
            attempt: &run.attempt,
            agent: &run.agent_id,
            budget: &budget,
            policy,
            not_after_ms,
        };
        ApprovalRow {
            id: id.to_owned(),
            run: run.id.clone(),
            account: run.account.clone(),
            agent: run.agent_id.clone(),
            tool: BUDGET_TOOL.to_owned(),
            rule: BUDGET_RULE.to_owned(),
            definition: String::new(),
            policy: policy.clone(),
            digest: subject.digest(),
            arguments: None,
            evidence: BTreeMap::new(),
            price: Nanodollars::ZERO,
            state: ApprovalState::Pending,
            requested_ms,
            not_after_ms,
            resolved_ms: None,
            by: None,
            reason: None,
            call: None,
            budget: Some(budget),
            raised: None,
            standing: None,
        }
    }

    fn lock_asked(&self) -> MutexGuard<'_, BTreeMap<SpendingLimit, AskedLimit>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn record_question(audit: &AuditLog, row: &ApprovalRow) {
    let Some(budget) = &row.budget else { return };
    audit.record_budget_question(&BudgetQuestionRecord {
        approval: &row.id,
        digest: &row.digest,
        rule: &row.rule,
        limit: budget.limit,
        limits: &budget.limits,
        spent: budget.spent,
        not_after: format_unix_millis(row.not_after_ms),
    });
}

/// The most calls of a run that wait for a larger budget. Our choice: further calls are told to come again.
const MAX_HELD_CALLS: usize = 8;

/// The name in place of a rule's in a question about a budget.
const BUDGET_RULE: &str = "on_budget";

const RAISED_BY_OTHER: &str = "another answer has raised this limit, too";
