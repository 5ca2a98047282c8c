//! `cogni-gateway doctor`: reports what this machine can enforce and reach, and how to get the rest.

use std::env;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgMatches, Command, FromArgMatches};
use rustix::fs::{Access, access};

use super::relay::RelayArgs;
use super::run::{SandboxPathArgs, resolve_init_binary};
use super::{flags, hide_env_values};
use crate::base::private_dir;
use crate::gateway::config::{ConfigSetting, SETTINGS};
use crate::gateway::upstream;
use crate::gateway::upstream::check::ProbeError;
use crate::sandbox::probe::{self, DoctorFinding, DoctorReport, HostFacts, engine, machine};

/// The flags of `doctor`.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    places: SandboxPathArgs,

    /// The sandbox's first process [default: the cogni-init that this program carries]
    #[arg(long, value_name = "PATH", env = "COGNI_INIT")]
    init: Option<PathBuf>,

    /// The forge, as for services and runs
    #[command(flatten)]
    relay: RelayArgs,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// Builds the command with its own flags and the flags for the upstream.
pub fn command() -> Command {
    Command::new("doctor").about(ABOUT).defer(|command| {
        let command = command.args(flags::flags_for(settings()));
        hide_env_values(<DoctorArgs as clap::Args>::augment_args(command))
            .about(ABOUT)
            .long_about(None)
    })
}

/// Prints the report. The exit status is 0 if at least one driver can enforce everything and no configured service
/// fails; otherwise 1.
pub fn run(matches: &ArgMatches, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let args = DoctorArgs::from_arg_matches(matches)?;
    // The facts are collected first and judged by a function without side effects.
    let mut report = DoctorReport::from_facts(&probe_host(&args)?);
    report.add(depended_on(matches, &args)?);
    if args.json {
        serde_json::to_writer(&mut *out, &report)?;
        writeln!(out)?;
    } else {
        print_report(&report, out)?;
    }
    Ok(if report.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Checks the services that runs need beside this machine: the state directory, the upstream and the forge.
fn depended_on(matches: &ArgMatches, args: &DoctorArgs) -> anyhow::Result<Vec<DoctorFinding>> {
    let variable = |name: &str| env::var(name).ok();
    let config = flags::read_config(settings(), matches, variable)?;
    let is_told = |name: &str| {
        flags::explicit_settings(settings(), matches, variable)
            .is_ok_and(|given| given.iter().any(|(given, _)| *given == name))
    };
    // An upstream is tried only if the operator named one: the default address may belong to another service.
    let has_key = !config.upstream.api_key.is_empty();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let is_configured =
        has_key || is_told("LITELLM_HOST") || flags::config_file_path(matches, variable).is_some();
    let upstream = if is_configured {
        runtime.block_on(upstream(&config.upstream, has_key))
    } else {
        probe::warn_finding(
            "upstream",
            "not checked: no upstream is configured",
            "set LITELLM_HOST and LITELLM_MASTER_KEY to check it",
        )
    };
    let forge = match args.relay.clone().forge_access(&variable) {
        // A host without a forge is complete: its runs keep their work on this machine.
        Ok(None) => probe::ok_finding(
            "forge",
            "no credential is configured, so runs cannot push; set GITHUB_TOKEN",
        ),
        Ok(Some(access)) => match runtime.block_on(access.credential.check(&access.api)) {
            Ok(()) => probe::ok_finding("forge", format!("{} accepts the credential", access.api)),
            Err(error) => probe::missing_finding(
                "forge",
                error.to_string(),
                "see GITHUB_TOKEN and GITHUB_API_URL",
            ),
        },
        Err(error) => probe::missing_finding(
            "forge",
            format!("{error:#}"),
            "see GITHUB_TOKEN and GITHUB_API_URL",
        ),
    };
    Ok(vec![state(&args.relay.state_path()), upstream, forge])
}

/// Checks that the state directory can be used. A missing directory is fine, because it is created when it is needed.
fn state(path: &Path) -> DoctorFinding {
    let shown = path.display();
    // The check also accepts a directory that this user may only read.
    match private_dir::check(path) {
        Ok(()) if access(path, Access::WRITE_OK).is_err() => probe::missing_finding(
            "state directory",
            format!("this user may not write to `{shown}`"),
            "run as its owner, or name another with `--state-dir`",
        ),
        Ok(()) => probe::ok_finding("state directory", format!("{shown}")),
        // The check fails for a missing directory too.
        Err(_) if !path.exists() => probe::ok_finding(
            "state directory",
            format!("{shown} does not exist yet, and is created when it is needed"),
        ),
        Err(error) => probe::missing_finding(
            "state directory",
            error.to_string(),
            "correct this first: until then its files cannot be trusted",
        ),
    }
}

async fn upstream(config: &upstream::UpstreamConfig, has_key: bool) -> DoctorFinding {
    let url = &config.url;
    match upstream::check::probe(config).await {
        Ok(()) if has_key => {
            probe::ok_finding("upstream", format!("{url} answers, and accepts the key"))
        }
        Ok(()) => probe::warn_finding(
            "upstream",
            format!("{url} answers"),
            "set LITELLM_MASTER_KEY to check the key",
        ),
        // The upstream has answered; it only wants a key that the operator did not configure.
        Err(ProbeError::KeyRefused(_)) if !has_key => probe::warn_finding(
            "upstream",
            format!("{url} answers"),
            "set LITELLM_MASTER_KEY to check the key",
        ),
        Err(error) => {
            probe::missing_finding("upstream", format!("{url}: {}", error.found()), error.hint())
        }
    }
}

/// Returns the settings for the upstream's address and key.
fn settings() -> impl Iterator<Item = &'static ConfigSetting> {
    let names = ["LITELLM_HOST", "LITELLM_MASTER_KEY", "UPSTREAM_KIND", "UPSTREAM_CA_FILE"];
    SETTINGS.iter().filter(move |setting| names.contains(&setting.name))
}

fn probe_host(args: &DoctorArgs) -> anyhow::Result<HostFacts> {
    let init = resolve_init_binary(args.init.clone(), args.relay.state_path())?;
    let runtime_dir = env::var_os("XDG_RUNTIME_DIR");
    let facts =
        machine::probe_machine(&args.places.run_dir, init, runtime_dir.as_deref().map(Path::new));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let docker = runtime.block_on(engine::probe_engine(&args.places.docker_socket));
    Ok(HostFacts { docker, ..facts })
}

/// Prints a line for each finding, and a line for its remedy.
///
/// # Errors
/// Returns an error if `out` cannot be written.
pub fn print_report(report: &DoctorReport, out: &mut impl Write) -> anyhow::Result<()> {
    for DoctorFinding { name, level, found, remedy } in &report.findings {
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
    // One complete driver is enough to run agents; the hint is for the other findings.
    let has_driver = report.drivers.docker || report.drivers.embedded;
    let rest = if has_driver && !report.ok { "; correct the missing items above" } else { "" };
    writeln!(out, "{summary}{rest}")?;
    Ok(())
}

const ABOUT: &str = "Report what this machine can enforce and reach, with remedies";
