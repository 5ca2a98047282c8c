//! `cogni-gateway check`: whether a configuration could be served, its rules and their examples included.

use std::io::Write;
use std::process::ExitCode;

use clap::{ArgMatches, Command};

use super::explain::{configuration_flags, load_config};
use crate::gateway::process::compile_policy;

/// The command and its flags; it also takes those of `proxy`.
pub fn command() -> Command {
    Command::new("check")
        .about("Load a configuration, and say what is wrong with it")
        .defer(add_arguments)
}

fn add_arguments(command: Command) -> Command {
    command
        .after_help(
            "It knows words, rules and prices. Certificates, keys, agents, and what needs a restart are told by\nthe log of whoever serves. It takes the flags and variables of `cogni-gateway proxy`, too; the run's\nidentity and key may be left out.",
        )
        .args(configuration_flags())
}

/// Says that all is well, or fails with what is not.
pub fn run(matches: &ArgMatches, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let config = load_config(matches, |name| std::env::var(name).ok())?;
    compile_policy(&config)?;
    let rules = &config.policy.rules;
    let examples: usize = rules.iter().map(|rule| rule.matching.len() + rule.not_match.len()).sum();
    writeln!(out, "the configuration is fine: {} rules, {examples} examples hold", rules.len())?;
    Ok(ExitCode::SUCCESS)
}
