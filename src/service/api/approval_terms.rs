//! The terms of a yes for later calls, as people write them, and the checks that questions and standing approvals share.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ApiState;
use super::error::ApiError;
use super::extract::AuthenticatedCaller;
use crate::service::auth::{GrantPattern, GrantScope};
use crate::service::store::RunRow;
use crate::tools::approval::reach::ApprovalReach;
use crate::tools::approval::standing::{ApprovalScope, MAX_USES, StandingAnswer, StandingTerms};
use crate::tools::approval::store::ApprovalStore;
use crate::tools::approval::{ApprovalConfig, to_unix_millis};

/// The calls that an answer counts for: `once` (this call), `run` (the same calls of the same run) or `always` (the same calls
/// of all runs of the same agent and account).
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ApprovalScope)]
pub(super) enum ApprovalScopeView {
    /// This call.
    Once,
    /// The same calls of the same run.
    Run,
    /// The same calls of all runs of the same agent and account.
    Always,
}

/// The terms of a yes for later calls, as a person has written them.
pub(super) struct WrittenTerms {
    pub(super) scope: ApprovalScope,
    pub(super) max_uses: Option<u32>,
    pub(super) valid_for: Option<String>,
    pub(super) not_after: Option<String>,
}

impl WrittenTerms {
    /// Checks the scope of an answer to a question, and returns the standing approval that it makes.
    pub(super) fn check_answer(
        self,
        store: &ApprovalStore,
        run: &RunRow,
        is_yes: bool,
    ) -> Result<Option<StandingAnswer>, ApiError> {
        if self.scope == ApprovalScope::Once {
            let has_terms =
                self.max_uses.is_some() || self.valid_for.is_some() || self.not_after.is_some();
            return if has_terms {
                Err(wrong_scope("`max_uses`, `valid_for` and `not_after` need `run` or `always`"))
            } else {
                Ok(None)
            };
        }
        if !is_yes {
            return Err(wrong_scope("a denial has none"));
        }
        let allowed = present_terms(store).scopes;
        if !allowed.contains(&self.scope) {
            let names: Vec<_> = allowed.iter().map(|scope| scope.as_str()).collect();
            return Err(wrong_scope(format_args!(
                "`{}` is not allowed; `tools.approvals.scopes` allows `{}`",
                self.scope.as_str(),
                names.join("`, `")
            )));
        }
        let terms = self.check_terms(store)?;
        Ok(Some(StandingAnswer { terms, owner: run.grant.clone(), account: run.account.clone() }))
    }

    /// Checks the terms against the configuration and the bounds.
    pub(super) fn check_terms(self, store: &ApprovalStore) -> Result<StandingTerms, ApiError> {
        let Self { scope, max_uses, valid_for, not_after } = self;
        let now = store.read_time();
        let longest = present_terms(store).max_valid_for;
        let wrong = |problem: String| Err(ApiError::invalid_body(problem));
        if scope == ApprovalScope::Once {
            return wrong("`scope` is invalid: give `run` or `always`".to_owned());
        }
        let is_run = scope == ApprovalScope::Run;
        let end = match (valid_for, not_after) {
            (Some(_), Some(_)) => {
                return wrong("give either `valid_for` or `not_after`, not both".to_owned());
            }
            (Some(text), None) => {
                humantime::parse_duration(&text).ok().and_then(|time| now.checked_add(time))
            }
            (None, Some(text)) => humantime::parse_rfc3339_weak(&text).ok(),
            (None, None) if is_run => now.checked_add(longest),
            (None, None) => {
                return wrong("`always` needs an end: give `valid_for` or `not_after`".to_owned());
            }
        };
        let is_in_time = |end: &SystemTime| {
            *end > now && end.duration_since(now).is_ok_and(|left| left <= longest)
        };
        let Some(end) = end.filter(is_in_time) else {
            let longest = humantime::format_duration(longest);
            return wrong(format!(
                "`valid_for` or `not_after` is invalid: give a time such as `1h` or `2030-01-31T08:00:00Z`, later than now and at most {longest} away (`tools.approvals.max_valid_for`)"
            ));
        };
        match max_uses.or(is_run.then_some(MAX_USES)) {
            Some(uses) if (1..=MAX_USES).contains(&uses) => {
                Ok(StandingTerms { scope, not_after_ms: to_unix_millis(end), max_uses: uses })
            }
            _ => wrong(format!(
                "`max_uses` is invalid: give the number of calls that may begin, 1 to {MAX_USES}"
            )),
        }
    }
}

