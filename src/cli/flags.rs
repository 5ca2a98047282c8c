//! Flags that are made from the table of settings, and the configuration that is read with them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::{Arg, ArgMatches};

use crate::base::time::MAX_TIME;
use crate::gateway::config::{ConfigSetting, GatewayConfig, check_variable_names};
use crate::runner::tool_opener::{NamedToolFiles, RunToolOpener};
use crate::telemetry::access_log::{self, AccessLogFormat};

/// Returns one flag for each setting, and `--config`.
pub fn flags_for(
    settings: impl Iterator<Item = &'static ConfigSetting>,
) -> impl Iterator<Item = Arg> {
    let config = Arg::new("CONFIG")
        .long("config")
        .value_name("FILE")
        .help("A TOML file with further settings [env: CONFIG]");
    let flags = settings.map(|setting| {
        let help = format!("{} [env: {}]", setting.help, setting.variable_names());
        Arg::new(setting.name)
            .long(setting.flag_name())
            .value_name(setting.value)
            // Else clap itself would refuse `-1`, and advise `-- -1`, which is a program's name.
            .allow_negative_numbers(true)
            .help(help)
    });
    std::iter::once(config).chain(flags)
}

/// Reads the configuration: the file, then the environment, then the flags. The result is not validated yet.
///
/// # Errors
/// Returns an error if a file cannot be read or a value is invalid.
pub fn read_config(
    settings: impl Iterator<Item = &'static ConfigSetting>,
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<GatewayConfig> {
    read_config_with(settings, matches, variable, |_| ())
}

/// Reads the configuration like [`read_config`], and calls `between` after the file and before the environment.
///
/// # Errors
/// Returns an error if a file cannot be read or a value is invalid.
pub fn read_config_with(
    settings: impl Iterator<Item = &'static ConfigSetting>,
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
    between: impl FnOnce(&mut GatewayConfig),
) -> anyhow::Result<GatewayConfig> {
    let file = config_file_path(matches, &variable);
    let mut config = file.map_or_else(
        || Ok(GatewayConfig::default()),
        |file| GatewayConfig::read_file(Path::new(&file)),
    )?;
    between(&mut config);
    // The file is named here, where it is known; a later check of the whole configuration finds the same mistakes.
    config.tools.opener = Some(Arc::new(RunToolOpener::default()));
    let read = NamedToolFiles::read_files(&config.tools).and_then(|named| {
        config.tools.files = Some(Arc::new(named.texts));
        config.files.extend(named.secret);
        config.decisive_files.extend(named.decisive);
        config.tools.check()
    });
    read.with_context(|| match config_file_path(matches, &variable) {
        Some(file) => format!("`{file}` is not a valid configuration"),
        None => "the configuration is not valid".to_owned(),
    })?;
    config.access_log_format =
        AccessLogFormat::from_variable(variable(access_log::FORMAT_VARIABLE).as_deref());
    // These files are private: no sandbox may mount them.
    config.files.extend(config_file_path(matches, &variable).map(PathBuf::from));
    // A later source overrides an earlier one; `find_value` prefers the flag to the variable.
    for setting in settings {
        let secret = setting.secret_file(matches.get_one(setting.name).cloned(), &variable);
        config.files.extend(secret.map(PathBuf::from));
        let given = setting.find_value(matches.get_one(setting.name).cloned(), &variable)?;
        setting.apply_value(&mut config, &given.unwrap_or_default())?;
    }
    Ok(config)
}

/// Returns the values that flags and variables set, as text. Secrets are left out.
pub fn explicit_settings(
    settings: impl Iterator<Item = &'static ConfigSetting>,
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<Vec<(&'static str, String)>> {
    let mut given = vec![];
    for setting in settings.filter(|setting| !setting.is_secret) {
        let found = setting.find_value(matches.get_one(setting.name).cloned(), &variable)?;
        given.extend(found.map(|value| (setting.name, value)));
    }
    Ok(given)
}

/// Checks the environment for variables whose names are almost those of settings.
///
/// # Errors
/// Returns an error if there is such a variable.
pub fn check_environment() -> anyhow::Result<()> {
    // An empty variable counts as not set.
    let given = std::env::vars_os().filter(|(_, value)| !value.is_empty());
    let names: Vec<_> = given.filter_map(|(name, _)| name.into_string().ok()).collect();
    check_variable_names(names.iter().map(String::as_str))
}

/// Parses a duration such as `1h 30m`.
///
/// # Errors
/// Returns a hint if the text is not a duration or is longer than a hundred years.
pub fn parse_duration(given: &str) -> Result<Duration, &'static str> {
    let time = humantime::parse_duration(given);
    let time = time.map_err(|_| "give a time, such as 30s, 5m or 1h 30m")?;
    if time <= MAX_TIME { Ok(time) } else { Err("give a hundred years at most") }
}

/// Parses a whole number, limited by its type.
///
/// # Errors
/// Returns a hint if the text is not a whole number or is too large.
pub fn count<T: FromStr>(given: &str) -> Result<T, &'static str> {
    given.parse().map_err(|_| "give a whole number, such as 20")
}

/// Parses a number of processors, which may be a fraction.
///
/// # Errors
/// Returns a hint if the text is not a positive number.
pub fn processors(given: &str) -> Result<f64, &'static str> {
    const RULE: &str = "give a number of processors, such as 2 or 0.5";
    given.parse().ok().filter(|count: &f64| count.is_finite() && *count > 0.0).ok_or(RULE)
}

/// Parses an address and a port to listen on.
///
/// # Errors
/// Returns a hint if the text is not an address with a port.
pub fn address(given: &str) -> Result<SocketAddr, &'static str> {
    given.parse().map_err(|_| "give an IP address and a port, such as 127.0.0.1:4000")
}

/// Returns the configuration file that a flag or a variable names.
pub fn config_file_path(
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> Option<String> {
    let file = matches.get_one("CONFIG").cloned().or_else(|| variable("CONFIG"));
    file.filter(|file: &String| !file.is_empty())
}

/// The help of `DRAIN_TIMEOUT_SECONDS` for commands whose runs end before their gateways do.
pub const DRAIN_TIMEOUT_HELP: &str =
    "Time for calls that are open at a run's end [default: 8] [env: DRAIN_TIMEOUT_SECONDS]";
