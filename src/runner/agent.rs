//! An agent of the catalog: what it is to answer, and what it is given for it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::directory::Directory;
use super::openclaw;
use super::workspace::Writer;
use crate::catalog::entry::Text;
use crate::catalog::placeholder::{TooLong, Values};
use crate::catalog::{Entry, Setup};
use crate::sandbox::spec::{Access, Mount, Workspace};
use crate::sandbox::{RunSpec, name_of};

/// An agent, and what it is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Agent {
    pub entry: Arc<Entry>,
    /// All that was said; none where the workspace has the conversation already.
    pub messages: Vec<Message>,
    /// The model that it begins with.
    pub model: String,
    /// The models that it may choose from, as far as it is told.
    pub models: Vec<String>,
    /// How long it may take.
    pub timeout: Duration,
}

/// Something that was said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    pub role: Role,
    pub content: String,
}

/// Who has said it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    System,
    User,
    Assistant,
}

/// What an agent finds in its workspace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Files {
    /// Written anew for each run.
    pub(super) own: Vec<(&'static str, String)>,
    /// What it makes itself, and is none of its work.
    pub(super) made: &'static [&'static str],
}

impl Message {
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: Role::User, content: content.into() }
    }
}

impl Agent {
    /// The program and its arguments, as they are executed.
    ///
    /// # Errors
    /// A message is longer than an argument may be.
    pub fn argv(&self, run: &str) -> Result<Vec<String>, TooLong> {
        let values = Values {
            run_id: run.to_owned(),
            session_id: name_of(run),
            model: self.model.clone(),
            agent: self.entry.openclaw.agent.clone(),
            message: self.last().map(|(_, message)| message.to_owned()).unwrap_or_default(),
            timeout: self.timeout,
        };
        values.fill(&self.entry.argv)
    }

    /// The last thing that a user has said, and its place among all that was said.
    pub(super) fn last(&self) -> Option<(usize, &str)> {
        let place = self.messages.iter().rposition(|message| message.role == Role::User)?;
        Some((place, &self.messages[place].content))
    }

    /// Gives the sandbox what the agent needs of us. An agent without a workspace gets one that goes with the run.
    pub(super) fn prepare(
        &self,
        spec: &mut RunSpec,
        directory: &Directory,
        is_repository: bool,
    ) -> anyhow::Result<()> {
        if spec.workspace == Workspace::None {
            let path = directory.make_workspace()?;
            spec.workspace = Workspace::Directory { path, access: Access::ReadWrite };
        }
        if let Workspace::Directory { path, access: Access::ReadWrite } = &spec.workspace {
            self.write(path, spec.uid, is_repository)?;
        }
        spec.mounts.extend(self.program(spec));
        Ok(())
    }

    /// Its program, where that is ours: it is in the file of the sandbox's first process.
    pub(super) fn program(&self, spec: &RunSpec) -> Option<Mount> {
        let (source, target) = (spec.init.clone()?, self.entry.program.clone()?);
        Some(Mount { source, target, access: Access::ReadOnly })
    }

    /// Writes what the agent finds in its workspace, and sees to it that none of that is taken for its work.
    fn write(&self, workspace: &Path, uid: u32, is_repository: bool) -> anyhow::Result<()> {
        let Files { own, made } = self.files()?;
        let writer = Writer::open(workspace, uid)?;
        let mut ignored: Vec<_> = made.iter().map(|name| format!("/{name}")).collect();
        for (place, text) in &own {
            writer.put(Path::new(place), text)?;
            ignored.push(format!("/{place}"));
        }
        for (place, text) in &self.entry.files {
            let Text::Here(text) = text else { continue };
            if writer.put_new(place, text)? {
                ignored.push(format!("/{}", place.display()));
            }
        }
        if is_repository {
            writer.put(Path::new(".git/info/exclude"), &(ignored.join("\n") + "\n"))?;
        }
        Ok(())
    }

    fn files(&self) -> anyhow::Result<Files> {
        match self.entry.setup {
            Setup::OpenClaw => Ok(openclaw::files(self)?),
            Setup::Messages if self.messages.is_empty() => Ok(Files::default()),
            Setup::Messages => {
                let conversation = json!({ "messages": self.messages });
                Ok(Files { own: vec![(MESSAGES, conversation.to_string())], made: &[] })
            }
        }
    }
}

/// Where an agent finds what it is to answer.
pub(super) fn place(setup: Setup) -> &'static str {
    match setup {
        Setup::Messages => MESSAGES,
        Setup::OpenClaw => openclaw::PROMPT,
    }
}

const MESSAGES: &str = ".cogni/messages.json";
