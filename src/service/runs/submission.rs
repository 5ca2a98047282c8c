//! A run as somebody asks a service for it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::RunServiceConfig;
use crate::base::host_reach::HostReach;
use crate::base::{hex, trace_context};
use crate::gateway::config::GatewayConfig;
use crate::gateway::run::is_reserved_key;
use crate::llm::budget::{BudgetLimits, Nanodollars};
use crate::relay::repo::branch_key::{self, BranchKey, BranchKeySources};
use crate::relay::repo::repository::{self, RepositoryUrl};
use crate::runner::agents::{AgentCatalog, AgentDefinition, SandboxLifetime};
use crate::runner::branch_delivery::DeliveryReport;
use crate::runner::long_running::{SandboxKey, SandboxKeyScope};
use crate::runner::{ChatMessage, GatewayOverrides, RunPlan, RunRequest};
use crate::sandbox::spec::LimitOverrides as Limited;

/// What somebody who may ask for it wants. It is kept until the run begins.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunSubmission {
    /// The id of the grant that allows it.
    pub grant: String,
    /// An agent of the catalog.
    pub agent: String,
    /// Else the agent's own.
    pub model: Option<String>,
    /// What it is to answer, and what was said before.
    pub messages: Vec<ChatMessage>,
    /// Who pays.
    pub account: String,
    /// What stands in the records of its calls, beside what stands there anyway.
    #[serde(default)]
    pub metadata: Map<String, Value>,
    /// Beside what every sandbox has.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The conversation that the run is a part of.
    pub state_key: Option<String>,
    /// Whose work it is, where it has a repository.
    #[serde(default)]
    pub branch: BranchOptions,
    /// No more than its agent and its grant allow.
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
    /// Without one, nothing is delivered.
    pub repository: Option<String>,
    /// Which addresses its host may have, by the grant; those on the internet where it does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reach: Option<HostReach>,
    pub key: Option<String>,
    /// The key where there is none.
    pub work_item: Option<String>,
    /// Whether the state key is the key, where there is no other.
    pub by_state_key: bool,
    /// The branch that the work is for; else the default branch.
    pub base: Option<String>,
    pub pull_request: bool,
}

/// Where a run's work goes.
#[derive(Clone, Debug)]
pub(super) struct BranchRef {
    pub(super) repository: RepositoryUrl,
    pub(super) key: BranchKey,
}

