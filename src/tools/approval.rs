//! Approvals: a call of a tool waits until a person allows it, and a call beyond the budget waits until a person raises
//! the budget.
//!
//! A question has these states:
//!
//! ```text
//! pending ─┬→ approved ─┬→ consumed   the call has begun
//!          ├→ denied    ├→ expired    `ttl` is over
//!          ├→ expired   └→ withdrawn  the run has ended, or the call could not begin
//!          └→ withdrawn
//! ```
//!
//! - [`store`] keeps the questions in a database, one transaction for each arrow; `question_rows` has the statements.
//! - `waiting_call` asks, waits, checks the whole call again, and runs it.
//! - [`budget_questions`] asks about a spent limit, and raises it.
//! - [`standing`] describes approvals that count for later calls, too, and `standing_store` keeps them by the
//!   statements in `standing_rows`.
//! - [`agent_policy`] keeps what people say about the tools of each agent.
//! - [`open_questions`] bounds the questions that are open at the same time.
//! - [`present_tools`] tells which tools are still configured.
//! - [`outbox`] keeps the messages about questions until the receiver of the [`webhook`] has them, and
//!   `message_delivery` sends them.
//!
//! **Invariant:** a question moves along these arrows only, and at most one call begins by one question. Expiry, a
//! restart and the run's end mean no.
//!
//! **Invariant:** without a wider scope, an answer is about the digest of one call. A call that differs in its run, tool, definition,
//! arguments or policy has another digest, and the answer does not count for it.

pub mod agent_policy;
pub mod budget_questions;
mod message_delivery;
pub mod open_questions;
pub mod outbox;
pub mod present_tools;
mod question_rows;
pub mod reach;
mod schema;
pub mod standing;
mod standing_clock;
mod standing_rows;
mod standing_store;
pub mod store;
pub mod webhook;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use crate::base::canonical;
use crate::base::timestamp;
use crate::llm::budget::{BudgetAmount, Nanodollars, SpendingLimit, SpendingLimits};

pub use schema::APPROVAL_SCHEMA;

use standing::{ApprovalScope, MAX_PROPOSALS_PER_RUN, StandingOffer};
use store::ApprovalStore;
use webhook::WebhookConfig;

/// The mode in which a rule lets a tool run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ApprovalMode {
    /// No person is asked.
    #[default]
    Never,
    /// A person is asked about each call.
    Ask,
}

/// The state of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ApprovalState {
    /// No person has answered.
    Pending,
    /// A person has allowed the call, which has not begun.
    Approved,
    /// A person has denied the call.
    Denied,
    /// The time for an answer, or for the beginning of the approved call, is over.
    Expired,
    /// The run has ended, or the call could not begin.
    Withdrawn,
    /// The approved call has begun.
    Consumed,
}

/// The effect of a spent budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBudget {
    /// The call is refused.
    #[default]
    Refuse,
    /// A person is asked to raise the spent limit, and the call waits.
    Ask,
}

/// A spent limit, as a person sees it who may raise it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetQuestion {
    /// The limit that is spent.
    pub limit: SpendingLimit,
    /// The limits in force.
    pub limits: SpendingLimits,
    pub spent: BudgetAmount,
}

/// The raise that a person approves. The digest of this value is the subject of the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BudgetSubject<'a> {
    pub run: &'a str,
    pub attempt: &'a str,
    pub agent: &'a str,
    pub budget: &'a BudgetQuestion,
    /// The digest of the policy about the run's tools, which lets the budget ask.
    pub policy: &'a str,
    /// The last moment at which the limits may be raised, in milliseconds since 1970.
    pub not_after_ms: i64,
}

/// The call that a person approves. The digest of this value is the subject of the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ApprovalSubject<'a> {
    pub run: &'a str,
    pub attempt: &'a str,
    pub agent: &'a str,
    pub tool: &'a str,
    /// The digest of the tool's definition.
    pub definition: &'a str,
    /// The digest of the image, or of the files of this machine, that the tool's program is made of.
    pub program: Option<&'a str>,
    /// The salted digest of the arguments, byte for byte as the client wrote them.
    pub arguments: &'a str,
    /// The digest of the policy about the run's tools.
    pub policy: &'a str,
    /// The digest of the policy that people have set for the agent.
    pub agent_policy: &'a str,
    /// The number of calls that the answer allows: `once`.
    pub scope: &'static str,
    /// The last moment at which the call may begin, in milliseconds since 1970.
    pub not_after_ms: i64,
}

/// A question as the store keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalRow {
    pub id: String,
    pub run: String,
    /// The account of the run; empty for a question of an earlier version.
    pub account: String,
    pub agent: String,
    pub tool: String,
    /// The rule that asks.
    pub rule: String,
    pub definition: String,
    pub policy: String,
    /// The digest of the [`ApprovalSubject`].
    pub digest: String,
    /// The arguments as the client wrote them; `None` once no person needs to read them.
    pub arguments: Option<String>,
    /// The argument fields that the operator has listed.
    pub evidence: BTreeMap<String, String>,
    pub price: Nanodollars,
    pub state: ApprovalState,
    pub requested_ms: i64,
    pub not_after_ms: i64,
    /// The time of the answer, or of the end without an answer.
    pub resolved_ms: Option<i64>,
    /// The grant that has answered.
    pub by: Option<String>,
    /// The text that the person has given.
    pub reason: Option<String>,
    /// The call that has begun by the answer.
    pub call: Option<String>,
    /// The spent limit, for a question about a budget; its tool is [`BUDGET_TOOL`].
    pub budget: Option<BudgetQuestion>,
    /// The limits that the person has raised.
    pub raised: Option<SpendingLimits>,
    /// The standing approval that an answer can make; `None` if an answer is for this call only.
    pub standing: Option<StandingOffer>,
}

