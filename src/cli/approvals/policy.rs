//! `cogni-gateway approvals policy`: shows the policy of an agent about its tools, and replaces it.

use std::io::Write;

use http::Method;
use serde_json::{Value, json};

use super::{print_json, text};
use crate::base::url_component::encode_url_component;
use crate::cli::runs::client::ServiceArgs;

/// The flags of `approvals policy`.
#[derive(Debug, clap::Args)]
pub struct PolicyArgs {
    #[command(flatten)]
    service: ServiceArgs,

    /// The agent, by its `agentId`
    agent: String,

    #[command(flatten)]
    change: PolicyChangeArgs,

    /// Print the service's answer as JSON
    #[arg(long)]
    json: bool,
}

/// The new policy. Without these flags, the policy is shown.
#[derive(Debug, clap::Args)]
pub(super) struct PolicyChangeArgs {
    /// The digest of the policy to replace, as the command has printed it
    #[arg(long, value_name = "DIGEST", requires = "security")]
    base: Option<String>,

    /// The tools that the agent may call: none, those of `--allow`, or all that the other layers allow
    #[arg(long, value_name = "TOOLS", requires = "base", value_parser = ["deny", "allowlist", "full"])]
    security: Option<String>,

    /// The calls that wait for a person: none, those of tools that `--allow` does not name, or all
    #[arg(long, value_name = "CALLS", requires = "base", value_parser = ["off", "on-miss", "always"])]
    ask: Option<String>,

    /// A tool on the list; a `*` stands for any text
    #[arg(long, value_name = "TOOL", requires = "base")]
    allow: Vec<String>,
}

impl PolicyArgs {
    /// Shows the policy, or replaces it and shows the new one.
    pub(super) async fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let Self { service, agent, change, json } = self;
        let mut path = "/api/v1/ai/agents/".to_owned();
        path.extend(encode_url_component(&agent));
        path.push_str("/policy");
        let client = service.client()?;
        let shown = match change.base {
            None => client.json(Method::GET, &path).await?,
            Some(base) => {
                let ask = change.ask.unwrap_or_else(|| "off".to_owned()).replace('-', "_");
                let (security, allow) = (change.security, change.allow);
                let body =
                    json!({ "base": base, "security": security, "ask": ask, "allowlist": allow });
                client.put_json(&path, &body).await?
            }
        };
        if json { print_json(&shown, out) } else { print_policy(&shown, out) }
    }
}

fn print_policy(policy: &Value, out: &mut impl Write) -> anyhow::Result<()> {
    for name in ["agent", "security", "ask", "digest", "changed_at", "by"] {
        if !policy[name].is_null() {
            writeln!(out, "{name:12} {}", text(&policy[name]))?;
        }
    }
    for tool in policy["allowlist"].as_array().map(Vec::as_slice).unwrap_or_default() {
        writeln!(out, "{:12} {}", "allow", text(tool))?;
    }
    Ok(())
}
