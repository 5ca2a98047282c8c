//! Escape attempts of an agent that the kernel must refuse, one line each.
//!
//! The tests of every driver run this program inside a sandbox. A line is `held` with the kernel's answer, or `ESCAPED`
//! with what was reached; the exit status is 1 if any attempt succeeded. The arguments are facts of the host as
//! NAME=VALUE, which only a process outside of the sandbox knows: `abstract=` a listening abstract socket, `host-pid=`
//! a process, `port=` a TCP port, `pids=` the limit of processes. With `fill=accept-queues` the program only fills
//! accept queues, which ends the sandbox.
#![expect(clippy::print_stdout, reason = "it is a program for a test to read")]
#![expect(unsafe_code, reason = "what has to be refused is mostly what no safe call asks for")]

mod files;
mod kernel;
mod network;
mod processes;
mod resources;

use std::collections::HashMap;
use std::env;
use std::fmt::Display;
use std::fs;
use std::io;
use std::process::ExitCode;

/// The result of an attempt.
enum AttemptOutcome {
    /// The attempt was refused, with this text.
    Held(String),
    /// The attempt succeeded, and reached this.
    Escaped(String),
}

/// An action that must fail.
struct EscapeAttempt {
    area: &'static str,
    what: &'static str,
    make: fn(&HostFacts) -> AttemptOutcome,
}

/// Facts about the host.
type HostFacts = HashMap<String, String>;

fn main() -> ExitCode {
    // As root of a machine, most attempts succeed, and cause the damage that they describe.
    if !fs::exists("/cogni-init").unwrap_or(false) {
        println!("this must not be run outside of a sandbox");
        return ExitCode::from(2);
    }
    let facts: HostFacts = env::args()
        .skip(1)
        .filter_map(|fact| fact.split_once('=').map(|(name, value)| (name.into(), value.into())))
        .collect();
    if facts.contains_key("fill") {
        let filled = network::fill_accept_queues();
        println!("{filled:?}");
        return ExitCode::SUCCESS;
    }
    let mut status = ExitCode::SUCCESS;
    // Attempts that use up memory and processes come last.
    let attempts = [
        network::ATTEMPTS,
        files::ATTEMPTS,
        kernel::ATTEMPTS,
        processes::ATTEMPTS,
        resources::ATTEMPTS,
    ];
    for EscapeAttempt { area, what, make } in attempts.into_iter().flatten() {
        let (word, why) = match make(&facts) {
            AttemptOutcome::Held(why) => ("held", why),
            AttemptOutcome::Escaped(how) => {
                status = ExitCode::FAILURE;
                ("ESCAPED", how)
            }
        };
        println!("{area}\t{what}\t{word}\t{why}");
    }
    status
}

impl AttemptOutcome {
    /// The outcome of an attempt that must end in an error.
    fn of<T>(done: io::Result<T>) -> Self {
        match done {
            Ok(_) => Self::Escaped("it worked".to_owned()),
            Err(error) => Self::Held(error_name(&error)),
        }
    }

    /// The outcome of a statement that must hold.
    fn expect(holds: bool, found: impl Display) -> Self {
        if holds { Self::Held(found.to_string()) } else { Self::Escaped(found.to_string()) }
    }

    /// The first of several attempts that succeeded.
    fn all(outcomes: impl IntoIterator<Item = (String, Self)>) -> Self {
        let mut why = "nothing to try".to_owned();
        for (what, outcome) in outcomes {
            match outcome {
                Self::Escaped(how) => return Self::Escaped(format!("{what}: {how}")),
                Self::Held(said) => why = said,
            }
        }
        Self::Held(why)
    }
}

/// Converts a system call's result; -1 is an error.
fn call_result(result: impl Into<i64>) -> io::Result<i64> {
    match result.into() {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

/// Returns a short name of the error, the same on every machine.
fn error_name(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}
