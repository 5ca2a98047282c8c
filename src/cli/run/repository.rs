//! The flags of a run whose work goes to a branch.

use std::env;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::cli::relay::{RelayArgs, RunSecrets};
use crate::relay::delivery::DeliveryService;
use crate::relay::repo::BranchKey;
use crate::relay::repo::branch_key::BranchKeySources;
use crate::relay::repo::repository::RepositoryUrl;
use crate::runner::agents::AgentDefinition;
use crate::runner::branch_delivery::DeliveryTarget;
use crate::service::config::default_state_directory;

/// Which repository the workspace is of, and where the work goes.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Options of a run with a repository")]
#[group(id = "repository")]
pub(super) struct RunRepositoryArgs {
    /// The repository: `https://HOST/OWNER/NAME`, or `file:///PATH`. The workspace has it checked out, and what is
    /// committed there goes to the branch `sandbox/KEY`
    #[arg(long, value_name = "URL")]
    repo: Option<String>,

    /// The key of the branch; runs with the same one append to it
    #[arg(long, value_name = "KEY", requires = "repo")]
    branch_key: Option<String>,

    /// The key where `--branch-key` is not given: what the run is about
    #[arg(long, value_name = "KEY", requires = "repo")]
    work_item: Option<String>,

    /// The key of the agent's state, which outlives the work that a branch is for: it names one with `--branch-by-state`
    /// only, where neither of the others is given
    #[arg(long, value_name = "KEY", requires = "repo")]
    state_key: Option<String>,

    /// Take the state's key for the branch, where there is no other
    #[arg(long, requires = "state_key")]
    branch_by_state: bool,

    /// How long to wait for another run at the same branch
    #[arg(
        long,
        value_name = "DURATION",
        requires = "repo",
        default_value = "0s",
        value_parser = crate::cli::flags::parse_duration
    )]
    branch_wait: Duration,

    /// The branch that the work is for; else the repository's default branch
    #[arg(long, value_name = "REF", requires = "repo")]
    base: Option<String>,

    /// Ask for the work to be pulled, where the run was ok
    #[arg(long, requires = "repo")]
    pull_request: bool,

    #[command(flatten)]
    setup: RelayArgs,
}

/// What a run has to do with a repository.
pub(super) enum RepositoryRequest {
    Nothing,
    /// There is a repository, and no key: the run goes without.
    Skipped,
    Branch(Box<BranchRequest>),
}

/// A branch that a run is for.
pub(super) struct BranchRequest {
    repository: RepositoryUrl,
    key: BranchKey,
    args: RunRepositoryArgs,
}

impl RunRepositoryArgs {
    /// Returns the directory of what outlives a run: the one that is given, or the default.
    pub(super) fn state_dir(&self) -> PathBuf {
        self.setup.state_dir().unwrap_or_else(default_state_directory)
    }

    /// What the relay reads and writes for itself alone.
    pub(super) fn private_paths(&self) -> Vec<PathBuf> {
        self.setup.private_paths(|name| env::var(name).ok())
    }

    /// # Errors
    /// The address or the key is none.
    pub(super) fn into_repository_request(self, run: &str) -> anyhow::Result<RepositoryRequest> {
        let Some(url) = &self.repo else { return Ok(RepositoryRequest::Nothing) };
        // It is not repeated in errors: some people put a password there.
        let repository = RepositoryUrl::parse(url).context("`--repo` cannot be used")?;
        let sources = BranchKeySources {
            explicit: self.branch_key.as_deref(),
            work_item: self.work_item.as_deref(),
            state: self.state_key.as_deref(),
            may_use_state: self.branch_by_state,
        };
        let Some(key) = BranchKey::from_sources(sources, run)? else {
            return Ok(RepositoryRequest::Skipped);
        };
        if self.pull_request && repository.as_hosted().is_none() {
            bail!("`--pull-request` needs a repository on a forge, by `https://HOST/OWNER/NAME`");
        }
        Ok(RepositoryRequest::Branch(Box::new(BranchRequest { repository, key, args: self })))
    }
}

impl BranchRequest {
    /// Makes the branch the run's. `keys` are secrets that must not be in anybody's work.
    ///
    /// # Errors
    /// Another run has it, it cannot be looked up, or too much of earlier runs' work is kept.
    pub(super) async fn acquire_target(
        self,
        agent: Option<&AgentDefinition>,
        keys: RunSecrets,
    ) -> anyhow::Result<DeliveryTarget> {
        let Self { repository, key, args } = self;
        let flag = args.setup.state_flag();
        let relay = Arc::new(args.setup.open_service(|name| env::var(name).ok(), keys)?);
        if repository.as_hosted().is_some() && !relay.has_credential() {
            if args.pull_request {
                bail!(
                    "`--pull-request` needs a credential of the forge, and there is none; set `GITHUB_TOKEN`, name \
                     its file with `--github-token-file`, or give an app with `--github-app-id`"
                );
            }
            tracing::warn!(
                "there is no credential of the forge, so the run's work stays on this machine until `cogni-gateway \
                 relay retry` has one; set `GITHUB_TOKEN`"
            );
        }
        check_retention(&relay, &flag)?;
        if let Some(agent) = agent {
            relay.warn_ineffective_rules(&agent.name, agent.relay.as_ref());
        }
        let (base, patience) = (args.base.as_deref(), args.branch_wait);
        let begun = DeliveryTarget::acquire_with_timeout(relay, repository, &key, base, patience);
        let target = Box::pin(begun).await?;
        let target = target.with_pull_request(args.pull_request);
        Ok(match agent {
            Some(agent) => target.for_agent(agent),
            None => target,
        })
    }
}

/// Tells how much of earlier runs' work is kept on this machine, which bounds how many may leave more.
fn check_retention(relay: &DeliveryService, flag: &str) -> anyhow::Result<()> {
    if let Some(why) = relay.retention_full_reason(None)? {
        bail!(
            "no run with a branch can begin: {why}; `cogni-gateway relay status{flag}` lists them, and `cogni-gateway \
             relay discard ID{flag}` or `cogni-gateway relay sweep --kept-older-than AGE{flag}` makes room"
        );
    }
    let kept = relay.outbox().retained_totals(None)?;
    if let Some(age) = kept.oldest_age() {
        let oldest = humantime::format_duration(Duration::from_secs(age.as_secs()));
        tracing::warn!(
            works = kept.works,
            bytes = kept.bytes,
            oldest = %oldest,
            "work of earlier runs is kept; see `cogni-gateway relay status{flag}`"
        );
    }
    Ok(())
}
