//! `cogni-gateway doctor`: what this machine enforces, what it does not, and how to get that.

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

#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    places: SandboxPathArgs,

    /// The sandbox's first process [default: the cogni-init that this program carries]
    #[arg(long, value_name = "PATH", env = "COGNI_INIT")]
    init: Option<PathBuf>,

    /// What services and runs are told of the forge
    #[command(flatten)]
    relay: RelayArgs,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// The command and its flags: its own, and those that say where the upstream is.
pub fn command() -> Command {
    Command::new("doctor").about(ABOUT).defer(|command| {
        let command = command.args(flags::flags_for(settings()));
        hide_env_values(<DoctorArgs as clap::Args>::augment_args(command))
            .about(ABOUT)
            .long_about(None)
    })
}

/// Exit status 0 where at least one driver can enforce everything, and nothing that is configured fails; else 1.
pub fn run(matches: &ArgMatches, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let args = DoctorArgs::from_arg_matches(matches)?;
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

/// What runs and services depend on beside this machine: the state directory, the upstream and the forge.
fn depended_on(matches: &ArgMatches, args: &DoctorArgs) -> anyhow::Result<Vec<DoctorFinding>> {
    let variable = |name: &str| env::var(name).ok();
    let config = flags::read_config(settings(), matches, variable)?;
    let is_told = |name: &str| {
        flags::explicit_settings(settings(), matches, variable)
            .is_ok_and(|given| given.iter().any(|(given, _)| *given == name))
    };
    let has_key = !config.upstream.api_key.is_empty();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let is_configured =
        has_key || is_told("LITELLM_HOST") || flags::config_file_path(matches, variable).is_some();
    let upstream = if is_configured {
        runtime.block_on(upstream(&config.upstream, has_key))
    } else {
        probe::warn_finding(
            "upstream",
            "not asked: no upstream is named",
            "set LITELLM_HOST and LITELLM_MASTER_KEY to have it tried",
        )
    };
    let forge = match args.relay.clone().forge_access(&variable) {
        Ok(None) => probe::ok_finding(
            "forge",
            "no credential, so nothing is pushed there; GITHUB_TOKEN gives one",
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

/// Whether the state directory can be used. One that is not there yet is made when it is needed.
fn state(path: &Path) -> DoctorFinding {
    let shown = path.display();
    match private_dir::check(path) {
        Ok(()) if access(path, Access::WRITE_OK).is_err() => probe::missing_finding(
            "state directory",
            format!("this user may not write to `{shown}`"),
            "run as its owner, or name another with `--state-dir`",
        ),
        Ok(()) => probe::ok_finding("state directory", format!("{shown}")),
        Err(_) if !path.exists() => probe::ok_finding(
            "state directory",
            format!("{shown} is not there yet, and is made when it is needed"),
        ),
        Err(error) => probe::missing_finding(
            "state directory",
            error.to_string(),
            "nothing that it keeps can be trusted before that is put right",
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
            "set LITELLM_MASTER_KEY to have the key tried",
        ),
        Err(ProbeError::KeyRefused(_)) if !has_key => probe::warn_finding(
            "upstream",
            format!("{url} answers"),
            "set LITELLM_MASTER_KEY to have the key tried",
        ),
        Err(error) => {
            probe::missing_finding("upstream", format!("{url}: {}", error.found()), error.hint())
        }
    }
}

/// What says where the upstream is.
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

/// One line for each finding, and one for what to do about it.
///
/// # Errors
/// Nobody takes the lines.
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
    let has_driver = report.drivers.docker || report.drivers.embedded;
    let rest = if has_driver && !report.ok { "; put right what is missing above" } else { "" };
    writeln!(out, "{summary}{rest}")?;
    Ok(())
}

const ABOUT: &str = "Say what this machine can enforce and reach, and how to get the rest";
