//! The tools of one run. Every call takes this way, whichever [endpoint](super::endpoint) has read its request.
//!
//! A call goes through these steps, in this order:
//!
//! 1. Parse the request (the endpoint). 2. Ask the lists of all layers. 3. Check the arguments' types. 4. Ask the rules. 5. Take a
//!    place among the open calls. 6. Reserve the budget. 7. Record the admission. 8. Run the tool. 9. Settle, and record
//!    the settlement.
//!
//! If a rule asks a person, the call [waits](super::waiting_call) after step 4, and takes all the steps again when
//! the person has allowed it. Between steps 6 and 7 the answer is used up. A call that a rule denies or asks about begins
//! at step 5 if a [standing approval](super::standing_call) allows it.
//!
//! A step that fails gives back what the earlier steps have taken. Steps 6 to 9 run in a task of the run, so a client
//! that leaves changes nothing: the call goes on within its time, and its result can be asked for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::approval::RunApprovals;
use super::approval::agent_policy::{AGENT_POLICY_RULE, AgentToolPolicy, PolicyVerdict};
use super::call_table::{CallSlotOutcome, OpenCallSlot, ToolCall, ToolCallEnd, ToolCallTable};
use super::config::{LIST_RULE, TaintEffect};
use super::exec_request::{MAX_WAIT, ToolArguments, ToolExecRequest};
use super::policy::{GrantedTool, PolicyLayer, ToolDenial, ToolPolicy};
use super::program::ToolPrograms;
use super::program_digest::DigestedProgram;
use super::program_error::ToolProgramError;
use super::refusal::ToolRefusal;
use super::rule_facts::{ToolCallFacts, ToolRunFacts};
use crate::base::db::DatabaseError;
use crate::base::digest::sha256_hex;
use crate::base::task_group::TaskGroup;
use crate::llm::budget::{
    BudgetAmount, BudgetAsker, BudgetLedger, ToolBudgetError, ToolReservation, ToolReserveRequest,
};
use crate::telemetry::audit::AuditLog;
use crate::telemetry::audit::tool_records::{
    ToolAdmittedRecord, ToolOutcome, ToolRefusedRecord, ToolSettledRecord,
};
use crate::telemetry::metrics::{MetricsRegistry, SettledToolCall};

/// The operator's switches of a run.
pub trait RunSwitches: Send + Sync {
    /// Checks that a new call may start.
    ///
    /// # Errors
    /// Returns [`ToolRefusal::Paused`] or [`ToolRefusal::Ended`].
    fn check_accepting(&self) -> Result<(), ToolRefusal>;

    /// Returns a token that is cancelled when a call that starts now must end.
    fn abort_token(&self) -> CancellationToken;
}

/// The tools of one run.
#[derive(Clone)]
pub struct RunTools {
    parts: Arc<RunToolParts>,
    calls: Arc<ToolCallTable>,
}

/// The parts of a run that its tools need.
pub struct RunToolParts {
    pub run: ToolRunFacts,
    pub policy: ToolPolicy,
    pub programs: ToolPrograms,
    pub ledger: Arc<BudgetLedger>,
    pub audit: Arc<AuditLog>,
    pub switches: Box<dyn RunSwitches>,
    pub metrics: Arc<MetricsRegistry>,
    pub tasks: TaskGroup,
    /// The salt of the digests in this process's records of the run.
    pub salt: String,
    /// The place where people answer; `None` if no rule asks.
    pub approvals: Option<RunApprovals>,
    /// The way to ask for a larger budget, and the longest time for which a request waits for it.
    pub budget_asker: Option<(Arc<dyn BudgetAsker>, Duration)>,
}

/// A call that every check has let through.
pub(super) struct CheckedCall {
    pub(super) slot: OpenCallSlot,
    pub(super) arguments: ToolArguments,
    pub(super) argument_bytes: u64,
    pub(super) pid: Option<u32>,
    /// The subject that a person has approved, for a call that was asked about.
    pub(super) approved: Option<ApprovedSubject>,
    /// The standing approval that lets the call begin.
    pub(super) standing: Option<StandingUse>,
}

