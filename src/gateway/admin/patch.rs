//! What an operator may change of a run: its limits, and the models it may use.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::base::serde_words;
use crate::gateway::config::GatewayConfig;
use crate::llm::budget::BudgetLimits;

/// The models of a run, as in `[policy.body]`; what is left out stays as it is.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelsPatch {
    models: Option<Vec<String>>,
    aliases: Option<BTreeMap<String, String>>,
}

impl ModelsPatch {
    pub(super) fn apply_patch(self, config: &mut GatewayConfig) {
        let body = &mut config.policy.body;
        body.models = self.models.unwrap_or_else(|| std::mem::take(&mut body.models));
        body.aliases = self.aliases.unwrap_or_else(|| std::mem::take(&mut body.aliases));
    }
}

/// Limits by their names in `[budget]`, merged into those in force (RFC 7396): `null` lifts a limit.
///
/// # Errors
/// A name that is no limit, or a value that it cannot have.
pub(super) fn merge_limits(
    limits: &BudgetLimits,
    patch: Map<String, Value>,
) -> anyhow::Result<BudgetLimits> {
    let mut merged = serde_json::to_value(limits)?;
    if let Value::Object(fields) = &mut merged {
        fields.extend(patch);
    }
    Ok(serde_words::from_value(merged)?)
}
