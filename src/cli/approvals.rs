//! `cogni-gateway approvals`: shows the tool calls and the spent budgets of a service's runs that wait for a person, and
//! answers.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::Subcommand;
use http::Method;
use serde_json::{Map, Value, json};

use super::runs::{self, client::ServiceArgs};
use crate::base::hidden_characters::escape_hidden;
use crate::base::url_component::encode_url_component;

/// The subcommands of `approvals`.
#[derive(Debug, Subcommand)]
pub enum ApprovalsCommand {
    /// List the questions that wait for an answer, oldest first
    List {
        #[command(flatten)]
        service: ServiceArgs,

        /// Only questions of this run
        #[arg(long, value_name = "RUN")]
        run: Option<String>,

        /// Also list questions that are closed, newest first
        #[arg(long)]
        all: bool,

        /// Maximum number of questions, 1 to 200
        #[arg(long, value_name = "COUNT", default_value = "50", value_parser = crate::cli::flags::count::<u32>)]
        limit: u32,

        /// Continue after this question, the last one of the page before
        #[arg(long, value_name = "QUESTION")]
        after: Option<String>,

        /// Print the service's answer as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a question with the arguments of its call
    Show {
        #[command(flatten)]
        service: ServiceArgs,

        #[arg(help = QUESTION)]
        id: String,

        /// Print the service's answer as JSON
        #[arg(long)]
        json: bool,
    },
    /// Let a call run, once, or raise a spent budget
    Approve {
        #[command(flatten)]
        answer: AnswerArgs,

        /// A new value of a limit of the budget, such as `max_turns=50`
        #[arg(long, value_name = "LIMIT=VALUE", value_parser = parse_raise)]
        raise: Vec<(String, Value)>,
    },
    /// Deny a call
    Deny {
        #[command(flatten)]
        answer: AnswerArgs,
    },
}

/// The flags of an answer.
#[derive(Debug, clap::Args)]
pub struct AnswerArgs {
    #[command(flatten)]
    service: ServiceArgs,

    #[arg(help = QUESTION)]
    id: String,

    /// The digest that `approvals show` has printed
    #[arg(long, value_name = "DIGEST")]
    digest: String,

    /// A reason for the agent and the records
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

/// Runs the command.
pub fn run(command: ApprovalsCommand, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            ApprovalsCommand::List { service, run, all, limit, after, json } => {
                let mut path = format!("/api/v1/approvals?limit={limit}");
                if !all {
                    path += "&state=pending";
                }
                for (name, value) in [("&run=", run), ("&cursor=", after)] {
                    if let Some(value) = value {
                        path += name;
                        path.extend(encode_url_component(&value));
                    }
                }
                let listed = service.client()?.json(Method::GET, &path).await?;
                if json { print_json(&listed, out)? } else { print_list(&listed, out)? }
            }
            ApprovalsCommand::Show { service, id, json } => {
                let shown = service.client()?.json(Method::GET, &path_of(&id)).await?;
                if json { print_json(&shown, out)? } else { print_question(&shown, out)? }
            }
            ApprovalsCommand::Approve { answer, raise } => {
                answer.send("approve", raise, out).await?;
            }
            ApprovalsCommand::Deny { answer } => answer.send("deny", vec![], out).await?,
        }
        Ok(ExitCode::SUCCESS)
    })
}

impl AnswerArgs {
    async fn send(
        self,
        decision: &str,
        raise: Vec<(String, Value)>,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        let Self { service, id, digest, reason } = self;
        let mut body = json!({"decision": decision, "digest": digest, "reason": reason});
        if !raise.is_empty() {
            body["raise"] = raise.into_iter().collect::<Map<_, _>>().into();
        }
        let path = format!("{}/decision", path_of(&id));
        let answered = service.client()?.post_json(&path, &body).await?;
        let (id, state) = (text(&answered["id"]), text(&answered["state"]));
        Ok(writeln!(out, "question {id} is {state}")?)
    }
}

fn print_list(listed: &Value, out: &mut impl Write) -> anyhow::Result<()> {
    let questions = listed["approvals"].as_array().map(Vec::as_slice).unwrap_or_default();
    if questions.is_empty() {
        writeln!(out, "no question that this grant may see matches")?;
        return Ok(());
    }
    writeln!(
        out,
        "{:36}  {:9}  {:28}  {:24}  {:40}  AGENT",
        "QUESTION", "STATE", "TOOL", "UNTIL", "RUN"
    )?;
    for question in questions {
        writeln!(
            out,
            "{:36}  {:9}  {:28}  {:24}  {:40}  {}",
            text(&question["id"]),
            text(&question["state"]),
            text(&question["tool"]),
            text(&question["expires_at"]),
            text(&question["run"]),
            text(&question["agent"]),
        )?;
    }
    if !listed["next"].is_null() {
        writeln!(out, "more questions exist: `--after {}`", text(&listed["next"]))?;
    }
    Ok(())
}

fn print_question(question: &Value, out: &mut impl Write) -> anyhow::Result<()> {
    for name in SHOWN {
        if !question[name].is_null() {
            writeln!(out, "{name:12} {}", text(&question[name]))?;
        }
    }
    Ok(())
}

fn print_json(answer: &Value, out: &mut impl Write) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *out, answer).context("the answer cannot be printed")?;
    Ok(writeln!(out)?)
}

/// Formats a value for people, in one line. A person decides by this text, so no character of it hides or moves another.
fn text(value: &Value) -> String {
    let shown = match value {
        Value::String(text) => escape_hidden(text).into_owned(),
        other => escape_hidden(&runs::text(other)).into_owned(),
    };
    shown.replace('\n', "\\n").replace('\t', "\\t")
}

/// Parses a raise. The service knows the names of limits and checks the values.
fn parse_raise(text: &str) -> Result<(String, Value), String> {
    let (limit, value) =
        text.split_once('=').ok_or("give a limit and its value: `max_turns=50`")?;
    // Money is a text in the API, everything else a number.
    let value = match value.parse::<u64>() {
        Ok(number) if limit != "max_cost_usd" => number.into(),
        _ => value.into(),
    };
    Ok((limit.to_owned(), value))
}

fn path_of(id: &str) -> String {
    let mut path = "/api/v1/approvals/".to_owned();
    path.extend(encode_url_component(id));
    path
}

const QUESTION: &str = "The question's id, as listed by `approvals list`";

/// The fields of a question, in the order in which they are printed.
const SHOWN: [&str; 20] = [
    "id",
    "state",
    "run",
    "agent",
    "account",
    "grant",
    "tool",
    "argv",
    "image",
    "arguments",
    "rule",
    "price_usd",
    "budget",
    "raised",
    "digest",
    "requested_at",
    "expires_at",
    "resolved_at",
    "by",
    "reason",
];

#[cfg(test)]
mod tests {
    use super::*;

    /// A person sees each character of the arguments, also one that a terminal would not show or would obey.
    #[test]
    fn no_character_of_a_question_is_hidden() {
        let question = json!({
            "arguments": "{\"a\": \"x\u{200b}y\u{2028}z\u{e0041}\u{202e}\u{1b}[2J\nid  fake\r\u{ad}\"}",
            "argv": ["/bin/tool", "a\u{200b}b"],
            "image": null,
        });
        let mut out = vec![];
        print_question(&question, &mut out).unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap().trim_end(), @r#"
        argv         ["/bin/tool","a\u{200b}b"]
        arguments    {"a": "x\u{200b}y\u{2028}z\u{e0041}\u{202e}\u{1b}[2J\nid  fake\u{d}\u{ad}"}
        "#);
    }
}
