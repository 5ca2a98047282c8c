//! `cogni-gateway forget`: shows or deletes the workspaces that agents keep between runs.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};

use super::relay::StateDirArgs;
use crate::relay::delivery::OUTBOX_FILE;
use crate::relay::delivery::outbox::DeliveryOutbox;
use crate::runner::long_running::workspace_store::{
    self, PruneOutcome, StoredBranchRef, StoredWorkspace, WorkspaceOwner, WorkspaceStore,
};
use crate::runner::quota::HumanBytes;

/// The flags of `forget`.
#[derive(Debug, clap::Args)]
pub struct ForgetArgs {
    #[command(flatten)]
    state: StateDirArgs,

    /// Ids of the workspaces [default: all that the other flags select]
    ids: Vec<String>,

    /// Only workspaces of this agent
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,

    /// Only workspaces that were not used for this time
    #[arg(long, value_name = "DURATION", value_parser = crate::cli::flags::parse_duration)]
    older_than: Option<Duration>,

    /// Delete the workspaces [default: only show them]
    #[arg(long)]
    apply: bool,
}

/// Runs the command. The exit status is 1 if a workspace that was to be deleted still exists.
pub fn run(args: &ForgetArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    // Deleting every workspace must be said explicitly.
    if args.apply && !args.has_selection() {
        bail!(
            "`--apply` alone would delete every workspace; give ids, `--agent` or `--older-than`"
        );
    }
    let state = args.state.path();
    let store = WorkspaceStore::in_state_dir(&state);
    let chosen =
        args.select_workspaces(store.list().with_context(|| read_error_message(&state))?)?;
    let outbox = state.join(OUTBOX_FILE);
    // A command that only reads must not create a database.
    let outbox = outbox.exists().then(|| DeliveryOutbox::open(&outbox)).transpose()?;
    let is_awaited = |line: &StoredBranchRef| {
        outbox.as_ref().is_some_and(|outbox| workspace_store::has_pending_delivery(outbox, line))
    };
    // The age is checked again under the workspace's lock, because a run may have used the workspace since the listing.
    let age = args.older_than.unwrap_or_default();
    let (mut left, mut removed) = (0, 0);
    for kept in &chosen {
        // A workspace whose size cannot be read is listed with `?`, because it may still be deleted.
        let size = store
            .disk_usage(kept)
            .map_or_else(|_| "?".to_owned(), |size| HumanBytes(size).to_string());
        let outcome = if args.apply {
            store.prune(kept, age, is_awaited)
        } else {
            store.prune_decision(kept, age, is_awaited)
        };
        match outcome {
            PruneOutcome::Removed => removed += 1,
            // Both exist and should be deleted; the other outcomes are reasons to keep a workspace.
            PruneOutcome::Unused | PruneOutcome::RemoveFailed(_) => left += 1,
            PruneOutcome::InUse | PruneOutcome::DeliveryPending | PruneOutcome::RecentlyUsed => (),
        }
        writeln!(
            out,
            "{} {}: {}",
            kept.id,
            describe_workspace(kept, &size),
            outcome_label(&outcome)
        )?;
    }
    match (args.apply, left) {
        _ if chosen.is_empty() => {
            let what = if args.has_selection() { "nothing of that" } else { "nothing" };
            writeln!(out, "{what} is kept in `{}`", state.display())?;
        }
        (true, _) => writeln!(out, "{removed} forgotten")?,
        (false, 0) => writeln!(out, "none can be forgotten")?,
        (false, left) if args.has_selection() => {
            writeln!(out, "{left} can be forgotten; `--apply` does it")?;
        }
        (false, left) => writeln!(out, "{left} can be forgotten; name them, and `--apply`")?,
    }
    Ok(if args.apply && left > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

impl ForgetArgs {
    fn has_selection(&self) -> bool {
        !self.ids.is_empty() || self.agent.is_some() || self.older_than.is_some()
    }

    fn select_workspaces(&self, all: Vec<StoredWorkspace>) -> anyhow::Result<Vec<StoredWorkspace>> {
        // A misspelled id must not silently select nothing.
        if let Some(unknown) = self.ids.iter().find(|id| all.iter().all(|kept| kept.id != **id)) {
            bail!("no workspace has the id `{unknown}`; without an id, all workspaces are shown");
        }
        let is_chosen = |kept: &StoredWorkspace| {
            let of_agent =
                |agent: &String| kept.owner.as_ref().is_some_and(|tenant| tenant.agent == *agent);
            (self.ids.is_empty() || self.ids.contains(&kept.id))
                && self.agent.as_ref().is_none_or(of_agent)
                && self.older_than.is_none_or(|age| time_since_use(kept) >= age)
        };
        Ok(all.into_iter().filter(is_chosen).collect())
    }
}

fn describe_workspace(kept: &StoredWorkspace, size: &str) -> String {
    let owner = kept.owner.as_ref().map(ToString::to_string);
    let owner = owner.unwrap_or_else(|| "of an earlier version".to_owned());
    let more = kept.owner.as_ref().map(|tenant| {
        let WorkspaceOwner { grant, account, kind, .. } = tenant;
        let labels = [("grant", grant), ("account", account), ("by", kind)].into_iter();
        labels.filter_map(|(what, text)| Some(format!(", {what} {}", text.as_ref()?))).collect()
    });
    let more: String = more.unwrap_or_default();
    let unused = Duration::from_secs(time_since_use(kept).as_secs());
    format!("{owner}{more}, {size}, used {} ago", humantime::format_duration(unused))
}

fn time_since_use(kept: &StoredWorkspace) -> Duration {
    SystemTime::now().duration_since(kept.used).unwrap_or_default()
}

fn outcome_label(outcome: &PruneOutcome) -> String {
    match outcome {
        PruneOutcome::InUse => "in use".to_owned(),
        PruneOutcome::DeliveryPending => "kept: a delivery for this branch is pending".to_owned(),
        PruneOutcome::RecentlyUsed => "kept: it was used since".to_owned(),
        PruneOutcome::Unused => "not in use".to_owned(),
        PruneOutcome::Removed => "forgotten".to_owned(),
        PruneOutcome::RemoveFailed(error) => format!("cannot be removed: {error}"),
    }
}

fn read_error_message(state: &Path) -> String {
    format!("cannot read the workspaces in `{}`", state.display())
}
