//! The facts about a tool call that a condition may use: its arguments, its run and its agent.
//!
//! **Invariant:** each fact has a value at every call. An argument that the call leaves out is empty, 0 or false. The
//! type of an argument is the type in the tool's schema, which every call is checked against before its conditions.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::argument_schema::{ArgumentSchema, ArgumentType};
use crate::base::condition::{FactTable, FactValues, RuleValue, RuleValueType};

/// The run of a tool call, as the host describes it.
#[derive(Clone, Debug, Default)]
pub struct ToolRunFacts {
    pub id: String,
    pub attempt: String,
    pub account: String,
    /// The agent's name in the records of its calls, which several agents may share.
    pub agent: String,
    /// The agent's own name in the catalog; empty for a run without an agent of the catalog.
    pub agent_id: String,
    pub metadata: Map<String, Value>,
}

/// The facts of one call.
#[derive(Clone, Copy, Debug)]
pub struct ToolCallFacts<'a> {
    pub run: &'a ToolRunFacts,
    pub arguments: &'a Map<String, Value>,
}

/// A fact in a compiled condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolFact {
    /// The argument at this path.
    Argument(Box<[Box<str>]>, RuleValueType),
    RunId,
    RunAttempt,
    RunAccount,
    AgentName,
    /// The text of this name in the run's metadata.
    Metadata(Box<str>),
}

/// The facts about the calls of one tool.
#[derive(Clone, Copy, Debug)]
pub struct ToolFactTable<'a> {
    pub parameters: &'a ArgumentSchema,
}

impl ToolFactTable<'_> {
    fn find_argument(&self, path: &[&str]) -> Option<&ArgumentSchema> {
        path.iter().try_fold(self.parameters, |schema, name| schema.properties.get(*name))
    }
}

impl FactTable for ToolFactTable<'_> {
    type Fact = ToolFact;

    fn find_fact(&self, path: &[&str]) -> Option<(ToolFact, RuleValueType)> {
        let fact = match path {
            ["args", names @ ..] if !names.is_empty() => {
                let kind = match self.find_argument(names)?.kind {
                    ArgumentType::String => RuleValueType::Text,
                    ArgumentType::Integer => RuleValueType::Int,
                    ArgumentType::Number => RuleValueType::Double,
                    ArgumentType::Boolean => RuleValueType::Bool,
                    // A condition tests single values only.
                    ArgumentType::Object | ArgumentType::Array | ArgumentType::Any => return None,
                };
                let names = names.iter().map(|name| Box::from(*name)).collect();
                return Some((ToolFact::Argument(names, kind), kind));
            }
            ["run", "id"] => ToolFact::RunId,
            ["run", "attempt"] => ToolFact::RunAttempt,
            ["run", "account"] => ToolFact::RunAccount,
            ["run", "metadata", name] => ToolFact::Metadata((*name).into()),
            ["agent", "name"] => ToolFact::AgentName,
            _ => return None,
        };
        Some((fact, RuleValueType::Text))
    }

    fn names_under(&self, prefix: &str) -> Vec<String> {
        let names: &[&str] = match prefix {
            "run" => &["id", "attempt", "account", "metadata.NAME"],
            "agent" => &["name"],
            _ => &[],
        };
        let mut parts = prefix.split('.');
        let arguments = parts.next() == Some("args");
        let path: Vec<_> = parts.collect();
        let schema = self.find_argument(&path).filter(|_| arguments);
        let known = schema.into_iter().flat_map(|schema| schema.properties.keys().cloned());
        names.iter().map(|name| (*name).to_owned()).chain(known).collect()
    }

    fn roots(&self) -> &'static str {
        "`args`, `run` or `agent`"
    }

    fn allowed_values(&self, fact: &ToolFact) -> Option<(String, Vec<String>)> {
        let ToolFact::Argument(names, _) = fact else { return None };
        let path: Vec<_> = names.iter().map(|name| &**name).collect();
        let mut words = self.find_argument(&path)?.words.clone();
        if words.is_empty() {
            return None;
        }
        // An argument that the call leaves out is empty.
        words.push(String::new());
        Some((format!("args.{}", path.join(".")), words))
    }
}

impl FactValues<ToolFact> for ToolCallFacts<'_> {
    fn read_fact<'a>(&'a self, fact: &'a ToolFact) -> RuleValue<'a> {
        let text = |text: &'a str| RuleValue::Text(Cow::Borrowed(text));
        match fact {
            ToolFact::Argument(path, kind) => self.read_argument(path, *kind),
            ToolFact::RunId => text(&self.run.id),
            ToolFact::RunAttempt => text(&self.run.attempt),
            ToolFact::RunAccount => text(&self.run.account),
            ToolFact::AgentName => text(&self.run.agent),
            ToolFact::Metadata(name) => RuleValue::Text(match self.run.metadata.get(&**name) {
                None => Cow::Borrowed(""),
                Some(Value::String(text)) => Cow::Borrowed(text),
                Some(other) => Cow::Owned(other.to_string()),
            }),
        }
    }
}

impl<'a> ToolCallFacts<'a> {
    fn read_argument(&self, path: &[Box<str>], kind: RuleValueType) -> RuleValue<'a> {
        let mut names = path.iter();
        let first = names.next().and_then(|name| self.arguments.get(&**name));
        let value = names.fold(first, |value, name| value?.get(&**name));
        // The texts are not truncated: a test of a cut text would let the rest pass unseen. The size of all arguments
        // is bounded instead.
        match (kind, value) {
            (RuleValueType::Text, value) => {
                RuleValue::Text(Cow::Borrowed(value.and_then(Value::as_str).unwrap_or_default()))
            }
            (RuleValueType::Int, value) => {
                RuleValue::Int(value.and_then(Value::as_i64).unwrap_or_default())
            }
            (RuleValueType::Double, value) => {
                RuleValue::Double(value.and_then(Value::as_f64).unwrap_or_default())
            }
            (RuleValueType::Bool, value) => {
                RuleValue::Bool(value.and_then(Value::as_bool).unwrap_or_default())
            }
        }
    }
}
