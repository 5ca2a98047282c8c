//! `cogni-gateway runs`: shows and ends the runs of a service from a shell.

pub(super) mod client;
mod events;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Subcommand;
use http::Method;
use serde_json::Value;
use tokio::time::sleep;

use super::run::output_renderer::escape_for_terminal;
use crate::base::hidden_characters::escape_hidden;
use crate::base::url_component::encode_url_component;
use client::{ServiceArgs, ServiceClient};
use events::{ReceivedEvent, RunEventStream};

/// The subcommands of `runs`.
#[derive(Debug, Subcommand)]
pub enum RunsCommand {
    /// List runs, newest first
    List {
        #[command(flatten)]
        service: ServiceArgs,

        /// Only runs of this agent
        #[arg(long, value_name = "NAME")]
        agent: Option<String>,

        /// Only runs in this state: queued, running or ended
        #[arg(long, value_name = "STATE", value_parser = ["queued", "running", "ended"])]
        state: Option<String>,

        /// Maximum number of runs, 1 to 200
        #[arg(long, value_name = "COUNT", default_value = "50", value_parser = crate::cli::flags::count::<u32>)]
        limit: u32,

        /// Print the service's answer as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a run and its result
    Show {
        #[command(flatten)]
        service: ServiceArgs,

        #[arg(help = RUN)]
        run: String,

        /// Print the service's answer as JSON
        #[arg(long)]
        json: bool,
    },
    /// Follow a run until it ends
    Watch {
        #[command(flatten)]
        service: ServiceArgs,

        #[arg(help = RUN)]
        run: String,

        /// Print a line of JSON for each event
        #[arg(long)]
        json: bool,
    },
    /// End a run
    Cancel {
        #[command(flatten)]
        service: ServiceArgs,

        #[arg(help = RUN)]
        run: String,
    },
    /// Print the output of a run's program
    Output {
        #[command(flatten)]
        service: ServiceArgs,

        #[arg(help = RUN)]
        run: String,

        /// Print its standard error in place of its standard output
        #[arg(long)]
        stderr: bool,
    },
}

/// Runs the command. The exit status is 1 if the displayed or watched run is not ok.
pub fn run(command: RunsCommand, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            RunsCommand::List { service, agent, state, limit, json } => {
                let mut path = format!("/api/v1/runs?limit={limit}");
                let filters = [("agent", agent), ("state", state)];
                for (name, value) in filters {
                    path += &value.map(|value| format!("&{name}={}", encode_url_component(&value))).unwrap_or_default();
                }
                let listed = service.client()?.json(Method::GET, &path).await?;
                if json { print_json(&listed, out)? } else { print_list(&listed, out)? }
                Ok(ExitCode::SUCCESS)
            }
            RunsCommand::Show { service, run, json } => {
                let shown = service.client()?.json(Method::GET, &path_of(&run, "")).await?;
                if json { print_json(&shown, out)? } else { print_run(&shown, out)? }
                Ok(code(&shown["result"]))
            }
            RunsCommand::Watch { service, run, json } => watch(&service.client()?, &run, json, out).await,
            RunsCommand::Cancel { service, run } => {
                let shown = service.client()?.json(Method::POST, &path_of(&run, "/cancel")).await?;
                let state = match shown["state"].as_str() {
                    Some("ended") => "had ended already",
                    // The service ends the run in the background; `runs watch` shows its end.
                    _ => "is being ended",
                };
                writeln!(out, "run {} {state}", text(&shown["id"]))?;
                Ok(ExitCode::SUCCESS)
            }
            RunsCommand::Output { service, run, stderr } => {
                let printed = service.client()?.json(Method::GET, &path_of(&run, "/output")).await?;
                if printed["complete"] != true {
                    bail!("run `{run}` has not ended, and its output is stored when it ends; follow it with `cogni-gateway runs watch {run}`");
                }
                let stream = if stderr { "stderr" } else { "stdout" };
                let printed = printed[stream].as_str().unwrap_or_default();
                // An untrusted program wrote this text.
                write!(out, "{}", escape_for_terminal(printed))?;
                Ok(ExitCode::SUCCESS)
            }
        }
    })
}

/// Prints the events of a run until its end. Reconnects where the stream breaks off.
async fn watch(
    client: &ServiceClient,
    run: &str,
    json: bool,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let (mut last, mut tries) = (0, 0);
    loop {
        let path = format!("{}?after={last}", path_of(run, "/events"));
        let mut events = RunEventStream::new(client.send(Method::GET, &path).await?);
        while let Some(event) = events.next().await? {
            // An event resets the count: only streams that bring nothing are counted.
            (last, tries) = (event.id.unwrap_or(last), 0);
            if json {
                writeln!(out, "{}", event.to_json())?;
            } else {
                print_event(&event, out)?;
            }
            out.flush()?;
            if event.name == "final" {
                return Ok(code(&event.data));
            }
        }
        // The stream has ended without the final event: the service restarted, or a proxy closed the connection.
        tries += 1;
        if tries > TRIES {
            bail!(
                "run `{run}`: the service keeps closing the event stream; see `cogni-gateway runs show {run}`"
            );
        }
        sleep(PAUSE).await;
    }
}

