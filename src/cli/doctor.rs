//! `cogni-gateway doctor`: what this machine enforces, what it does not, and how to get that.

use std::env;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::relay::StateDir;
use super::run::{Places, init};
use crate::sandbox::probe::{Facts, Finding, Report, engine, machine};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    places: Places,

    /// The sandbox's first process [default: the cogni-init that this program carries]
    #[arg(long, value_name = "PATH", env = "COGNI_INIT")]
    init: Option<PathBuf>,

    #[command(flatten)]
    state: StateDir,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// Exit status 0 where at least one driver can enforce everything, 1 where none can.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let report = Report::of(&look(args)?);
    if args.json {
        serde_json::to_writer(&mut *out, &report)?;
        writeln!(out)?;
    } else {
        print(&report, out)?;
    }
    Ok(if report.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn look(args: &Args) -> anyhow::Result<Facts> {
    let init = init(args.init.clone(), args.state.path())?;
    let runtime_dir = env::var_os("XDG_RUNTIME_DIR");
    let facts = machine::look(&args.places.run_dir, init, runtime_dir.as_deref().map(Path::new));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let docker = runtime.block_on(engine::ask(&args.places.docker_socket));
    Ok(Facts { docker, ..facts })
}

/// One line for each finding, and one for what to do about it.
///
/// # Errors
/// Nobody takes the lines.
pub fn print(report: &Report, out: &mut impl Write) -> anyhow::Result<()> {
    for Finding { name, level, found, remedy } in &report.findings {
        writeln!(out, "{level:8} {name:18} {found}")?;
        if let Some(remedy) = remedy {
            writeln!(out, "{:27} {remedy}", "")?;
        }
    }
    let summary = match (report.drivers.docker, report.drivers.embedded) {
        (true, true) => "both drivers enforce everything",
        (true, false) => "the driver `docker` enforces everything",
        (false, true) => "the driver `embedded` enforces everything",
        (false, false) => "no driver enforces everything",
    };
    writeln!(out, "{summary}")?;
    Ok(())
}
