//! `cogni-gateway approvals`: shows the tool calls and the spent budgets of a service's runs that wait for a person, and
//! answers; shows the calls that a rule has denied, and allows
//! them; and shows and replaces the policies of agents about their tools.

mod policy;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::Subcommand;
use http::Method;
use serde_json::{Map, Value, json};

use policy::PolicyArgs;

use super::runs::{self, client::ServiceArgs};
use crate::base::hidden_characters::escape_hidden;
use crate::base::url_component::encode_url_component;
use crate::tools::approval::standing::STANDING_PREFIX;

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
    /// Let a call run, once or with a wider scope, or raise a spent budget
    Approve {
        #[command(flatten)]
        answer: AnswerArgs,

        /// The calls that the answer counts for: this one, or the same call later, too
        #[arg(long, value_name = "SCOPE", value_parser = ["once", "run", "always"])]
        scope: Option<String>,

        /// The number of later calls that may begin, 1 to 1000
        #[arg(long, value_name = "COUNT", value_parser = crate::cli::flags::count::<u32>)]
        uses: Option<u32>,

        #[command(flatten)]
        end: EndArgs,

        /// A new value of a limit of the budget, such as `max_turns=50`
        #[arg(long, value_name = "LIMIT=VALUE", value_parser = parse_raise)]
        raise: Vec<(String, Value)>,
    },
    /// Deny a call
    Deny {
        #[command(flatten)]
        answer: AnswerArgs,
    },
    /// List the calls that a rule has denied and a person may allow, newest first
    Proposals {
        #[command(flatten)]
        service: ServiceArgs,

        /// Only those of this run
        #[arg(long, value_name = "RUN")]
        run: Option<String>,

        /// Also list those that are granted, spent, revoked or expired
        #[arg(long)]
        all: bool,

        /// Maximum number of proposals, 1 to 200
        #[arg(long, value_name = "COUNT", default_value = "50", value_parser = crate::cli::flags::count::<u32>)]
        limit: u32,

        /// Continue after this one, the last of the page before
        #[arg(long, value_name = "PROPOSAL")]
        after: Option<String>,

        /// Print the service's answer as JSON
        #[arg(long)]
        json: bool,
    },
    /// Allow the call of a proposal, as often and as long as you say
    Grant {
        #[command(flatten)]
        answer: AnswerArgs,

        /// The number of calls that may begin, 1 to 1000
        #[arg(long, value_name = "COUNT", default_value = "1", value_parser = crate::cli::flags::count::<u32>)]
        uses: u32,

        #[command(flatten)]
        end: EndArgs,

        /// Only calls of the run that was denied
        #[arg(long)]
        only_run: bool,
    },
    /// Show what people say about an agent's tools, or replace it
    Policy(PolicyArgs),
    /// Take back a proposal, or an approval that counts for later calls
    Revoke {
        #[command(flatten)]
        service: ServiceArgs,

        #[arg(help = STANDING)]
        id: String,
    },
}

/// The end of an approval for later calls.
#[derive(Debug, clap::Args)]
#[group(multiple = false)]
pub struct EndArgs {
    /// The time for which the calls may begin, such as `1h`
    #[arg(long = "for", value_name = "TIME", value_parser = crate::cli::flags::parse_duration)]
    valid_for: Option<std::time::Duration>,

