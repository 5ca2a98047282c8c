//! The flags of a run whose work is delivered to a branch.

use std::env;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio_util::sync::CancellationToken;

use super::TerminationSignals;
use crate::cli::relay::{RelayArgs, RunSecrets};
use crate::relay::delivery::DeliveryService;
use crate::relay::repo::BranchKey;
use crate::relay::repo::branch_key::BranchKeySources;
use crate::relay::repo::repository::RepositoryUrl;
use crate::runner::RunPlan;
use crate::runner::branch_delivery::{BranchRequest, DeliveryTarget};
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

    /// Title of a new pull request [default: the commits' subject]
    #[arg(long, value_name = "TEXT", requires = "pull_request")]
    title: Option<String>,

    /// Leave the text of the request out of the pull request
    #[arg(long, requires = "pull_request")]
    hide_request: bool,

    #[command(flatten)]
    setup: RelayArgs,
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

    /// Returns true if a repository is named.
    pub(super) fn has_repository(&self) -> bool {
        self.repo.is_some()
    }

    /// Checks the flags and returns the run's branch, or `None` if no repository or no key is given.
    ///
    /// # Errors
    /// Returns an error if the URL or the key is invalid.
    pub(super) fn branch_request(
        &self,
        run: &str,
        asked: String,
    ) -> anyhow::Result<Option<BranchRequest>> {
        let Some(url) = &self.repo else { return Ok(None) };
        // Errors do not repeat the URL, because it may contain a password.
        let repository = RepositoryUrl::parse(url).context("`--repo` cannot be used")?;
        let sources = BranchKeySources {
            explicit: self.branch_key.as_deref(),
            work_item: self.work_item.as_deref(),
            state: self.state_key.as_deref(),
            may_use_state: self.branch_by_state,
        };
        let Some(key) = BranchKey::from_sources(sources, run)? else { return Ok(None) };
        if self.pull_request && repository.as_hosted().is_none() {
            bail!("`--pull-request` needs a repository on a forge, by `https://HOST/OWNER/NAME`");
        }
        let (base, pull_request, title) =
            (self.base.clone(), self.pull_request, self.title.clone());
        let asked = if self.hide_request { String::new() } else { asked };
        Ok(Some(BranchRequest { repository, key, base, pull_request, title, asked, grant: None }))
    }

    /// Leases the branch of the run's plan, if the plan has a branch.
    ///
    /// # Errors
    /// Returns an error if another run has the branch, the branch cannot be looked up, too much work of earlier runs is
    /// stored, or `cancel` was cancelled.
    pub(super) async fn acquire_target(
        self,
        plan: &RunPlan,
        cancel: &CancellationToken,
    ) -> anyhow::Result<Option<DeliveryTarget>> {
        let Some(branch) = plan.branch.clone() else { return Ok(None) };
        // The gateway's secrets must not appear in delivered work.
        let keys = RunSecrets::from_config(&plan.config);
        let flag = self.setup.state_flag();
        let relay = Arc::new(self.setup.open_service(|name| env::var(name).ok(), keys)?);
        // A run without a credential can still work: its commits wait on this machine.
        if branch.repository.as_hosted().is_some() && !relay.has_credential() {
            if branch.pull_request {
                bail!(
                    "`--pull-request` needs a credential of the forge, and there is none; set `GITHUB_TOKEN`, name \
                     its file with `--github-token-file`, or give an app with `--github-app-id`"
                );
            }
            tracing::warn!(
                "no forge credential is set: the run's commits stay on this machine; set `GITHUB_TOKEN`, then \
                 `cogni-gateway relay retry` pushes them"
            );
        }
        // All checks come before the lease, so that a refused run blocks no branch.
        check_retention(&relay, &flag)?;
        let agent = plan.agent.as_ref().map(|agent| &*agent.entry);
        if let Some(agent) = agent {
            relay.warn_ineffective_rules(&agent.name, agent.relay.as_ref());
        }
        let target = DeliveryTarget::acquire(relay, branch, agent, self.branch_wait, cancel);
        Box::pin(target).await.map(Some)
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

/// Takes the branch of the run. Returns `None` if a signal has cancelled the run: the git calls that read the branch are
/// dead then. The second signal ends the wait for the delivery of an earlier run's work.
pub(super) async fn acquire_with_signals(
    repository: RunRepositoryArgs,
    plan: &RunPlan,
    signals: &mut TerminationSignals,
) -> Option<anyhow::Result<Option<DeliveryTarget>>> {
    let cancel = CancellationToken::new();
    let mut acquiring = Box::pin(repository.acquire_target(plan, &cancel));
    tokio::select! {
        acquired = &mut acquiring => return Some(acquired),
        () = signals.next() => cancel.cancel(),
    }
    tokio::select! {
        // A branch that was taken in the same moment is released again.
        _ = acquiring => None,
        () = signals.next() => None,
    }
}
