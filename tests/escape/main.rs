//! What an agent would try to get out of its sandbox: attempts that the kernel has to refuse, one line each.
//!
//! It is run inside a sandbox, by the tests of every driver. A line is `held` with the kernel's answer, or `ESCAPED`
//! with what was reached; the exit status is 1 where anything was. Arguments are facts of the host, as NAME=VALUE, that
//! only somebody outside of the sandbox knows: `abstract=` a listening abstract socket, `host-pid=` a process,
//! `port=` a TCP port, `pids=` the limit of processes. With `fill=accept-queues` it does only that, which ends the sandbox.
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

/// What came of an attempt.
enum Outcome {
    /// Refused, with the words it was refused in.
    Held(String),
    /// Done, with what it reached.
    Escaped(String),
}

/// One thing that must not work.
struct Attempt {
    area: &'static str,
    what: &'static str,
    make: fn(&Facts) -> Outcome,
}

/// What the host says of itself.
type Facts = HashMap<String, String>;

fn main() -> ExitCode {
    // As root of a machine, most of this works, and does what it says.
    if !fs::exists("/cogni-init").unwrap_or(false) {
        println!("this must not be run outside of a sandbox");
        return ExitCode::from(2);
    }
    let facts: Facts = env::args()
        .skip(1)
        .filter_map(|fact| fact.split_once('=').map(|(name, value)| (name.into(), value.into())))
        .collect();
    if facts.contains_key("fill") {
        let filled = network::fill_accept_queues();
        println!("{filled:?}");
        return ExitCode::SUCCESS;
    }
    let mut status = ExitCode::SUCCESS;
    // What fills up memory and processes comes last.
    let attempts = [
        network::ATTEMPTS,
        files::ATTEMPTS,
        kernel::ATTEMPTS,
        processes::ATTEMPTS,
        resources::ATTEMPTS,
    ];
    for Attempt { area, what, make } in attempts.into_iter().flatten() {
        let (word, why) = match make(&facts) {
            Outcome::Held(why) => ("held", why),
            Outcome::Escaped(how) => {
                status = ExitCode::FAILURE;
                ("ESCAPED", how)
            }
        };
        println!("{area}\t{what}\t{word}\t{why}");
    }
    status
}

impl Outcome {
    /// For an attempt that must end in an error.
    fn of<T>(done: io::Result<T>) -> Self {
        match done {
            Ok(_) => Self::Escaped("it worked".to_owned()),
            Err(error) => Self::Held(name(&error)),
        }
    }

    /// For something that must be as it is said.
    fn expect(holds: bool, found: impl Display) -> Self {
        if holds { Self::Held(found.to_string()) } else { Self::Escaped(found.to_string()) }
    }

    /// The first of several that got through.
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

/// The result of a system call that answers with -1.
fn answered(result: impl Into<i64>) -> io::Result<i64> {
    match result.into() {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

/// Short, and the same on every machine.
fn name(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}
