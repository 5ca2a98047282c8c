//! The command line. This module has the top-level command, and each command has its own short file.

pub mod admin;
pub mod agents;
pub mod approvals;
pub mod audit;
pub mod billing;
pub mod check;
pub mod cogni_init;
pub mod demo;
pub mod doctor;
pub mod explain;
pub mod flags;
pub mod forget;
pub mod generate;
pub mod grant;
pub mod health;
mod log;
pub mod provider;
pub mod proxy;
pub mod relay;
pub mod run;
pub mod runs;
pub mod serve;
pub mod shared;
mod stdout_writer;
pub mod sweep;
pub mod token;
pub mod tools;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, Subcommand};

use log::StderrLog;
use stdout_writer::StdoutWriter;

use crate::base::hidden_characters::escape_hidden;

/// Runs the command that the process was called with.
pub fn main() -> ExitCode {
    let matches = command().get_matches();
    // The demo and a watched run print their own progress. Only warnings and errors may interrupt the progress.
    let prints_progress = matches.subcommand_matches("demo").is_some()
        || matches.subcommand_matches("run").is_some_and(run::shows_progress);
    let log = match StderrLog::start(
        asked_level(&matches),
        if prints_progress { "warn" } else { "info" },
    ) {
        Ok(log) => log,
        Err(error) => {
            let _ = writeln!(io::stderr(), "error: cannot start the log's thread: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut out = StdoutWriter::stdout();
    // `out` remembers a failed write, so that the exit status is right even if a command ignores the error.
    let done = dispatch_command(&matches, &mut out);
    // The buffered output is written before the last error, so that a reader sees both in order.
    let (last, code) = match (out.finish(), done) {
        (Ok(()), Ok(code)) => (None, code),
        // A command that fails could not do its work: status 2. A negative result is the command's own status.
        (Ok(()), Err(error)) => (Some(format_error_chain(&error)), ExitCode::from(EXIT_USAGE)),
        // A closed pipe needs no message: its reader has what it wanted. But the command did not deliver all of its
        // output.
        (Err(error), _) if error.kind() == io::ErrorKind::BrokenPipe => (None, ExitCode::FAILURE),
        (Err(error), _) => {
            (Some(format!("cannot write to standard output: {error}")), ExitCode::FAILURE)
        }
    };
    // The last error goes through the log's queue, so that it comes after all log lines.
    // It may have lines, and quote another party's text.
    log.finish(last.map(|last| format!("error: {}", escape_hidden(&last))));
    code
}

/// Returns the log level that `-v` and `-q` request.
fn asked_level(matches: &ArgMatches) -> Option<&'static str> {
    match (matches.get_count(VERBOSE), matches.get_flag(QUIET)) {
        (0, false) => None,
        (0, true) => Some("error"),
        (1, _) => Some("debug"),
        (_, _) => Some("trace"),
    }
}

/// Formats an error and its causes. A cause that an error's own message contains is not repeated.
fn format_error_chain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| {
        if text.is_empty() {
            cause
        } else if text.contains(&cause) {
            text
        } else {
            format!("{text}: {cause}")
        }
    })
}

/// Builds the command line with all commands. A command adds its flags only when it is called or its help is requested:
/// building all of them would be a quarter of the start-up time.
pub fn command() -> Command {
    let command = Command::new("cogni-gateway")
        .version(env!("CARGO_PKG_VERSION"))
        .about("One way out for untrusted agents: an LLM gateway on a unix socket per run")
        .after_help(AFTER_HELP)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .args(log_flags())
        // The order of the help: first the commands that serve and run, then the tools around them.
        .subcommand(proxy::command())
        .subcommand(shared::command())
        .subcommand(run::command())
        .subcommand(with_args::<agents::AgentsArgs>(
            "agents",
            "List the agents of the catalog that can run here",
        ))
        .subcommand(serve::command())
        .subcommand(with_subcommands::<runs::RunsCommand>(
            "runs",
            "Show the runs of a service, or end them",
        ))
        .subcommand(with_subcommands::<approvals::ApprovalsCommand>(
            "approvals",
            "Show the tool calls that wait for a person, and answer",
        ))
        .subcommand(with_args::<sweep::SweepArgs>(
            "sweep",
            "Show the leftovers of crashed runs, or remove them",
        ))
        .subcommand(with_args::<forget::ForgetArgs>(
            "forget",
            "Show the stored workspaces of agents, or delete them",
        ))
        .subcommand(with_subcommands::<relay::RelayCommand>(
            "relay",
            "Show, retry, apply or discard deliveries of work to branches",
        ))
        .subcommand(with_subcommands::<billing::BillingCommand>(
            "billing",
            "Show the costs of runs, and compare them with LiteLLM's",
        ));
    with_operator_commands(command)
}

/// Adds the commands that check, explain and prove, and those that make keys, tokens and pages.
fn with_operator_commands(command: Command) -> Command {
    command
        .subcommand(doctor::command())
        .subcommand(with_args::<cogni_init::CogniInitArgs>(
            "cogni-init",
            "Write the first process of a sandbox to a file, for your own containers",
        ))
        .subcommand(explain::command())
        .subcommand(check::command())
        .subcommand(
            Command::new("demo")
                .about("Show a complete run against fake servers; needs nothing else installed"),
        )
        .subcommand(with_args::<admin::AdminArgs>(
            "admin",
            "Show the open runs of a gateway process, or change them",
        ))
        .subcommand(with_args::<health::HealthArgs>(
            "health",
            "Check that a gateway's socket answers",
        ))
        .subcommand(provider::command())
        .subcommand(with_subcommands::<audit::AuditCommand>(
            "audit",
            "Verify or print an audit log",
        ))
        .subcommand(with_subcommands::<grant::GrantCommand>(
            "grant",
            "Make, show and revoke grants, the permissions of clients",
        ))
        .subcommand(with_subcommands::<token::TokenCommand>(
            "token",
            "Make run tokens, or show their contents",
        ))
        .subcommand(with_subcommands::<tools::ToolsCommand>(
            "tools",
            "Pin the tools of servers of MCP, or show what has changed",
        ))
        .subcommand(with_args::<generate::Completions>(
            "completions",
            "Print shell completions for this command",
        ))
        .subcommand(with_args::<generate::ManualPages>(
            "man",
            "Write a manual page for each command to a directory",
        ))
}