fn print_event(
    ReceivedEvent { name, data, .. }: &ReceivedEvent,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    match name.as_str() {
        "queued" => writeln!(
            out,
            "run {}: waits for a place, position {} in the queue",
            text(&data["run"]),
            text(&data["position"])
        )?,
        "run_started" => {
            writeln!(out, "run {}: {} begins", text(&data["run"]), text(&data["agent"]))?;
        }
        "text_delta" => {
            write!(out, "{}", escape_for_terminal(data["text"].as_str().unwrap_or_default()))?;
        }
        "usage_report" => writeln!(
            out,
            "\ncall of {}: {} in, {} out, ${}",
            text(&data["model"]),
            text(&data["input"]),
            text(&data["output"]),
            text(&data["cost_usd"])
        )?,
        "error" => writeln!(out, "\nerror {}: {}", text(&data["code"]), text(&data["message"]))?,
        "final" => {
            writeln!(out)?;
            print_result(data, out)?;
        }
        // A newer service may send events that this version does not know.
        _ => (),
    }
    Ok(())
}

fn print_list(listed: &Value, out: &mut impl Write) -> anyhow::Result<()> {
    let runs = listed["runs"].as_array().map(Vec::as_slice).unwrap_or_default();
    if runs.is_empty() {
        writeln!(out, "no run that this grant may see matches")?;
        return Ok(());
    }
    writeln!(
        out,
        "{:40}  {:12}  {:20}  {:24}  {:24}  CODE",
        "RUN", "STATE", "AGENT", "MODEL", "CREATED"
    )?;
    for run in runs {
        writeln!(
            out,
            "{:40}  {:12}  {:20}  {:24}  {:24}  {}",
            text(&run["id"]),
            state_text(run),
            text(&run["agent"]),
            text(&run["model"]),
            text(&run["created_at"]),
            text(&run["error_code"]),
        )?;
    }
    if !listed["next"].is_null() {
        writeln!(out, "older runs exist; `--limit` shows up to 200")?;
    }
    Ok(())
}

fn print_run(run: &Value, out: &mut impl Write) -> anyhow::Result<()> {
    let facts =
        ["id", "state", "agent", "model", "account", "created_at", "started_at", "ended_at"];
    for name in facts {
        let shown = if name == "state" { state_text(run) } else { text(&run[name]) };
        writeln!(out, "{name:11} {shown}")?;
    }
    if run["result"].is_object() {
        print_result(&run["result"], out)?;
    }
    Ok(())
}

fn print_result(result: &Value, out: &mut impl Write) -> anyhow::Result<()> {
    let end = match result["error_code"].as_str() {
        None => "ok".to_owned(),
        Some(code) => format!("{}: {}", escape_hidden(code), text(&result["error"])),
    };
    writeln!(out, "{:11} {end}", "result")?;
    let usage = &result["usage"];
    if usage.is_object() {
        writeln!(
            out,
            "{:11} {} {}, {} tokens in, {} out, ${}",
            "spent",
            text(&usage["turns"]),
            if usage["turns"] == 1 { "turn" } else { "turns" },
            text(&usage["input"]),
            text(&usage["output"]),
            usage["cost_usd"].as_str().map_or("0".into(), escape_hidden),
        )?;
    }
    let relay = &result["relay"];
    for name in ["branch", "verdict", "pull_request_url", "why"] {
        if !relay[name].is_null() {
            writeln!(out, "{name:11} {}", text(&relay[name]))?;
        }
    }
    Ok(())
}

/// Formats the state of a run, with its position if it is queued.
fn state_text(run: &Value) -> String {
    match run["queue_position"].as_u64() {
        Some(position) => format!("{} #{position}", text(&run["state"])),
        None => text(&run["state"]),
    }
}

fn print_json(answer: &Value, out: &mut impl Write) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *out, answer).context("the answer cannot be printed")?;
    Ok(writeln!(out)?)
}

fn code(result: &Value) -> ExitCode {
    let is_bad = result.is_object() && result["ok"] != true;
    if is_bad { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Formats a value for people. No character of it hides or moves another.
pub(super) fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => escape_hidden(text).into_owned(),
        other => other.to_string(),
    }
}

fn path_of(run: &str, what: &str) -> String {
    format!("/api/v1/runs/{}{what}", encode_url_component(run))
}

const RUN: &str = "The run's id, as listed by `runs list`";

/// The maximum number of streams in a row without an event. Our choice.
const TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A person tells runs apart by these texts, so no character of them is unseen.
    #[test]
    fn a_character_that_shows_nothing_is_shown_as_its_number() {
        let run = json!({
            "id": "run-\u{200b}1", "state": "ended", "agent": "a\u{ad}b", "model": "gpt\u{202e}",
            "result": {"ok": false, "error_code": "x\u{2060}", "error": "\u{feff}why", "relay": {"branch": "b\u{200d}"}},
        });
        let mut out = vec![];
        print_run(&run, &mut out).unwrap();
        print_list(&json!({"runs": [run]}), &mut out).unwrap();
        let shown = String::from_utf8(out).unwrap();
        assert_eq!(escape_hidden(&shown), shown);
        for number in [
            "run-\\u{200b}1",
            "a\\u{ad}b",
            "gpt\\u{202e}",
            "x\\u{2060}",
            "\\u{feff}why",
            "b\\u{200d}",
        ] {
            assert!(shown.contains(number), "{number} in {shown}");
        }
    }
}