/// Why a branch cannot be worked on.
#[derive(Debug, thiserror::Error)]
pub(super) enum BranchRefError {
    #[error("the repository cannot be used: {0}")]
    Repository(#[from] repository::RepositoryUrlError),
    #[error(transparent)]
    Key(#[from] branch_key::BranchKeyError),
    #[error("a pull request needs a repository on a forge, by `https://HOST/OWNER/NAME`")]
    NoForge,
}

impl RunSubmission {
    /// Tells whether the same is wanted again. Each time it is asked for within a span of its own.
    pub(super) fn digest(&self) -> String {
        let mut asked = Self { traceparent: None, ..self.clone() };
        // The grant's, and not asked for.
        asked.branch.reach = None;
        hex::sha256_hex(asked.to_json().as_bytes())
    }

    pub(super) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("its maps have texts as keys")
    }

    /// Lowers the run's limit of money to what is reserved for it, where its grant has a cap.
    pub(super) fn with_reserved_cost(mut self, reserved: Option<Nanodollars>) -> Self {
        let most = BudgetLimits { max_cost_usd: reserved, ..BudgetLimits::default() };
        self.budget = self.budget.capped_by(&most);
        self
    }

    /// What is left of it once the run has begun.
    pub(super) fn without_content(&self) -> Self {
        Self { messages: vec![], env: BTreeMap::new(), ..self.clone() }
    }

    /// The branch that it is for; none where there is no repository, or no key.
    pub(super) fn branch_ref(&self, run: &str) -> Result<Option<BranchRef>, BranchRefError> {
        let BranchOptions { repository, key, work_item, by_state_key, pull_request, .. } =
            &self.branch;
        let sources = BranchKeySources {
            explicit: key.as_deref(),
            work_item: work_item.as_deref(),
            state: self.state_key.as_deref(),
            may_use_state: *by_state_key,
        };
        let key = BranchKey::from_sources(sources, run)?;
        let Some(repository) = repository.as_deref().map(RepositoryUrl::parse).transpose()? else {
            return Ok(None);
        };
        let Some(key) = key else { return Ok(None) };
        if *pull_request && repository.as_hosted().is_none() {
            return Err(BranchRefError::NoForge);
        }
        Ok(Some(BranchRef {
            repository: repository.with_reach(self.branch.reach.unwrap_or_default()),
            key,
        }))
    }

    /// What its result says of work that cannot go anywhere.
    pub(super) fn skipped_delivery(&self, line: Option<&BranchRef>) -> Option<DeliveryReport> {
        let is_skipped = self.branch.repository.is_some() && line.is_none();
        is_skipped.then(DeliveryReport::skipped_without_key)
    }

    /// Whose sandbox it is executed in, where its agent has one that outlives its runs: that of its branch, or of its
    /// conversation.
    pub(super) fn long_running_key(&self, entry: &AgentDefinition) -> Option<SandboxKey> {
        if entry.mode != SandboxLifetime::LongRunning {
            return None;
        }
        let BranchOptions { repository, key, work_item, .. } = &self.branch;
        let kinds = [("branch_key", key), ("work_item", work_item), ("state_key", &self.state_key)];
        let (kind, line) =
            kinds.into_iter().find_map(|(kind, text)| Some((kind, text.as_ref()?)))?;
        let scope = SandboxKeyScope {
            grant: self.grant.clone(),
            account: self.account.clone(),
            repository: repository.clone().unwrap_or_default(),
            kind,
        };
        Some(
            SandboxKey::new(&entry.name, line)
                .scoped_to(scope)
                .preserving(PRESERVED_DIRS.iter().copied()),
        )
    }

    /// The run as the runner wants it, but for its branch.
    ///
    /// # Errors
    /// What does not fit together.
    pub(super) fn run_plan(
        &self,
        run: &str,
        (settings, config, catalog): (&RunServiceConfig, &GatewayConfig, &AgentCatalog),
    ) -> anyhow::Result<RunPlan> {
        let mut request = self.run_request(run, settings, config);
        // The service's is for agents that do not say.
        let entry = catalog.find_agent(&self.agent)?;
        request.driver = Some(entry.driver.or(settings.driver));
        if self.model.is_none() && entry.models.default.is_none() {
            bail!(
                "no model is named, and `{}` has none of its own; name one as `model`",
                entry.name
            );
        }
        let config = self.gateway_config(run, settings, config);
        let mut order = request.resolve(config, settings.host.clone(), catalog)?;
        let longest = entry.limits.resolve_limits().max_runtime;
        let max_runtime = &mut order.spec.limits.max_runtime;
        *max_runtime = longest.min(*max_runtime);
        Ok(order)
    }

    /// The settings of its gateway.
    pub(super) fn gateway_config(
        &self,
        run: &str,
        settings: &RunServiceConfig,
        base: &GatewayConfig,
    ) -> GatewayConfig {
        let mut config = base.clone();
        self.run_request(run, settings, base).apply_to_config(&mut config);
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

    fn run_request(
        &self,
        run: &str,
        settings: &RunServiceConfig,
        base: &GatewayConfig,
    ) -> RunRequest {
        RunRequest {
            run: Some(run.to_owned()),
            agent: Some(self.agent.clone()),
            messages: self.messages.clone(),
            driver: Some(settings.driver),
            allow_unlimited: Some(settings.allow_unlimited),
            env: self.env.clone(),
            limits: Limited { max_runtime: self.max_runtime, ..Limited::default() },
            // Nothing of this machine is shown to it but what the catalog's entry says.
            roots: vec![PathBuf::from("/")],
            grace: Some(settings.grace),
            llm: GatewayOverrides {
                account: Some(self.account.clone()),
                metadata: Some(self.caller_metadata()),
                model: self.model.clone(),
                traceparent: self.traceparent,
                budget: self.budget.capped_by(&base.budget),
                ..GatewayOverrides::default()
            },
            ..RunRequest::default()
        }
    }
}

/// Where the agents of the catalog keep what they remember, in their workspaces.
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