/// The digest of an approved call, the digest of its program, and the id of the image that it runs.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct ApprovedSubject {
    pub(super) digest: String,
    pub(super) program: Option<String>,
    pub(super) image: Option<String>,
    pub(super) is_interpreter: bool,
}

/// A standing approval that a call is about to use, and the subject that it must have been granted for.
pub(super) struct StandingUse {
    pub(super) id: String,
    pub(super) subject: ApprovedSubject,
}

/// A call that cannot begin, and the reason.
pub(super) type UnadmittedCall = Box<(CheckedCall, ToolRefusal)>;

/// The facts of a request that a record of its refusal has.
#[derive(Default)]
pub(super) struct ToolRequestFacts {
    pub(super) tool: Option<String>,
    pub(super) arguments: Option<String>,
    pub(super) argument_bytes: u64,
    pub(super) pid: Option<u32>,
}

impl ApprovedSubject {
    pub(super) fn new(digest: String, program: DigestedProgram) -> Self {
        let DigestedProgram { digest: program, image, is_interpreter } = program;
        Self { digest, program, image, is_interpreter }
    }
}

impl RunTools {
    pub fn new(parts: RunToolParts) -> Self {
        Self { parts: Arc::new(parts), calls: Arc::default() }
    }

    pub(super) fn parts(&self) -> &RunToolParts {
        &self.parts
    }

    /// Starts a call that every layer allows, or finds the earlier call with the same idempotency key. If the run's money
    /// is spent and a person may raise it, waits for the person and tries again.
    ///
    /// # Errors
    /// Returns the reason why the call did not begin. The caller records the refusal.
    pub(super) async fn start_call(
        &self,
        request: ToolExecRequest,
        facts: &mut ToolRequestFacts,
    ) -> Result<Arc<ToolCall>, ToolRefusal> {
        match &self.parts.budget_asker {
            None => self.try_start_call(request, facts).await,
            Some((_, hold)) => {
                let hold = if request.has_progress { MAX_WAIT } else { *hold };
                let hold = request.wait.min(hold);
                // The box keeps the future of a call whose budget does not ask small.
                Box::pin(self.start_funded_call(request, facts, hold)).await
            }
        }
    }

    async fn start_funded_call(
        &self,
        request: ToolExecRequest,
        facts: &mut ToolRequestFacts,
        hold: Duration,
    ) -> Result<Arc<ToolCall>, ToolRefusal> {
        loop {
            match self.try_start_call(request.clone(), facts).await {
                Ok(call) => return Ok(call),
                Err(refusal) => self.parts.ask_for_budget(refusal, hold).await?,
            }
        }
    }

    async fn try_start_call(
        &self,
        request: ToolExecRequest,
        facts: &mut ToolRequestFacts,
    ) -> Result<Arc<ToolCall>, ToolRefusal> {
        let parts = &self.parts;
        facts.set_call(&request, &parts.salt);
        let tool = match check_call(&parts.policy, &parts.run, &request) {
            Ok(tool) => tool,
            Err(ToolRefusal::Denied(denial)) if parts.approvals.is_some() => {
                return Box::pin(self.start_denied_call(denial, request, facts)).await;
            }
            Err(refusal) => return Err(refusal),
        };
        if let Some(rule) = parts.find_asking_rule(tool, false).await? {
            // The box keeps the future of a call that asks no person small.
            return Box::pin(self.start_asking_call((tool, &rule), request, facts)).await;
        }
        self.begin_call(tool, request, facts, None).await
    }

