//! `cogni-gateway sweep`: what crashed runs have left behind, and its end.

use std::io::Write;
use std::process::ExitCode;

use super::run::Places;
use crate::runner::sweep::{Fate, Found, Kind, sweep};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    places: Places,

    /// Remove what is orphaned; without this it is only shown
    #[arg(long)]
    apply: bool,
}

/// Exit status 1 where something is still left behind.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let Places { docker_socket, run_dir } = &args.places;
    let found = runtime.block_on(sweep(docker_socket, run_dir, args.apply))?;
    for Found { kind, name, state } in &found {
        let kind = match kind {
            Kind::Container => "container",
            Kind::Directory => "directory",
        };
        let state = match state {
            Fate::InUse => "in use",
            Fate::Unclear => "kept: nobody can tell whose it is",
            Fate::Orphaned => "orphaned",
            Fate::Removed => "removed",
            Fate::Stuck(error) => &format!("cannot be removed: {error}"),
        };
        writeln!(out, "{kind} {name}: {state}")?;
    }
    let is_left = |found: &Found| matches!(found.state, Fate::Orphaned | Fate::Stuck(_));
    let left = found.iter().filter(|found| is_left(found)).count();
    if left > 0 {
        let remedy = if args.apply { "" } else { "; `--apply` removes it" };
        writeln!(out, "{left} left behind{remedy}")?;
        return Ok(ExitCode::FAILURE);
    }
    writeln!(out, "nothing is left behind")?;
    Ok(ExitCode::SUCCESS)
}
