//! Standing approvals: a person's yes that counts for later calls, too, as long as they are the same.
//!
//! ```text
//! proposed ─┬→ granted ─┬→ spent    its last use has begun
//!           ├→ revoked  ├→ revoked  a person has taken it back, or the operator has revoked that person's grant
//!           └→ expired  └→ expired  its time is over, or its run has ended
//! ```
//!
//! A proposal is written when a rule denies a call that a person could allow. An answer to a question can make a standing
//! approval at once.
//!
//! **Invariant:** a standing approval is for one digest: of the account, the agent, the tool, its definition, its program,
//! the rules about it, and the arguments byte for byte. No step changes the digest.
//!
//! **Invariant:** a use is counted before the call begins, and no more calls begin than `max_uses`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::reach::ApprovalReach;
use crate::base::canonical;
use crate::base::digest::sha256_hex;
use crate::llm::budget::Nanodollars;

/// The calls that an answer counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ApprovalScope {
    /// The call that the question is about.
    Once,
    /// The same calls of the same run.
    Run,
    /// The same calls of all runs of the same agent and account.
    Always,
}

/// The state of a standing approval.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StandingState {
    /// A rule has denied the call, and no person has allowed it.
    Proposed,
    /// A person has allowed the call.
    Granted,
    /// All uses have begun.
    Spent,
    /// A person has taken the proposal or the approval back, or the grant that has given it was revoked.
    Revoked,
    /// The time is over, or the run of an approval for one run has ended.
    Expired,
}

/// A standing approval as the store keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandingApproval {
    pub id: String,
    pub state: StandingState,
    /// The widest scope of a proposal, or the scope of an approval: `run` or `always`.
    pub scope: ApprovalScope,
    /// The digest of the call without its program, by which a call finds it.
    pub key: String,
    /// The digest that a grant must name.
    pub digest: String,
    /// The run that was denied, or that has asked.
    pub run: String,
    /// The grant that has started the run; `None` for a run without one.
    pub owner: Option<String>,
    pub account: String,
    /// The agent's own name in the catalog.
    pub agent: String,
    pub tool: String,
    /// The rules that deny the call, or the rule that has asked.
    pub rules: Vec<String>,
    pub definition: String,
    /// The arguments as the client wrote them; `None` once the approval is closed, and for one that an answer has made.
    pub arguments: Option<String>,
    /// The argument fields that the operator has listed.
    pub evidence: BTreeMap<String, String>,
    pub price: Nanodollars,
    pub created_ms: i64,
    /// The last moment at which a person may grant the proposal, or a call may begin.
    pub not_after_ms: i64,
    pub max_uses: u32,
    pub used: u32,
    /// The time of the grant.
    pub granted_ms: Option<i64>,
    /// The grant of the person who has allowed the call.
    pub by: Option<String>,
    pub reason: Option<String>,
    /// The grant of the person who has taken it back; `None` if the grant that has given it was revoked.
    pub revoked_by: Option<String>,
}

/// The call that a standing approval is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StandingSubject<'a> {
    pub account: &'a str,
    /// The agent's own name in the catalog.
    pub agent: &'a str,
    pub tool: &'a str,
    /// The digest of the tool's definition.
    pub definition: &'a str,
    /// The digest of the rules about the tool.
    pub rules: &'a str,
    /// The digest of the arguments, byte for byte as the client wrote them.
    pub arguments: String,
}

/// The standing approval that an answer to a question can make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandingOffer {
    pub key: String,
    pub digest: String,
    /// The scopes that an answer may have beside `once`.
    pub scopes: Vec<ApprovalScope>,
    /// The scope of the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answered: Option<ApprovalScope>,
}

/// The terms of a standing approval, as a person gives them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandingTerms {
    pub scope: ApprovalScope,
    pub not_after_ms: i64,
    pub max_uses: u32,
}

/// The standing approval that a person's answer to a question makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandingAnswer {
    pub terms: StandingTerms,
    /// The grant that has started the run, and the run's account.
    pub owner: String,
    pub account: String,
}

/// A person's yes to a proposal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandingGrant {
    /// The digest of the proposal that the person has seen.
    pub digest: String,
    pub terms: StandingTerms,
    /// The grant of the person.
    pub by: String,
    pub reason: Option<String>,
}

