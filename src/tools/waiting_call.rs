//! A call that waits for a person: the question, the wait, and the way on.
//!
//! 1. The call is checked like every call, and its budget must suffice, so that no person is asked in vain.
//! 2. The question is written, and a task of the run waits for its end. The client waits for at most `hold`.
//! 3. If the person allows the call, the task takes the whole way of a call again: every layer, the budget, the answer,
//!    the record, the program. Without an answer, or with a no, the call ends with an error.
//!
//! The task ends with the run, so a waiting call never delays the run's end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::approval::store::ApprovalWatch;
use super::approval::{
    ApprovalRow, ApprovalState, ApprovalSubject, RunApprovals, SCOPE_ONCE, format_unix_millis,
    to_unix_millis,
};
use super::call_table::{
    CallQuestion, CallSlotOutcome, DENIED_CODE, OpenCallSlot, ToolCall, ToolCallEnd,
};
use super::exec_request::{ToolArguments, ToolExecRequest};
use super::policy::{GrantedTool, PolicyLayer};
use super::program_digest::{DigestedProgram, digest_program};
use super::refusal::ToolRefusal;
use super::run_tools::{
    ApprovedSubject, CheckedCall, RunToolParts, RunTools, ToolRequestFacts, UnadmittedCall,
    check_arguments, reserve_request,
};
use crate::llm::budget::Nanodollars;
use crate::telemetry::audit::approval_records::{ApprovalRequestedRecord, ApprovalResolvedRecord};
use crate::telemetry::audit::tool_records::{ToolOutcome, ToolRefusedRecord};
use crate::telemetry::metrics::OpenApprovalGuard;

/// A call whose question is written.
struct WaitingCall {
    checked: CheckedCall,
    watch: ApprovalWatch,
    digest: String,
    rule: Arc<str>,
    asked: Instant,
    open: OpenApprovalGuard,
}

impl RunTools {
    /// Asks a person about a call, or joins the same call that was asked about before.
    ///
    /// # Errors
    /// Returns the reason why no person is asked. The caller records the refusal.
    pub(super) async fn ask_about_call(
        &self,
        (tool, rule): (&GrantedTool, &Arc<str>),
        request: ToolExecRequest,
        facts: &ToolRequestFacts,
    ) -> Result<Arc<ToolCall>, ToolRefusal> {
        let parts = self.parts();
        let approvals = parts.require_approvals()?;
        let (asked, now) = (Instant::now(), approvals.store.read_time());
        // 1. A question lives no longer than its run.
        let left = parts.ledger.deadline().map(|end| end.saturating_duration_since(asked));
        let ttl = left.map_or(approvals.times.ttl, |left| left.min(approvals.times.ttl));
        let question = CallQuestion::new(
            format!("apr-{}", uuid::Uuid::now_v7().simple()),
            parts.salted_digest(request.arguments.text()),
            to_unix_millis(now + ttl),
        );
        // 2. Take a place, or join the same call.
        let arguments = facts.arguments.as_deref().unwrap_or_default();
        let key = request.idempotency_key.as_deref();
        let call = (&tool.definition.name, arguments);
        let slot = match self.calls().open_waiting_call(call, key, question)? {
            CallSlotOutcome::Joined(call) => return Ok(call),
            CallSlotOutcome::Opened(slot) => slot,
        };
        // 3. No person is asked about a call that the budget does not allow. A client that joins an earlier call needs no
        //    budget.
        if let Err(refusal) = parts.check_budget(tool) {
            return Err(drop_unasked(slot, refusal));
        }
        // 4. Ask. A client that leaves now must not tear the question from the task that waits for its answer.
        let call = Arc::clone(slot.call());
        let checked = CheckedCall {
            slot,
            arguments: request.arguments,
            argument_bytes: facts.argument_bytes,
            pid: facts.pid,
            approved: None,
            standing: None,
        };
        let ask = Arc::clone(self.shared_parts()).ask_person(checked, Arc::clone(rule), asked);
        parts.tasks.run_detached(ask).await?;
        Ok(call)
    }

