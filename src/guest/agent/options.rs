//! What the command line asks for.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

/// How one conversation is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentOptions {
    /// Where the conversation is.
    pub messages: PathBuf,
    /// How often the model may be asked.
    pub rounds: u32,
    /// For everything, tools included.
    pub timeout: Duration,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentCommand {
    Start(AgentOptions),
    /// `--help` or `--version`.
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

/// Reads the arguments after the program's own name.
///
/// # Errors
/// Which one is wrong, and what would be right.
pub fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<AgentCommand, String> {
    let mut options = AgentOptions::default();
    while let Some(argument) = arguments.next() {
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

/// Of rounds, or of seconds: more than anybody means, and far from where arithmetic with clocks ends.
const MAX_COUNT: u32 = 1_000_000;

const VERSION_TEXT: &str = concat!("cogni-agent ", env!("CARGO_PKG_VERSION"), "\n");

const HELP_TEXT: &str = "\
A small agent: reads a conversation, asks the model in COGNI_MODEL, runs what it calls for, prints its answer as JSON.

Usage: cogni-agent [OPTIONS]

Options:
  --messages PATH    the conversation [default: /workspace/.cogni/messages.json]
  --rounds COUNT     how often the model may be asked [default: 16]
  --timeout SECONDS  for everything [default: 540]
  --help             print this
  --version          print the version

The LLM is at OPENAI_BASE_URL (http://localhost:8080/v1). Exit status: 0 there is an answer, 1 there is an error, which
the answer's `meta.error` tells, 2 wrong use.
";
