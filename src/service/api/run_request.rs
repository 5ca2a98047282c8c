//! The body of a request for a run, as the API documents it. The body becomes a run's submission, within the limits of
//! the grant.

use std::time::Duration;

use serde::{Deserialize, Deserializer, de};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::error::ApiError;
use crate::base::hidden_characters::is_hidden;
use crate::base::host_reach::HostReach;
use crate::gateway::run::{NAME_RULE, is_name, is_reserved_key};
use crate::llm::budget::{BudgetLimits, Nanodollars, Tokens};
use crate::relay::repo::repository::RepositoryUrl;
use crate::runner;
use crate::service::auth::{AccessGrant, GrantScope};
use crate::service::runs::submission::{BranchOptions, RunSubmission};

/// The request for a run.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CreateRunBody {
    /// The agent to run: an `agentId` of `GET /api/v1/ai/agents`.
    #[schema(example = "sandbox:agent")]
    pub(super) agent: String,
    /// The model that the agent uses. The default is the agent's own.
    pub(super) model: Option<String>,
    /// The conversation, oldest message first. The last message is the user's.
    #[schema(min_items = 1)]
    pub(super) messages: Vec<ApiMessage>,
    /// The account that pays for the run. The default is the grant's first account.
    pub(super) account: Option<String>,
    /// The name of the conversation that the run is a part of. Runs with the same state key may share a workspace.
    pub(super) state_key: Option<String>,
    /// The URL of the repository that the agent works on. The grant has to allow it.
    #[schema(example = "https://github.com/acme/site")]
    pub(super) repo: Option<String>,
    /// The branch that the work is based on. The default is the repository's default branch.
    pub(super) base: Option<String>,
    /// The key of the branch `sandbox/KEY` that receives the work. Without `branch_key` and `work_item`, no work is
    /// delivered.
    pub(super) branch_key: Option<String>,
    /// The key of the branch if `branch_key` is absent, such as the number of an issue.
    pub(super) work_item: Option<String>,
    /// True if the service opens a pull request for the work of a successful run.
    #[serde(default)]
    pub(super) pull_request: bool,
    /// The title of a new pull request. The default comes from the commits.
    #[schema(min_length = 1, max_length = 256)]
    pub(super) pull_request_title: Option<String>,
    /// True if the pull request does not show the text of this request. By default, the pull request shows the first 2,000
    /// characters of the last message to everyone who may read the repository.
    #[serde(default)]
    pub(super) hide_request: bool,
    /// The budget of the run. The limits of the agent and of the grant apply in any case.
    #[serde(default)]
    pub(super) budget: BudgetBody,
    /// The time after which the service ends the run, as a number with a unit. The maximum of the agent applies in any
    /// case.
    #[serde(default, deserialize_with = "deserialize_duration")]
    #[schema(value_type = Option<String>, pattern = "^([0-9]+(ms|s|m|h|d) ?)+$", example = "10m")]
    pub(super) max_runtime: Option<Duration>,
    /// Further metadata of the run for LiteLLM's spend logs, at most 4096 bytes as JSON. Keys that the service sets are
    /// refused.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub(super) metadata: Map<String, Value>,
}

/// One message of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ApiMessage {
    /// The author of the message.
    pub(super) role: ApiRole,
    /// The text of the message.
    #[schema(example = "What is a socket?")]
    pub(super) content: String,
}

/// The author of a message.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum ApiRole {
    System,
    User,
    Assistant,
}