/// The outcome of writing a proposal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProposalOutcome {
    New,
    /// The same call has an open proposal with this id.
    Known(String),
    /// Too many proposals are open, or the run has made too many.
    Full,
}

/// The outcome of a person's step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StandingOutcome {
    Changed(Box<StandingApproval>),
    /// The grant of the person was revoked.
    GrantRevoked,
    /// The proposal has another digest.
    OtherDigest,
    /// The proposal may be granted for its run only.
    ScopeTooWide,
    /// The approval is in another state already.
    Closed(StandingState),
    /// Too many standing approvals are in force.
    Full,
    Unknown,
}

/// The filter of a list of standing approvals.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StandingFilter {
    pub state: Option<StandingState>,
    pub run: Option<String>,
    /// The agents and accounts whose standing approvals are listed.
    pub reach: ApprovalReach,
    /// The last one of the page before.
    pub after: Option<String>,
    pub limit: u32,
}

impl StandingSubject<'_> {
    /// Returns the digest of arguments. It is salted before it is stored.
    pub fn digest_arguments(text: &str) -> String {
        sha256_hex(text.as_bytes())
    }

    /// Returns the digest by which a call finds its standing approvals. The salt of the database keeps the arguments from
    /// being guessed from it.
    pub fn key(&self, salt: &str) -> String {
        canonical::digest("standing call 2", &(salt, self)).expect("a subject has string keys")
    }

    /// Returns the digest that a grant must name.
    pub fn digest(&self, salt: &str, program: Option<&str>) -> String {
        let digest = canonical::digest("standing approval 2", &(salt, self, program));
        digest.expect("a subject has string keys")
    }
}

impl StandingApproval {
    /// Returns the state at a time: nothing notices the end of the time by itself.
    pub fn state_at(&self, now_ms: i64) -> StandingState {
        if self.state.is_open() && self.not_after_ms <= now_ms {
            StandingState::Expired
        } else {
            self.state
        }
    }

    /// Returns true if the approval allows a call that these rules deny.
    pub fn covers_rules(&self, denying: &[String]) -> bool {
        denying.iter().all(|rule| self.rules.contains(rule))
    }
}

impl StandingState {
    pub const ALL: [Self; 5] =
        [Self::Proposed, Self::Granted, Self::Spent, Self::Revoked, Self::Expired];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Proposed => "proposed",
            Self::Granted => "granted",
            Self::Spent => "spent",
            Self::Revoked => "revoked",
            Self::Expired => "expired",
        }
    }

    pub fn is_open(self) -> bool {
        matches!(self, Self::Proposed | Self::Granted)
    }

    /// Returns true if a standing approval may move from this state to `next`. A use leaves it granted or spends it.
    pub fn may_become(self, next: Self) -> bool {
        match self {
            Self::Proposed => matches!(next, Self::Granted | Self::Revoked | Self::Expired),
            Self::Granted => next != Self::Proposed,
            Self::Spent | Self::Revoked | Self::Expired => false,
        }
    }
}

impl ApprovalScope {
    pub const ALL: [Self; 3] = [Self::Once, Self::Run, Self::Always];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Once => "once",
            Self::Run => "run",
            Self::Always => "always",
        }
    }
}

/// Returns the scopes, beside `once`, that an answer about a call may have. What an interpreter does is decided by what it
/// reads, so it is never allowed for all runs.
pub fn standing_scopes(allowed: &[ApprovalScope], is_interpreter: bool) -> Vec<ApprovalScope> {
    let fits = |scope: &ApprovalScope| match scope {
        ApprovalScope::Once => false,
        ApprovalScope::Run => true,
        ApprovalScope::Always => !is_interpreter,
    };
    allowed.iter().copied().filter(fits).collect()
}

/// Returns the id of the standing approval that an answer to a question makes.
pub fn standing_id(question: &str) -> String {
    format!("{STANDING_PREFIX}{}", question.trim_start_matches("apr-"))
}

/// The beginning of the id of a standing approval.
pub const STANDING_PREFIX: &str = "sta-";

/// The most proposals of a run, open or not. Our choice: an agent that is denied so often needs another rule.
pub const MAX_PROPOSALS_PER_RUN: u32 = 32;

/// The most calls that one standing approval allows. Our choice: a person who needs more changes the rule.
pub const MAX_USES: u32 = 1000;