/// The place where people answer the questions of one run.
#[derive(Debug)]
pub struct RunApprovals {
    pub store: ApprovalStore,
    pub times: ApprovalConfig,
    /// Permits for requests that are held until the answer.
    pub held: Semaphore,
    /// Permits for the proposals of the run. None is given back.
    pub proposals: Semaphore,
}

/// The effect of a rule that denies a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnDenial {
    /// The call is refused.
    #[default]
    Refuse,
    /// The call is refused, and a person may allow the same call for later.
    Propose,
}

/// The times and scopes of a configuration's approvals.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ApprovalConfig {
    /// The time after which a question is answered with no.
    #[serde(with = "humantime_serde")]
    pub ttl: Duration,
    /// The longest time for which a request waits for the answer before it is told that the call is pending.
    #[serde(with = "humantime_serde")]
    pub hold: Duration,
    /// The effect of a spent budget of the run.
    pub on_budget: OnBudget,
    /// The effect of a rule that denies a call.
    #[serde(skip_serializing_if = "is_refusing")]
    pub on_denial: OnDenial,
    /// The calls that an answer may count for.
    #[serde(skip_serializing_if = "is_once")]
    pub scopes: Vec<ApprovalScope>,
    /// The longest time for which a standing approval may be in force.
    #[serde(with = "humantime_serde", skip_serializing_if = "is_default_validity")]
    pub max_valid_for: Duration,
    /// The receiver that is told of questions, and may answer them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub webhook: Option<WebhookConfig>,
}

impl RunApprovals {
    pub fn new(store: ApprovalStore, times: ApprovalConfig) -> Self {
        let proposals = Semaphore::new(MAX_PROPOSALS_PER_RUN as usize);
        Self { store, times, held: Semaphore::new(MAX_HELD_REQUESTS), proposals }
    }
}

impl ApprovalConfig {
    /// Returns true if a person can allow more than one call.
    pub fn has_standing(&self) -> bool {
        self.on_denial == OnDenial::Propose
            || self.scopes.iter().any(|scope| *scope != ApprovalScope::Once)
    }
}

impl ApprovalRow {
    /// Returns the decision about the question. A person's yes stays the decision if the question was closed after it,
    /// because its run has ended or its time was over before the call could begin.
    pub fn decision(&self) -> ApprovalState {
        let is_closed = matches!(self.state, ApprovalState::Withdrawn | ApprovalState::Expired);
        if is_closed && self.by.is_some() { ApprovalState::Approved } else { self.state }
    }
}

impl ApprovalSubject<'_> {
    /// Returns the digest that an answer must name.
    pub fn digest(&self) -> String {
        canonical::digest("approval 2", self).expect("a subject has string keys")
    }
}

impl BudgetSubject<'_> {
    /// Returns the digest that an answer must name.
    pub fn digest(&self) -> String {
        canonical::digest("budget approval 1", self).expect("a subject has string keys")
    }
}

impl ApprovalState {
    /// Every state, in the order of the diagram.
    pub const ALL: [Self; 6] = [
        Self::Pending,
        Self::Approved,
        Self::Denied,
        Self::Expired,
        Self::Withdrawn,
        Self::Consumed,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Approved => "approved",
            Self::Denied => "denied",
            Self::Expired => "expired",
            Self::Withdrawn => "withdrawn",
            Self::Consumed => "consumed",
        }
    }

    /// Returns true if the question may move from this state to `next`.
    pub fn may_become(self, next: Self) -> bool {
        match self {
            Self::Pending => {
                matches!(next, Self::Approved | Self::Denied | Self::Expired | Self::Withdrawn)
            }
            Self::Approved => matches!(next, Self::Expired | Self::Withdrawn | Self::Consumed),
            Self::Denied | Self::Expired | Self::Withdrawn | Self::Consumed => false,
        }
    }
}

impl Default for ApprovalConfig {
    fn default() -> Self {
        // Forty seconds are shorter than the timeout of every measured client.
        Self {
            ttl: Duration::from_mins(30),
            hold: Duration::from_secs(40),
            on_budget: OnBudget::Refuse,
            on_denial: OnDenial::Refuse,
            scopes: vec![ApprovalScope::Once],
            max_valid_for: DEFAULT_MAX_VALID_FOR,
            webhook: None,
        }
    }
}

// A default is left out of the digest of a policy, so that a new key changes no digest.
#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands a field to its function by reference"
)]
fn is_refusing(on_denial: &OnDenial) -> bool {
    *on_denial == OnDenial::Refuse
}

fn is_once(scopes: &[ApprovalScope]) -> bool {
    *scopes == [ApprovalScope::Once]
}

fn is_default_validity(longest: &Duration) -> bool {
    *longest == DEFAULT_MAX_VALID_FOR
}

/// Returns a time in milliseconds since 1970.
pub fn to_unix_millis(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Formats a time in milliseconds since 1970 as RFC 3339.
pub fn format_unix_millis(millis: i64) -> String {
    let since = Duration::from_millis(millis.try_into().unwrap_or_default());
    timestamp::format_rfc3339_millis(UNIX_EPOCH + since).to_string()
}

/// The most requests of a run that wait for a person at the same time. Our choice: further requests are answered at once,
/// with the id of their call.
const MAX_HELD_REQUESTS: usize = 8;

/// The longest time of a standing approval, unless the configuration says otherwise. Our choice.
pub const DEFAULT_MAX_VALID_FOR: Duration = Duration::from_hours(7 * 24);

/// The name in place of a tool's in a question about a budget. A tool's name has `__`.
pub const BUDGET_TOOL: &str = "budget";

/// The scope of an answer: one call.
pub const SCOPE_ONCE: &str = "once";
