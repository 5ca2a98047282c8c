//! The flags of a run whose work is delivered to a branch.

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

/// The flags for the repository of the workspace, and for the branch of the work.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Options of a run with a repository")]
#[group(id = "repository")]
pub(super) struct RunRepositoryArgs {
    /// Repository: `https://HOST/OWNER/NAME`, or `file:///PATH`. It is checked out in the workspace, and commits there
    /// go to the branch `sandbox/KEY`
    #[arg(long, value_name = "URL")]
    repo: Option<String>,

    /// Key of the branch; runs with the same key append to the branch
    #[arg(long, value_name = "KEY", requires = "repo")]
    branch_key: Option<String>,

    /// Key if `--branch-key` is not given: the work item of the run
    #[arg(long, value_name = "KEY", requires = "repo")]
    work_item: Option<String>,

    /// Key of the agent's state, which outlives the work of a branch; it names the branch only with
    /// `--branch-by-state`, and only if no other key is given
    #[arg(long, value_name = "KEY", requires = "repo")]
    state_key: Option<String>,

    /// Use the state's key for the branch if no other key is given
    #[arg(long, requires = "state_key")]
    branch_by_state: bool,

    /// Time to wait for another run on the same branch
    #[arg(
        long,
        value_name = "DURATION",
        requires = "repo",
        default_value = "0s",
        value_parser = crate::cli::flags::parse_duration
    )]
    branch_wait: Duration,

    /// Branch that the work is for [default: the repository's default branch]
    #[arg(long, value_name = "REF", requires = "repo")]
    base: Option<String>,

    /// Open a pull request if the run was ok
    #[arg(long, requires = "repo")]
    pull_request: bool,

    #[command(flatten)]
    setup: RelayArgs,
}

/// The repository part of a run's request.
pub(super) enum RepositoryRequest {
    None,
    /// A repository is given without a key: the run works without the repository.
    Skipped,
    Branch(Box<BranchRequest>),
}

/// The branch of a run, with the flags to acquire it.
pub(super) struct BranchRequest {
    repository: RepositoryUrl,
    key: BranchKey,
    args: RunRepositoryArgs,
}

impl RunRepositoryArgs {
    /// Returns the directory of persistent state, named or default.
    pub(super) fn state_dir(&self) -> PathBuf {
        self.setup.state_dir().unwrap_or_else(default_state_directory)
    }

    /// Returns the paths that only the relay may read or write.
    pub(super) fn private_paths(&self) -> Vec<PathBuf> {
        self.setup.private_paths(|name| env::var(name).ok())
    }

    /// Checks the flags and resolves the branch's key.
    ///
    /// # Errors
    /// Returns an error if the URL or the key is invalid.
    pub(super) fn into_repository_request(self, run: &str) -> anyhow::Result<RepositoryRequest> {
        let Some(url) = &self.repo else { return Ok(RepositoryRequest::None) };
        // Errors do not repeat the URL, because it may contain a password.
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
    /// Leases the branch for the run. `keys` are secrets that must not appear in delivered work.
    ///
    /// # Errors
    /// Returns an error if another run has the branch, the branch cannot be looked up, or too much work of earlier runs
    /// is stored.
    pub(super) async fn acquire_target(
        self,
        agent: Option<&AgentDefinition>,
        keys: RunSecrets,
    ) -> anyhow::Result<DeliveryTarget> {
        let Self { repository, key, args } = self;
        let flag = args.setup.state_flag();
        let relay = Arc::new(args.setup.open_service(|name| env::var(name).ok(), keys)?);
        // A run without a credential can still work: its commits wait on this machine.
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
        // All checks come before the lease, so that a refused run blocks no branch.
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

/// Warns about stored work of earlier runs. Returns an error if the limit of stored work is reached.
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