    /// Takes a place for a call that every layer or a standing approval allows, admits it, and starts its program.
    ///
    /// # Errors
    /// Returns the reason why the call did not begin. The caller records the refusal.
    pub(super) async fn begin_call(
        &self,
        tool: &GrantedTool,
        request: ToolExecRequest,
        facts: &ToolRequestFacts,
        standing: Option<StandingUse>,
    ) -> Result<Arc<ToolCall>, ToolRefusal> {
        let parts = &self.parts;
        let key = request.idempotency_key.as_deref();
        let digest = facts.arguments.as_deref().unwrap_or_default();
        let slot = match self.calls.open_call(&tool.definition.name, digest, key)? {
            CallSlotOutcome::Joined(call) => return Ok(call),
            CallSlotOutcome::Opened(slot) => slot,
        };
        let call = Arc::clone(slot.call());
        let checked = CheckedCall {
            slot,
            arguments: request.arguments,
            argument_bytes: facts.argument_bytes,
            pid: facts.pid,
            approved: None,
            standing,
        };
        // A client that leaves now must not tear the admission from its settlement.
        let admission = Arc::clone(parts).admit_call(checked);
        // The drop of a refused call gives its place back.
        parts.tasks.run_detached(admission).await.map_err(|refused| refused.1)?;
        Ok(call)
    }

    pub(super) fn shared_parts(&self) -> &Arc<RunToolParts> {
        &self.parts
    }

    pub(super) fn calls(&self) -> &Arc<ToolCallTable> {
        &self.calls
    }

    /// Returns an open call, or one whose end is still kept.
    pub(super) fn find_call(&self, id: &str) -> Option<Arc<ToolCall>> {
        self.calls.find_call(id)
    }
}

/// Asks every layer of a policy about a request. The function has no side effect, so `explain` gives the answer of a
/// real call.
///
/// # Errors
/// Returns the first layer that denies the call, or the argument that does not fit the tool.
pub fn check_call<'a>(
    policy: &'a ToolPolicy,
    run: &ToolRunFacts,
    request: &ToolExecRequest,
) -> Result<&'a GrantedTool, ToolRefusal> {
    check_arguments(policy, run, (&request.tool, &request.arguments))
}

/// Asks every layer of a policy about a call of a tool with arguments, like [`check_call`].
pub(super) fn check_arguments<'a>(
    policy: &'a ToolPolicy,
    run: &ToolRunFacts,
    (tool, arguments): (&str, &ToolArguments),
) -> Result<&'a GrantedTool, ToolRefusal> {
    let tool = policy.find_tool(tool).map_err(ToolRefusal::NotGranted)?;
    // The types come before the rules: a condition reads an argument by the type that the schema gives it.
    let arguments = &arguments.members();
    tool.definition.parameters.check_arguments(arguments)?;
    let facts = ToolCallFacts { run, arguments };
    tool.check_rules(&facts).map_err(ToolRefusal::Denied)?;
    Ok(tool)
}

/// Returns the rule that asks a person about a call now; see [`RunToolParts::find_asking_rule`].
fn find_asking_rule(
    policy: &ToolPolicy,
    tool: &GrantedTool,
    (ledger, has_place): (&BudgetLedger, bool),
) -> Result<Option<Arc<str>>, ToolRefusal> {
    match policy.taint().judge_call(&tool.definition.name, (ledger, has_place)) {
        Some((rule, TaintEffect::Deny)) => Err(ToolRefusal::Denied(ToolDenial {
            layer: PolicyLayer::Tool,
            rule: Arc::clone(rule),
            fault: None,
        })),
        Some((rule, TaintEffect::Ask)) => {
            Ok(Some(tool.asking_rule.clone().unwrap_or_else(|| Arc::clone(rule))))
        }
        None => Ok(tool.asking_rule.clone()),
    }
}

/// Returns the resources that a call of a tool needs.
pub(super) fn reserve_request(tool: &GrantedTool) -> ToolReserveRequest<'_> {
    ToolReserveRequest { tool: &tool.definition.name, price: tool.price, limits: tool.limits }
}

