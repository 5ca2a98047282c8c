//! Compiles the policy of a run. A contradiction is an error, never repaired.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};

use super::{CompiledToolRule, GrantedTool, ToolPolicy};
use crate::base::canonical;
use crate::base::condition::{RuleExpr, compile_condition};
use crate::llm::budget::{Nanodollars, ToolBudgetLimits};
use crate::tools::agent_modes::{AgentToolLayer, COMMANDS_RULE};
use crate::tools::approval::standing::ApprovalScope;
use crate::tools::approval::{ApprovalConfig, ApprovalMode};
use crate::tools::config::{
    LIST_RULE, ToolConfig, ToolConfigError, ToolRuleConfig, ToolRuleExample,
};
use crate::tools::connection_config::AGENT_PREFIX;
use crate::tools::definition::{METRICS_QUERY_TOOL, TOOL_NAME_RULE, ToolDefinition, is_tool_name};
use crate::tools::program_digest::check_approvable;
use crate::tools::rule_facts::{ToolCallFacts, ToolFact, ToolFactTable, ToolRunFacts};
use crate::tools::taint::{TaintPolicy, is_rule_name};

pub(super) fn compile_policy(
    config: &ToolConfig,
    tools: Vec<ToolDefinition>,
    agent: Option<AgentToolLayer>,
) -> Result<ToolPolicy, ToolConfigError> {
    let mut known: BTreeMap<_, _> =
        tools.into_iter().map(|tool| (Arc::clone(&tool.name), tool)).collect();
    let mut granted = BTreeMap::new();
    // 1. Take each granted tool out of the known ones, so that a second grant finds none.
    for (number, name) in config.granted.iter().enumerate() {
        let wrong = |problem: String| ToolConfigError::new(format!("granted[{number}]"), problem);
        if !is_tool_name(name) {
            return Err(wrong(format!("a tool's name is {TOOL_NAME_RULE}")));
        }
        if !config.connections.is_empty() && name.starts_with(AGENT_PREFIX) {
            let problem = format!("`{name}` is a name of connections; give the tool another one");
            return Err(wrong(problem));
        }
        if granted.contains_key(name.as_str()) {
            return Err(wrong(format!("`{name}` is granted twice; remove one of the two")));
        }
        let Some(definition) = known.remove(name.as_str()) else {
            let others: Vec<_> = known.keys().map(|name| &**name).collect();
            return Err(wrong(unknown_tool_problem(name, &others)));
        };
        granted.insert(Arc::clone(&definition.name), GrantedTool::new(definition));
    }
    check_approvals(&config.approvals)?;
    if granted.len() > MAX_TOOLS {
        return Err(ToolConfigError::new("granted", format!("has more than {MAX_TOOLS} tools")));
    }
    // 2. Add the rules to their tools.
    let mut names = BTreeSet::from([LIST_RULE]);
    for (number, rule) in config.rules.iter().enumerate() {
        let wrong = |key: &str, problem: String| {
            let dot = if key.is_empty() { "" } else { "." };
            ToolConfigError::new(format!("rules[{number}]{dot}{key}"), problem)
        };
        if number == MAX_RULES {
            return Err(wrong("", format!("there are more than {MAX_RULES} rules")));
        }
        if !is_rule_name(&rule.name) {
            return Err(wrong("name", "is not 1 to 64 small letters, digits and `-`".to_owned()));
        }
        if !names.insert(&rule.name) {
            let name = &rule.name;
            return Err(wrong("name", format!("`{name}` is taken; give each rule its own name")));
        }
        let Some(tool) = granted.get_mut(rule.tool.as_str()) else {
            let name = rule.tool.escape_debug();
            return Err(wrong(
                "tool",
                format!("`{name}` is not granted; add it to `tools.granted`, or remove the rule"),
            ));
        };
        tool.add_rule(rule).map_err(|(key, problem)| wrong(&key, problem))?;
    }
    // 3. Compare the layers: an agent whose file lists a tool that no run can have is a contradiction.
    if let Some(agent) = &agent {
        let is_tool =
            |name: &&String| config.connections.is_empty() || !name.starts_with(AGENT_PREFIX);
        check_agent_list(agent.listed_names().iter().filter(is_tool), &granted)?;
        let mut asked = granted.values_mut().filter(|tool| agent.asks_about(&tool.definition.name));
        asked.try_for_each(GrantedTool::ask_by_mode)?;
    }
    let digest = canonical::digest("tool policy 2", &(config, &agent))
        .map_err(|error| ToolConfigError::new("", error.to_string()))?;
    let connections = config.connections.keys().map(|name| format!("{AGENT_PREFIX}{name}").into());
    let guarded: Vec<_> = granted.keys().cloned().chain(connections).collect();
    let taint = Arc::new(TaintPolicy::compile_taint(&config.taint, &guarded, &names)?);
    if !taint.is_empty() {
        // An answer about a call counts only while these rules are the same, too.
        for tool in granted.values_mut() {
            tool.rules_digest =
                canonical::digest("tool taint 1", &(&tool.rules_digest, &config.taint))
                    .map_err(|error| ToolConfigError::new("taint", error.to_string()))?;
        }
    }
    Ok(ToolPolicy { granted, agent, workspace: None, taint, digest })
}

