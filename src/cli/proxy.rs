//! `cogni-gateway proxy`: serves one run, in place of the nginx container that did it before.

use std::path::Path;
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::config::{Config, SETTINGS};

/// The command's flags: one for each setting.
pub fn command() -> Command {
    let config = Arg::new("CONFIG")
        .long("config")
        .value_name("FILE")
        .help("A TOML file with further settings [env: CONFIG]");
    let flags = SETTINGS.iter().map(|setting| {
        let help = format!("{} [env: {}]", setting.help, setting.variables());
        Arg::new(setting.name).long(setting.flag()).value_name(setting.value).help(help)
    });
    Command::new("proxy")
        .about("Serve one run on a unix socket")
        .after_help(EXAMPLE)
        .arg(config)
        .args(flags)
}

/// Serves until SIGTERM, SIGINT or SIGQUIT, then lets open calls finish.
pub fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let config = configure(matches, |name| std::env::var(name).ok())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let app = App::build(config)?;
        let shutdown = CancellationToken::new();
        let signals = crate::app::signals(shutdown.clone(), app.access_log())?;
        tokio::select! {
            biased;
            served = app.serve(shutdown) => served?,
            never = signals => match never {},
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// The configuration: the file, then the environment, then the flags.
pub fn configure(
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<Config> {
    let file = matches
        .get_one("CONFIG")
        .cloned()
        .or_else(|| variable("CONFIG"))
        .filter(|file: &String| !file.is_empty());
    let mut config =
        file.map_or_else(|| Ok(Config::default()), |file| Config::read(Path::new(&file)))?;
    for setting in SETTINGS {
        let given = setting.find(matches.get_one(setting.name).cloned(), &variable)?;
        setting.apply(&mut config, &given.unwrap_or_default())?;
    }
    config.check()?;
    Ok(config)
}

const EXAMPLE: &str = "\
A flag wins over its variable, a variable over the file. Arguments are visible to every process, so
a secret is given as a variable or as the path of its file.

Example:
  RUN_ID=run-1 BILLING_ACCOUNT_ID=acct-1 LITELLM_MASTER_KEY_FILE=/run/secrets/litellm \\
  cogni-gateway proxy --litellm-host litellm:4000 --max-turns 50 \\
    --audit-log-path /var/log/run-1.jsonl";