/// Checks that a budget allows a call of a tool, and keeps nothing of it. Returns the rule that asks a person before the
/// call. The function is for `explain`, and takes the steps of a real call: the budget must allow a call that waits
/// for a person only for good.
///
/// # Errors
/// Returns the rule or the limit that prevents the call.
pub fn check_budget(
    policy: &ToolPolicy,
    tool: &GrantedTool,
    ledger: &Arc<BudgetLedger>,
) -> Result<Option<Arc<str>>, ToolRefusal> {
    let asking_rule = find_asking_rule(policy, tool, (ledger, false))?;
    match asking_rule {
        Some(_) => ledger.check_tool_call(&reserve_request(tool))?,
        None => ledger.reserve_tool_call(&reserve_request(tool))?.release_unspent(),
    }
    Ok(asking_rule)
}

/// Returns the names of the rules that apply to a tool: the list, or the rules about the tool.
pub(super) fn applied_rules(tool: &GrantedTool) -> Vec<Arc<str>> {
    let names = tool.rule_names();
    if names.is_empty() { vec![Arc::from(LIST_RULE)] } else { names }
}

impl RunToolParts {
    /// Reserves the budget of a call, records its admission, and starts its program.
    pub(super) async fn admit_call(
        self: Arc<Self>,
        checked: CheckedCall,
    ) -> Result<(), UnadmittedCall> {
        match self.reserve_and_record(&checked).await {
            Ok(reservation) => {
                // Nothing can fail between the record and the start of this task.
                let own = Arc::clone(&self);
                self.tasks.spawn_task(async move { own.run_call(checked, reservation).await });
                Ok(())
            }
            Err(refusal) => Err(Box::new((checked, refusal))),
        }
    }

    /// Waits until a person has raised the limit that has refused a call, for at most `hold`.
    ///
    /// # Errors
    /// Returns the refusal, if no person can be asked about it or none has raised the limit, or
    /// [`ToolRefusal::BudgetAsked`].
    pub(super) async fn ask_for_budget(
        &self,
        refusal: ToolRefusal,
        hold: Duration,
    ) -> Result<(), ToolRefusal> {
        let (ToolRefusal::Budget(ToolBudgetError::Run(spent)), Some((asker, _))) =
            (&refusal, &self.budget_asker)
        else {
            return Err(refusal);
        };
        if spent.spent_limit().is_none() {
            return Err(refusal);
        }
        match tokio::time::timeout(hold, asker.ask_for_budget(*spent)).await {
            Ok(answer) => Ok(answer.map_err(ToolBudgetError::from)?),
            Err(_) => Err(ToolRefusal::BudgetAsked),
        }
    }

    /// Returns the rule that asks a person about a call now: a rule about the tool, one about what the run has seen, or
    /// the policy of the agent. `has_place` states that the ledger counts the call itself already, which the run has not
    /// seen.
    ///
    /// # Errors
    /// Returns the rule that denies the tool to a run that has seen what this run has, or the denial of the policy.
    pub(super) async fn find_asking_rule(
        &self,
        tool: &GrantedTool,
        has_place: bool,
    ) -> Result<Option<Arc<str>>, ToolRefusal> {
        let rule = find_asking_rule(&self.policy, tool, (&self.ledger, has_place))?;
        Ok(match self.judge_by_agent_policy(tool).await? {
            PolicyVerdict::AskOnMiss | PolicyVerdict::AskAlways => {
                Some(rule.unwrap_or_else(|| Arc::from(AGENT_POLICY_RULE)))
            }
            PolicyVerdict::Allow | PolicyVerdict::Deny => rule,
        })
    }

    /// Asks the policy of the agent about a tool. Without people who can answer, there is no policy.
    ///
    /// # Errors
    /// Returns the denial of the policy, or an error if the policy cannot be read.
    pub(super) async fn judge_by_agent_policy(
        &self,
        tool: &GrantedTool,
    ) -> Result<PolicyVerdict, ToolRefusal> {
        match self.read_agent_policy().await?.judge_tool(&tool.definition.name) {
            PolicyVerdict::Deny => Err(ToolRefusal::Denied(ToolDenial {
                layer: PolicyLayer::Approval,
                rule: Arc::from(AGENT_POLICY_RULE),
                fault: None,
            })),
            verdict => Ok(verdict),
        }
    }

