//! What an agent of the catalog prints: its answer, and what it says about it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What an agent prints: its answer, and what it says about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope {
    pub payloads: Vec<Value>,
    pub meta: Map<String, Value>,
}

impl Envelope {
    /// Reads all of an agent's standard output.
    ///
    /// # Errors
    /// It is something else.
    pub fn parse(stdout: &str) -> Result<Self, String> {
        serde_json::from_str(stdout)
            .map_err(|error| format!("the agent's standard output is no envelope: {error}"))
    }

    /// What was answered.
    pub fn text(&self) -> String {
        let texts = self.payloads.iter().filter_map(|payload| payload["text"].as_str());
        texts.collect::<Vec<_>>().join("\n\n")
    }

    /// What went wrong, as the agent tells it.
    pub fn error(&self) -> Option<String> {
        match self.meta.get("error")? {
            Value::Null => None,
            Value::String(message) => Some(message.clone()),
            error => {
                let text = |key: &str| error[key].as_str();
                let message = text("message").map_or_else(|| error.to_string(), str::to_owned);
                Some(
                    text("kind")
                        .map_or_else(|| message.clone(), |kind| format!("{kind}: {message}")),
                )
            }
        }
    }
}
