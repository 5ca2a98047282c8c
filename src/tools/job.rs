//! Tools that are files: each call runs a program in a sandbox of its own, which has no network and no gateway.
//!
//! The arguments of a call are one JSON file in the sandbox. They are in no argument of the program and pass through no
//! shell.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::program_error::ToolProgramError;
use crate::base::secret::SecretString;
use crate::sandbox::spec::{MountAccess, SandboxLimits};

/// The program of a tool that is a file.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolJob {
    pub argv: Vec<String>,
    pub image: Option<String>,
    pub workspace: JobWorkspace,
    pub env: BTreeMap<String, String>,
    pub limits: SandboxLimits,
}

/// The access of a tool to the workspace of its run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobWorkspace {
    /// An empty directory in memory.
    #[default]
    None,
    /// The run's workspace, which the tool cannot change.
    Ro,
    /// The run's workspace. Only a run that may write to its workspace has such tools.
    Rw,
}

/// One call of a tool that is a file, or one start of a program that serves calls.
#[derive(Clone, Debug)]
pub struct JobCall {
    /// The id of the call, which names its sandbox.
    pub id: String,
    pub job: Arc<ToolJob>,
    /// The image of the sandbox, by its name or its id.
    pub image: Option<String>,
    /// The arguments as the client wrote them, in JSON.
    pub arguments: String,
    pub timeout: Duration,
    /// The credentials among the program's variables.
    pub secret_env: BTreeMap<String, SecretString>,
    /// Cancelled when the call must end.
    pub stop: CancellationToken,
}

/// The future of a call's result, as JSON.
pub type JobFuture = Pin<Box<dyn Future<Output = Result<String, ToolProgramError>> + Send>>;

/// The future of a program that serves calls: the reason why it serves no more. The text is for the operator.
pub type ServerFuture = Pin<Box<dyn Future<Output = String> + Send>>;

/// The future of an image's id.
pub type ImageIdFuture = Pin<Box<dyn Future<Output = io::Result<String>> + Send>>;

/// Runs calls in sandboxes.
pub trait JobRunner: Send + Sync {
    /// Runs a call to its end, and removes its sandbox. The caller does not drop the future before that.
    fn run_job(&self, call: JobCall) -> JobFuture;

    /// Starts a program that serves calls until its time is over or its `stop` is cancelled, and removes its sandbox.
    /// `connected` gets the program's standard input and output. The caller does not drop the future before its end.
    fn run_server(&self, _call: JobCall, _connected: oneshot::Sender<UnixStream>) -> ServerFuture {
        Box::pin(async { "there is no sandbox for it".to_owned() })
    }

    /// Returns the id of an image. A runner without images has none.
    fn resolve_image(&self, _name: &str) -> ImageIdFuture {
        Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
    }

    /// Returns the run's access to its workspace; `None` if the run has no workspace on this machine.
    fn workspace_access(&self) -> Option<MountAccess>;
}

impl JobWorkspace {
    /// Returns true if a run with this access to its workspace may have the tool.
    pub fn is_possible_with(self, access: Option<MountAccess>) -> bool {
        match self {
            Self::None => true,
            Self::Ro => access.is_some(),
            Self::Rw => access == Some(MountAccess::ReadWrite),
        }
    }
}

impl ToolJob {
    /// Returns the program and its arguments.
    pub fn resolved_argv(&self) -> Vec<String> {
        let resolve = |word: &String| word.replace(ARGUMENTS_PLACEHOLDER, ARGUMENTS_TARGET);
        self.argv.iter().map(resolve).collect()
    }
}

/// The path of a call's arguments in its sandbox.
pub const ARGUMENTS_TARGET: &str = "/arguments.json";

/// The text in a tool's arguments that is replaced by [`ARGUMENTS_TARGET`].
pub(super) const ARGUMENTS_PLACEHOLDER: &str = "${ARGUMENTS_FILE}";