    /// Returns the policy of the agent as it is now.
    pub(super) async fn read_agent_policy(&self) -> Result<AgentToolPolicy, DatabaseError> {
        let Some(approvals) = &self.approvals else { return Ok(AgentToolPolicy::default()) };
        Ok(approvals.store.find_agent_policy(&self.run.agent_id).await?.policy)
    }

    /// Returns the tools that a client sees, each with whether a person is asked about its calls: those that the lists name
    /// and the agent's policy does not deny.
    pub(super) async fn offered_tools(&self) -> Vec<(&GrantedTool, bool)> {
        // A policy that cannot be read denies the calls, which tells the client more than an empty list.
        let policy = self.read_agent_policy().await.unwrap_or_default();
        let judge = |tool: &'_ GrantedTool| policy.judge_tool(&tool.definition.name);
        let offered = self.policy.listed_tools().filter_map(|tool| match judge(tool) {
            PolicyVerdict::Deny => None,
            PolicyVerdict::Allow => Some((tool, tool.asking_rule.is_some())),
            PolicyVerdict::AskOnMiss | PolicyVerdict::AskAlways => Some((tool, true)),
        });
        offered.collect()
    }

    async fn reserve_and_record(
        &self,
        checked: &CheckedCall,
    ) -> Result<ToolReservation, ToolRefusal> {
        let call = checked.slot.call();
        let tool = self.policy.find_tool(&call.tool).map_err(ToolRefusal::NotGranted)?;
        // 1. The operator's switch and the budget. A failure drops the slot, which removes the call.
        self.switches.check_accepting()?;
        let reservation = self.ledger.reserve_tool_call(&reserve_request(tool))?;
        // 2. A person's answer is used up before the record: a crash between the two loses the answer, and never runs
        //    the call twice. The tool's rule may ask now although it did not at the request; then no person was asked.
        if let Err(refusal) = self.use_approval(tool, checked).await {
            reservation.release_unspent();
            return Err(refusal);
        }
        // 3. The record. Only a durable record lets the tool run.
        let record = ToolAdmittedRecord {
            call: &call.id,
            tool: &call.tool,
            definition: &tool.definition.digest,
            rules: &applied_rules(tool),
            arguments: &call.arguments_digest,
            argument_bytes: checked.argument_bytes,
            evidence: &tool.collect_evidence(checked.arguments.members()),
            approval: checked.approval_id(),
            pid: checked.pid,
            reserved: reservation.granted_amount(),
        };
        if let Err(error) = self.audit.record_tool_admission(&record).await {
            reservation.release_unspent();
            return Err(error.into());
        }
        // 4. The operator may have paused the run while the record was written.
        if let Err(refusal) = self.switches.check_accepting() {
            reservation.release_unspent();
            self.record_unsent_call(call);
            return Err(refusal);
        }
        Ok(reservation)
    }

