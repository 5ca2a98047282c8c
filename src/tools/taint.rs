//! Taint rules: the history of a run decides whether a tool asks a person, or a tool or a connection is denied.
//!
//! The operator marks tools and connections, such as `untrusted` for one that reads the web and `private` for one that
//! reads a customer's data. A run has seen a mark as soon as a call of a marked tool, or a request over a marked
//! connection, was admitted. A rule tests the marks that the run has seen, and names what it guards. A connection has the
//! name that it has in an agent's file: `connect__NAME`.
//!
//! The history is the run's ledger, which counts the calls of each tool and the requests over each connection, also those
//! of an earlier process of the run. A call is judged when it is made, and again when its own place in the ledger is
//! taken; a request over a connection is judged when its place is taken, and again before each part of its body passes. So
//! what was admitted first is always seen.
//!
//! **Invariant:** a mark never goes away, and a rule that cannot be evaluated denies the call.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use super::config::{TaintConfig, TaintEffect, TaintRuleConfig, ToolConfigError};
use super::connection_config::AGENT_PREFIX;
use crate::base::condition::{
    FactTable, FactValues, RuleExpr, RuleValue, RuleValueType, compile_condition,
};
use crate::base::star_pattern::select_names;
use crate::llm::budget::BudgetLedger;

/// The compiled taint rules of a run.
#[derive(Debug, Default)]
pub struct TaintPolicy {
    /// The marks of tools and connections.
    marks: BTreeMap<String, Arc<str>>,
    rules: Vec<CompiledTaintRule>,
}

#[derive(Debug)]
struct CompiledTaintRule {
    name: Arc<str>,
    when: RuleExpr<TaintMark>,
    /// The granted tools and the connections that the rule guards.
    tools: BTreeSet<Arc<str>>,
    effect: TaintEffect,
}

/// A mark in a compiled condition: `run.saw.NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TaintMark(Box<str>);

/// The marks that a condition may test, and those that it tests.
struct TaintMarkTable<'a> {
    known: &'a BTreeSet<&'a str>,
    tested: Mutex<BTreeSet<String>>,
}

/// The marks that a run has seen.
struct SeenMarks<'a>(&'a BTreeSet<&'a str>);

impl TaintPolicy {
    /// Compiles the taint rules about the granted tools and the connections, which have the names of [`AGENT_PREFIX`].
    ///
    /// # Errors
    /// Returns the first mistake: a tool that is not granted, a mark that no rule tests, a rule without tools or that fails
    /// its own examples, or one that would ask a person about a connection.
    pub fn compile_taint(
        config: &TaintConfig,
        granted: &[Arc<str>],
        taken: &BTreeSet<&str>,
    ) -> Result<Self, ToolConfigError> {
        let wrong = |key: String, problem: String| Err(ToolConfigError::new(key, problem));
        for (tool, mark) in &config.marks {
            if !granted.iter().any(|name| **name == **tool) {
                let name = tool.escape_debug();
                return wrong(
                    format!("taint.marks.{name}"),
                    "is not granted; add the tool to `tools.granted` or the connection to `tools.connections`, or remove the mark"
                        .to_owned(),
                );
            }
            if !is_mark_name(mark) {
                return wrong(
                    format!("taint.marks.{tool}"),
                    "is not 1 to 64 small letters, digits and `_`, beginning with a letter"
                        .to_owned(),
                );
            }
        }
        let known: BTreeSet<&str> = config.marks.values().map(String::as_str).collect();
        let mut names = taken.clone();
        let (mut rules, mut tested) = (vec![], BTreeSet::new());
        for (number, rule) in config.rules.iter().enumerate() {
            let place = |(key, problem): (&str, String)| {
                ToolConfigError::new(format!("taint.rules[{number}].{key}"), problem)
            };
            if !names.insert(&rule.name) || !is_rule_name(&rule.name) {
                let problem = "is taken, or not 1 to 64 small letters, digits and `-`".to_owned();
                return Err(place(("name", problem)));
            }
            let (rule, marks) = rule.compile_rule(&known, granted).map_err(place)?;
            rules.push(rule);
            tested.extend(marks);
        }
        if let Some(mark) = known.iter().find(|mark| !tested.contains(**mark)) {
            return wrong(
                "taint.marks".to_owned(),
                format!(
                    "no rule tests the mark `{mark}`; give a rule with `run.saw.{mark}`, or remove it"
                ),
            );
        }
        let marks = config.marks.iter().map(|(tool, mark)| (tool.clone(), mark.as_str().into()));
        Ok(Self { marks: marks.collect(), rules })
    }

    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Returns true if a rule guards a tool or a connection, whatever a run has seen.
    pub fn is_guarded(&self, tool: &str) -> bool {
        self.rules.iter().any(|rule| rule.tools.contains(tool))
    }

    /// Returns the first rule that asks a person, whatever a run has seen.
    pub fn first_asking_rule(&self) -> Option<&str> {
        let asks = |rule: &&CompiledTaintRule| rule.effect == TaintEffect::Ask;
        self.rules.iter().find(asks).map(|rule| &*rule.name)
    }

