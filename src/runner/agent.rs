//! An agent of the catalog in a run: its messages, its models, and the files that it finds in its workspace.

use std::path::Path;

use serde_json::json;

use super::conversation::{AgentFiles, AgentInvocation, ChatRole};
use super::directory::RunDirectory;
use super::openclaw;
use super::workspace::{ObstaclePolicy, WorkspaceWriter};
use crate::runner::agents::WorkspaceSetup;
use crate::runner::agents::definition::FileContent;
use crate::runner::agents::placeholders::{ArgumentTooLongError, PlaceholderValues};
use crate::sandbox::spec::{BindMount, MountAccess, WorkspaceMount};
use crate::sandbox::{SandboxSpec, sandbox_name};
use crate::tools::agent_modes::WorkspaceMode;

impl AgentInvocation {
    /// Returns the program and its arguments, with the run's values in place of the placeholders.
    ///
    /// # Errors
    /// Returns an error if an argument, with the message in it, is longer than the kernel allows.
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

    /// Lists `models` for the agent, if it has no list.
    pub(super) fn with_default_models(self, models: Vec<String>) -> Self {
        let models = if self.models.is_empty() { models } else { self.models };
        Self { models, ..self }
    }

    /// Returns the last message of a user, and its index in the conversation.
    pub(super) fn last_user_message(&self) -> Option<(usize, &str)> {
        let index = self.messages.iter().rposition(|message| message.role == ChatRole::User)?;
        Some((index, &self.messages[index].content))
    }

    /// Adds the agent's workspace, files and program to the sandbox. If the run has no workspace, the agent gets a new
    /// one, which is removed with the run's directory.
    pub(super) fn prepare_sandbox(
        &self,
        spec: &mut SandboxSpec,
        directory: &RunDirectory,
        is_repository: bool,
        obstacles: ObstaclePolicy,
    ) -> anyhow::Result<()> {
        let mode = self.entry.modes.workspace;
        if spec.workspace == WorkspaceMount::None && mode != WorkspaceMode::None {
            let path = directory.create_workspace()?;
            spec.workspace = WorkspaceMount::Directory { path, access: MountAccess::ReadWrite };
        }
        // A read-only workspace stays as the operator made it; it has to hold the agent's input already.
        if let WorkspaceMount::Directory { path, access: MountAccess::ReadWrite } = &spec.workspace
        {
            let writer = WorkspaceWriter::open(path, spec.uid, obstacles)?;
            self.write_workspace(&writer, is_repository)?;
        }
        if let (WorkspaceMode::Ro, WorkspaceMount::Directory { access, .. }) =
            (mode, &mut spec.workspace)
        {
            *access = MountAccess::ReadOnly;
        }
        spec.mounts.extend(self.program_mount(spec));
        Ok(())
    }

    /// Returns the mount of the agent's program, if the program is the project's own. That program and the sandbox's
    /// first process (cogni-init) are the same file.
    pub(super) fn program_mount(&self, spec: &SandboxSpec) -> Option<BindMount> {
        let (source, target) = (spec.init.clone()?, self.entry.program.clone()?);
        Some(BindMount { source, target, access: MountAccess::ReadOnly })
    }

    /// Writes the agent's files into its workspace. In a repository, adds the files to git's `info/exclude`, so that
    /// git does not take the files for the agent's work.
    fn write_workspace(&self, writer: &WorkspaceWriter, is_repository: bool) -> anyhow::Result<()> {
        let AgentFiles { own, made } = self.workspace_files()?;
        let mut ignored: Vec<_> = made.iter().map(|name| format!("/{name}")).collect();
        for (path, text) in &own {
            writer.write_file(Path::new(path), text)?;
            ignored.push(format!("/{path}"));
        }
        for (path, text) in &self.entry.files {
            let FileContent::Inline(text) = text else { continue };
            // A file that the repository has already is left alone, and stays a part of the agent's work.
            if writer.write_new_file(path, text)? {
                ignored.push(format!("/{}", path.display()));
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

/// Returns the path of the agent's input, relative to the workspace.
pub(super) fn input_path(setup: WorkspaceSetup) -> &'static str {
    match setup {
        WorkspaceSetup::Messages => MESSAGES_PATH,
        WorkspaceSetup::OpenClaw => openclaw::PROMPT_PATH,
    }
}

/// The path of the conversation's file, relative to the workspace.
const MESSAGES_PATH: &str = ".cogni/messages.json";