    /// Waits for the end of a new call, for at most `wait`. While a person is asked, the request is held for at most
    /// `hold`.
    pub(super) async fn wait_for_end(
        &self,
        call: &ToolCall,
        wait: Duration,
    ) -> Option<Arc<ToolCallEnd>> {
        let hold = self.parts().approvals.as_ref().map_or(wait, |asked| asked.times.hold);
        self.wait_within(call, wait, hold).await
    }

    /// Waits for the end of a call, for at most `wait`, and at most `hold` of it while a person is asked. Only a few
    /// requests of the run are held; a further one does not wait.
    pub(super) async fn wait_within(
        &self,
        call: &ToolCall,
        wait: Duration,
        hold: Duration,
    ) -> Option<Arc<ToolCallEnd>> {
        let end = match (&self.parts().approvals, call.open_question()) {
            (Some(approvals), Some(_)) => {
                let permit = approvals.held.try_acquire();
                let hold = if permit.is_ok() { hold.min(wait) } else { Duration::ZERO };
                match call.wait_for_end(hold).await {
                    Some(end) => Some(end),
                    None if call.open_question().is_some() => return None,
                    None => call.wait_for_end(wait.saturating_sub(hold)).await,
                }
            }
            _ => call.wait_for_end(wait).await,
        };
        end.inspect(|_| call.mark_collected())
    }
}

impl RunToolParts {
    /// Writes the question about a call that has a place, and lets a task of the run wait for the answer.
    async fn ask_person(
        self: Arc<Self>,
        mut checked: CheckedCall,
        rule: Arc<str>,
        asked: Instant,
    ) -> Result<(), ToolRefusal> {
        // The digest comes after every bound: a large program is read only for a call that a person is asked about.
        let row = match self.describe_question(&mut checked, &rule).await {
            Ok(row) => row,
            Err(refusal) => return Err(drop_unasked(checked.slot, refusal)),
        };
        let approvals = self.require_approvals()?;
        let watch = match approvals.store.ask(row.clone()).await {
            Ok(Some(watch)) => watch,
            Ok(None) => return Err(drop_unasked(checked.slot, ToolRefusal::TooManyQuestions)),
            Err(error) => return Err(drop_unasked(checked.slot, error.into())),
        };
        // The task below writes the record of the answer, so this record always comes first.
        self.record_question(&row, &checked);
        let open = self.metrics.record_approval_request("call");
        let waiting = WaitingCall { checked, watch, digest: row.digest, rule, asked, open };
        let own = Arc::clone(&self);
        self.tasks.spawn_task(async move { own.wait_and_run(waiting).await });
        Ok(())
    }

    /// Digests a call, and returns its question.
    async fn describe_question(
        &self,
        checked: &mut CheckedCall,
        rule: &Arc<str>,
    ) -> Result<ApprovalRow, ToolRefusal> {
        let call = Arc::clone(checked.slot.call());
        let question = call.question.as_ref().ok_or(ToolRefusal::ApprovalLost(NO_QUESTION))?;
        let tool = self.policy.find_tool(&call.tool).map_err(ToolRefusal::NotGranted)?;
        let subject = self.digest_call((tool, question)).await?;
        let row = self.question_row((tool, rule), (question, &subject.digest), &checked.arguments);
        let standing = self.describe_offer(tool, &checked.arguments, &subject).await?;
        let requested_ms = self.require_approvals()?.store.now_ms();
        checked.approved = Some(subject);
        Ok(ApprovalRow { requested_ms, standing, ..row })
    }

    pub(super) fn require_approvals(&self) -> Result<&RunApprovals, ToolRefusal> {
        self.approvals.as_ref().ok_or(ToolRefusal::ApprovalLost(NO_SURFACE))
    }

