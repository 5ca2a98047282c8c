//! An agent of the catalog: what it is to answer, and its answer.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::conversation;
use super::directory::Directory;
use crate::catalog::Entry;
use crate::sandbox::RunSpec;
use crate::sandbox::spec::{Access, Mount, Workspace};

/// An agent, and what it is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Agent {
    pub entry: Entry,
    /// None where the workspace has the conversation already.
    pub message: Option<String>,
}

/// What an agent prints: its answer, and what it says about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope {
    pub payloads: Vec<Value>,
    pub meta: Map<String, Value>,
}

impl Agent {
    /// Gives the sandbox what the agent needs of us. An agent without a workspace gets one that goes with the run.
    pub(super) fn prepare(&self, spec: &mut RunSpec, directory: &Directory) -> anyhow::Result<()> {
        if spec.workspace == Workspace::None {
            let path = directory.make_workspace()?;
            spec.workspace = Workspace::Directory { path, access: Access::ReadWrite };
        }
        if let (Workspace::Directory { path, .. }, Some(message)) = (&spec.workspace, &self.message)
        {
            conversation::write(path, &self.entry.conversation, message)?;
        }
        let program = |target: &PathBuf| {
            let source = spec.init.clone()?;
            Some(Mount { source, target: target.clone(), access: Access::ReadOnly })
        };
        spec.mounts.extend(self.entry.program.as_ref().and_then(program));
        Ok(())
    }
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
