//! `cogni-gateway relay`: shows and manages deliveries of work to branches, and work that was held.

mod relay_options;
mod verify;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use clap::Subcommand;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

use crate::base::hidden_characters::escape_hidden;
use crate::relay::delivery::job_audit_log::{self, JobAuditLog};
use crate::relay::delivery::outbox::{
    DeliveryJob, DeliveryOutbox, DeliveryPlan, DeliveryStep, RetainedTotals, WorkspaceRow,
};
use crate::relay::delivery::{DeliveryStatus, OUTBOX_FILE, sweep, sweep_clock};
use crate::relay::repo::artifact::held_branch_name;
use crate::relay::repo::{ArtifactDir, RepoMirror};
use crate::runner::branch_delivery;

pub use relay_options::{RelayArgs, RunSecrets, StateDirArgs};

/// The subcommands of `relay`.
#[derive(Debug, Subcommand)]
pub enum RelayCommand {
    /// Show pending deliveries, and the reasons
    Status {
        #[command(flatten)]
        state: StateDirArgs,

        /// Also show finished deliveries
        #[arg(long)]
        all: bool,

        /// Print a line of JSON for each delivery
        #[arg(long)]
        json: bool,
    },
    /// Deliver all that is due, or one delivery now
    Retry {
        #[command(flatten)]
        setup: Box<RelayArgs>,

        /// Delivery to retry now, even if it is not due, was held or has failed
        #[arg(required_unless_present = "due")]
        id: Option<String>,

        /// Re-check against this host's current rules instead of the stored ones; the agent's stored rules still apply
        #[arg(long, conflicts_with = "due")]
        new_rules: bool,

        /// Retry all due deliveries, on every branch that no run uses
        #[arg(long, conflicts_with = "id")]
        due: bool,
    },
    /// Show the stored rules of a delivery; their SHA-256 is in its statement
    Rules {
        #[command(flatten)]
        state: StateDirArgs,

        /// The delivery, as listed by `relay status`
        id: String,
    },
    /// Remove delivered rows, orphaned directories and unused mirrors; held work and kept workspaces stay, unless an
    /// age for them is given
    Sweep {
        #[command(flatten)]
        state: StateDirArgs,

        /// Delete held and failed work and kept workspaces older than `kept.age` of this file
        #[arg(long, value_name = "FILE", env = "COGNI_RELAY_CONFIG")]
        relay_config: Option<PathBuf>,

        /// Keep everything newer than this
        #[arg(long, value_name = "DURATION", default_value = "30d", value_parser = crate::cli::flags::parse_duration)]
        older_than: Duration,

        /// Delete held and failed work and kept workspaces older than this
        #[arg(long, value_name = "DURATION", value_parser = crate::cli::flags::parse_duration)]
        kept_older_than: Option<Duration>,
    },
    /// Fetch undelivered work into the repository in the current directory, as its own branch
    Apply {
        #[command(flatten)]
        state: StateDirArgs,

        /// The delivery, as listed by `relay status`
        id: String,

        /// Only print the command
        #[arg(long)]
        print: bool,
    },
    /// Verify the statement of a commit, in the repository in the current directory
    Verify(verify::VerifyStatementArgs),
    /// Delete held or failed work, or a kept workspace, with all of its files
    Discard {
        #[command(flatten)]
        state: StateDirArgs,

        /// The delivery, as listed by `relay status`
        id: String,
    },
}

