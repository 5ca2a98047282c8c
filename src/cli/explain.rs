//! `cogni-gateway explain`: shows how the gateway would treat a request, and why.
//!
//! The command calls the functions of the data plane in the same order, with a ledger of its own. It sends and records
//! no data.

mod connect_request;
pub mod explain_input;
pub mod explanation;
mod remedy;
mod text;
mod tool_call;

use std::fmt::Display;
use std::io::{Read, Write};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use serde::Serialize;

use self::connect_request::ConnectExplanation;
use self::explain_input::ExplainInput;
use self::explanation::{ExplainContext, RequestExplanation};
use self::tool_call::ToolExplanation;
use super::flags;
use super::run::AgentsDirArgs;
use crate::base::regular_file::{open_regular_file, read_within};
use crate::base::secret::SecretString;
use crate::gateway::config::{GatewayConfig, SETTINGS};
use crate::gateway::pipeline::connect_route::is_connect_path;
use crate::gateway::pipeline::connect_tunnel::asks_for_tunnel;
use crate::gateway::pipeline::tool_route::is_tool_path;
use crate::gateway::process::compile_policy;
use crate::llm::budget::{BudgetAmount, BudgetLedger, Nanodollars, PriorUsage, Tokens};
use crate::service::config::ServiceConfig;

/// Builds the command and its flags. The command also accepts the flags of `proxy`.
pub fn command() -> Command {
    Command::new("explain")
        .about("Show how the gateway would treat a request, and why")
        .defer(add_arguments)
}

fn add_arguments(command: Command) -> Command {
    let file = Arg::new("FILE")
        .required(true)
        .help("An HTTP request, or only its JSON body; `-` is standard input");
    let route = Arg::new("ROUTE")
        .long("route")
        .value_name("PATH")
        .help("Path that a body is posted to [default: guessed from its fields]");
    let set = Arg::new("SET")
        .long("set")
        .value_name("NAME=VALUE")
        .action(ArgAction::Append)
        .help("Set earlier usage of the run: usage.turns, usage.input_tokens, usage.output_tokens, usage.cost_usd");
    let agent = Arg::new("AGENT").long("agent").value_name("NAME").help(
        "Agent of the run: its list of tools, its modes, its policy and its budget count, too",
    );
    let upstream = Arg::new("UPSTREAM")
        .long("upstream")
        .action(ArgAction::SetTrue)
        .help("Also print the request that would go upstream");
    let json = Arg::new("JSON")
        .long("json")
        .action(ArgAction::SetTrue)
        .help("Print the explanation as JSON");
    let command = command.after_help(AFTER_HELP).args([file, route, set, agent, upstream, json]);
    // The other command's flag brings its own description, which is none of a command.
    let about = command.get_about().cloned();
    let command = AgentsDirArgs::augment_args(command).args(configuration_flags());
    match about {
        Some(about) => command.about(about),
        None => command,
    }
}