    /// Returns the rule that a call of a tool or a request over a connection meets, and its effect, for a run with this
    /// ledger. A rule that denies comes before one that asks. `has_place` states that the ledger counts the call itself
    /// already, which the run has not seen.
    pub fn judge_call(
        &self,
        tool: &str,
        (ledger, has_place): (&BudgetLedger, bool),
    ) -> Option<(&Arc<str>, TaintEffect)> {
        if self.is_empty() {
            return None;
        }
        let (tools, connections) = (ledger.tool_spending(), ledger.connection_spending());
        let tools = tools.iter().map(|(name, spent)| (name.to_string(), spent.calls));
        let connections = connections
            .iter()
            .map(|(name, spent)| (format!("{AGENT_PREFIX}{name}"), spent.requests));
        let own = |name: &str| u64::from(has_place && name == tool);
        let used = tools.chain(connections).filter(|(name, count)| *count > own(name));
        let seen: BTreeSet<&str> =
            used.filter_map(|(name, _)| Some(&**self.marks.get(&name)?)).collect();
        let guarding = self.rules.iter().filter(|rule| rule.tools.contains(tool));
        let met = guarding.filter_map(|rule| match rule.when.eval_bool(&SeenMarks(&seen)) {
            Ok(false) => None,
            Ok(true) => Some((&rule.name, rule.effect)),
            Err(_) => Some((&rule.name, TaintEffect::Deny)),
        });
        met.max_by_key(|(_, effect)| *effect)
    }
}

impl TaintRuleConfig {
    /// Compiles the rule, and returns it with the marks that it tests. An error is the key in the rule, and the mistake.
    fn compile_rule(
        &self,
        known: &BTreeSet<&str>,
        granted: &[Arc<str>],
    ) -> Result<(CompiledTaintRule, BTreeSet<String>), (&'static str, String)> {
        let table = TaintMarkTable { known, tested: Mutex::default() };
        let when = compile_condition(&self.when, &table).map_err(|error| {
            let place = error.place.map(|(line, column)| format!("line {line}, column {column}: "));
            ("when", place.unwrap_or_default() + &error.problem)
        })?;
        let tools = select_names(&self.tools, granted).map_err(|pattern| {
            let pattern = pattern.escape_debug();
            ("tools", format!("`{pattern}` adds no granted tool or connection; remove it"))
        })?;
        if tools.is_empty() {
            return Err(("tools", "names no tool; name those that the rule guards".to_owned()));
        }
        let connection = tools.iter().find(|name| is_connection(name));
        if let (TaintEffect::Ask, Some(name)) = (self.effect, connection) {
            let problem = format!(
                "would ask about requests over `{name}`, and no person is asked about a connection; give `deny`, or leave the connection out of `tools`"
            );
            return Err(("then", problem));
        }
        if self.matching.is_empty() {
            let problem = "is missing; give the marks of a run that the rule is about";
            return Err(("match", problem.to_owned()));
        }
        for (key, examples, expected) in
            [("match", &self.matching, true), ("not_match", &self.not_match, false)]
        {
            for example in examples {
                let seen: BTreeSet<&str> = example.iter().map(String::as_str).collect();
                if let Some(mark) = seen.iter().find(|mark| !known.contains(**mark)) {
                    return Err((key, format!("there is no mark `{}`", mark.escape_debug())));
                }
                if when.eval_bool(&SeenMarks(&seen)) != Ok(expected) {
                    let marks = example.join("`, `");
                    let holds = if expected { "does not hold" } else { "holds" };
                    let problem = format!("`when` {holds} for [`{marks}`]; correct one of them");
                    return Err((key, problem));
                }
            }
        }
        let name = Arc::from(self.name.as_str());
        let tested = table.tested.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok((CompiledTaintRule { name, when, tools, effect: self.effect }, tested))
    }
}

impl FactTable for TaintMarkTable<'_> {
    type Fact = TaintMark;

    fn find_fact(&self, path: &[&str]) -> Option<(TaintMark, RuleValueType)> {
        match path {
            ["run", "saw", mark] if self.known.contains(mark) => {
                let mut tested = self.tested.lock().unwrap_or_else(PoisonError::into_inner);
                tested.insert((*mark).to_owned());
                Some((TaintMark((*mark).into()), RuleValueType::Bool))
            }
            _ => None,
        }
    }

    fn names_under(&self, prefix: &str) -> Vec<String> {
        match prefix {
            "run" => self.known.iter().map(|mark| format!("saw.{mark}")).collect(),
            "run.saw" => self.known.iter().map(|mark| (*mark).to_owned()).collect(),
            _ => vec![],
        }
    }

    fn roots(&self) -> &'static str {
        "`run`"
    }

    fn allowed_values(&self, _: &TaintMark) -> Option<(String, Vec<String>)> {
        None
    }
}

impl FactValues<TaintMark> for SeenMarks<'_> {
    fn read_fact<'a>(&'a self, fact: &'a TaintMark) -> RuleValue<'a> {
        RuleValue::Bool(self.0.contains(&*fact.0))
    }
}

/// Returns true if a name is that of a connection. The compiled policy lets no tool have such a name beside connections.
fn is_connection(name: &str) -> bool {
    name.starts_with(AGENT_PREFIX)
}

/// Returns true if a text may be the name of a rule.
pub fn is_rule_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=64).contains(&name.len()) && name.bytes().all(is_plain)
}

fn is_mark_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    (1..=64).contains(&name.len())
        && name.bytes().all(is_plain)
        && name.starts_with(|first: char| first.is_ascii_lowercase())
}