/// The limits of what a run may spend. An absent value is no limit.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BudgetBody {
    /// The largest number of turns: calls that make a model generate.
    max_turns: Option<u64>,
    /// The largest sum of input and output, in tokens.
    max_total_tokens: Option<u64>,
    /// The largest input of all calls together, in tokens.
    max_input_tokens: Option<u64>,
    /// The largest output of all calls together, in tokens.
    max_output_tokens: Option<u64>,
    /// The largest cost in US dollars, as a decimal text, because many clients read JSON numbers with rounding errors.
    #[serde(default, deserialize_with = "deserialize_dollars")]
    #[schema(value_type = Option<String>, pattern = "^[0-9]{1,9}([.][0-9]{1,9})?$", example = "2.50")]
    max_cost_usd: Option<Nanodollars>,
    /// The largest number of calls that are open at the same time.
    #[schema(minimum = 1)]
    max_concurrent: Option<u32>,
    /// The largest number of calls per minute.
    #[schema(minimum = 1)]
    requests_per_minute: Option<u32>,
    /// The largest number of tokens per minute, input and output together.
    #[schema(minimum = 1)]
    tokens_per_minute: Option<u32>,
}

impl CreateRunBody {
    /// Returns the submission, if the grant allows it.
    pub(super) fn authorize(self, grant: &AccessGrant) -> Result<RunSubmission, ApiError> {
        grant.check_scope(GrantScope::Runs)?;
        grant.check_sandbox()?;
        grant.check_agent(&self.agent)?;
        let account = grant.resolve_account(self.account.as_deref())?;
        if !is_name(&account) {
            return Err(ApiError::invalid_body(format_args!("`account`: {NAME_RULE}")));
        }
        self.validate_body()?;
        let repository =
            self.repo.as_deref().map(|url| resolve_repository(grant, url)).transpose()?;
        let (repository, reach) = repository.unzip();
        Ok(RunSubmission {
            grant: grant.id.clone(),
            agent: self.agent,
            model: self.model,
            messages: self.messages.into_iter().map(Into::into).collect(),
            account,
            metadata: self.metadata,
            state_key: self.state_key,
            branch: BranchOptions {
                repository,
                reach,
                key: self.branch_key,
                work_item: self.work_item,
                by_state_key: false,
                base: self.base,
                pull_request: self.pull_request,
                title: self.pull_request_title,
                hide_request: self.hide_request,
            },
            budget: self.budget.into_limits()?.capped_by(&grant.terms.budget),
            max_runtime: self.max_runtime,
            ..RunSubmission::default()
        })
    }

    fn validate_body(&self) -> Result<(), ApiError> {
        let Self { agent, model, state_key, base, branch_key, work_item, .. } = self;
        let pull_request_title = &self.pull_request_title;
        let optional = [
            ("model", model),
            ("state_key", state_key),
            ("base", base),
            ("branch_key", branch_key),
            ("work_item", work_item),
            ("pull_request_title", pull_request_title),
        ];
        let optional = optional.into_iter().filter_map(|(what, text)| Some((what, text.as_ref()?)));
        let mut named = optional.chain([("agent", agent)]);
        if let Some((what, _)) = named.find(|(_, text)| !is_valid_label(text)) {
            return Err(ApiError::invalid_body(format_args!(
                "`{what}` is invalid: give 1 to {MAX_LABEL_BYTES} visible characters"
            )));
        }
        match self.messages.last() {
            None => {
                return Err(ApiError::invalid_body(
                    "`messages` is empty; give at least one message",
                ));
            }
            Some(ApiMessage { role: ApiRole::User, .. }) => (),
            Some(_) => {
                return Err(ApiError::invalid_body(
                    "the last entry of `messages` is not from the user; end with a message of the role `user`",
                ));
            }
        }
        self.validate_branch()?;
        if self.max_runtime.is_some_and(|longest| longest.is_zero()) {
            return Err(ApiError::invalid_body(
                "`max_runtime` is 0; give a duration such as \"10m\"",
            ));
        }
        if let Some(key) = self.metadata.keys().find(|key| is_reserved_key(key)) {
            let hint = match &**key {
                "existing_trace_id" => {
                    "; send the header `traceparent` to make the run part of a trace"
                }
                _ => "",
            };
            let key: String = key.chars().take(MAX_LABEL_BYTES).collect();
            return Err(ApiError::invalid_body(format_args!(
                "`metadata.{key}` is reserved: the service sets it{hint}; leave it out"
            )));
        }
        if Value::Object(self.metadata.clone()).to_string().len() > MAX_METADATA_BYTES {
            return Err(ApiError::invalid_body(format_args!(
                "`metadata` is longer than {MAX_METADATA_BYTES} bytes"
            )));
        }
        Ok(())
    }