    /// Returns the digest that an answer to a question about a call must name.
    async fn digest_call(
        &self,
        (tool, question): (&GrantedTool, &CallQuestion),
    ) -> Result<ApprovedSubject, ToolRefusal> {
        let program = self.digest_present_program(tool).await?;
        let agent_policy = self.read_agent_policy().await?.digest();
        let subject = ApprovalSubject {
            run: &self.run.id,
            attempt: &self.run.attempt,
            agent: &self.run.agent_id,
            tool: &tool.definition.name,
            definition: &tool.definition.digest,
            program: program.digest.as_deref(),
            arguments: &question.exact_arguments,
            policy: self.policy.digest(),
            agent_policy: &agent_policy,
            scope: SCOPE_ONCE,
            not_after_ms: question.not_after_ms,
        };
        let digest = subject.digest();
        Ok(ApprovedSubject::new(digest, program))
    }

    /// Digests the program of a tool that is configured as the run has it.
    pub(super) async fn digest_present_program(
        &self,
        tool: &GrantedTool,
    ) -> Result<DigestedProgram, ToolRefusal> {
        let store = &self.require_approvals()?.store;
        // The run keeps its configuration, but a tool that the operator has taken out or changed since needs no answer.
        let names = (&*self.run.agent_id, &*tool.definition.name);
        if !store.has_tool(names, (&tool.definition.digest, &tool.rules_digest)) {
            return Err(ToolRefusal::ApprovalLost(
                "the tool, the rules about it or the agent's list were changed since the run began",
            ));
        }
        let files = store.file_digests();
        let jobs = self.programs.jobs.as_ref();
        digest_program(&tool.definition, jobs, files).await.map_err(|error| {
            // A run can ask again and again.
            if let Some(more) = store.failure_lines().count_event("digest") {
                let tool = &*tool.definition.name;
                tracing::error!(tool, %error, more, "a tool's program cannot be digested");
            }
            ToolRefusal::ApprovalLost("the tool's program cannot be digested")
        })
    }

    /// Checks that the run and its budget allow a call, and reserves nothing.
    fn check_budget(&self, tool: &GrantedTool) -> Result<(), ToolRefusal> {
        self.switches.check_accepting()?;
        // Rates are not asked: they pass while the person thinks.
        Ok(self.ledger.check_tool_call(&reserve_request(tool))?)
    }

    fn question_row(
        &self,
        (tool, rule): (&GrantedTool, &Arc<str>),
        (question, digest): (&CallQuestion, &str),
        arguments: &ToolArguments,
    ) -> ApprovalRow {
        ApprovalRow {
            id: question.id.clone(),
            run: self.run.id.clone(),
            account: self.run.account.clone(),
            agent: self.run.agent_id.clone(),
            tool: tool.definition.name.to_string(),
            rule: rule.to_string(),
            definition: tool.definition.digest.clone(),
            policy: self.policy.digest().to_owned(),
            digest: digest.to_owned(),
            arguments: Some(arguments.text().to_owned()),
            evidence: tool.collect_evidence(arguments.members()),
            price: tool.price,
            state: ApprovalState::Pending,
            requested_ms: 0,
            not_after_ms: question.not_after_ms,
            resolved_ms: None,
            by: None,
            reason: None,
            call: None,
            budget: None,
            raised: None,
            standing: None,
        }
    }

    fn record_question(&self, row: &ApprovalRow, checked: &CheckedCall) {
        let call = checked.slot.call();
        self.audit.record_approval_request(&ApprovalRequestedRecord {
            approval: &row.id,
            call: &call.id,
            tool: &row.tool,
            digest: &row.digest,
            rule: &row.rule,
            arguments: &call.arguments_digest,
            argument_bytes: checked.argument_bytes,
            evidence: &row.evidence,
            not_after: format_unix_millis(row.not_after_ms),
        });
    }

