//! `cogni-tool`: the client of the run's tools, in every sandbox.
//!
//! The program is part of the file `cogni-init`, which links it at `/run/cogni-tool`; `cogni-init --tool` is the same
//! program. It prints the gateway's answer, one line of JSON, on standard output.
//!
//! **Invariant:** this module imports no module outside of the guest's programs and no async runtime, because it is part
//! of the file `cogni-init`.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::agent::http::{self, LlmEndpoint};

/// The request that the command line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolCommand {
    /// Send a GET request, and print the answer.
    Get(String),
    /// Post a body to `/tool/exec`, and print the answer.
    Exec(String),
    /// Print a text and exit: `--help` or `--version`.
    Print(String),
}

/// Runs the program. `arguments` are the arguments after the program's name.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let words: Option<Vec<String>> = arguments.map(|word| word.into_string().ok()).collect();
    let command = words.ok_or("an argument is not UTF-8".to_owned()).and_then(|words| {
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        parse(&words)
    });
    match command {
        Ok(ToolCommand::Print(text)) => print_line(text.trim_end(), ExitCode::SUCCESS),
        Ok(command) => match send_request(&command) {
            Ok((status, body)) => print_line(&body, exit_code(status, &body)),
            Err(error) => {
                report(&format!("the gateway does not answer: {error}"));
                ExitCode::from(EXIT_UNAVAILABLE)
            }
        },
        Err(wrong) => {
            report(&format!("{wrong}; see `cogni-tool --help`"));
            ExitCode::from(EXIT_USAGE)
        }
    }
}

/// Parses the arguments after the program's name.
///
/// # Errors
/// Returns a message that names the invalid argument.
pub fn parse(words: &[&str]) -> Result<ToolCommand, String> {
    match words {
        ["--help"] | [] => Ok(ToolCommand::Print(HELP_TEXT.to_owned())),
        ["--version"] => Ok(ToolCommand::Print(VERSION_TEXT.to_owned())),
        ["list"] => Ok(ToolCommand::Get("/tool/list".to_owned())),
        ["exec", tool, rest @ ..] => parse_exec(tool, rest),
        ["result", id] => result_path(id, "0s"),
        ["result", id, "--wait", wait] => result_path(id, wait),
        ["result", ..] => Err("`result` needs the id of a call".to_owned()),
        ["exec"] => Err("`exec` needs the name of a tool".to_owned()),
        [other, ..] => Err(format!("there is no command `{other}`")),
    }
}

fn parse_exec(tool: &str, rest: &[&str]) -> Result<ToolCommand, String> {
    let (arguments, wait) = match rest {
        [] => ("{}", None),
        [arguments] => (*arguments, None),
        ["--wait", wait] => ("{}", Some(*wait)),
        [arguments, "--wait", wait] => (*arguments, Some(*wait)),
        _ => return Err("`exec` takes a tool, its arguments as JSON, and `--wait TIME`".to_owned()),
    };
    // The arguments go to the gateway byte for byte: it refuses what two readers could read in two ways.
    let arguments = if arguments == "-" { read_stdin()? } else { arguments.to_owned() };
    let tool = plain_word("the tool's name", tool)?;
    let wait = match wait {
        Some(wait) => format!(",\"wait\":\"{}\"", plain_word("`--wait`", wait)?),
        None => String::new(),
    };
    Ok(ToolCommand::Exec(format!("{{\"tool\":\"{tool}\",\"arguments\":{arguments}{wait}}}")))
}

fn result_path(id: &str, wait: &str) -> Result<ToolCommand, String> {
    let (id, wait) = (plain_word("the call's id", id)?, plain_word("`--wait`", wait)?);
    Ok(ToolCommand::Get(format!("/tool/exec/{id}?wait={wait}")))
}

/// Returns a word that needs no escape in JSON or in a path.
fn plain_word<'a>(subject: &str, word: &'a str) -> Result<&'a str, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    if !word.is_empty() && word.bytes().all(is_plain) {
        Ok(word)
    } else {
        Err(format!("{subject} has other characters than letters, digits, `_` and `-`"))
    }
}

fn read_stdin() -> Result<String, String> {
    let mut text = String::new();
    let read = io::stdin().take(MAX_ARGUMENT_BYTES).read_to_string(&mut text);
    read.map(|_| text).map_err(|error| format!("standard input cannot be read: {error}"))
}

fn send_request(command: &ToolCommand) -> io::Result<(u16, String)> {
    let base = LlmEndpoint::parse(GATEWAY_URL).map_err(io::Error::other)?;
    let deadline = Instant::now() + MAX_TIME;
    let response = match command {
        ToolCommand::Get(path) => http::get(&base, path, deadline)?,
        ToolCommand::Exec(body) => http::post_json(&base, "/tool/exec", body, deadline)?,
        ToolCommand::Print(_) => return Ok((200, String::new())),
    };
    let mut body = String::new();
    let status = response.status;
    response.body.take(MAX_ANSWER_BYTES).read_to_string(&mut body)?;
    Ok((status, body))
}

/// Returns the exit status for an answer.
fn exit_code(status: u16, body: &str) -> ExitCode {
    match status {
        202 => ExitCode::from(EXIT_PENDING),
        200 if !is_failed(body) => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// Returns true if a call has failed. The gateway writes the result as the last member, so a result that has members of
/// the same names is cut off first.
fn is_failed(body: &str) -> bool {
    let head = body.split(",\"result\":").next().unwrap_or_default();
    head.contains("\"status\":\"failed\"")
}

fn print_line(text: &str, code: ExitCode) -> ExitCode {
    match io::stdout().write_all(format!("{text}\n").as_bytes()) {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}

fn report(message: &str) {
    // A failed write to standard error cannot be reported anywhere.
    let _ = io::stderr().write_all(format!("cogni-tool: {message}\n").as_bytes());
}

/// The address at which the first process serves the run's socket.
const GATEWAY_URL: &str = "http://localhost:8080";

/// The longest time of a request: longer than the gateway waits for a result.
const MAX_TIME: Duration = Duration::from_mins(11);

/// The largest arguments from standard input: the gateway's own limit.
const MAX_ARGUMENT_BYTES: u64 = 256 << 10;

/// The largest answer that is printed. Our choice: results are smaller.
const MAX_ANSWER_BYTES: u64 = 16 << 20;

/// The exit status of every program for invalid arguments.
const EXIT_USAGE: u8 = 2;
/// The call goes on; its result can be asked for later.
const EXIT_PENDING: u8 = 3;
/// The gateway does not answer: `EX_UNAVAILABLE` of sysexits.h.
const EXIT_UNAVAILABLE: u8 = 69;

const VERSION_TEXT: &str = concat!("cogni-tool ", env!("CARGO_PKG_VERSION"), "\n");

const HELP_TEXT: &str = "\
Calls the tools that this run may use.

Usage: /run/cogni-tool list
       /run/cogni-tool exec TOOL [JSON] [--wait TIME]
       /run/cogni-tool result ID [--wait TIME]

JSON is the object of the tool's arguments [default: {}]; `-` reads it from standard input. The answer is one line of
JSON. Exit status: 0 the tool has returned a result, 1 the call was refused or has failed, 2 wrong usage, 3 the call goes
on, 69 the gateway does not answer.
";
