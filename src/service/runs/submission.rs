//! A run as a client requests it from the service.

use std::collections::BTreeMap;
use std::ops::Not;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::RunServiceConfig;
use crate::base::digest::sha256_hex;
use crate::base::host_reach::HostReach;
use crate::base::trace_context;
use crate::gateway::config::GatewayConfig;
use crate::gateway::run::is_reserved_key;
use crate::llm::budget::{BudgetLimits, Nanodollars};
use crate::relay::repo::branch_key::{BranchKey, BranchKeySources};
use crate::relay::repo::repository::RepositoryUrl;
use crate::runner::agents::{AgentCatalog, AgentDefinition, SandboxLifetime};
use crate::runner::branch_delivery::BranchRequest;
use crate::runner::long_running::{SandboxKey, SandboxKeyScope};
use crate::runner::{ChatMessage, ChatRole, GatewayOverrides, GatewayServer, RunPlan, RunRequest};
use crate::sandbox::spec::LimitOverrides as Limited;
use crate::tools::agent_modes::SandboxScope;

/// A client's request for a run, after its grant was checked. The run store stores the submission as JSON, and
/// [`RunSubmission::resolve`] makes the run's plan from it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunSubmission {
    /// The id of the grant that allows the run.
    pub grant: String,
    /// An agent of the catalog.
    pub agent: String,
    /// The model. `None` means the agent's own default.
    pub model: Option<String>,
    /// The messages that the agent answers, after the earlier messages of the conversation.
    pub messages: Vec<ChatMessage>,
    /// The account that pays.
    pub account: String,
    /// The client's metadata for the records of the run's calls, in addition to the gateway's own keys.
    #[serde(default)]
    pub metadata: Map<String, Value>,
    /// The environment variables of the run, in addition to those of every sandbox.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The conversation that the run is a part of.
    pub state_key: Option<String>,
    /// The repository and the branch of the run's work.
    #[serde(default)]
    pub branch: BranchOptions,
    /// The run's limits, at most those of its agent and its grant.
    #[serde(default)]
    pub budget: BudgetLimits,
    pub max_runtime: Option<Duration>,
    /// The span that the run is part of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<trace_context::TraceContext>,
}

/// A repository, and the line of work there that a run is for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BranchOptions {
    /// The repository's URL. Without a repository, no work is delivered.
    pub repository: Option<String>,
    /// The addresses that the grant allows for the repository's host. `None` means public addresses of the internet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reach: Option<HostReach>,
    pub key: Option<String>,
    /// The work item, which is the branch key if `key` is `None`.
    pub work_item: Option<String>,
    /// True if the state key may be the branch key when the request has no other key.
    pub by_state_key: bool,
    /// The branch that the work is based on. `None` means the default branch.
    pub base: Option<String>,
    pub pull_request: bool,
    /// The title for a new pull request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// True if the pull request does not show the user's request.
    #[serde(skip_serializing_if = "Not::not")]
    pub hide_request: bool,
}

impl RunSubmission {
    /// Returns the digest that identifies a repeated request. The digest ignores the span, which differs for each
    /// request.
    pub(super) fn digest(&self) -> String {
        let mut asked = Self { traceparent: None, ..self.clone() };
        // The reach comes from the grant, not from the request, and the grant's terms may change between two requests.
        asked.branch.reach = None;
        sha256_hex(asked.to_json().as_bytes())
    }