/// Returns the present times and scopes of answers.
pub(super) fn present_terms(store: &ApprovalStore) -> ApprovalConfig {
    store.present_tools().map(|present| present.approvals.clone()).unwrap_or_default()
}

pub(super) fn check_reason(reason: Option<&str>) -> Result<(), ApiError> {
    if reason.is_some_and(|reason| reason.len() > MAX_REASON_BYTES) {
        return Err(ApiError::invalid_body(format_args!(
            "`reason` has more than {MAX_REASON_BYTES} bytes; shorten it"
        )));
    }
    Ok(())
}

/// Checks that the caller may see the questions of all runs.
pub(super) fn require_all(caller: &AuthenticatedCaller) -> Result<(), ApiError> {
    caller
        .require_scope(GrantScope::Approve)
        .or_else(|denied| caller.require_scope(GrantScope::Admin).map_err(|_| denied))
}

/// Checks that the caller may see the questions of some run. The check comes before the look-up, so that a caller without
/// the access does not learn which questions there are.
pub(super) fn require_any(caller: &AuthenticatedCaller) -> Result<(), ApiError> {
    require_all(caller).or_else(|_| caller.require_read())
}

/// Returns true if the caller may see the questions and standing approvals of any run of an agent and an account.
pub(super) fn is_in_reach(caller: &AuthenticatedCaller, agent: &str, account: &str) -> bool {
    caller.0.is_admin()
        || (caller.require_scope(GrantScope::Approve).is_ok()
            && caller.0.check_approver(agent, account).is_ok())
}

impl ApiState {
    /// Checks that the caller may see a question or a standing approval of a run with an agent and an account.
    pub(super) async fn require_row_of(
        &self,
        caller: &AuthenticatedCaller,
        run: &str,
        (agent, account): (&str, &str),
    ) -> Result<(), ApiError> {
        if is_in_reach(caller, agent, account) {
            return Ok(());
        }
        caller.require_read().map_err(|_| ApiError::no_such_run(run))?;
        self.requested_run(caller, run).await.map(|_| ())
    }
}

/// Returns the agents and accounts whose questions the caller's lists have. A caller that may list a run of its own only
/// has no other limit.
pub(super) fn list_reach(caller: &AuthenticatedCaller) -> ApprovalReach {
    if caller.0.is_admin() || caller.require_scope(GrantScope::Approve).is_err() {
        return ApprovalReach::default();
    }
    let to_names =
        |patterns: &[GrantPattern]| patterns.iter().map(GrantPattern::to_string).collect();
    ApprovalReach {
        agents: to_names(caller.0.approver_agents()),
        accounts: to_names(caller.0.approver_accounts()),
    }
}

pub(super) fn too_many_standing() -> ApiError {
    let message = "the limit of 4,096 standing approvals in force is reached; revoke some of them";
    ApiError::Conflict { code: "too_many_standing_approvals", message: message.to_owned() }
}

pub(super) fn wrong_scope(problem: impl std::fmt::Display) -> ApiError {
    ApiError::invalid_body(format_args!("`scope` is invalid: {problem}"))
}

impl From<ApprovalScope> for ApprovalScopeView {
    fn from(scope: ApprovalScope) -> Self {
        match scope {
            ApprovalScope::Once => Self::Once,
            ApprovalScope::Run => Self::Run,
            ApprovalScope::Always => Self::Always,
        }
    }
}

impl From<ApprovalScopeView> for ApprovalScope {
    fn from(scope: ApprovalScopeView) -> Self {
        match scope {
            ApprovalScopeView::Once => Self::Once,
            ApprovalScopeView::Run => Self::Run,
            ApprovalScopeView::Always => Self::Always,
        }
    }
}

/// The longest reason of an answer, in bytes. Our choice.
const MAX_REASON_BYTES: usize = 500;