/// Runs the command. The exit status is 1 if a delivery is not finished.
pub fn run(command: RelayCommand, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    match command {
        RelayCommand::Status { state, all, json } => print_all(&state, all, json, out),
        RelayCommand::Retry { setup, id: Some(id), new_rules, .. } => {
            retry_delivery(*setup, &id, new_rules, out)
        }
        RelayCommand::Retry { setup, id: None, .. } => retry_due_deliveries(*setup, out),
        RelayCommand::Rules { state, id } => {
            let rules = open_outbox(&state)?.get(&id)?.request.rules;
            let rules =
                rules.context("this delivery has no stored rules: an earlier version made it, so the current rules apply")?;
            write!(out, "{}", rules.as_str())?;
            Ok(ExitCode::SUCCESS)
        }
        RelayCommand::Sweep { state, relay_config, older_than, kept_older_than } => {
            let configured =
                relay_config.as_deref().map(relay_options::load_relay_config).transpose()?;
            // A flag overrides the file.
            let age = kept_older_than.or(configured.map(|config| config.kept.age));
            sweep_state(&state, (older_than, age), out)
        }
        RelayCommand::Apply { state, id, print } => apply_bundle(&state, &id, print, out),
        RelayCommand::Verify(args) => Ok(exit_code(verify::run(&args, out)?)),
        RelayCommand::Discard { state, id } => {
            open_outbox(&state)?.discard_item(&id)?;
            writeln!(out, "deleted")?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn sweep_state(
    state: &StateDirArgs,
    (older_than, kept_older_than): (Duration, Option<Duration>),
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let outbox = open_outbox(state)?;
    // An age beyond the clock's range deletes nothing.
    let before = kept_older_than.and_then(|age| SystemTime::now().checked_sub(age));
    let is_clock_trusted = before.is_none()
        || sweep_clock::check_wall_clock(&state.path())
            .with_context(|| format!("cannot note the time in `{}`", state.path().display()))?;
    if !is_clock_trusted {
        writeln!(
            out,
            "deleted: nothing that is held, has failed or is kept: the clock, which tells its age, cannot be compared \
             with that of an earlier sweep; repeat this in an hour, or `relay discard` single items"
        )?;
    }
    if let Some(before) = before.filter(|_| is_clock_trusted) {
        let kept = outbox.expire_retained(before)?;
        writeln!(out, "deleted: {kept} held or failed deliveries and kept workspaces")?;
    }
    let swept = sweep::sweep_relay_state(&state.path(), &outbox, older_than, SystemTime::now())?;
    let sweep::RelaySweepReport { delivered, works, mirrors } = swept;
    writeln!(out, "removed: {delivered} delivered, {works} directories, {mirrors} mirrors")?;
    Ok(ExitCode::SUCCESS)
}

fn print_all(
    state: &StateDirArgs,
    all: bool,
    json: bool,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let (outbox, flag, state) = (open_outbox(state)?, state.flag(), state.path());
    let workspaces =
        outbox.workspaces()?.into_iter().map(|row| WorkspaceView::from_row(row, &state));
    let workspaces: Vec<_> = workspaces.collect::<Result<_, _>>()?;
    let jobs = outbox.list_jobs(false)?;
    let shown: Vec<_> = jobs.iter().filter(|job| all || job.step != DeliveryStep::Done).collect();
    if json {
        workspaces.iter().try_for_each(|seen| write_json(&seen.to_status(), out))?;
        shown.iter().try_for_each(|job| write_json(&DeliveryStatus::from_job(job, &state), out))?;
    } else {
        // An agent has chosen names in this text, and a person decides by it.
        let mut text = vec![];
        workspaces.iter().try_for_each(|seen| print_workspace(seen, &flag, &mut text))?;
        shown.iter().try_for_each(|job| print_job(job, &state, &flag, &mut text))?;
        out.write_all(escape_hidden(&String::from_utf8_lossy(&text)).as_bytes())?;
        if shown.is_empty() && workspaces.is_empty() {
            writeln!(out, "everything is delivered")?;
        }
        let kept = outbox.retained_totals(None)?;
        if let Some(age) = kept.oldest_age() {
            let days = age.as_secs() / SECONDS_PER_DAY;
            let RetainedTotals { works, bytes, .. } = kept;
            writeln!(out, "kept: {works}, with {bytes} bytes, for {days} days at most")?;
        }
    }
    let is_well = shown.iter().all(|job| job.step == DeliveryStep::Done);
    // A workspace whose run has not ended needs no attention.
    Ok(exit_code(is_well && workspaces.iter().all(|seen| seen.goes_on)))
}

/// A workspace whose work is not collected yet. `goes_on` is true if its run has not ended.
struct WorkspaceView {
    row: WorkspaceRow,
    goes_on: bool,
}

impl WorkspaceView {
    /// Checks whether the branch is leased. The holder of the lease is the run itself, or a process that collects the
    /// run's work.
    fn from_row(row: WorkspaceRow, state: &Path) -> anyhow::Result<Self> {
        let DeliveryPlan { repository, state: branch, .. } = &row.plan;
        let is_taken = || RepoMirror::is_leased(state, repository, branch.branch.key());
        // A recorded reason means that the run has ended, even if a process holds the lease.
        let goes_on = row.left.is_none() && is_taken()?;
        Ok(Self { row, goes_on })
    }

    fn to_status(&self) -> DeliveryStatus {
        let status = DeliveryStatus::from_workspace(&self.row);
        // A recorded reason is more precise than the general message.
        let gone = (!self.goes_on).then(|| RUN_DIED_MESSAGE.to_owned());
        DeliveryStatus { why: status.why.or(gone), ..status }
    }
}

fn retry_delivery(
    setup: RelayArgs,
    id: &str,
    new_rules: bool,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let relay = Arc::new(setup.open_service(read_env, RunSecrets::default())?);
    let retried =
        build_runtime()?.block_on(branch_delivery::retry_delivery(&relay, id, new_rules))?;
    let Some(delivered) = retried else {
        bail!("another process uses this branch; retry after it has finished");
    };
    write_json(&delivered, out)?;
    Ok(exit_code(delivered.is_complete()))
}

fn retry_due_deliveries(setup: RelayArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let relay = Arc::new(setup.open_service(read_env, RunSecrets::default())?);
    let delivered = build_runtime()?.block_on(async {
        // The work of dead runs is collected first, so that it can be delivered in the same call.
        branch_delivery::recover_all(&relay).await?;
        anyhow::Ok(relay.resume_due_jobs(&CancellationToken::new()).await?)
    })?;
    delivered.iter().try_for_each(|one| write_json(one, out))?;
    Ok(exit_code(delivered.iter().all(DeliveryStatus::is_complete)))
}

fn apply_bundle(
    state: &StateDirArgs,
    id: &str,
    print: bool,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let job = open_outbox(state)?.get(id)?;
    let state = state.path();
    if job.step == DeliveryStep::Done {
        bail!("this delivery is already in the branch `{}`", job.request.branch());
    }
    // The files may be malformed on purpose. Only a bundle that git itself has accepted may enter a clone.
    if !job.can_be_applied() {
        bail!(
            "git does not accept this delivery's content, so it must not enter a clone; its files are in `{}`",
            job.request.artifacts.display()
        );
    }
    let line =
        ArtifactDir::from_path(&job.request.artifacts).apply_command(job.request.branch(), &job.id);
    if print {
        writeln!(out, "{line}")?;
        return Ok(ExitCode::SUCCESS);
    }
    // The audit log is opened before the fetch: work that cannot be recorded is not applied.
    let record =
        JobAuditLog::open(&state, &job, Some(relay_options::load_signing_key(&read_env, &state)?))?;
    // The printed command reports its progress; here only errors matter.
    let quiet = line.replacen(" fetch ", " fetch --quiet ", 1);
    let done =
        process::Command::new("sh").arg("-c").arg(quiet).status().context("`sh` is missing")?;
    if !done.success() {
        bail!("git has rejected the work; the command was: {line}");
    }
    record.record_applied(&job);
    record.finish()?;
    let branch = held_branch_name(job.request.branch(), &job.id);
    writeln!(out, "the work is in the branch `{}` of this repository", escape_hidden(&branch))?;
    Ok(ExitCode::SUCCESS)
}

fn read_env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn build_runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

fn open_outbox(state: &StateDirArgs) -> anyhow::Result<DeliveryOutbox> {
    let path = state.path().join(OUTBOX_FILE);
    // A command that only reads must not create a database.
    if !path.exists() {
        bail!("no deliveries found: `{}` does not exist; see `--state-dir`", path.display());
    }
    Ok(DeliveryOutbox::open(&path)?)
}

fn print_job(
    job: &DeliveryJob,
    state: &Path,
    flag: &str,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let DeliveryJob { id, step, request, error, .. } = job;
    let (repository, branch, run) = (&request.repository, request.branch(), &request.facts.run);
    writeln!(out, "{id} {step}: {branch} of {repository}, from run {run}")?;
    if let Some(pull) = &job.pull_request {
        writeln!(out, "    {}", pull.url)?;
    }
    if let Some(error) = error {
        writeln!(out, "    {error}")?;
    }
    let audit = job_audit_log::log_path(state, id);
    if audit.exists() {
        writeln!(out, "    {}", audit.display())?;
    }
    // The commands that make sense in this step.
    let retried: &[&str] = match step {
        DeliveryStep::Done => return Ok(()),
        // Some work can only be applied or deleted.
        DeliveryStep::Held | DeliveryStep::Failed if !job.can_be_retried() => &[],
        DeliveryStep::Held => &["retry", "retry --new-rules"],
        DeliveryStep::Failed => &["retry"],
        _ => return Ok(print_due(job.due, out)?),
    };
    let applied = job.can_be_applied().then_some("apply");
    let commands = applied.into_iter().chain(retried.iter().copied()).chain(["discard"]);
    show_commands(commands, id, flag, out)
}

/// Prints commands that the operator can paste.
fn show_commands<'c>(
    mut commands: impl Iterator<Item = &'c str>,
    id: &str,
    flag: &str,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    Ok(commands
        .try_for_each(|command| writeln!(out, "    cogni-gateway relay {command} {id}{flag}"))?)
}

fn print_due(due: SystemTime, out: &mut impl Write) -> io::Result<()> {
    match due.duration_since(SystemTime::now()).unwrap_or_default().as_secs() {
        0 => writeln!(out, "    due now"),
        wait => writeln!(out, "    due in {wait} s"),
    }
}

fn print_workspace(seen: &WorkspaceView, flag: &str, out: &mut impl Write) -> anyhow::Result<()> {
    let WorkspaceView { row, goes_on } = seen;
    let WorkspaceRow { id, plan, workspace, left, due, .. } = row;
    let (repository, branch, run) = (&plan.repository, &plan.state.branch, &plan.facts.run);
    let step = DeliveryStatus::from_workspace(row).step;
    writeln!(out, "{id} {step}: {branch} of {repository}, from run {run}")?;
    match left {
        Some(left) => {
            writeln!(out, "    {left}")?;
            writeln!(out, "    {}", workspace.display())?;
            if let Some(due) = due {
                print_due(*due, out)?;
            }
            show_commands(["retry", "discard"].into_iter(), id, flag, out)?;
        }
        None if *goes_on => writeln!(out, "    its run goes on")?,
        None => {
            writeln!(out, "    {RUN_DIED_MESSAGE}")?;
            show_commands(["retry"].into_iter(), id, flag, out)?;
        }
    }
    Ok(())
}

fn write_json(one: &DeliveryStatus, out: &mut impl Write) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *out, one)?;
    Ok(writeln!(out)?)
}

fn exit_code(is_well: bool) -> ExitCode {
    if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The message for a run whose process died before the run's work was collected.
const RUN_DIED_MESSAGE: &str =
    "its process died during the run, and the run's work is not collected yet";

const SECONDS_PER_DAY: u64 = 24 * 60 * 60;
