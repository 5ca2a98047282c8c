//! A run's way to a branch: its workspace is filled before the agent comes, and what it has committed is taken out and
//! delivered when its processes are gone.
//!
//! The taking out is done by a sandbox of its own, which has the workspace read-only and nothing of the agent's
//! running in it. Nothing that has gone wrong here changes how the run itself has ended.

mod extractor;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Serialize;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::directory::Directory;
use super::residents::kept::Line;
use crate::catalog::Entry;
use crate::delivery::outbox;
use crate::delivery::rules::Rules;
use crate::delivery::statement::Facts;
use crate::delivery::{Begun, Delivered, Relay};
use crate::relay::extract::{Announced, Commands};
use crate::relay::mirror::{Author, Owner};
use crate::relay::repository::Repository;
use crate::relay::{Artifacts, BranchKey};
use crate::run::Run;
use crate::sandbox::spec::{Access, GID, UID, Workspace};
use crate::sandbox::{self, Driver, RunSpec};

use extractor::Extractor;

/// A branch that the run's work is for. It is the run's for as long as this lives.
#[derive(Clone)]
pub struct Target {
    relay: Arc<Relay>,
    repository: Repository,
    begun: Begun,
    /// Whether there is to be a pull request, too.
    wants_pull_request: bool,
    /// Who the commits are by.
    agent: String,
    /// What they will be judged by.
    rules: Rules,
}

/// What has become of the work, as the result tells it.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Relayed {
    Delivered(Delivered),
    /// There was nothing to deliver, or it did not come out.
    Not {
        #[serde(skip_serializing_if = "Option::is_none")]
        branch: Option<String>,
        why: String,
    },
    /// Nothing was to be delivered, by a word for why.
    Skipped {
        skipped: &'static str,
    },
}

impl Target {
    /// Makes the branch the run's, and finds out where it stands.
    ///
    /// # Errors
    /// Another run has the branch, or the remote cannot be asked.
    pub async fn begin(
        relay: Arc<Relay>,
        repository: Repository,
        key: &BranchKey,
        base: Option<&str>,
    ) -> anyhow::Result<Self> {
        Box::pin(Self::begin_within(relay, repository, key, base, Duration::ZERO)).await
    }

    /// The same, for whoever waits so long until the branch is free.
    ///
    /// # Errors
    /// As [`Target::begin`].
    pub async fn begin_within(
        relay: Arc<Relay>,
        repository: Repository,
        key: &BranchKey,
        base: Option<&str>,
        patience: Duration,
    ) -> anyhow::Result<Self> {
        let begun = Box::pin(relay.begin_within(&repository, key, base, patience)).await?;
        let (agent, rules) = ("agent".to_owned(), relay.rules(None));
        Ok(Self { relay, repository, begun, wants_pull_request: false, agent, rules })
    }

    /// With a pull request, once the run is over and was ok.
    #[must_use]
    pub fn with_pull_request(self, wanted: bool) -> Self {
        Self { wants_pull_request: wanted, ..self }
    }

    /// Whose the commits are, where the agent does not say otherwise, and whose rules they are judged by beside this host's.
    #[must_use]
    pub fn by(self, agent: &Entry) -> Self {
        let rules = self.relay.rules(agent.relay.as_ref());
        Self { agent: agent.name.clone(), rules, ..self }
    }

    /// The branch, for whoever asks the outbox about it.
    pub(super) fn line(&self) -> Line {
        let branch_key = self.begun.state.branch.key().as_str().to_owned();
        Line { repository: self.repository.key(), branch_key }
    }

    /// Gives the sandbox a workspace with the branch checked out, which goes with the run. Blocks.
    pub(super) fn prepare(&self, spec: &mut RunSpec, directory: &Directory) -> anyhow::Result<()> {
        if spec.workspace != Workspace::None {
            bail!("a run with a repository has a workspace of its own; give no other");
        }
        let path = directory.workspace();
        self.feed(&path)?;
        spec.workspace = Workspace::Directory { path, access: Access::ReadWrite };
        Ok(())
    }

    /// Checks the branch out in a directory that is not there yet. Blocks.
    pub(super) fn feed(&self, workspace: &Path) -> anyhow::Result<()> {
        let Begun { mirror, lease, state } = &self.begun;
        let owner = Owner { uid: UID, gid: GID };
        let author = Author { name: self.agent.clone(), email: "agent@sandbox".to_owned() };
        let fed = mirror.feed(lease, state, workspace, (owner, &author));
        fed.with_context(|| format!("the workspace for `{}` cannot be filled", state.branch))
    }

