//! `cogni-gateway admin`: asks the operator's socket, for where there is no curl.

mod table;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use clap::Subcommand;
use serde_json::{Map, Value, json};

/// Look at the runs of a served process, and change them.
#[derive(Debug, clap::Args)]
pub struct AdminArgs {
    /// The operator's socket.
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
    /// Let no call begin, until `resume`
    Pause {
        #[arg(help = RUN_HELP)]
        run: String,
    },
    /// Let calls begin again
    Resume {
        #[arg(help = RUN_HELP)]
        run: String,
    },
    /// Let no call begin any more; those that are open go on
    Drain {
        #[arg(help = RUN_HELP)]
        run: String,
    },
    /// End the calls that are open
    Cut {
        #[arg(help = RUN_HELP)]
        run: String,
    },
    /// Close a run: open calls may end, then its records are closed
    Close {
        #[arg(help = RUN_HELP)]
        run: String,
    },
    /// Open a run, described in JSON as in `[[shared.runs]]`
    Open {
        /// Such as `{"run_id":"run-7","account":"acct-1"}`
        description: String,
    },
    /// Change limits, such as `max_turns=50`; an empty value lifts one
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
        /// All that it may use from now on
        #[arg(required = true, value_delimiter = ',', value_name = "NAME,…")]
        models: Vec<String>,
    },
    /// Read the configuration again, as SIGHUP does
    Reload,
}

/// Prints the answer; fails with what the socket says where something was not done.
pub fn run(args: &AdminArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let (method, path, body) = args.command.to_request()?;
    let (status, answer) = send_request(&args.socket, method, &path, body.as_ref())?;
    let answer: Value = serde_json::from_str(&answer)
        .with_context(|| format!("`{}` answers what is not JSON", args.socket.display()))?;
    if !(200..300).contains(&status) {
        let message = answer["error"]["message"].as_str();
        bail!(
            "{}",
            message.unwrap_or("operator's socket: it gives no reason; see the log of the process")
        );
    }
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

/// A run's path. Of what an id may hold, only a slash means something in a path.
fn run_path(run: &str, what: &str) -> String {
    format!("/runs/{}{what}", run.replace('/', "%2F"))
}

fn limits_patch(limits: &[String]) -> anyhow::Result<Value> {
    let limit = |text: &String| {
        let (name, value) = text.split_once('=').ok_or_else(|| {
            anyhow!("`{text}` is not a limit; give name=value, as in max_turns=50")
        })?;
        // A number where it is one; money and times are texts.
        let value = match value {
            "" => Value::Null,
            value => value.parse::<u64>().map_or_else(|_| value.into(), Value::from),
        };
        Ok((name.to_owned(), value))
    };
    limits.iter().map(limit).collect::<anyhow::Result<Map<_, _>>>().map(Value::Object)
}

/// One request on a connection of its own: the status, and the body of the answer.
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
                "nothing answers on `{shown}`; name the `ADMIN_SOCKET_PATH` of a process that runs, with `--socket`"
            )
        })?;
    let body = body.map(Value::to_string).unwrap_or_default();
    let length = body.len();
    write!(
        connection,
        "{method} {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).with_context(|| format!("`{shown}` does not answer"))?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| anyhow!("`{shown}` does not speak HTTP"))?;
    Ok((status, body.to_owned()))
}

const RUN_HELP: &str = "The run's id, as `runs` lists it";
