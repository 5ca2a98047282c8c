//! An agent of the catalog: what it is to answer, and what it is given for it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::directory::RunDirectory;
use super::openclaw;
use super::workspace::WorkspaceWriter;
use crate::runner::agents::definition::FileContent;
use crate::runner::agents::placeholders::{ArgumentTooLongError, PlaceholderValues};
use crate::runner::agents::{AgentDefinition, WorkspaceSetup};
use crate::sandbox::spec::{BindMount, MountAccess, WorkspaceMount};
use crate::sandbox::{SandboxSpec, sandbox_name};

/// An agent, and what it is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentInvocation {
    pub entry: Arc<AgentDefinition>,
    /// All that was said; none where the workspace has the conversation already.
    pub messages: Vec<ChatMessage>,
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
pub struct ChatMessage {
    pub role: ChatRole,
    pub content: String,
}

/// Who has said it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChatRole {
    System,
    User,
    Assistant,
}

/// What an agent finds in its workspace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AgentFiles {
    /// Written anew for each run.
    pub(super) own: Vec<(&'static str, String)>,
    /// What it makes itself, and is none of its work.
    pub(super) made: &'static [&'static str],
}

impl ChatMessage {
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: ChatRole::User, content: content.into() }
    }
}

impl AgentInvocation {
    /// The program and its arguments, as they are executed.
    ///
    /// # Errors
    /// A message is longer than an argument may be.
    pub fn argv(&self, run: &str) -> Result<Vec<String>, ArgumentTooLongError> {
        let values = PlaceholderValues {
            run_id: run.to_owned(),
            session_id: sandbox_name(run),
            model: self.model.clone(),
            agent: self.entry.openclaw.agent.clone(),
            message: self
                .last_user_message()
                .map(|(_, message)| message.to_owned())
                .unwrap_or_default(),
            timeout: self.timeout,
        };
        values.expand(&self.entry.argv)
    }

    /// The last thing that a user has said, and its place among all that was said.
    pub(super) fn last_user_message(&self) -> Option<(usize, &str)> {
        let place = self.messages.iter().rposition(|message| message.role == ChatRole::User)?;
        Some((place, &self.messages[place].content))
    }

    /// Gives the sandbox what the agent needs of us. An agent without a workspace gets one that goes with the run.
    pub(super) fn prepare_sandbox(
        &self,
        spec: &mut SandboxSpec,
        directory: &RunDirectory,
        is_repository: bool,
    ) -> anyhow::Result<()> {
        if spec.workspace == WorkspaceMount::None {
            let path = directory.create_workspace()?;
            spec.workspace = WorkspaceMount::Directory { path, access: MountAccess::ReadWrite };
        }
        if let WorkspaceMount::Directory { path, access: MountAccess::ReadWrite } = &spec.workspace
        {
            self.write_workspace(path, spec.uid, is_repository)?;
        }
        spec.mounts.extend(self.program_mount(spec));
        Ok(())
    }

    /// Its program, where that is ours: it is in the file of the sandbox's first process.
    pub(super) fn program_mount(&self, spec: &SandboxSpec) -> Option<BindMount> {
        let (source, target) = (spec.init.clone()?, self.entry.program.clone()?);
        Some(BindMount { source, target, access: MountAccess::ReadOnly })
    }

    /// Writes what the agent finds in its workspace, and sees to it that none of that is taken for its work.
    fn write_workspace(
        &self,
        workspace: &Path,
        uid: u32,
        is_repository: bool,
    ) -> anyhow::Result<()> {
        let AgentFiles { own, made } = self.workspace_files()?;
        let writer = WorkspaceWriter::open(workspace, uid)?;
        let mut ignored: Vec<_> = made.iter().map(|name| format!("/{name}")).collect();
        for (place, text) in &own {
            writer.write_file(Path::new(place), text)?;
            ignored.push(format!("/{place}"));
        }
        for (place, text) in &self.entry.files {
            let FileContent::Here(text) = text else { continue };
            if writer.write_new_file(place, text)? {
                ignored.push(format!("/{}", place.display()));
            }
        }
        if is_repository {
            writer.write_file(Path::new(".git/info/exclude"), &(ignored.join("\n") + "\n"))?;
        }
        Ok(())
    }

    fn workspace_files(&self) -> anyhow::Result<AgentFiles> {
        match self.entry.setup {
            WorkspaceSetup::OpenClaw => Ok(openclaw::workspace_files(self)?),
            WorkspaceSetup::Messages if self.messages.is_empty() => Ok(AgentFiles::default()),
            WorkspaceSetup::Messages => {
                let conversation = json!({ "messages": self.messages });
                Ok(AgentFiles { own: vec![(MESSAGES_PATH, conversation.to_string())], made: &[] })
            }
        }
    }
}

/// Where an agent finds what it is to answer.
pub(super) fn input_path(setup: WorkspaceSetup) -> &'static str {
    match setup {
        WorkspaceSetup::Messages => MESSAGES_PATH,
        WorkspaceSetup::OpenClaw => openclaw::PROMPT_PATH,
    }
}

const MESSAGES_PATH: &str = ".cogni/messages.json";