    /// Waits until the question is closed, then begins or ends the call.
    async fn wait_and_run(self: Arc<Self>, mut waiting: WaitingCall) {
        let resolved = self.wait_resolved(&mut waiting).await;
        let WaitingCall { mut checked, watch, digest, rule, asked, open } = waiting;
        drop(watch);
        checked.slot.stop_waiting();
        let call = Arc::clone(checked.slot.call());
        let id = call.question.as_ref().map(|question| question.id.clone()).unwrap_or_default();
        let (state, decision, by, reason) = match resolved {
            Ok(Some(row)) => (row.state, row.decision(), row.by, row.reason),
            // A question that cannot be read counts as one without an answer.
            Ok(None) => (ApprovalState::Withdrawn, ApprovalState::Withdrawn, None, None),
            Err(refusal) => {
                tracing::error!("a question about a tool call cannot be closed: {refusal:#}");
                (ApprovalState::Withdrawn, ApprovalState::Withdrawn, None, None)
            }
        };
        open.record_result(decision.as_str(), asked.elapsed());
        self.audit.record_approval_result(&ApprovalResolvedRecord {
            approval: &id,
            digest: &digest,
            decision: decision.as_str(),
            by: by.as_deref(),
            after_ms: u64::try_from(asked.elapsed().as_millis()).unwrap_or(u64::MAX),
        });
        if state != ApprovalState::Approved {
            let error = unanswered_error(state, reason.as_deref());
            self.record_unapproved(&checked, error.0, &rule);
            return end_unsent(checked.slot, error);
        }
        let Err(refused) = self.begin_approved(checked).await else { return };
        let (checked, refusal) = *refused;
        // The answer is not kept for later: the person has allowed this call, now.
        self.close_question(&id, (ApprovalState::Withdrawn, NOT_BEGUN)).await;
        let facts = ToolRequestFacts {
            tool: Some(call.tool.to_string()),
            arguments: Some(call.arguments_digest.clone()),
            argument_bytes: checked.argument_bytes,
            pid: checked.pid,
        };
        self.record_refusal(&refusal, &facts);
        end_unsent(checked.slot, (refusal.code(), refusal.to_string()));
    }

    /// Begins an approved call. A refusal that passes by itself, such as a rate, does not lose the answer.
    async fn begin_approved(
        self: &Arc<Self>,
        mut checked: CheckedCall,
    ) -> Result<(), UnadmittedCall> {
        loop {
            let Err(refused) = Arc::clone(self).admit_call(checked).await else { return Ok(()) };
            let question = &refused.0.slot.call().question;
            let not_after_ms = question.as_ref().map_or(0, |question| question.not_after_ms);
            let now = self.approvals.as_ref().map_or(0, |approvals| approvals.store.now_ms());
            let left = not_after_ms.saturating_sub(now);
            let is_over = left <= 0;
            // A spent budget is asked about, and does not lose the answer about the call either.
            if !is_over && !refused.1.is_temporary() {
                let (call, refusal) = *refused;
                let left = Duration::from_millis(left.cast_unsigned());
                match self.ask_for_budget(refusal, left).await {
                    Ok(()) => checked = call,
                    Err(refusal) => return Err(Box::new((call, refusal))),
                }
                continue;
            }
            let wait = tokio::time::sleep(RETRY_INTERVAL);
            if is_over
                || !refused.1.is_temporary()
                || self.tasks.shutdown_token().run_until_cancelled(wait).await.is_none()
            {
                return Err(refused);
            }
            checked = refused.0;
        }
    }

    /// Waits for the answer, the end of its time, or the end of the run.
    async fn wait_resolved(
        &self,
        waiting: &mut WaitingCall,
    ) -> Result<Option<ApprovalRow>, ToolRefusal> {
        let (Some(approvals), Some(question)) =
            (&self.approvals, &waiting.checked.slot.call().question)
        else {
            return Ok(None);
        };
        let abort = self.switches.abort_token();
        let run_ends = async {
            tokio::select! {
                () = abort.cancelled() => (),
                () = self.tasks.shutdown_token().cancelled() => (),
            }
        };
        let store = &approvals.store;
        Ok(store.wait_resolved(&mut waiting.watch, question.not_after_ms, run_ends).await?)
    }

