//! The command line of `cogni-agent`.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

/// The options of one conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentOptions {
    /// The path of the conversation's file.
    pub messages: PathBuf,
    /// The maximum number of requests to the model.
    pub rounds: u32,
    /// The time limit of the whole conversation, tools included.
    pub timeout: Duration,
}

/// The action that the command line requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentCommand {
    Start(AgentOptions),
    /// Print a text and exit: `--help` or `--version`.
    Print(String),
}

impl Default for AgentOptions {
    fn default() -> Self {
        Self {
            messages: PathBuf::from("/workspace/.cogni/messages.json"),
            rounds: 16,
            timeout: Duration::from_mins(9),
        }
    }
}

/// Parses the arguments after the program's name.
///
/// # Errors
/// Returns a message that names the invalid argument and a valid value.
pub fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<AgentCommand, String> {
    let mut options = AgentOptions::default();
    while let Some(argument) = arguments.next() {
        // Both forms are accepted: `--name value` and `--name=value`.
        let flag = argument.to_string_lossy().into_owned();
        let (name, mut value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(OsString::from(value))),
            None => (flag.as_str(), None),
        };
        let mut value =
            || value.take().or_else(|| arguments.next()).ok_or(format!("`{name}` needs a value"));
        match name {
            "--messages" => options.messages = PathBuf::from(value()?),
            "--rounds" => options.rounds = parse_number(name, &value()?)?,
            "--timeout" => {
                options.timeout = Duration::from_secs(parse_number(name, &value()?)?.into());
            }
            "--help" => return Ok(AgentCommand::Print(HELP_TEXT.to_owned())),
            "--version" => return Ok(AgentCommand::Print(VERSION_TEXT.to_owned())),
            _ => return Err(format!("there is no option `{flag}`")),
        }
    }
    Ok(AgentCommand::Start(options))
}

fn parse_number(name: &str, value: &OsStr) -> Result<u32, String> {
    let text = value.to_string_lossy();
    let number = text.parse().ok().filter(|number| (1..=MAX_COUNT).contains(number));
    number.ok_or_else(|| format!("`{name}` is `{text}`; give a number from 1 to {MAX_COUNT}"))
}

/// The maximum number of rounds, and of seconds. Our choice: more than any use needs, and far below the overflow of
/// clock arithmetic.
const MAX_COUNT: u32 = 1_000_000;

const VERSION_TEXT: &str = concat!("cogni-agent ", env!("CARGO_PKG_VERSION"), "\n");

const HELP_TEXT: &str = "\
A small agent: reads a conversation, asks the model in COGNI_MODEL, runs what it calls for, prints its answer as JSON.

Usage: cogni-agent [OPTIONS]

Options:
  --messages PATH    the conversation [default: /workspace/.cogni/messages.json]
  --rounds COUNT     maximum number of requests to the model [default: 16]
  --timeout SECONDS  time limit of everything, tools included [default: 540]
  --help             print this
  --version          print the version

The LLM is at OPENAI_BASE_URL (http://localhost:8080/v1). Exit status: 0 there is an answer, 1 there is an error, which
the answer's `meta.error` describes, 2 wrong usage.
";
