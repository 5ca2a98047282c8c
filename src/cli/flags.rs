//! Flags made from the table of settings, and the configuration made from them.

use std::path::Path;

use clap::{Arg, ArgMatches};

use crate::config::{Config, Setting};

/// One flag for each setting, and `--config`.
pub fn of(settings: impl Iterator<Item = &'static Setting>) -> impl Iterator<Item = Arg> {
    let config = Arg::new("CONFIG")
        .long("config")
        .value_name("FILE")
        .help("A TOML file with further settings [env: CONFIG]");
    let flags = settings.map(|setting| {
        let help = format!("{} [env: {}]", setting.help, setting.variables());
        Arg::new(setting.name).long(setting.flag()).value_name(setting.value).help(help)
    });
    std::iter::once(config).chain(flags)
}

/// The configuration, not checked yet: the file, then the environment, then the flags.
///
/// # Errors
/// A file cannot be read, or a value is wrong.
pub fn read(
    settings: impl Iterator<Item = &'static Setting>,
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<Config> {
    read_with(settings, matches, variable, |_| ())
}

/// The same, with something that is said between the file and the environment.
///
/// # Errors
/// A file cannot be read, or a value is wrong.
pub fn read_with(
    settings: impl Iterator<Item = &'static Setting>,
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
    between: impl FnOnce(&mut Config),
) -> anyhow::Result<Config> {
    let file = matches
        .get_one("CONFIG")
        .cloned()
        .or_else(|| variable("CONFIG"))
        .filter(|file: &String| !file.is_empty());
    let mut config =
        file.map_or_else(|| Ok(Config::default()), |file| Config::read(Path::new(&file)))?;
    between(&mut config);
    for setting in settings {
        let given = setting.find(matches.get_one(setting.name).cloned(), &variable)?;
        setting.apply(&mut config, &given.unwrap_or_default())?;
    }
    Ok(config)
}
