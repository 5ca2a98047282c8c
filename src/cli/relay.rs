//! `cogni-gateway relay`: work that is on its way to a branch, or was held back.

mod setup;

use std::io::Write;
use std::path::PathBuf;
use std::process::{self, ExitCode};
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, bail};
use clap::Subcommand;

use crate::delivery::outbox::{Job, Outbox, Step};
use crate::delivery::{Delivered, OUTBOX};
use crate::relay::Artifacts;

pub use setup::{Setup, StateDir};

/// What can be done with it.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show what is not delivered, and why
    Status {
        #[command(flatten)]
        state: StateDir,

        /// What is delivered, too
        #[arg(long)]
        all: bool,

        /// A line of JSON for each
        #[arg(long)]
        json: bool,
    },
    /// Deliver what is due, or what was held or failed, now
    Retry {
        #[command(flatten)]
        setup: Box<Setup>,

        /// One relay, also where its time has not come
        id: Option<String>,
    },
    /// Bring work that is not at its branch into the repository in the current directory, as a branch of its own
    Apply {
        #[command(flatten)]
        state: StateDir,

        id: String,

        /// Only show the line that does it
        #[arg(long)]
        print: bool,
    },
}

/// Exit status 1 where something is not delivered.
pub fn run(command: Command, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    match command {
        Command::Status { state, all, json } => {
            let jobs = open(&state)?.list(false)?;
            let shown: Vec<_> = jobs.iter().filter(|job| all || job.step != Step::Done).collect();
            if json {
                shown.iter().try_for_each(|job| write_json(&Delivered::of(job), out))?;
            } else {
                shown.iter().try_for_each(|job| show(job, out))?;
                if shown.is_empty() {
                    writeln!(out, "everything is delivered")?;
                }
            }
            Ok(status(shown.iter().all(|job| job.step == Step::Done)))
        }
        Command::Retry { setup, id } => retry(*setup, id.as_deref(), out),
        Command::Apply { state, id, print } => apply(&state, &id, print, out),
    }
}

fn retry(setup: Setup, id: Option<&str>, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let relay = Arc::new(setup.open(|name| std::env::var(name).ok(), vec![])?);
    if let Some(id) = id {
        let job = relay.outbox().get(id)?;
        if job.step.is_end() {
            relay.outbox().revive(&job)?;
        }
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let delivered = runtime.block_on(relay.resume(id))?;
    if id.is_some() && delivered.is_empty() {
        bail!("another process is at this branch; wait for it");
    }
    delivered.iter().try_for_each(|one| write_json(one, out))?;
    Ok(status(delivered.iter().all(|one| one.step == Step::Done.as_str())))
}

fn apply(
    state: &StateDir,
    id: &str,
    print: bool,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let job = open(state)?.get(id)?;
    if job.step == Step::Done {
        bail!("it is delivered: `{}` has it", job.order.branch());
    }
    let line = Artifacts::create(&job.order.artifacts)?.apply_line(job.order.branch());
    if print {
        writeln!(out, "{line}")?;
        return Ok(ExitCode::SUCCESS);
    }
    // Whatever else is configured: what comes from an agent is checked on its way in.
    let checked = line.replacen("git fetch", "git -c fetch.fsckObjects=true fetch --quiet", 1);
    let done =
        process::Command::new("sh").arg("-c").arg(checked).status().context("`sh` is missing")?;
    if !done.success() {
        bail!("git has not taken it; this is the line: {line}");
    }
    writeln!(out, "it is the branch `held/{}` here", job.order.branch().key())?;
    Ok(ExitCode::SUCCESS)
}

fn open(state: &StateDir) -> anyhow::Result<Outbox> {
    Ok(Outbox::open(&state.path().join(OUTBOX))?)
}

fn show(job: &Job, out: &mut impl Write) -> anyhow::Result<()> {
    let Job { id, step, order, error, .. } = job;
    let (repository, branch, run) = (&order.repository, order.branch(), &order.facts.run);
    writeln!(out, "{id} {step}: {branch} of {repository}, from run {run}")?;
    if let Some(pull) = &job.pull {
        writeln!(out, "    {}", pull.url)?;
    }
    if let Some(error) = error {
        writeln!(out, "    {error}")?;
    }
    let wait = job.due.duration_since(SystemTime::now()).unwrap_or_default().as_secs();
    match step {
        Step::Done => (),
        Step::Held | Step::Failed => {
            writeln!(out, "    cogni-gateway relay apply {id} | retry {id}")?;
        }
        _ if wait == 0 => writeln!(out, "    due now")?,
        _ => writeln!(out, "    due in {wait} s")?,
    }
    Ok(())
}

fn write_json(one: &Delivered, out: &mut impl Write) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *out, one)?;
    Ok(writeln!(out)?)
}

fn status(is_well: bool) -> ExitCode {
    if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Where a user's programs keep what outlives them (XDG Base Directory Specification).
fn default_state() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return PathBuf::from("/var/lib/cogni");
    }
    let absolute =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    state.unwrap_or_else(std::env::temp_dir).join("cogni")
}
