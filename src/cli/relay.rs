//! `cogni-gateway relay`: work that is on its way to a branch, or was held back.

mod setup;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use clap::Subcommand;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

use crate::delivery::outbox::{Job, Outbox, Step};
use crate::delivery::record::{self, Record};
use crate::delivery::{Delivered, OUTBOX, sweep};
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
    /// Deliver what is due, or one relay, now
    Retry {
        #[command(flatten)]
        setup: Box<Setup>,

        /// One relay, also where its time has not come, or it was held or failed
        #[arg(required_unless_present = "due")]
        id: Option<String>,

        /// Judge it by this host's rules as they are now, and not as they were when it came out; its agent's own stay
        #[arg(long, conflicts_with = "due")]
        new_rules: bool,

        /// All whose time has come, on every branch that no run is at
        #[arg(long, conflicts_with = "id")]
        due: bool,
    },
    /// Show the rules that work is judged by, as they were when it came out; their SHA-256 is in its statement
    Rules {
        #[command(flatten)]
        state: StateDir,

        /// The relay, as `relay status` names it
        id: String,
    },
    /// Remove what is delivered, workspaces that were kept, and mirrors that nobody uses; held work stays
    Sweep {
        #[command(flatten)]
        state: StateDir,

        /// What is younger stays
        #[arg(long, value_name = "DURATION", default_value = "30d", value_parser = crate::cli::flags::time)]
        older_than: Duration,
    },
    /// Bring work that is not at its branch into the repository in the current directory, as a branch of its own
    Apply {
        #[command(flatten)]
        state: StateDir,

        /// The relay, as `relay status` names it
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
            let (jobs, state) = (open(&state)?.list(false)?, state.path());
            let shown: Vec<_> = jobs.iter().filter(|job| all || job.step != Step::Done).collect();
            if json {
                shown.iter().try_for_each(|job| write_json(&Delivered::of(job, &state), out))?;
            } else {
                shown.iter().try_for_each(|job| show(job, &state, out))?;
                if shown.is_empty() {
                    writeln!(out, "everything is delivered")?;
                }
            }
            Ok(status(shown.iter().all(|job| job.step == Step::Done)))
        }
        Command::Retry { setup, id: Some(id), new_rules, .. } => retry(*setup, &id, new_rules, out),
        Command::Retry { setup, id: None, .. } => retry_due(*setup, out),
        Command::Rules { state, id } => {
            let rules = open(&state)?.get(&id)?.order.rules;
            let rules =
                rules.context("it is of an earlier version, and judged by the rules of now")?;
            write!(out, "{}", rules.as_str())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Sweep { state, older_than } => {
            let swept = sweep::sweep(&state.path(), &open(&state)?, older_than)?;
            let sweep::Swept { delivered, works, mirrors } = swept;
            writeln!(out, "removed: {delivered} delivered, {works} workspaces, {mirrors} mirrors")?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Apply { state, id, print } => apply(&state, &id, print, out),
    }
}

fn retry(
    setup: Setup,
    id: &str,
    new_rules: bool,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let relay = Arc::new(setup.open(variable, vec![])?);
    let mut job = relay.outbox().get(id)?;
    if new_rules {
        if !job.step.is_end() {
            bail!("it is on its way; new rules are for what is held, or has failed");
        }
        job = relay.renew(&job)?;
    }
    if job.step.is_end() {
        relay.outbox().revive(&job)?;
    }
    let Some(delivered) = runtime()?.block_on(relay.resume(id))? else {
        bail!("another process is at this branch; wait for it");
    };
    write_json(&delivered, out)?;
    Ok(status(delivered.step == Step::Done.as_str()))
}

fn retry_due(setup: Setup, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let relay = Arc::new(setup.open(variable, vec![])?);
    let delivered = runtime()?.block_on(relay.resume_due(&CancellationToken::new()))?;
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
    let state = state.path();
    if job.step == Step::Done {
        bail!("it is delivered: `{}` has it", job.order.branch());
    }
    let line = Artifacts::create(&job.order.artifacts)?.apply_line(job.order.branch());
    if print {
        writeln!(out, "{line}")?;
        return Ok(ExitCode::SUCCESS);
    }
    let record = Record::open(&state, &job, Some(setup::signing_key(&variable, &state)?))?;
    // Whatever else is configured: what comes from an agent is checked on its way in.
    let checked = line.replacen("git fetch", "git -c fetch.fsckObjects=true fetch --quiet", 1);
    let done =
        process::Command::new("sh").arg("-c").arg(checked).status().context("`sh` is missing")?;
    if !done.success() {
        bail!("git has not taken it; this is the line: {line}");
    }
    record.applied(&job);
    record.finish()?;
    writeln!(out, "it is the branch `held/{}` here", job.order.branch().key())?;
    Ok(ExitCode::SUCCESS)
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

fn open(state: &StateDir) -> anyhow::Result<Outbox> {
    Ok(Outbox::open(&state.path().join(OUTBOX))?)
}

fn show(job: &Job, state: &Path, out: &mut impl Write) -> anyhow::Result<()> {
    let Job { id, step, order, error, .. } = job;
    let (repository, branch, run) = (&order.repository, order.branch(), &order.facts.run);
    writeln!(out, "{id} {step}: {branch} of {repository}, from run {run}")?;
    if let Some(pull) = &job.pull {
        writeln!(out, "    {}", pull.url)?;
    }
    if let Some(error) = error {
        writeln!(out, "    {error}")?;
    }
    let audit = record::path(state, id);
    if audit.exists() {
        writeln!(out, "    {}", audit.display())?;
    }
    let wait = job.due.duration_since(SystemTime::now()).unwrap_or_default().as_secs();
    match step {
        Step::Done => (),
        Step::Held => {
            writeln!(out, "    cogni-gateway relay apply {id} | retry [--new-rules] {id}")?;
        }
        Step::Failed => writeln!(out, "    cogni-gateway relay apply {id} | retry {id}")?,
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
pub(super) fn default_state() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return PathBuf::from("/var/lib/cogni");
    }
    let absolute =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    state.unwrap_or_else(std::env::temp_dir).join("cogni")
}
