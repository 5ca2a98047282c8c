//! `cogni-gateway admin`: sends requests to the operator's socket, also where curl is not installed.

mod table;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use clap::Subcommand;
use serde_json::{Map, Value, json};

/// The flags of `admin`.
#[derive(Debug, clap::Args)]
pub struct AdminArgs {
    /// The operator's socket
    #[arg(long, env = "ADMIN_SOCKET_PATH", value_name = "PATH")]
    socket: PathBuf,

    /// Print the socket's answer as JSON, for programs
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    command: AdminCommand,
}

#[derive(Debug, Subcommand)]
enum AdminCommand {
    /// List the open runs
    Runs,
    /// Show one run
    Show {
        #[arg(help = RUN_HELP)]
        run: String,
    },
    /// Refuse new calls of a run until `resume`
    Pause {
        #[arg(help = RUN_HELP)]
        run: String,
    },
    /// Accept new calls of a run again
    Resume {
        #[arg(help = RUN_HELP)]
        run: String,
    },
    /// Refuse new calls of a run for good; open calls continue
    Drain {
        #[arg(help = RUN_HELP)]
        run: String,
    },
    /// Abort the open calls of a run
    Cut {
        #[arg(help = RUN_HELP)]
        run: String,
    },
    /// Close a run: wait for its open calls, then close its records
    Close {
        #[arg(help = RUN_HELP)]
        run: String,
    },
    /// Open a run, described in JSON as in `[[shared.runs]]`
    Open {
        /// The run as JSON, such as `{"run_id":"run-7","account":"acct-1"}`
        description: String,
    },
    /// Change limits, such as `max_turns=50`; an empty value lifts a limit
    Budget {
        #[arg(help = RUN_HELP)]
        run: String,
        /// A limit of `[budget]`, such as `max_turns=50`
        #[arg(required = true, value_name = "LIMIT=VALUE")]
        limits: Vec<String>,
    },
    /// Change the models a run may use
    Models {
        #[arg(help = RUN_HELP)]
        run: String,
        /// The complete list of models that the run may use from now on
        #[arg(required = true, value_delimiter = ',', value_name = "NAME,…")]
        models: Vec<String>,
    },
    /// Read the configuration again, as SIGHUP does
    Reload,
}

/// Sends the request and prints the answer. Returns the socket's message as an error if the status is not a success.
pub fn run(args: &AdminArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    // Invalid arguments are refused before the socket is opened.
    let (method, path, body) = args.command.to_request()?;
    let (status, answer) = send_request(&args.socket, method, &path, body.as_ref())?;
    let shown = args.socket.display();
    let answer = serde_json::from_str::<Value>(&answer);
    if !(200..300).contains(&status) {
        // A refusal has its reason in `error.message`. Another program on the socket may answer in another form.
        let reason =
            answer.ok().and_then(|json| json["error"]["message"].as_str().map(str::to_owned));
        let unknown = || {
            format!(
                "`{shown}` answered with status {status} and without a reason; see the log of the process, or correct `--socket`"
            )
        };
        bail!("{}", reason.unwrap_or_else(unknown));
    }
    let answer = answer.with_context(|| format!("`{shown}` sent an answer that is not JSON"))?;
    if args.json {
        writeln!(out, "{answer:#}")?;
    } else {
        table::print(&answer, out)?;
    }
    Ok(ExitCode::SUCCESS)
}

impl AdminCommand {
    fn to_request(&self) -> anyhow::Result<(&'static str, String, Option<Value>)> {
        Ok(match self {
            Self::Runs => ("GET", "/runs".to_owned(), None),
            Self::Show { run } => ("GET", run_path(run, ""), None),
            Self::Pause { run } => ("POST", run_path(run, "/pause"), None),
            Self::Resume { run } => ("POST", run_path(run, "/resume"), None),
            Self::Drain { run } => ("POST", run_path(run, "/drain"), None),
            Self::Cut { run } => ("POST", run_path(run, "/cut"), None),
            Self::Close { run } => ("DELETE", run_path(run, ""), None),
            Self::Open { description } => {
                let description = serde_json::from_str(description);
                let description = description.context("the description is not JSON")?;
                ("POST", "/runs".to_owned(), Some(description))
            }
            Self::Budget { run, limits } => {
                ("PATCH", run_path(run, "/budget"), Some(limits_patch(limits)?))
            }
            Self::Models { run, models } => {
                ("PATCH", run_path(run, "/models"), Some(json!({ "models": models })))
            }
            Self::Reload => ("POST", "/reload".to_owned(), None),
        })
    }
}

/// Returns the path of a run. A slash is the only character of a run's id that has a meaning in a path.
fn run_path(run: &str, what: &str) -> String {
    format!("/runs/{}{what}", run.replace('/', "%2F"))
}

fn limits_patch(limits: &[String]) -> anyhow::Result<Value> {
    let limit = |text: &String| {
        let (name, value) = text.split_once('=').ok_or_else(|| {
            anyhow!("`{text}` is not a limit; give name=value, as in max_turns=50")
        })?;
        // Whole numbers are sent as numbers. Money and times are sent as texts, and an empty value removes the limit.
        let value = match value {
            "" => Value::Null,
            value => value.parse::<u64>().map_or_else(|_| value.into(), Value::from),
        };
        Ok((name.to_owned(), value))
    };
    limits.iter().map(limit).collect::<anyhow::Result<Map<_, _>>>().map(Value::Object)
}

/// Sends one request on its own connection. Returns the status and the body of the answer.
fn send_request(
    socket: &Path,
    method: &str,
    path: &str,
    body: Option<&Value>,
) -> anyhow::Result<(u16, String)> {
    let shown = socket.display();
    let mut connection =
        UnixStream::connect(socket).with_context(|| {
            format!(
                "no process answers on `{shown}`; give the `ADMIN_SOCKET_PATH` of a running process with `--socket`"
            )
        })?;
    let body = body.map(Value::to_string).unwrap_or_default();
    let length = body.len();
    // `connection: close` makes the end of the answer the end of the stream, so that no framing has to be parsed. The
    // request is written at once: a server may answer and close after the first bytes.
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    connection.write_all(request.as_bytes())?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).with_context(|| format!("`{shown}` does not answer"))?;
    // An answer without an empty line has no body.
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| anyhow!("`{shown}` does not speak HTTP"))?;
    Ok((status, body.to_owned()))
}

const RUN_HELP: &str = "The run's id, as listed by `runs`";