/// Returns the flags for the log level, which every command has.
fn log_flags() -> [Arg; 2] {
    let verbose = Arg::new(VERBOSE)
        .short('v')
        .long("verbose")
        .action(ArgAction::Count)
        .help("Log more: `-v` is LOG=debug, `-vv` is LOG=trace");
    let quiet = Arg::new(QUIET)
        .short('q')
        .long("quiet")
        .action(ArgAction::SetTrue)
        .conflicts_with(VERBOSE)
        .help("Log errors only, as LOG=error does");
    [verbose, quiet].map(|flag| flag.global(true).display_order(LAST))
}

/// Builds a command with flags. `about` is set last, because clap would replace it by the doc comment of the flags'
/// type.
fn with_args<A: Args>(name: &'static str, about: &'static str) -> Command {
    Command::new(name).about(about).defer(|command| augment_keeping_about(command, A::augment_args))
}

/// Builds a command that has subcommands.
fn with_subcommands<S: Subcommand>(name: &'static str, about: &'static str) -> Command {
    Command::new(name).about(about).defer(|command| {
        let command = augment_keeping_about(command, S::augment_subcommands);
        command.subcommand_required(true).arg_required_else_help(true)
    })
}

// The doc comments of the argument types describe code and are not help.
fn augment_keeping_about(command: Command, flags: fn(Command) -> Command) -> Command {
    let about = command.get_about().cloned().unwrap_or_default();
    hide_env_values(flags(command).about(about).long_about(None))
}

/// Hides the values of environment variables in the help, because they may be secrets. Their names stay.
fn hide_env_values(command: Command) -> Command {
    command.mut_args(|arg| arg.hide_env_values(true)).mut_subcommands(hide_env_values)
}

fn dispatch_command(matches: &ArgMatches, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    match matches.subcommand() {
        Some(("proxy", matches)) => proxy::run(matches),
        Some(("shared", matches)) => shared::run(matches),
        Some(("run", matches)) => run::run(matches, out),
        Some(("agents", matches)) => {
            agents::run(&agents::AgentsArgs::from_arg_matches(matches)?, out)
        }
        Some(("serve", matches)) => serve::run(matches),
        Some(("runs", matches)) => runs::run(runs::RunsCommand::from_arg_matches(matches)?, out),
        Some(("approvals", matches)) => {
            approvals::run(approvals::ApprovalsCommand::from_arg_matches(matches)?, out)
        }
        Some(("sweep", matches)) => sweep::run(matches, out),
        Some(("forget", matches)) => {
            forget::run(&forget::ForgetArgs::from_arg_matches(matches)?, out)
        }
        Some(("relay", matches)) => {
            relay::run(relay::RelayCommand::from_arg_matches(matches)?, out)
        }
        Some(("billing", matches)) => {
            billing::run(billing::BillingCommand::from_arg_matches(matches)?, out)
        }
        Some(("doctor", matches)) => doctor::run(matches, out),
        Some(("explain", matches)) => explain::run(matches, io::stdin(), out),
        Some(("check", matches)) => check::run(matches, out),
        Some(("cogni-init", matches)) => {
            cogni_init::run(&cogni_init::CogniInitArgs::from_arg_matches(matches)?, out)
        }
        Some(("demo", _)) => demo::run(out),
        Some(("admin", matches)) => admin::run(&admin::AdminArgs::from_arg_matches(matches)?, out),
        Some(("health", matches)) => health::run(&health::HealthArgs::from_arg_matches(matches)?),
        Some(("provider", matches)) => {
            provider::run(provider::ProviderArgs::from_arg_matches(matches)?, out)
        }
        Some(("tools", matches)) => {
            tools::run(&tools::ToolsCommand::from_arg_matches(matches)?, out)
        }
        Some(("audit", matches)) => {
            audit::run(&audit::AuditCommand::from_arg_matches(matches)?, out)
        }
        Some(("grant", matches)) => {
            grant::run(grant::GrantCommand::from_arg_matches(matches)?, out)
        }
        Some(("completions", matches)) => {
            generate::completions(&generate::Completions::from_arg_matches(matches)?, out)
        }
        Some(("man", matches)) => {
            generate::manual_pages(&generate::ManualPages::from_arg_matches(matches)?, out)
        }
        Some(("token", matches)) => {
            token::run(&token::TokenCommand::from_arg_matches(matches)?, io::stdin(), out)
        }
        // clap refuses an unknown command, and `subcommand_required` a missing one.
        _ => unreachable!("clap knows no other command"),
    }
}

const AFTER_HELP: &str = "\
Begin with `cogni-gateway demo`, which needs nothing, then `doctor`, `run` and `serve`.

Variables:
  LOG=info          Log level on standard error: error, warn, info, debug or trace
  LOG_FORMAT=json   Write log lines as JSON, for programs; the access log, too";

const VERBOSE: &str = "VERBOSE";
const QUIET: &str = "QUIET";

/// The display order of the last flags in a command's help. Our choice: higher than any other flag's order.
const LAST: usize = 1000;

/// clap's exit status for wrong usage.
const EXIT_USAGE: u8 = 2;