fn check_approvals(times: &ApprovalConfig) -> Result<(), ToolConfigError> {
    let wrong = |key: &str, problem| Err(ToolConfigError::new(format!("approvals.{key}"), problem));
    if !(MIN_APPROVAL_TTL..=MAX_APPROVAL_TTL).contains(&times.ttl) {
        return wrong("ttl", "must be a time such as `30m`, from `1s` to `7days`");
    }
    if times.hold > MAX_APPROVAL_HOLD {
        return wrong("hold", "must be a time such as `40s`, at most `10m`");
    }
    if !times.scopes.contains(&ApprovalScope::Once) {
        return wrong("scopes", "must have `once`, and may have `run` and `always`");
    }
    if !(MIN_APPROVAL_TTL..=MAX_VALID_FOR).contains(&times.max_valid_for) {
        return wrong("max_valid_for", "must be a time such as `24h`, from `1s` to `90days`");
    }
    Ok(())
}

fn check_agent_list<'a>(
    mut listed: impl Iterator<Item = &'a String>,
    granted: &BTreeMap<Arc<str>, GrantedTool>,
) -> Result<(), ToolConfigError> {
    if let Some(name) = listed.find(|name| !granted.contains_key(name.as_str())) {
        let name = name.escape_debug();
        return Err(ToolConfigError::new(
            "granted",
            format!(
                "the agent's file lists the tool `{name}`, which is not granted here; add it to `tools.granted`, or remove it from `tools` in the agent's file"
            ),
        ));
    }
    Ok(())
}

fn unknown_tool_problem(name: &str, others: &[&str]) -> String {
    if name == METRICS_QUERY_TOOL {
        return format!("`{name}` needs a server; give `url` in `[tools.metrics]`");
    }
    format!("there is no tool `{name}`; there are `{}`", others.join("`, `"))
}

impl GrantedTool {
    fn new(definition: ToolDefinition) -> Self {
        Self {
            definition,
            price: Nanodollars::ZERO,
            limits: ToolBudgetLimits::default(),
            evidence: BTreeSet::new(),
            asking_rule: None,
            rules_digest: String::new(),
            rules: vec![],
        }
    }

    /// Lets the mode of the agent's commands ask a person about each call.
    fn ask_by_mode(&mut self) -> Result<(), ToolConfigError> {
        check_approvable(&self.definition).map_err(|problem| {
            let name = &self.definition.name;
            let problem = format!(
                "the agent's file has `modes.commands = \"ask\"`, and an approval cannot cover `{name}`: {problem}"
            );
            ToolConfigError::new("groups.commands", problem)
        })?;
        self.asking_rule.get_or_insert_with(|| Arc::from(COMMANDS_RULE));
        Ok(())
    }

    /// Adds a rule. An error is the key in the rule, and the mistake.
    fn add_rule(&mut self, rule: &ToolRuleConfig) -> Result<(), (String, String)> {
        let key = |key: &str, problem: &str| (key.to_owned(), problem.to_owned());
        let has_effect = rule.when.is_some()
            || rule.price_usd.is_some()
            || rule.budget != ToolBudgetLimits::default()
            || !rule.evidence.is_empty()
            || rule.approve != ApprovalMode::Never;
        if !has_effect {
            let remedy =
                "has no effect; give `when`, `price_usd`, `budget`, `approve` or `evidence`";
            return Err(key("", remedy));
        }
        if rule.is_final && rule.when.is_none() {
            return Err(key("final", "has no effect without `when`; remove it, or give `when`"));
        }
        self.price = self.price.max(rule.price_usd.unwrap_or_default());
        self.limits = lower_limits(self.limits, rule.budget);
        if self.limits.calls == Some(0) || self.limits.per_minute == Some(0) {
            let remedy = "is 0, which allows no call; remove the tool from `tools.granted` instead";
            return Err(key("budget", remedy));
        }
        if self.limits.cost_usd.is_some_and(|limit| limit < self.price) {
            let remedy = "`cost_usd` does not pay for one call; raise it, or lower `price_usd`";
            return Err(key("budget", remedy));
        }
        let parameters = &self.definition.parameters;
        if let Some(name) =
            rule.evidence.iter().find(|name| !parameters.properties.contains_key(name.as_str()))
        {
            let name = name.escape_debug();
            return Err((
                "evidence".to_owned(),
                format!("`{name}` is not an argument of the tool; remove it"),
            ));
        }
        self.evidence.extend(rule.evidence.iter().cloned());
        if rule.approve == ApprovalMode::Ask {
            check_approvable(&self.definition).map_err(|problem| {
                ("approve".to_owned(), format!("an approval cannot cover the program: {problem}"))
            })?;
        }
        if rule.approve == ApprovalMode::Ask && self.asking_rule.is_none() {
            self.asking_rule = Some(Arc::from(rule.name.as_str()));
        }
        self.rules_digest = canonical::digest("tool rules 1", &(&self.rules_digest, rule))
            .map_err(|error| (String::new(), error.to_string()))?;
        let when = self.compile_when(rule)?;
        let (name, is_final) = (Arc::from(rule.name.as_str()), rule.is_final);
        self.rules.push(CompiledToolRule { name, is_final, when });
        Ok(())
    }