    pub(super) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("its maps have texts as keys")
    }

    /// Lowers the run's limit of money to the reserved amount, if its grant has a cap.
    pub(super) fn with_reserved_cost(mut self, reserved: Option<Nanodollars>) -> Self {
        let most = BudgetLimits { max_cost_usd: reserved, ..BudgetLimits::default() };
        self.budget = self.budget.capped_by(&most);
        self
    }

    /// Returns the submission without messages and environment, as the run store stores it after the run has begun.
    pub(super) fn without_content(&self) -> Self {
        Self { messages: vec![], env: BTreeMap::new(), ..self.clone() }
    }

    /// Returns the run's branch, or `None` if the request has no repository or no key. With `hide_requests`, no pull request
    /// shows the user's request.
    fn branch_request(
        &self,
        run: &str,
        hide_requests: bool,
    ) -> anyhow::Result<Option<BranchRequest>> {
        let BranchOptions { repository, reach, key, work_item, by_state_key, base, .. } =
            &self.branch;
        let (pull_request, title) = (&self.branch.pull_request, &self.branch.title);
        let sources = BranchKeySources {
            explicit: key.as_deref(),
            work_item: work_item.as_deref(),
            state: self.state_key.as_deref(),
            may_use_state: *by_state_key,
        };
        let key = BranchKey::from_sources(sources, run)?;
        let repository = repository.as_deref().map(RepositoryUrl::parse).transpose();
        let repository = repository.context("the repository cannot be used")?;
        let Some((repository, key)) = repository.zip(key) else { return Ok(None) };
        if *pull_request && repository.as_hosted().is_none() {
            bail!("a pull request needs a repository on a forge, by `https://HOST/OWNER/NAME`");
        }
        Ok(Some(BranchRequest {
            repository: repository.with_reach(reach.unwrap_or_default()),
            key,
            base: base.clone(),
            pull_request: *pull_request,
            title: title.clone(),
            asked: if hide_requests || self.branch.hide_request {
                String::new()
            } else {
                last_user_text(&self.messages)
            },
            grant: Some(self.grant.clone()),
        }))
    }

    /// Returns the key of the run's long-running sandbox: by its branch, or else by its conversation. `None` if the
    /// agent's sandboxes live for one run.
    pub(super) fn long_running_key(&self, entry: &AgentDefinition) -> Option<SandboxKey> {
        if entry.mode != SandboxLifetime::LongRunning {
            return None;
        }
        let BranchOptions { repository, key, work_item, .. } = &self.branch;
        let scope = |kind| SandboxKeyScope {
            grant: self.grant.clone(),
            account: self.account.clone(),
            repository: repository.clone().unwrap_or_default(),
            kind,
        };
        let scoped_key = |agent: &str, line: &str, kind| {
            let key = SandboxKey::new(agent, line).scoped_to(scope(kind));
            key.preserving(PRESERVED_DIRS.iter().copied())
        };
        match entry.modes.scope {
            SandboxScope::Session => {}
            SandboxScope::Agent => return Some(scoped_key(&entry.name, "", "agent")),
            // No agent has an empty name, so the key is that of no agent.
            SandboxScope::Shared => return Some(scoped_key("", "", "shared")),
        }
        // The first key that the request has decides. The kind is part of the scope, so that equal texts of different
        // kinds do not share a sandbox.
        let kinds = [("branch_key", key), ("work_item", work_item), ("state_key", &self.state_key)];
        let (kind, line) =
            kinds.into_iter().find_map(|(kind, text)| Some((kind, text.as_ref()?)))?;
        Some(scoped_key(&entry.name, line, kind))
    }

    /// Returns the plan for the runner.
    ///
    /// # Errors
    /// Returns an error if the agent is unknown, the branch cannot be used, no model is named, or the settings
    /// contradict each other.
    pub(super) fn resolve(
        &self,
        run: &str,
        gateway: GatewayServer,
        (settings, config, catalog): (&RunServiceConfig, &GatewayConfig, &AgentCatalog),
    ) -> anyhow::Result<RunPlan> {
        let entry = catalog.find_agent(&self.agent)?;
        let branch = self.branch_request(run, settings.hide_requests)?;
        if self.branch.repository.is_some() && entry.modes.scope != SandboxScope::Session {
            bail!(
                "`modes.scope` of `{}` lets runs share a workspace, which has no place for a repository; give no repository",
                entry.name
            );
        }
        if self.model.is_none() && entry.models.default.is_none() {
            bail!(
                "no model is named, and `{}` has none of its own; name one as `model`",
                entry.name
            );
        }
        // A client may shorten the agent's maximum run time, but never extend it.
        let longest = entry.limits.resolve_limits().max_runtime;
        let max_runtime = self.max_runtime.map(|asked| asked.min(longest));
        let request = RunRequest {
            run: Some(run.to_owned()),
            agent: Some(self.agent.clone()),
            messages: self.messages.clone(),
            // The service's driver is the default for agents that name none.
            driver: Some(entry.driver.or(settings.driver)),
            allow_unlimited: Some(settings.allow_unlimited),
            env: self.env.clone(),
            limits: Limited { max_runtime, ..Limited::default() },
            // The roots are those that the catalog's entry may mount; the request itself cannot name a path of this
            // machine.
            roots: vec![PathBuf::from("/")],
            grace: Some(settings.grace),
            llm: self.gateway_overrides(config),
            branch,
            ..RunRequest::default()
        };
        let config = self.gateway_config(run, settings, config);
        request.resolve((config, gateway), settings.host.clone(), catalog)
    }

    /// Returns the settings of the run's gateway.
    pub(super) fn gateway_config(
        &self,
        run: &str,
        settings: &RunServiceConfig,
        base: &GatewayConfig,
    ) -> GatewayConfig {
        let mut config = base.clone();
        self.gateway_overrides(base).apply_to_config(Some(run), &mut config);
        config.audit.path = Some(settings.audit_log_path(run));
        config.audit.signing_key = Some(settings.signing_key.clone());
        config
    }

    /// The caller's metadata without the keys that the service sets. The API refuses those; a row of an earlier version
    /// may still have them.
    fn caller_metadata(&self) -> Map<String, Value> {
        let mut metadata = self.metadata.clone();
        metadata.retain(|key, _| !is_reserved_key(key));
        metadata
    }

    fn gateway_overrides(&self, base: &GatewayConfig) -> GatewayOverrides {
        GatewayOverrides {
            account: Some(self.account.clone()),
            metadata: Some(self.caller_metadata()),
            model: self.model.clone(),
            traceparent: self.traceparent,
            budget: self.budget.capped_by(&base.budget),
            ..GatewayOverrides::default()
        }
    }
}

/// Returns the last message of the user.
fn last_user_text(messages: &[ChatMessage]) -> String {
    let last = messages.iter().rev().find(|message| message.role == ChatRole::User);
    last.map_or_else(String::new, |message| message.content.clone())
}

/// The directories of a workspace in which the catalog's agents store their state between runs.
const PRESERVED_DIRS: &[&str] = &[".openclaw-state", ".cache"];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn metadata_of_an_earlier_version_cannot_say_who_the_run_is() {
        let metadata = json!({
            "graph_id": "architect", "Run_ID": "run-1", "attempt": 7, "existing_trace_id": "4bf9",
            "cogni_deployment_id": "d-1", "team": "ads",
        });
        let metadata = metadata.as_object().unwrap().clone();
        let wanted = RunSubmission { metadata, ..RunSubmission::default() };
        assert_eq!(Value::Object(wanted.caller_metadata()), json!({"team": "ads"}));
    }
}
