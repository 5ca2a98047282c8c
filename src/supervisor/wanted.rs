//! A run as somebody asks a service for it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Settings;
use crate::base::reach::Reach;
use crate::base::{hex, trace};
use crate::budget::{Limits, Nanodollars};
use crate::catalog::{Catalog, Entry, Mode};
use crate::config::Config;
use crate::relay::branch_key::{self, BranchKey, Sources};
use crate::relay::repository::{self, Repository};
use crate::run::is_reserved_key;
use crate::runner::delivery::Relayed;
use crate::runner::residents::{Key, Scope};
use crate::runner::{Llm, Message, Order, Request};
use crate::sandbox::spec::Wanted as Limited;

/// What somebody who may ask for it wants. It is kept until the run begins.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Wanted {
    /// The id of the grant that allows it.
    pub grant: String,
    /// An agent of the catalog.
    pub agent: String,
    /// Else the agent's own.
    pub model: Option<String>,
    /// What it is to answer, and what was said before.
    pub messages: Vec<Message>,
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
    pub branch: Branch,
    /// No more than its agent and its grant allow.
    #[serde(default)]
    pub budget: Limits,
    pub max_runtime: Option<Duration>,
    /// The span that the run is part of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<trace::Context>,
}

/// A repository, and the line of work there that a run is for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Branch {
    /// Without one, nothing is delivered.
    pub repository: Option<String>,
    /// Which addresses its host may have, by the grant; those on the internet where it does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reach: Option<Reach>,
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
pub(super) struct Line {
    pub(super) repository: Repository,
    pub(super) key: BranchKey,
}

/// Why a branch cannot be worked on.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoLine {
    #[error("the repository cannot be used: {0}")]
    Repository(#[from] repository::Invalid),
    #[error(transparent)]
    Key(#[from] branch_key::Invalid),
    #[error("a pull request needs a repository on a forge, by `https://HOST/OWNER/NAME`")]
    NoForge,
}

impl Wanted {
    /// Tells whether the same is wanted again. Each time it is asked for within a span of its own.
    pub(super) fn digest(&self) -> String {
        let mut asked = Self { traceparent: None, ..self.clone() };
        // The grant's, and not asked for.
        asked.branch.reach = None;
        hex::sha256(asked.to_json().as_bytes())
    }

    pub(super) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("its maps have texts as keys")
    }

    /// Lowers the run's limit of money to what is reserved for it, where its grant has a cap.
    pub(super) fn within_money(mut self, reserved: Option<Nanodollars>) -> Self {
        let most = Limits { max_cost_usd: reserved, ..Limits::default() };
        self.budget = self.budget.within(&most);
        self
    }

    /// What is left of it once the run has begun.
    pub(super) fn begun(&self) -> Self {
        Self { messages: vec![], env: BTreeMap::new(), ..self.clone() }
    }

    /// The branch that it is for; none where there is no repository, or no key.
    pub(super) fn line(&self, run: &str) -> Result<Option<Line>, NoLine> {
        let Branch { repository, key, work_item, by_state_key, pull_request, .. } = &self.branch;
        let sources = Sources {
            explicit: key.as_deref(),
            work_item: work_item.as_deref(),
            state: self.state_key.as_deref(),
            may_use_state: *by_state_key,
        };
        let key = BranchKey::choose(sources, run)?;
        let Some(repository) = repository.as_deref().map(Repository::parse).transpose()? else {
            return Ok(None);
        };
        let Some(key) = key else { return Ok(None) };
        if *pull_request && repository.hosted().is_none() {
            return Err(NoLine::NoForge);
        }
        Ok(Some(Line { repository: repository.within(self.branch.reach.unwrap_or_default()), key }))
    }

    /// What its result says of work that cannot go anywhere.
    pub(super) fn skipped(&self, line: Option<&Line>) -> Option<Relayed> {
        let is_skipped = self.branch.repository.is_some() && line.is_none();
        is_skipped.then(Relayed::without_key)
    }

    /// Whose sandbox it is executed in, where its agent has one that outlives its runs: that of its branch, or of its
    /// conversation.
    pub(super) fn resident(&self, entry: &Entry) -> Option<Key> {
        if entry.mode != Mode::LongRunning {
            return None;
        }
        let Branch { repository, key, work_item, .. } = &self.branch;
        let kinds = [("branch_key", key), ("work_item", work_item), ("state_key", &self.state_key)];
        let (kind, line) =
            kinds.into_iter().find_map(|(kind, text)| Some((kind, text.as_ref()?)))?;
        let scope = Scope {
            grant: self.grant.clone(),
            account: self.account.clone(),
            repository: repository.clone().unwrap_or_default(),
            kind,
        };
        Some(Key::new(&entry.name, line).within(scope).keeping(KEPT.iter().copied()))
    }

    /// The run as the runner wants it, but for its branch.
    ///
    /// # Errors
    /// What does not fit together.
    pub(super) fn order(
        &self,
        run: &str,
        (settings, config, catalog): (&Settings, &Config, &Catalog),
    ) -> anyhow::Result<Order> {
        let mut request = self.request(run, settings, config);
        // The service's is for agents that do not say.
        let entry = catalog.find(&self.agent)?;
        request.driver = Some(entry.driver.or(settings.driver));
        if self.model.is_none() && entry.models.default.is_none() {
            bail!(
                "no model is named, and `{}` has none of its own; name one as `model`",
                entry.name
            );
        }
        let config = self.config(run, settings, config);
        let mut order = request.order(config, settings.host.clone(), catalog)?;
        let longest = entry.limits.limits().max_runtime;
        let max_runtime = &mut order.spec.limits.max_runtime;
        *max_runtime = longest.min(*max_runtime);
        Ok(order)
    }

    /// The settings of its gateway.
    pub(super) fn config(&self, run: &str, settings: &Settings, base: &Config) -> Config {
        let mut config = base.clone();
        self.request(run, settings, base).configure(&mut config);
        config.audit.path = Some(settings.audit_log(run));
        config.audit.signing_key = Some(settings.signing_key.clone());
        config
    }

    /// The caller's metadata without the keys that the service sets. The API refuses those; a row of an earlier version
    /// may still have them.
    fn own_metadata(&self) -> Map<String, Value> {
        let mut metadata = self.metadata.clone();
        metadata.retain(|key, _| !is_reserved_key(key));
        metadata
    }

    fn request(&self, run: &str, settings: &Settings, base: &Config) -> Request {
        Request {
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
            llm: Llm {
                account: Some(self.account.clone()),
                metadata: Some(self.own_metadata()),
                model: self.model.clone(),
                traceparent: self.traceparent,
                budget: self.budget.within(&base.budget),
                ..Llm::default()
            },
            ..Request::default()
        }
    }
}

/// Where the agents of the catalog keep what they remember, in their workspaces.
const KEPT: &[&str] = &[".openclaw-state", ".cache"];

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
        let wanted = Wanted { metadata, ..Wanted::default() };
        assert_eq!(Value::Object(wanted.own_metadata()), json!({"team": "ads"}));
    }
}