    /// Uses a person's answer up, for a call that needs one. The whole call is checked again: what was approved is what
    /// begins now.
    pub(super) async fn use_approval(
        &self,
        tool: &GrantedTool,
        checked: &CheckedCall,
    ) -> Result<(), ToolRefusal> {
        if let Some(standing) = &checked.standing {
            // The box keeps the future of every other call small.
            return Box::pin(self.use_standing(tool, checked, standing)).await;
        }
        let call = checked.slot.call();
        // The run may have seen more since the request: the call that another one follows is in the ledger first.
        let asking_rule = self.find_asking_rule(tool, true).await?;
        let (Some(approved), Some(question)) = (&checked.approved, &call.question) else {
            return match asking_rule {
                None => Ok(()),
                Some(_) => Err(ToolRefusal::ApprovalLost(NO_QUESTION)),
            };
        };
        let approvals = self.require_approvals()?;
        // A run that ends lets its open calls finish, and begins none.
        if self.tasks.shutdown_token().is_cancelled() {
            return Err(ToolRefusal::Ended);
        }
        check_arguments(&self.policy, &self.run, (&call.tool, &checked.arguments))?;
        // The digest is made anew from what is about to run, not taken from the question.
        let exact = self.salted_digest(checked.arguments.text());
        let present = CallQuestion::new(question.id.clone(), exact, question.not_after_ms);
        let subject = self.digest_call((tool, &present)).await?;
        if subject != *approved {
            return Err(ToolRefusal::ApprovalLost(
                "the tool, its program, its policy or its arguments have changed",
            ));
        }
        let (digest, now) = (&subject.digest, approvals.store.read_time());
        if approvals.store.consume(&question.id, digest, Some(&call.id), now).await? {
            Ok(())
        } else {
            Err(ToolRefusal::ApprovalLost("it is expired, withdrawn or used"))
        }
    }

    async fn close_question(&self, id: &str, end: (ApprovalState, &'static str)) {
        let Some(approvals) = &self.approvals else { return };
        if let Err(error) = approvals.store.close(id, end, approvals.store.read_time()).await {
            tracing::error!(%error, "a question about a tool call cannot be closed");
        }
    }

    /// Records that a call was not admitted because no person has allowed it.
    fn record_unapproved(&self, checked: &CheckedCall, code: &'static str, rule: &str) {
        let call = checked.slot.call();
        self.audit.record_tool_refusal(&ToolRefusedRecord {
            code,
            status: http::StatusCode::FORBIDDEN.as_u16(),
            tool: Some(&call.tool),
            layer: Some(PolicyLayer::Approval.as_str()),
            rule: Some(rule),
            proposal: None,
            arguments: Some(&call.arguments_digest),
            argument_bytes: checked.argument_bytes,
            pid: checked.pid,
        });
        self.metrics.record_tool_refusal(code);
    }
}

/// Returns the code and the message of a call that no person has allowed.
fn unanswered_error(state: ApprovalState, reason: Option<&str>) -> (&'static str, String) {
    match state {
        ApprovalState::Denied => {
            let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
            (DENIED_CODE, format!("a person has denied this call{reason}"))
        }
        ApprovalState::Expired => (
            "approval_expired",
            "no person has answered in time; call again to ask again".to_owned(),
        ),
        _ => ("approval_withdrawn", "the question was withdrawn: the run ends".to_owned()),
    }
}

/// Ends a call about which no person could be asked, also for the clients that have joined it.
fn drop_unasked(slot: OpenCallSlot, refusal: ToolRefusal) -> ToolRefusal {
    let call = Arc::clone(slot.call());
    end_unsent(slot, (refusal.code(), refusal.to_string()));
    call.mark_collected();
    refusal
}

/// Ends a call whose program has not run.
fn end_unsent(slot: OpenCallSlot, error: (&'static str, String)) {
    slot.end_call(ToolCallEnd {
        outcome: ToolOutcome::NotSent,
        error: Some(error),
        result: String::new(),
        charged: Nanodollars::ZERO,
        duration: Duration::ZERO,
    });
}

/// The time between two attempts to begin an approved call. Our choice.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

const NO_QUESTION: &str = "no person was asked";
const NO_SURFACE: &str = "no person can answer here";
const NOT_BEGUN: &str = "the approved call could not begin";