    /// The last moment at which a call may begin, such as `2030-01-31T08:00:00Z`
    #[arg(long, value_name = "TIME")]
    not_after: Option<String>,
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
                push_parameters(&mut path, [("&run=", run), ("&cursor=", after)]);
                let listed = service.client()?.json(Method::GET, &path).await?;
                if json { print_json(&listed, out)? } else { print_list(&listed, out)? }
            }
            ApprovalsCommand::Show { service, id, json } => {
                let shown = service.client()?.json(Method::GET, &path_of(&id)).await?;
                if json { print_json(&shown, out)? } else { print_question(&shown, out)? }
            }
            ApprovalsCommand::Approve { answer, scope, uses, end, raise } => {
                let mut more = end.to_json();
                more.insert("scope".to_owned(), json!(scope));
                more.insert("max_uses".to_owned(), json!(uses));
                if !raise.is_empty() {
                    let raise: Map<_, _> = raise.into_iter().collect();
                    more.insert("raise".to_owned(), raise.into());
                }
                answer.send("approve", more, out).await?;
            }
            ApprovalsCommand::Deny { answer } => answer.send("deny", Map::new(), out).await?,
            ApprovalsCommand::Proposals { service, run, all, limit, after, json } => {
                let state = if all { "" } else { "&state=proposed" };
                let mut path = format!("{STANDING_PATH}?limit={limit}{state}");
                push_parameters(&mut path, [("&run=", run), ("&cursor=", after)]);
                let listed = service.client()?.json(Method::GET, &path).await?;
                if json { print_json(&listed, out)? } else { print_proposals(&listed, out)? }
            }
            ApprovalsCommand::Grant { answer, uses, end, only_run } => {
                answer.grant((uses, end, only_run), out).await?;
            }
            ApprovalsCommand::Policy(policy) => policy.run(out).await?,
            ApprovalsCommand::Revoke { service, id } => {
                let path = format!("{}/revoke", path_of(&id));
                let revoked = service.client()?.post_json(&path, &json!({})).await?;
                let (id, state) = (text(&revoked["id"]), text(&revoked["state"]));
                writeln!(out, "standing approval {id} is {state}")?;
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

impl AnswerArgs {
    async fn send(
        self,
        decision: &str,
        mut body: Map<String, Value>,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        let Self { service, id, digest, reason } = self;
        body.insert("decision".to_owned(), json!(decision));
        body.insert("digest".to_owned(), json!(digest));
        body.insert("reason".to_owned(), json!(reason));
        let path = format!("{}/decision", path_of(&id));
        let answered = service.client()?.post_json(&path, &body.into()).await?;
        let (id, state) = (text(&answered["id"]), text(&answered["state"]));
        writeln!(out, "question {id} is {state}")?;
        if !answered["standing_approval"].is_null() {
            let standing = text(&answered["standing_approval"]);
            writeln!(out, "later calls begin by {standing}; `approvals revoke` takes it back")?;
        }
        Ok(())
    }

    async fn grant(
        self,
        (uses, end, only_run): (u32, EndArgs, bool),
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        let Self { service, id, digest, reason } = self;
        let mut body = end.to_json();
        if body.is_empty() {
            body.insert("valid_for".to_owned(), json!(DEFAULT_VALIDITY));
        }
        body.insert("digest".to_owned(), json!(digest));
        body.insert("reason".to_owned(), json!(reason));
        body.insert("max_uses".to_owned(), json!(uses));
        body.insert("scope".to_owned(), json!(only_run.then_some("run")));
        let path = format!("{}/grant", path_of(&id));
        let granted = service.client()?.post_json(&path, &body.into()).await?;
        let (id, state) = (text(&granted["id"]), text(&granted["state"]));
        let (uses, until) = (text(&granted["max_uses"]), text(&granted["expires_at"]));
        let calls = if uses == "1" { "call" } else { "calls" };
        Ok(writeln!(out, "standing approval {id} is {state}: {uses} {calls} until {until}")?)
    }
}

impl EndArgs {
    fn to_json(&self) -> Map<String, Value> {
        let valid_for = self.valid_for.map(|time| humantime::format_duration(time).to_string());
        [("valid_for", valid_for), ("not_after", self.not_after.clone())]
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?.into())))
            .collect()
    }
}

fn push_parameters(path: &mut String, parameters: [(&str, Option<String>); 2]) {
    for (name, value) in parameters {
        if let Some(value) = value {
            path.push_str(name);
            path.extend(encode_url_component(&value));
        }
    }
}