    /// Runs the program of a call to its end, and settles the call once.
    async fn run_call(&self, checked: CheckedCall, reservation: ToolReservation) {
        let CheckedCall { slot, arguments, approved, standing, .. } = checked;
        let subject = approved.or(standing.map(|standing| standing.subject));
        let image = subject.and_then(|subject| subject.image);
        let started = Instant::now();
        let result = match self.policy.find_tool(&slot.call().tool) {
            Ok(tool) => self.run_until_stopped((tool, &slot.call().id, image), &arguments).await,
            Err(_) => Err(ToolProgramError::failed("the tool is no longer granted")),
        };
        let charged = reservation.settle_call();
        let duration = started.elapsed();
        let (outcome, error, result) = match result {
            Ok(result) => (ToolOutcome::Completed, None, result),
            Err(error) => (error.outcome, Some((error.code, error.message)), String::new()),
        };
        let call = slot.call();
        let digest = (!result.is_empty()).then(|| self.salted_digest(&result));
        self.audit.record_tool_settlement(&ToolSettledRecord {
            call: &call.id,
            tool: &call.tool,
            outcome,
            code: error.as_ref().map(|(code, _)| *code),
            result: digest.as_deref(),
            result_bytes: result.len() as u64,
            charged,
            duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
        });
        let settled = SettledToolCall { tool: &call.tool, outcome, cost: charged.cost, duration };
        self.metrics.record_tool_call(&settled);
        slot.end_call(ToolCallEnd { outcome, error, result, charged: charged.cost, duration });
    }

    /// Runs a program until it ends, its time or the run's time is up, or the call is aborted.
    async fn run_until_stopped(
        &self,
        (tool, call, image): (&GrantedTool, &str, Option<String>),
        arguments: &ToolArguments,
    ) -> Result<String, ToolProgramError> {
        let left = self.ledger.deadline().map(|end| end.saturating_duration_since(Instant::now()));
        let timeout =
            left.map_or(tool.definition.timeout, |left| left.min(tool.definition.timeout));
        let abort = self.switches.abort_token();
        tokio::select! {
            biased;
            () = abort.cancelled() => Err(ToolProgramError::stopped()),
            () = self.tasks.abort_token().cancelled() => Err(ToolProgramError::stopped()),
            result = self.programs.run_tool((&tool.definition, call, image), arguments, timeout) => result,
        }
    }

    /// Records the settlement of a call that was admitted and did not run.
    fn record_unsent_call(&self, call: &ToolCall) {
        self.audit.record_tool_settlement(&ToolSettledRecord {
            call: &call.id,
            tool: &call.tool,
            outcome: ToolOutcome::NotSent,
            code: None,
            result: None,
            result_bytes: 0,
            charged: BudgetAmount::default(),
            duration_ms: 0,
        });
    }

    /// Records the refusal of a request that asked for a call.
    pub(super) fn record_refusal(&self, refusal: &ToolRefusal, facts: &ToolRequestFacts) {
        let denial = refusal.denial();
        self.audit.record_tool_refusal(&ToolRefusedRecord {
            code: refusal.code(),
            status: refusal.status().as_u16(),
            tool: facts.tool.as_deref(),
            layer: denial.map(|denial| denial.layer.as_str()),
            rule: denial.map(|denial| &*denial.rule),
            proposal: refusal.proposal(),
            arguments: facts.arguments.as_deref(),
            argument_bytes: facts.argument_bytes,
            pid: facts.pid,
        });
        self.metrics.record_tool_refusal(refusal.code());
    }

    pub(super) fn salted_digest(&self, text: &str) -> String {
        salted_digest(&self.salt, text)
    }
}

impl CheckedCall {
    /// Returns the question or the standing approval that lets the call begin.
    fn approval_id(&self) -> Option<&str> {
        let question = self.slot.call().question.as_ref().map(|question| &*question.id);
        question.or(self.standing.as_ref().map(|standing| &*standing.id))
    }
}

impl ToolRequestFacts {
    pub(super) fn new(pid: Option<u32>) -> Self {
        Self { pid, ..Self::default() }
    }

    /// Takes the facts of a parsed request.
    fn set_call(&mut self, request: &ToolExecRequest, salt: &str) {
        let mut arguments = Value::Object(request.arguments.members());
        arguments.sort_all_objects();
        let text = arguments.to_string();
        let digest = salted_digest(salt, &text);
        self.tool = Some(request.tool.clone());
        self.argument_bytes = text.len() as u64;
        self.arguments = Some(digest);
    }
}

fn salted_digest(salt: &str, text: &str) -> String {
    sha256_hex(format!("tool text 1\n{salt}\n{text}").as_bytes())
}
