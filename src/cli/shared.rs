//! `cogni-gateway shared`: serves many runs on one address. Run tokens tell the runs apart.

use std::process::ExitCode;

use anyhow::bail;
use clap::{ArgMatches, Command};

use super::{flags, proxy};
use crate::gateway::config::{ConfigSetting, GatewayConfig, SETTINGS};

/// Builds the command, with one flag for each setting that is not about one run.
pub fn command() -> Command {
    Command::new("shared")
        .about("Serve many runs on one address, told apart by run tokens")
        .defer(|command| command.after_help(AFTER_HELP).args(flags::flags_for(shared_settings())))
}

/// Serves until SIGTERM, SIGINT or SIGQUIT, then lets open calls finish.
pub fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    flags::check_environment()?;
    let matches = matches.clone();
    proxy::serve_runs(move || load_config(&matches, |name| std::env::var(name).ok()))
}

/// Loads the configuration: the file, then the environment, then the flags.
pub fn load_config(
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<GatewayConfig> {
    let config = flags::read_config(shared_settings(), matches, variable)?;
    // Without `[shared]` there is no listener and no run to serve.
    if config.shared.is_none() {
        bail!("there is no `[shared]`; name a file that has it with `--config`");
    }
    config.validate()?;
    Ok(config)
}

fn shared_settings() -> impl Iterator<Item = &'static ConfigSetting> {
    SETTINGS.iter().filter(|setting| !setting.is_per_run())
}

const AFTER_HELP: &str = "\
The listener, its keys and the runs are in the file's `[shared]`. Budgets and policy are the
defaults of runs. A client uses its run's token as its API key.

Example:
  cogni-gateway shared --config gateway.toml --litellm-master-key-file /run/secrets/litellm
  cogni-gateway token mint --run-id run-1 --ttl 1h --keys-file /run/secrets/run-tokens";
