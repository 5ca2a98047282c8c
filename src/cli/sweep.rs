//! `cogni-gateway sweep`: shows or removes the leftovers of crashed runs.

use std::io::Write;
use std::process::ExitCode;

use anyhow::bail;
use clap::parser::ValueSource;
use clap::{ArgMatches, FromArgMatches};

use super::run::SandboxPathArgs;
use crate::runner::sweep::{
    EngineSweepStatus, LeftoverKind, LeftoverSweeper, SweepItem, SweepOutcome, SweepReport,
};

/// The flags of `sweep`.
#[derive(Debug, clap::Args)]
pub struct SweepArgs {
    #[command(flatten)]
    places: SandboxPathArgs,

    /// Remove orphaned items [default: only show them]
    #[arg(long)]
    apply: bool,

    /// Also show containers of other run directories; they are never removed
    #[arg(long)]
    all: bool,
}

/// Runs the command. The exit status is 1 if a leftover remains or could not be inspected.
pub fn run(matches: &ArgMatches, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let args = SweepArgs::from_arg_matches(matches)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let SandboxPathArgs { docker_socket, run_dir } = args.places.clone();
    let socket = docker_socket.display().to_string();
    let sweep = LeftoverSweeper { docker_socket, run_dir, apply: args.apply, all: args.all };
    // A missing default directory is normal: no run was ever made. A missing directory that the operator named is a
    // mistake.
    let is_named = matches.value_source("run_dir") == Some(ValueSource::CommandLine);
    let is_missing = is_named && !sweep.run_dir.exists();
    let SweepReport { found, engine } = runtime.block_on(sweep.sweep())?;
    // After a reboot only the engine may still have containers of that directory's runs.
    if is_missing && found.is_empty() {
        bail!(
            "run directory `{}` does not exist, and no container belongs to its runs; give the runs' own `--run-dir`",
            sweep.run_dir.display()
        );
    }
    for SweepItem { kind, name, outcome } in &found {
        let kind = match kind {
            LeftoverKind::Container => "container",
            LeftoverKind::Directory => "directory",
            LeftoverKind::Group => "group",
        };
        writeln!(out, "{kind} {name}: {}", describe_outcome(outcome))?;
    }
    match &engine {
        EngineSweepStatus::Listed => (),
        EngineSweepStatus::Absent => {
            writeln!(out, "engine {socket}: not found, so it has no containers")?;
        }
        EngineSweepStatus::Failed(error) => writeln!(out, "engine {socket}: {error:#}")?,
    }
    let is_left = |found: &SweepItem| {
        matches!(found.outcome, SweepOutcome::Orphaned | SweepOutcome::RemoveFailed(_))
    };
    let left = found.iter().filter(|found| is_left(found)).count();
    if left > 0 {
        let remedy = if args.apply { "" } else { "; `--apply` removes it" };
        writeln!(out, "{left} left behind{remedy}")?;
        return Ok(ExitCode::FAILURE);
    }
    // Without the engine's answer there may be further leftovers, so that this is no success.
    if let EngineSweepStatus::Failed(_) = engine {
        writeln!(out, "nothing else is left behind")?;
        return Ok(ExitCode::FAILURE);
    }
    writeln!(out, "nothing is left behind")?;
    Ok(ExitCode::SUCCESS)
}

fn describe_outcome(outcome: &SweepOutcome) -> String {
    match outcome {
        SweepOutcome::InUse => "in use".to_owned(),
        SweepOutcome::UnknownOwner => "kept: its owner is unknown".to_owned(),
        SweepOutcome::OtherInstallation(run_dir) => format!("kept: of the runs in `{run_dir}`"),
        SweepOutcome::Orphaned => "orphaned".to_owned(),
        SweepOutcome::Removed => "removed".to_owned(),
        SweepOutcome::RemoveFailed(error) => format!("cannot be removed: {error}"),
    }
}