fn print_proposals(listed: &Value, out: &mut impl Write) -> anyhow::Result<()> {
    let found = listed["standing_approvals"].as_array().map(Vec::as_slice).unwrap_or_default();
    if found.is_empty() {
        writeln!(out, "no proposal that this grant may see matches")?;
        return Ok(());
    }
    writeln!(
        out,
        "{:36}  {:8}  {:28}  {:24}  {:9}  {:40}  AGENT",
        "PROPOSAL", "STATE", "TOOL", "UNTIL", "USED", "RUN"
    )?;
    for proposal in found {
        let used = format!("{}/{}", text(&proposal["used"]), text(&proposal["max_uses"]));
        writeln!(
            out,
            "{:36}  {:8}  {:28}  {:24}  {used:9}  {:40}  {}",
            text(&proposal["id"]),
            text(&proposal["state"]),
            text(&proposal["tool"]),
            text(&proposal["expires_at"]),
            text(&proposal["run"]),
            text(&proposal["agent"]),
        )?;
    }
    if !listed["next"].is_null() {
        writeln!(out, "more proposals exist: `--after {}`", text(&listed["next"]))?;
    }
    Ok(())
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
    // The id says what it is.
    let is_standing = id.starts_with(STANDING_PREFIX);
    let base = if is_standing { STANDING_PATH } else { "/api/v1/approvals" };
    let mut path = format!("{base}/");
    path.extend(encode_url_component(id));
    path
}

const QUESTION: &str = "The id, as listed by `approvals list` or `approvals proposals`";

const STANDING: &str = "The id, as listed by `approvals proposals --all`";

const STANDING_PATH: &str = "/api/v1/standing-approvals";

/// The time of a grant that names none. Our choice: long enough for the next run of the agent.
const DEFAULT_VALIDITY: &str = "1h";

/// The fields of a question, in the order in which they are printed.
const SHOWN: [&str; 29] = [
    "id",
    "state",
    "scope",
    "run",
    "agent",
    "account",
    "grant",
    "tool",
    "argv",
    "image",
    "arguments",
    "rule",
    "rules",
    "price_usd",
    "budget",
    "raised",
    "digest",
    "scopes",
    "requested_at",
    "created_at",
    "expires_at",
    "used",
    "max_uses",
    "resolved_at",
    "granted_at",
    "by",
    "reason",
    "standing_approval",
    "revoked_by",
];

#[cfg(test)]
mod tests {
    use super::*;

    /// A list of proposals shows how much of each is used.
    #[test]
    fn a_list_of_proposals_shows_their_uses() {
        let row = |id: &str, state: &str, used: u32| {
            json!({
                "id": id, "state": state, "tool": "text__count", "expires_at": "2026-11-25T11:02:08.125Z",
                "used": used, "max_uses": 2, "run": "run-1", "agent": "caller",
            })
        };
        let rows = [row("sta-2", "proposed", 0), row("sta-1", "granted", 1)];
        let listed = json!({"standing_approvals": rows, "next": "sta-1"});
        let mut out = vec![];
        print_proposals(&listed, &mut out).unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap().trim_end(), @r"
        PROPOSAL                              STATE     TOOL                          UNTIL                     USED       RUN                                       AGENT
        sta-2                                 proposed  text__count                   2026-11-25T11:02:08.125Z  0/2        run-1                                     caller
        sta-1                                 granted   text__count                   2026-11-25T11:02:08.125Z  1/2        run-1                                     caller
        more proposals exist: `--after sta-1`
        ");
    }

    /// A person sees each character of the arguments, also one that a terminal would not show or would obey.
    #[test]
    fn no_character_of_a_question_is_hidden() {
        let question = json!({
            "arguments": "{\"a\": \"x\u{200b}y\u{2028}z\u{e0041}\u{202e}\u{1b}[2J\nid  fake\r\u{ad}\u{a0}\u{3000}\u{2800}\u{fff9}\u{1d173}\u{16fe4}\u{e000}\"}",
            "argv": ["/bin/tool", "a\u{200b}b"],
            "image": null,
        });
        let mut out = vec![];
        print_question(&question, &mut out).unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap().trim_end(), @r#"
        argv         ["/bin/tool","a\u{200b}b"]
        arguments    {"a": "x\u{200b}y\u{2028}z\u{e0041}\u{202e}\u{1b}[2J\nid  fake\u{d}\u{ad}\u{a0}\u{3000}\u{2800}\u{fff9}\u{1d173}\u{16fe4}\u{e000}"}
        "#);
    }
}