    /// Takes the work out and delivers it, as far as that can be done now.
    pub(super) async fn deliver(
        &self,
        driver: &Driver,
        order: &sandbox::Order,
        source: Source<'_>,
    ) -> Relayed {
        let branch = Some(self.begun.state.branch.to_string());
        let artifacts = match self.relay.artifacts() {
            Ok(artifacts) => artifacts,
            Err(error) => {
                let why = format!("{error}; the workspace could not be kept");
                return Relayed::Not { branch, why };
            }
        };
        let extractor = Extractor::new(driver, order, self.relay.git());
        let image = order.spec.root.to_string();
        match Box::pin(self.try_deliver(&extractor, &artifacts, image, source)).await {
            Ok(Some(delivered)) => Relayed::Delivered(delivered),
            Ok(None) => {
                if let Err(error) = artifacts.discard() {
                    tracing::warn!(run = order.spec.run, %error, "an empty directory stays");
                }
                Relayed::Not { branch, why: "nothing was committed".to_owned() }
            }
            Err(error) => {
                tracing::error!(run = order.spec.run, "cannot relay: {error:#}");
                let why = match keep(order, &artifacts).await {
                    Ok(place) => {
                        format!("{error:#}; the workspace is kept in `{}`", place.display())
                    }
                    Err(lost) => format!("{error:#}; the workspace could not be kept: {lost:#}"),
                };
                Relayed::Not { branch, why }
            }
        }
    }

    async fn try_deliver(
        &self,
        extractor: &Extractor,
        artifacts: &Artifacts,
        image: String,
        source: Source<'_>,
    ) -> anyhow::Result<Option<Delivered>> {
        let Begun { lease, state, .. } = &self.begun;
        let commands = Commands::new(state, sandbox::spec::WORKSPACE, self.relay.limits());
        let facts = extractor.answer(artifacts, &commands.facts).await?;
        let Some(announced) = Announced::parse(&facts, 0)? else { return Ok(None) };
        // A `HEAD` that names nothing is no failure.
        let head = extractor.answer(artifacts, &commands.head).await.unwrap_or_default();
        // They are for people, and to be compared: without them the commits go as they are.
        let patches = extractor.fill(artifacts, &artifacts.patches(), &commands.patches).await;
        if let Err(error) = patches {
            tracing::warn!("the patches are not whole: {error:#}");
        }
        extractor.fill(artifacts, &artifacts.bundle(), &commands.bundle).await?;
        let order = outbox::Order {
            repository: self.repository.clone(),
            state: state.clone(),
            announced: announced.with_head(&head),
            facts: Facts {
                run: source.run.identity.run.clone(),
                agent: self.agent.clone(),
                image,
                policy: source.policy.to_owned(),
                spent: source.run.ledger.spent(),
            },
            rules: Some(self.rules.clone()),
            artifacts: artifacts.directory().to_owned(),
            pull_request: (self.wants_pull_request && source.is_ok).then_some(source.words),
        };
        Ok(Some(self.relay.deliver_until(source.leave, order, lease, &source.run.audit).await?))
    }
}

/// Copies the workspace beside what did come out: the run's directory goes with the run.
async fn keep(order: &sandbox::Order, artifacts: &Artifacts) -> anyhow::Result<PathBuf> {
    let Workspace::Directory { path, .. } = &order.spec.workspace else {
        bail!("there is none");
    };
    let place = artifacts.directory().join("workspace");
    // As they are: it follows no link, and runs nothing of what it copies.
    let copied = Command::new("cp").args(["-a", "--"]).arg(path).arg(&place).output().await?;
    if !copied.status.success() {
        bail!("{}", String::from_utf8_lossy(&copied.stderr).trim());
    }
    Ok(place)
}

/// The run that the work comes from, whose processes are gone.
pub(super) struct Source<'a> {
    pub(super) run: &'a Run,
    pub(super) policy: &'a str,
    /// Only then somebody is asked to look at it.
    pub(super) is_ok: bool,
    pub(super) words: outbox::Words,
    /// What is in the outbox by then is not waited for any longer.
    pub(super) leave: &'a CancellationToken,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").field("branch", &self.begun.state.branch).finish_non_exhaustive()
    }
}

impl Relayed {
    /// Why a run with a repository has no branch.
    pub fn skipped() -> Self {
        let why = "it has no branch: give `--branch-key` or `--work-item`, or `--branch-by-state`";
        Self::Not { branch: None, why: why.to_owned() }
    }

    /// The same, for programs.
    pub fn without_key() -> Self {
        Self::Skipped { skipped: "no_branch_key" }
    }
}
