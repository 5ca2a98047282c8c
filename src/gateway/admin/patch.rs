//! The parts of a run that an operator may change: its limits, and the models that it may use.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::base::serde_words;
use crate::gateway::config::GatewayConfig;
use crate::llm::budget::BudgetLimits;

/// The models of a run, as in `[policy.body]`. A missing field leaves its setting unchanged.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelsPatch {
    models: Option<Vec<String>>,
    aliases: Option<BTreeMap<String, String>>,
}

impl ModelsPatch {
    pub(super) fn apply_patch(self, config: &mut GatewayConfig) {
        let body = &mut config.policy.body;
        // Taking the old value avoids a copy: the field is assigned in the same statement.
        body.models = self.models.unwrap_or_else(|| std::mem::take(&mut body.models));
        body.aliases = self.aliases.unwrap_or_else(|| std::mem::take(&mut body.aliases));
    }
}

/// Merges limits by their names in `[budget]` into the limits in force (RFC 7396). A `null` removes a limit.
///
/// # Errors
/// Returns an error if a name is no limit, or if a value does not fit its limit.
pub(super) fn merge_limits(
    limits: &BudgetLimits,
    patch: Map<String, Value>,
) -> anyhow::Result<BudgetLimits> {
    // Merging as JSON lets the type of the limits check the names and the values, as for the file.
    let mut merged = serde_json::to_value(limits)?;
    if let Value::Object(fields) = &mut merged {
        fields.extend(patch);
    }
    Ok(serde_words::from_value(merged)?)
}
