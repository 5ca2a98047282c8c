//! A call that a [standing approval](super::approval::standing) allows, and the proposal of a call that a rule denies.
//!
//! 1. A rule denies a call, or asks about it. If a person has allowed the same call before, it begins: the whole way of a
//!    call is taken, and the use is counted before the call is admitted.
//! 2. Else a call that a rule asks about waits for a person, and a denied call is refused. The refusal carries the proposal
//!    that lets a person allow the same call.
//!
//! What the run has seen is no matter of an earlier answer: while a taint rule guards the call, no standing approval counts
//! for it, and nothing is proposed. The same holds while the agent's policy asks about every call. Neither is a call that does not fit its tool, that no list names, or that the budget
//! refuses.

use std::sync::Arc;

use super::approval::agent_policy::PolicyVerdict;
use super::approval::standing::{
    ApprovalScope, ProposalOutcome, STANDING_PREFIX, StandingApproval, StandingOffer,
    StandingState, StandingSubject, standing_scopes,
};
use super::approval::store::ApprovalStore;
use super::approval::{OnDenial, RunApprovals, format_unix_millis};
use super::call_table::ToolCall;
use super::exec_request::{ToolArguments, ToolExecRequest};
use super::job::ToolJob;
use super::policy::{GrantedTool, ToolDenial};
use super::program_digest::check_digestible;
use super::refusal::ToolRefusal;
use super::rule_facts::ToolCallFacts;
use super::run_tools::{
    ApprovedSubject, CheckedCall, RunToolParts, RunTools, StandingUse, ToolRequestFacts,
};
use crate::base::db::DatabaseError;
use crate::telemetry::audit::approval_records::{ApprovalProposedRecord, ApprovalUsedRecord};

/// A denied call that a person may allow.
struct DeniedCall {
    request: ToolExecRequest,
    /// The rules that deny it.
    rules: Vec<String>,
    /// The salted digest of the arguments, for the record.
    arguments: String,
    argument_bytes: u64,
}

impl RunTools {
    /// Starts a call that a rule denies, if a person has allowed the same call before.
    ///
    /// # Errors
    /// Returns the denial, with the proposal that a person may grant. The caller records it.
    pub(super) async fn start_denied_call(
        &self,
        denial: ToolDenial,
        request: ToolExecRequest,
        facts: &ToolRequestFacts,
    ) -> Result<Arc<ToolCall>, ToolRefusal> {
        let parts = self.parts();
        let found = parts.policy.find_tool(&request.tool).ok();
        let denied = found.and_then(|tool| Some((tool, parts.denying_rules(tool, &request)?)));
        let Some((tool, rules)) = denied else { return Err(ToolRefusal::Denied(denial)) };
        if parts.judge_by_agent_policy(tool).await? == PolicyVerdict::AskAlways {
            return Err(ToolRefusal::Denied(denial));
        }
        // A client that has lost the answer of an allowed call asks for the same call.
        let arguments = facts.arguments.clone().unwrap_or_default();
        let earlier = request.idempotency_key.as_deref();
        let earlier = earlier.and_then(|key| self.calls().find_keyed_call(key));
        if let Some(call) = earlier
            && call.tool == tool.definition.name
            && call.arguments_digest == arguments
        {
            return Ok(call);
        }
        if let Some(call) = self.start_granted_call((tool, &rules), &request, facts).await? {
            return Ok(call);
        }
        let argument_bytes = facts.argument_bytes;
        let denied = DeniedCall { request, rules, arguments, argument_bytes };
        // A client that leaves now must not tear the proposal from its record.
        let proposal = Arc::clone(self.shared_parts()).propose_call(denied);
        Err(match parts.tasks.run_detached(proposal).await {
            Some(proposal) => ToolRefusal::Proposed { denial, proposal },
            None => ToolRefusal::Denied(denial),
        })
    }

