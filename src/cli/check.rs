//! `cogni-gateway check`: checks a configuration, its rules and the rules' examples without serving it.

use std::io::Write;
use std::process::ExitCode;

use clap::{ArgMatches, Command};

use super::explain::{configuration_flags, load_config};
use crate::gateway::process::compile_policy;

/// Builds the command and its flags. The command also accepts the flags of `proxy`.
pub fn command() -> Command {
    Command::new("check")
        .about("Load a configuration, and report what is wrong with it")
        .defer(add_arguments)
}

fn add_arguments(command: Command) -> Command {
    command
        .after_help(
            "The check covers settings, rules and prices. Errors in certificates, keys and agents, and changes\nthat need a restart, are in the log of the serving process. The command also takes the flags and\nvariables of `cogni-gateway proxy`; the run's identity and key may be left out.",
        )
        .args(configuration_flags())
}

/// Prints that the configuration is valid, or returns its first error.
pub fn run(matches: &ArgMatches, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let config = load_config(matches, |name| std::env::var(name).ok())?;
    // Compiling checks the examples of the rules too.
    compile_policy(&config)?;
    let rules = &config.policy.rules;
    let examples: usize = rules.iter().map(|rule| rule.matching.len() + rule.not_match.len()).sum();
    writeln!(out, "the configuration is valid: {} rules, {examples} examples hold", rules.len())?;
    Ok(ExitCode::SUCCESS)
}