    /// Checks the branch settings. A named branch is used or refused. A repository without a branch key is accepted,
    /// and the run's result says that the relay was skipped.
    fn validate_branch(&self) -> Result<(), ApiError> {
        let has_key = self.branch_key.is_some() || self.work_item.is_some();
        let asked = [
            ("pull_request", self.pull_request),
            ("pull_request_title", self.pull_request_title.is_some()),
            ("base", self.base.is_some()),
        ];
        match asked.into_iter().find(|(_, is_asked)| *is_asked) {
            Some((what, _)) if self.repo.is_none() || !has_key => {
                Err(ApiError::invalid_body(format_args!(
                    "`{what}` needs a branch; give `repo`, and `branch_key` or `work_item`"
                )))
            }
            _ => Ok(()),
        }
    }
}

impl BudgetBody {
    fn into_limits(self) -> Result<BudgetLimits, ApiError> {
        let Self { max_concurrent, requests_per_minute, tokens_per_minute, .. } = self;
        if [max_concurrent, requests_per_minute, tokens_per_minute].contains(&Some(0)) {
            return Err(ApiError::invalid_body(
                "a rate or a maximum of open calls is 0; give at least 1, or leave it out",
            ));
        }
        Ok(BudgetLimits {
            max_turns: self.max_turns,
            max_total_tokens: self.max_total_tokens.map(Tokens),
            max_input_tokens: self.max_input_tokens.map(Tokens),
            max_output_tokens: self.max_output_tokens.map(Tokens),
            max_cost_usd: self.max_cost_usd,
            max_concurrent,
            requests_per_minute,
            tokens_per_minute,
            free_calls_per_minute: None,
            deadline: None,
        })
    }
}

impl From<ApiMessage> for runner::ChatMessage {
    fn from(message: ApiMessage) -> Self {
        let role = match message.role {
            ApiRole::System => runner::ChatRole::System,
            ApiRole::User => runner::ChatRole::User,
            ApiRole::Assistant => runner::ChatRole::Assistant,
        };
        Self { role, content: message.content }
    }
}

/// Returns the canonical spelling, which grants use, and the addresses that the host's name may lead to.
fn resolve_repository(grant: &AccessGrant, url: &str) -> Result<(String, HostReach), ApiError> {
    let repository = RepositoryUrl::parse(url).map_err(ApiError::invalid_body)?;
    let url = repository.clone_url();
    let reach = grant.check_repository(&url)?;
    Ok((url, reach))
}

/// Returns true if a text is safe in a variable, a log line and a list.
fn is_valid_label(text: &str) -> bool {
    (1..=MAX_LABEL_BYTES).contains(&text.chars().count()) && !text.chars().any(is_hidden)
}

fn deserialize_duration<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    let given = Option::<String>::deserialize(deserializer)?;
    let read = |text: String| humantime::parse_duration(&text);
    given.map(read).transpose().map_err(|_| de::Error::custom("give a time, such as \"10m\""))
}

fn deserialize_dollars<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Nanodollars>, D::Error> {
    let Some(given) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
    let wrong = || de::Error::custom("give an amount of dollars as a text, such as \"2.50\"");
    Nanodollars::parse(&given).map(Some).ok_or_else(wrong)
}

/// The maximum length of a name in a request, in bytes. Our choice: longer than any name in use.
const MAX_LABEL_BYTES: usize = 256;

/// The maximum size of the metadata as JSON, in bytes. The metadata goes into a header of each call; LiteLLM's server
/// accepts 64 KiB of headers, and other servers accept less.
const MAX_METADATA_BYTES: usize = 4096;