    /// Starts a call that a rule asks about, if a person has allowed the same call before; else asks.
    ///
    /// # Errors
    /// Returns the reason why the call did not begin and no person is asked. The caller records the refusal.
    pub(super) async fn start_asking_call(
        &self,
        (tool, rule): (&GrantedTool, &Arc<str>),
        request: ToolExecRequest,
        facts: &ToolRequestFacts,
    ) -> Result<Arc<ToolCall>, ToolRefusal> {
        let parts = self.parts();
        let has_standing =
            parts.approvals.as_ref().is_some_and(|approvals| approvals.times.has_standing());
        if has_standing && parts.judge_by_agent_policy(tool).await? != PolicyVerdict::AskAlways {
            // A call that waits, or whose end no client has received yet, is no new call.
            let exact = parts.salted_digest(request.arguments.text());
            if !self.calls().has_same_call(&tool.definition.name, &exact)
                && let Some(call) = self.start_granted_call((tool, &[]), &request, facts).await?
            {
                return Ok(call);
            }
        }
        self.ask_about_call((tool, rule), request, facts).await
    }

    /// Starts a call by a standing approval. Returns `None` if there is none, or other calls have used all of them up.
    async fn start_granted_call(
        &self,
        denied: (&GrantedTool, &[String]),
        request: &ToolExecRequest,
        facts: &ToolRequestFacts,
    ) -> Result<Option<Arc<ToolCall>>, ToolRefusal> {
        // Another call may use an approval up between the look and the use; then the next one counts.
        for standing in self.parts().find_standing(denied, &request.arguments).await {
            match self.begin_call(denied.0, request.clone(), facts, Some(standing)).await {
                Err(ToolRefusal::ApprovalLost(STANDING_LOST)) => {}
                begun => return begun.map(Some),
            }
        }
        Ok(None)
    }
}

impl RunToolParts {
    /// Returns the rules that deny a call, if a person may allow it in spite of them.
    fn denying_rules(&self, tool: &GrantedTool, request: &ToolExecRequest) -> Option<Vec<String>> {
        let approvals = self.approvals.as_ref()?;
        if approvals.times.on_denial != OnDenial::Propose || self.is_tainted(tool, false) {
            return None;
        }
        self.overridable_rules(tool, &request.arguments)
    }

    fn overridable_rules(
        &self,
        tool: &GrantedTool,
        arguments: &ToolArguments,
    ) -> Option<Vec<String>> {
        tool.overridable_rules(&ToolCallFacts { run: &self.run, arguments: &arguments.members() })
    }

    /// Returns true if what the run has seen guards the tool. `has_place` states that the ledger counts the call itself.
    pub(super) fn is_tainted(&self, tool: &GrantedTool, has_place: bool) -> bool {
        let name = &tool.definition.name;
        self.policy.taint().judge_call(name, (&self.ledger, has_place)).is_some()
    }