/// Explains the request in the file. The exit status is 1 if the gateway would refuse the request.
pub fn run(
    matches: &ArgMatches,
    input: impl Read,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let mut config = load_config(matches, |name| std::env::var(name).ok())?;
    if let Some(agent) = matches.get_one::<String>("AGENT") {
        let in_file = ServiceConfig::from_gateway_config(&config)?.and_then(|file| file.agents_dir);
        let catalog = AgentsDirArgs::from_arg_matches(matches)?.catalog_of(in_file)?;
        catalog.find_agent(agent)?.lay_over(&mut config)?;
    }
    let text = read_input(matches.get_one::<String>("FILE").map_or("-", String::as_str), input)?;
    let request =
        ExplainInput::parse(text, matches.get_one::<String>("ROUTE").map(String::as_str))?;
    let spent = parse_spent(matches.get_many::<String>("SET").into_iter().flatten())?;
    let policy = compile_policy(&config)?;
    // The ledger starts with the usage that `--set` gives, so that limits can be tried.
    let past = PriorUsage { spent, ..PriorUsage::default() };
    let ledger = Arc::new(BudgetLedger::new(config.budget.clone(), past));
    let case = ExplainContext { config: &config, policy: &policy, ledger: &ledger };
    let as_json = matches.get_flag("JSON");
    let target = request.request.uri();
    // The order is that of a real request. A run without tools has no tunnels, and no paths of tools and connections.
    let has_tools = !config.tools.is_empty();
    let is_allowed = if has_tools && asks_for_tunnel(&request.request) {
        let explanation = ConnectExplanation::explain_tunnel(&case, &request)?;
        print_explanation(&explanation, as_json, out)?;
        explanation.allowed
    } else if has_tools && is_tool_path(target) {
        let explanation = ToolExplanation::explain_request(&case, &request)?;
        print_explanation(&explanation, as_json, out)?;
        explanation.allowed
    } else if has_tools && is_connect_path(target) {
        let explanation = ConnectExplanation::explain_request(&case, &request.request)?;
        print_explanation(&explanation, as_json, out)?;
        explanation.allowed
    } else {
        let mut explanation = RequestExplanation::explain_request(&case, request);
        if !matches.get_flag("UPSTREAM") {
            explanation.upstream = None;
        }
        print_explanation(&explanation, as_json, out)?;
        explanation.refusal.is_none()
    };
    Ok(if is_allowed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print_explanation(
    explanation: &(impl Serialize + Display),
    as_json: bool,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    if as_json {
        writeln!(out, "{}", serde_json::to_string_pretty(explanation)?)?;
    } else {
        write!(out, "{explanation}")?;
    }
    Ok(())
}

/// Returns the flags of `proxy`. The help of this command shows only `--config` of them.
pub(super) fn configuration_flags() -> impl Iterator<Item = Arg> {
    flags::flags_for(SETTINGS.iter()).map(|flag| {
        // The hidden flags work; listing all of them would bury this command's own flags.
        let is_hidden = flag.get_id() != "CONFIG";
        flag.hide(is_hidden)
    })
}

/// Loads the configuration, with placeholders for values that only a served run has.
///
/// # Errors
/// Returns an error if a file cannot be read, or if a setting is invalid or contradicts another.
pub fn load_config(
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<GatewayConfig> {
    let mut config = flags::read_config(SETTINGS.iter(), matches, variable)?;
    // Validation demands an identity and a key, which an explanation does not need.
    for name in [&mut config.identity.run, &mut config.identity.account] {
        if name.is_empty() {
            "placeholder".clone_into(name);
        }
    }
    if config.upstream.api_key.is_empty() {
        config.upstream.api_key = SecretString::new("placeholder");
    }
    // A file may describe a single run, a service, or shared runs. Each part that is present is checked.
    config.validate()?;
    if let Some(service) = ServiceConfig::from_gateway_config(&config)? {
        service.validate()?;
    }
    if let Some(shared) = config.shared.take() {
        for spec in shared.runs {
            spec.resolve_config(&config, None)?;
        }
    }
    Ok(config)
}

fn read_input(file: &str, input: impl Read) -> anyhow::Result<Vec<u8>> {
    if file != "-" {
        let read = open_regular_file(file.as_ref());
        let read = read.and_then(|file| read_within(file, MAX_INPUT_BYTES));
        return read.with_context(|| format!("cannot read `{file}`"));
    }
    read_within(input, MAX_INPUT_BYTES).context("cannot read standard input")
}

/// Parses the usage of the run, with the names that rules use.
fn parse_spent<'a>(given: impl Iterator<Item = &'a String>) -> anyhow::Result<BudgetAmount> {
    let mut spent = BudgetAmount::default();
    for given in given {
        let (name, value) = given.split_once('=').unwrap_or((given, ""));
        let number = || {
            let number = value.parse();
            number.with_context(|| {
                format!("`{given}` has no number; give a value such as `{name}=100`")
            })
        };
        match name {
            "usage.turns" => spent.turns = number()?,
            "usage.input_tokens" => spent.input = Tokens(number()?),
            "usage.output_tokens" => spent.output = Tokens(number()?),
            "usage.cost_usd" => {
                let cost = Nanodollars::parse(value);
                spent.cost = cost.with_context(|| {
                    format!(
                        "`{given}` has no amount of dollars; give a value such as `{name}=2.50`"
                    )
                })?;
            }
            _ => bail!(
                "`{name}` cannot be set; there are `usage.turns`, `usage.input_tokens`, `usage.output_tokens` and `usage.cost_usd`"
            ),
        }
    }
    Ok(spent)
}

/// The largest request, in bytes. Our choice: five times the largest body of the default policy.
const MAX_INPUT_BYTES: u64 = 256 * 1024 * 1024;

const AFTER_HELP: &str = "\
The command also takes the flags and variables of `cogni-gateway proxy`; the run's identity and the
upstream's key may be left out.

Example:
  echo '{\"model\":\"gpt-5\",\"user\":\"me\",\"messages\":[]}' |
  cogni-gateway explain - --config gateway.toml --max-turns 10 --set usage.turns=9";
