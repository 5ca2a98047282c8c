//! `cogni-gateway forget`: what agents keep from run to run, and its end.

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

#[derive(Debug, clap::Args)]
pub struct ForgetArgs {
    #[command(flatten)]
    state: StateDirArgs,

    /// What is to be forgotten; without one, all that the flags let through
    ids: Vec<String>,

    /// Only what this agent keeps
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,

    /// Only what nobody has used for so long
    #[arg(long, value_name = "DURATION", value_parser = crate::cli::flags::parse_duration)]
    older_than: Option<Duration>,

    /// Remove it; without this it is only shown
    #[arg(long)]
    apply: bool,
}

/// Exit status 1 where something is still there that was to go.
pub fn run(args: &ForgetArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    if args.apply && !args.has_selection() {
        bail!(
            "`--apply` would forget everything; name what is to go, or give `--agent` or `--older-than`"
        );
    }
    let state = args.state.path();
    let shelf = WorkspaceStore::in_state_dir(&state);
    let chosen =
        args.select_workspaces(shelf.list().with_context(|| read_error_message(&state))?)?;
    let outbox = state.join(OUTBOX_FILE);
    // To look is not to make one.
    let outbox = outbox.exists().then(|| DeliveryOutbox::open(&outbox)).transpose()?;
    let is_awaited = |line: &StoredBranchRef| {
        outbox.as_ref().is_some_and(|outbox| workspace_store::has_pending_delivery(outbox, line))
    };
    let age = args.older_than.unwrap_or_default();
    let (mut left, mut gone) = (0, 0);
    for kept in &chosen {
        let size = shelf
            .disk_usage(kept)
            .map_or_else(|_| "?".to_owned(), |size| HumanBytes(size).to_string());
        let fate = if args.apply {
            shelf.prune(kept, age, is_awaited)
        } else {
            shelf.prune_decision(kept, age, is_awaited)
        };
        match fate {
            PruneOutcome::Forgotten => gone += 1,
            PruneOutcome::Unused | PruneOutcome::Stuck(_) => left += 1,
            PruneOutcome::InUse | PruneOutcome::Awaited | PruneOutcome::Young => (),
        }
        writeln!(out, "{} {}: {}", kept.id, describe_workspace(kept, &size), outcome_label(&fate))?;
    }
    match (args.apply, left) {
        _ if chosen.is_empty() => {
            let what = if args.has_selection() { "nothing of that" } else { "nothing" };
            writeln!(out, "{what} is kept in `{}`", state.display())?;
        }
        (true, _) => writeln!(out, "{gone} forgotten")?,
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
        if let Some(unknown) = self.ids.iter().find(|id| all.iter().all(|kept| kept.id != **id)) {
            bail!("nothing is kept as `{unknown}`; without a name, all that is kept is shown");
        }
        let is_chosen = |kept: &StoredWorkspace| {
            let of_agent =
                |agent: &String| kept.tenant.as_ref().is_some_and(|tenant| tenant.agent == *agent);
            (self.ids.is_empty() || self.ids.contains(&kept.id))
                && self.agent.as_ref().is_none_or(of_agent)
                && self.older_than.is_none_or(|age| time_since_use(kept) >= age)
        };
        Ok(all.into_iter().filter(is_chosen).collect())
    }
}

fn describe_workspace(kept: &StoredWorkspace, size: &str) -> String {
    let whose = kept.tenant.as_ref().map(ToString::to_string);
    let whose = whose.unwrap_or_else(|| "of an earlier version".to_owned());
    let more = kept.tenant.as_ref().map(|tenant| {
        let WorkspaceOwner { grant, account, kind, .. } = tenant;
        let said = [("grant", grant), ("account", account), ("by", kind)].into_iter();
        said.filter_map(|(what, text)| Some(format!(", {what} {}", text.as_ref()?))).collect()
    });
    let more: String = more.unwrap_or_default();
    let unused = Duration::from_secs(time_since_use(kept).as_secs());
    format!("{whose}{more}, {size}, used {} ago", humantime::format_duration(unused))
}

fn time_since_use(kept: &StoredWorkspace) -> Duration {
    SystemTime::now().duration_since(kept.used).unwrap_or_default()
}

fn outcome_label(fate: &PruneOutcome) -> String {
    match fate {
        PruneOutcome::InUse => "in use".to_owned(),
        PruneOutcome::Awaited => "kept: the relay has work of this branch under way".to_owned(),
        PruneOutcome::Young => "kept: it was used meanwhile".to_owned(),
        PruneOutcome::Unused => "not in use".to_owned(),
        PruneOutcome::Forgotten => "forgotten".to_owned(),
        PruneOutcome::Stuck(error) => format!("cannot be removed: {error}"),
    }
}

fn read_error_message(state: &Path) -> String {
    format!("cannot read what is kept in `{}`", state.display())
}