    fn standing_subject<'a>(
        &'a self,
        tool: &'a GrantedTool,
        arguments: &ToolArguments,
    ) -> StandingSubject<'a> {
        StandingSubject {
            account: &self.run.account,
            agent: &self.run.agent_id,
            tool: &tool.definition.name,
            definition: &tool.definition.digest,
            rules: &tool.rules_digest,
            arguments: StandingSubject::digest_arguments(arguments.text()),
        }
    }

    /// Finds the approvals in force for a call, and digests the call.
    async fn find_standing(
        &self,
        (tool, denying): (&GrantedTool, &[String]),
        arguments: &ToolArguments,
    ) -> Vec<StandingUse> {
        let Some(approvals) = &self.approvals else { return vec![] };
        let store = &approvals.store;
        if self.is_tainted(tool, false) {
            return vec![];
        }
        let look = async {
            let salt = store.standing_salt().await?;
            let key = self.standing_subject(tool, arguments).key(&salt);
            Ok((store.find_granted(&key, &self.run.id).await?, salt))
        };
        let (found, salt) = match look.await {
            Ok(found) => found,
            Err(error) => {
                log_failure(store, &error);
                return vec![];
            }
        };
        // A program is read only for a call that a person has allowed.
        if found.is_empty() {
            return vec![];
        }
        let subject = self.digest_standing(tool, arguments, &salt).await;
        let Some(subject) = subject else { return vec![] };
        let fits =
            |row: &StandingApproval| row.digest == subject.digest && row.covers_rules(denying);
        let found = found.into_iter().filter(fits);
        found.map(|row| StandingUse { id: row.id, subject: subject.clone() }).collect()
    }

    /// Digests a call as a standing approval names it; `None` if its tool or standing approvals are not configured so any
    /// more, or its program cannot be digested.
    async fn digest_standing(
        &self,
        tool: &GrantedTool,
        arguments: &ToolArguments,
        salt: &str,
    ) -> Option<ApprovedSubject> {
        if find_job(tool).is_some_and(|job| check_digestible(job).is_err()) {
            return None;
        }
        if !self.approvals.as_ref()?.store.allows_standing() {
            return None;
        }
        let program = self.digest_present_program(tool).await.ok()?;
        let subject = self.standing_subject(tool, arguments);
        let digest = subject.digest(salt, program.digest.as_deref());
        Some(ApprovedSubject::new(digest, program))
    }

    /// Returns the standing approval that an answer about a call can make; `None` if an answer is for one call only.
    pub(super) async fn describe_offer(
        &self,
        tool: &GrantedTool,
        arguments: &ToolArguments,
        subject: &ApprovedSubject,
    ) -> Result<Option<StandingOffer>, DatabaseError> {
        let Some(approvals) = &self.approvals else { return Ok(None) };
        let scopes = standing_scopes(&approvals.times.scopes, subject.is_interpreter);
        if scopes.is_empty() || self.is_tainted(tool, false) {
            return Ok(None);
        }
        let policy = self.read_agent_policy().await?;
        if policy.judge_tool(&tool.definition.name) == PolicyVerdict::AskAlways {
            return Ok(None);
        }
        let salt = approvals.store.standing_salt().await?;
        let standing = self.standing_subject(tool, arguments);
        let key = standing.key(&salt);
        let digest = standing.digest(&salt, subject.program.as_deref());
        Ok(Some(StandingOffer { key, digest, scopes, answered: None }))
    }

    /// Counts a use of a standing approval, for a call that is about to be admitted. The whole call is checked again: what
    /// was allowed is what begins now.
    pub(super) async fn use_standing(
        &self,
        tool: &GrantedTool,
        checked: &CheckedCall,
        standing: &StandingUse,
    ) -> Result<(), ToolRefusal> {
        let lost = || ToolRefusal::ApprovalLost(STANDING_LOST);
        let approvals = self.approvals.as_ref().ok_or_else(lost)?;
        // A run that ends lets its open calls finish, and begins none.
        if self.tasks.shutdown_token().is_cancelled() {
            return Err(ToolRefusal::Ended);
        }
        tool.definition.parameters.check_arguments(&checked.arguments.members())?;
        if self.is_tainted(tool, true) || self.overridable_rules(tool, &checked.arguments).is_none()
        {
            return Err(lost());
        }
        if self.judge_by_agent_policy(tool).await? == PolicyVerdict::AskAlways {
            return Err(lost());
        }
        let salt = approvals.store.standing_salt().await?;
        let subject = self.digest_standing(tool, &checked.arguments, &salt).await;
        let subject = subject.filter(|subject| *subject == standing.subject).ok_or_else(lost)?;
        let used = approvals.store.use_standing((&standing.id, &subject.digest), &self.run.id);
        let used = used.await?.ok_or_else(lost)?;
        let call = checked.slot.call();
        self.audit.record_approval_use(&ApprovalUsedRecord {
            approval: &used.id,
            call: &call.id,
            tool: &call.tool,
            digest: &used.digest,
            rules: &used.rules,
            scope: used.scope.as_str(),
            by: used.by.as_deref(),
            granted_at: used.granted_ms.map(format_unix_millis),
            not_after: format_unix_millis(used.not_after_ms),
            used: used.used,
            max_uses: used.max_uses,
        });
        self.metrics.record_standing_use(used.scope.as_str());
        Ok(())
    }

    /// Proposes a denied call to a person. Returns the id of the proposal; `None` if none can be made.
    async fn propose_call(self: Arc<Self>, denied: DeniedCall) -> Option<String> {
        let approvals = self.approvals.as_ref()?;
        let tool = self.policy.find_tool(&denied.request.tool).ok()?;
        if denied.request.arguments.text().len() > MAX_PROPOSED_ARGUMENT_BYTES {
            return None;
        }
        let proposed = self.try_propose(approvals, tool, &denied).await;
        proposed.map_err(|error| log_failure(&approvals.store, &error)).ok().flatten()
    }

    async fn try_propose(
        &self,
        approvals: &RunApprovals,
        tool: &GrantedTool,
        denied: &DeniedCall,
    ) -> Result<Option<String>, DatabaseError> {
        let (store, arguments) = (&approvals.store, &denied.request.arguments);
        let salt = store.standing_salt().await?;
        let key = self.standing_subject(tool, arguments).key(&salt);
        if let Some(known) = store.find_proposed(&key).await? {
            return Ok(Some(known));
        }
        // A run that is denied again and again costs no more than reads.
        let Ok(permit) = approvals.proposals.try_acquire() else { return Ok(None) };
        permit.forget();
        let Some(subject) = self.digest_standing(tool, arguments, &salt).await else {
            return Ok(None);
        };
        let widest = standing_scopes(&ApprovalScope::ALL, subject.is_interpreter);
        let Some(scope) = widest.last().copied() else { return Ok(None) };
        let now = store.now_ms();
        let row = StandingApproval {
            id: format!("{STANDING_PREFIX}{}", uuid::Uuid::now_v7().simple()),
            state: StandingState::Proposed,
            scope,
            key,
            digest: subject.digest,
            run: self.run.id.clone(),
            owner: None,
            account: self.run.account.clone(),
            agent: self.run.agent_id.clone(),
            tool: tool.definition.name.to_string(),
            rules: denied.rules.clone(),
            definition: tool.definition.digest.clone(),
            arguments: Some(arguments.text().to_owned()),
            evidence: tool.collect_evidence(arguments.members()),
            price: tool.price,
            created_ms: now,
            not_after_ms: now.saturating_add(PROPOSAL_LIFETIME_MS),
            max_uses: 1,
            used: 0,
            granted_ms: None,
            by: None,
            reason: None,
            revoked_by: None,
        };
        Ok(match store.propose(row.clone()).await? {
            ProposalOutcome::Known(id) => Some(id),
            ProposalOutcome::Full => None,
            ProposalOutcome::New => {
                self.record_proposal(&row, denied);
                Some(row.id)
            }
        })
    }

    fn record_proposal(&self, row: &StandingApproval, denied: &DeniedCall) {
        self.audit.record_approval_proposal(&ApprovalProposedRecord {
            approval: &row.id,
            tool: &row.tool,
            digest: &row.digest,
            rules: &row.rules,
            arguments: &denied.arguments,
            argument_bytes: denied.argument_bytes,
            evidence: &row.evidence,
            not_after: format_unix_millis(row.not_after_ms),
        });
        self.metrics.record_approval_proposal();
    }
}

/// Returns the program of a tool that runs in a sandbox.
fn find_job(tool: &GrantedTool) -> Option<&ToolJob> {
    tool.definition.program.sandbox_job().map(|job| &**job)
}

/// Logs that the store cannot be used. The call is judged as if there were no standing approval.
fn log_failure(store: &ApprovalStore, error: &DatabaseError) {
    // A run can call again and again.
    if let Some(more) = store.failure_lines().count_event("standing") {
        tracing::error!(%error, more, "the standing approvals cannot be read or written");
    }
}

/// The reason why a standing approval does not count for a call. The client never reads it: the call is judged again without
/// the approval.
const STANDING_LOST: &str = "the standing approval is used up, revoked or expired";

/// The time in which a person may grant a proposal. Our choice: longer than a night.
const PROPOSAL_LIFETIME_MS: i64 = 24 * 60 * 60 * 1000;

/// The longest arguments of a proposal, in bytes. Our choice: a person reads no more with care, and thousands are kept.
const MAX_PROPOSED_ARGUMENT_BYTES: usize = 16 * 1024;