    fn compile_when(
        &self,
        rule: &ToolRuleConfig,
    ) -> Result<Option<RuleExpr<ToolFact>>, (String, String)> {
        let Some(text) = &rule.when else {
            if rule.matching.is_empty() && rule.not_match.is_empty() {
                return Ok(None);
            }
            return Err(("when".to_owned(), "is missing, and there are examples".to_owned()));
        };
        let table = ToolFactTable { parameters: &self.definition.parameters };
        let when = compile_condition(text, &table).map_err(|error| {
            let place = error.place.map(|(line, column)| format!("line {line}, column {column}: "));
            ("when".to_owned(), place.unwrap_or_default() + &error.problem)
        })?;
        self.check_examples(&when, ("match", &rule.matching), true)?;
        self.check_examples(&when, ("not_match", &rule.not_match), false)?;
        Ok(Some(when))
    }

    fn check_examples(
        &self,
        when: &RuleExpr<ToolFact>,
        (list, examples): (&str, &[ToolRuleExample]),
        expected: bool,
    ) -> Result<(), (String, String)> {
        for (number, example) in examples.iter().enumerate() {
            let wrong = |problem: String| (format!("{list}[{number}]"), problem);
            self.check_example_types(&example.args).map_err(wrong)?;
            let run = example_run(example);
            let facts = ToolCallFacts { run: &run, arguments: &example.args };
            match when.eval_bool(&facts) {
                Ok(holds) if holds == expected => {}
                Ok(true) => return Err(wrong("is allowed by `when`; correct one of them".into())),
                Ok(false) => return Err(wrong("is denied by `when`; correct one of them".into())),
                Err(fault) => return Err(wrong(format!("cannot be evaluated: {fault}"))),
            }
        }
        Ok(())
    }

    /// Checks the arguments of an example against the schema. An example may leave out required arguments.
    fn check_example_types(&self, arguments: &Map<String, Value>) -> Result<(), String> {
        let mut parameters = self.definition.parameters.clone();
        parameters.required.clear();
        parameters.check_arguments(arguments).map_err(|error| error.to_string())
    }
}

fn example_run(example: &ToolRuleExample) -> ToolRunFacts {
    ToolRunFacts {
        id: example.run.id.clone(),
        attempt: example.run.attempt.clone(),
        account: example.run.account.clone(),
        agent: example.agent.name.clone(),
        agent_id: String::new(),
        metadata: example.run.metadata.clone(),
    }
}

/// Returns the lower of each pair of limits.
fn lower_limits(one: ToolBudgetLimits, other: ToolBudgetLimits) -> ToolBudgetLimits {
    fn lower<T: Ord>(one: Option<T>, other: Option<T>) -> Option<T> {
        match (one, other) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }
    }
    ToolBudgetLimits {
        calls: lower(one.calls, other.calls),
        per_minute: lower(one.per_minute, other.per_minute),
        cost_usd: lower(one.cost_usd, other.cost_usd),
    }
}

/// The shortest and the longest time for an answer. Our choice: a call that waits for a week is forgotten.
const MIN_APPROVAL_TTL: Duration = Duration::from_secs(1);
const MAX_APPROVAL_TTL: Duration = Duration::from_hours(7 * 24);

/// The longest time that a configuration may allow for a standing approval. Our choice: a season.
const MAX_VALID_FOR: Duration = Duration::from_hours(90 * 24);

/// The longest wait of one request for a person, which is the longest wait of any request.
const MAX_APPROVAL_HOLD: Duration = Duration::from_mins(10);

/// The most granted tools. Our choice, like the number of rules: a person must be able to read them.
const MAX_TOOLS: usize = 64;
const MAX_RULES: usize = 256;
