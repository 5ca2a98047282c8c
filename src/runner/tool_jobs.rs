//! Runs the calls of tools that are files, each in a sandbox of its own.
//!
//! **Invariant:** a call's sandbox has a directory and, without the run's workspace, a user of its own. Both are removed
//! with the call; after a crash, the sweep removes them like those of a run.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::io::sink;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::directory::RunDirectory;
use crate::base::json::{JsonError, check_document};
use crate::sandbox::docker::DockerEngine;
use crate::sandbox::output::OutputCapture;
use crate::sandbox::spec::{
    BindMount, MountAccess, OwnerLabels, RootSource, STDIO_SOCKET, SandboxSpec, SandboxTask,
    WorkspaceMount,
};
use crate::sandbox::{
    OwnerProcess, SandboxDriver, SandboxExit, SandboxRequest, StopReason, UserRange, embedded,
};
use crate::telemetry::audit::tool_records::ToolOutcome;
use crate::tools::job::{
    ARGUMENTS_TARGET, ImageIdFuture, JobCall, JobFuture, JobRunner, JobWorkspace, ServerFuture,
};
use crate::tools::program_error::ToolProgramError;

/// The place where the calls of one run get their sandboxes.
#[derive(Clone, Debug)]
pub struct SandboxJobRunner {
    /// The parent of all runs' directories.
    pub run_dir: PathBuf,
    pub users: UserRange,
    pub docker_socket: PathBuf,
    pub may_be_unlimited: bool,
    /// The first process of every sandbox.
    pub init: Option<PathBuf>,
    /// The run's workspace, if it is on this machine.
    pub workspace: Option<JobWorkspaceMount>,
    /// The log of the sandboxes that could not be made.
    pub failures: Arc<JobFailureLog>,
}

/// Logs the sandboxes of tools that could not be made: the first one at once, then one line a minute with the number of
/// others. An agent repeats a failing call as often as it likes.
#[derive(Debug, Default)]
pub struct JobFailureLog(Mutex<Option<(Instant, u64)>>);

impl JobFailureLog {
    fn log_failure(&self, error: &anyhow::Error) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let unlogged = match &mut *state {
            Some((logged, unlogged)) if logged.elapsed() < FAILURE_LOG_INTERVAL => {
                *unlogged += 1;
                return;
            }
            Some((_, unlogged)) => *unlogged,
            None => 0,
        };
        *state = Some((Instant::now(), 0));
        drop(state);
        tracing::error!(unlogged, "a tool's sandbox failed: {error:#}");
    }
}

/// The workspace of a run, as its tools may get it.
#[derive(Clone, Debug)]
pub struct JobWorkspaceMount {
    pub path: PathBuf,
    pub access: MountAccess,
    /// The run's user, who may read the workspace's files.
    pub uid: u32,
}

impl JobRunner for SandboxJobRunner {
    fn run_job(&self, call: JobCall) -> JobFuture {
        let (own, own_log) = (self.clone(), Arc::clone(&self.failures));
        Box::pin(async move {
            // The reason of a failure names paths of this machine, so the client does not see it.
            own.run_in_sandbox(call).await.unwrap_or_else(|error| {
                own_log.log_failure(&error);
                Err(ToolProgramError::failed("the tool's sandbox cannot be made"))
            })
        })
    }

    fn run_server(&self, call: JobCall, connected: oneshot::Sender<UnixStream>) -> ServerFuture {
        let own = self.clone();
        Box::pin(async move {
            let served = own.serve_in_sandbox(call, connected).await;
            served.unwrap_or_else(|error| format!("its sandbox cannot be made: {error:#}"))
        })
    }

    fn resolve_image(&self, name: &str) -> ImageIdFuture {
        let (socket, name) = (self.docker_socket.clone(), name.to_owned());
        Box::pin(async move {
            let engine = DockerEngine::connect(&socket).await.map_err(io::Error::other)?;
            engine.image_id(&name).await.map_err(io::Error::other)
        })
    }

    fn workspace_access(&self) -> Option<MountAccess> {
        self.workspace.as_ref().map(|workspace| workspace.access)
    }
}

impl SandboxJobRunner {
    /// Creates the runner for a run with a sandbox of its own.
    pub fn for_run(
        spec: &SandboxSpec,
        driver: &SandboxDriver,
        docker_socket: PathBuf,
        users: UserRange,
        run_dir: &Path,
    ) -> Self {
        let workspace = match &spec.workspace {
            WorkspaceMount::Directory { path, access } => {
                Some(JobWorkspaceMount { path: path.clone(), access: *access, uid: spec.uid })
            }
            WorkspaceMount::None | WorkspaceMount::Fresh => None,
        };
        let may_be_unlimited = match driver {
            SandboxDriver::Embedded(settings) => settings.may_be_unlimited,
            SandboxDriver::Docker { .. } => false,
        };
        let (run_dir, init) = (run_dir.to_owned(), spec.init.clone());
        let failures = Arc::default();
        Self { run_dir, users, docker_socket, may_be_unlimited, init, workspace, failures }
    }

    /// Creates the runner for programs of servers that belong to no run.
    pub fn without_run(
        run_dir: PathBuf,
        docker_socket: PathBuf,
        init: Option<PathBuf>,
        may_be_unlimited: bool,
    ) -> Self {
        let (users, failures) = (UserRange::default(), Arc::default());
        Self { run_dir, users, docker_socket, may_be_unlimited, init, workspace: None, failures }
    }

    async fn run_in_sandbox(
        self,
        call: JobCall,
    ) -> anyhow::Result<Result<String, ToolProgramError>> {
        let (timeout, stop) = (call.timeout, call.stop.clone());
        let limit = call.job.limits.max_output_bytes;
        let (directory, driver, request) =
            tokio::task::spawn_blocking(move || self.prepare_sandbox(&call, SandboxTask::Program))
                .await??;
        let mut output = OutputCapture::new(limit, sink());
        let overflow = output.overflow_token();
        let until = async {
            tokio::select! {
                () = sleep(timeout) => StopReason::Deadline,
                () = stop.cancelled() => StopReason::Cancelled,
                // A result that is cut off is no result, so the program need not go on.
                () = overflow.cancelled() => StopReason::Cancelled,
            }
        };
        let ended = Box::pin(driver.run(&request, &mut output, until)).await;
        directory.remove().await;
        Ok(job_result(&ended?, output, (timeout, limit)))
    }

    /// Runs a program that serves calls, and returns the reason why it serves no more.
    async fn serve_in_sandbox(
        self,
        call: JobCall,
        connected: oneshot::Sender<UnixStream>,
    ) -> anyhow::Result<String> {
        let (timeout, stop) = (call.timeout, call.stop.clone());
        let has_secrets = !call.secret_env.is_empty();
        let (directory, driver, request) =
            tokio::task::spawn_blocking(move || self.prepare_sandbox(&call, SandboxTask::Server))
                .await??;
        let listener = bind_stdio(&directory)?;
        // The first messages on the standard error may tell why the program fails; later ones are left out.
        let mut output = OutputCapture::new(MAX_SERVER_MESSAGE_BYTES, sink());
        let connect = async {
            // The listener takes one connection, that of the first process, and is gone before the program begins.
            if let Ok((stream, _)) = listener.accept().await {
                let _ = connected.send(stream);
            }
            drop(listener);
            std::future::pending().await
        };
        let until = async {
            tokio::select! {
                () = sleep(timeout) => StopReason::Deadline,
                () = stop.cancelled() => StopReason::Cancelled,
                never = connect => never,
            }
        };
        let ended = Box::pin(driver.run(&request, &mut output, until)).await;
        directory.remove().await;
        let said = output.stderr.finish().text;
        // A cut text may end within a credential, where no search finds it.
        Ok(server_end(&ended?, if has_secrets { "" } else { &said }))
    }

    fn prepare_sandbox(
        &self,
        call: &JobCall,
        task: SandboxTask,
    ) -> anyhow::Result<(RunDirectory, SandboxDriver, SandboxRequest)> {
        let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
        let directory =
            RunDirectory::create_for_users(self.users, &self.run_dir, &call.id, &owner)?;
        let arguments = directory.path().join("arguments.json");
        fs::write(&arguments, &call.arguments)?;
        fs::set_permissions(&arguments, fs::Permissions::from_mode(0o444))?;
        let (root, driver) = self.select_root(call.image.as_deref());
        let workspace =
            self.workspace.as_ref().filter(|_| call.job.workspace != JobWorkspace::None);
        let access = match call.job.workspace {
            JobWorkspace::Rw => MountAccess::ReadWrite,
            JobWorkspace::None | JobWorkspace::Ro => MountAccess::ReadOnly,
        };
        let mut env = call.job.env.clone();
        let secrets = call.secret_env.iter();
        env.extend(secrets.map(|(name, value)| (name.clone(), value.expose_secret().to_owned())));
        let mut limits = call.job.limits;
        limits.max_runtime = call.timeout;
        let spec = SandboxSpec {
            run: call.id.clone(),
            root,
            argv: call.job.resolved_argv(),
            uid: workspace.map_or(directory.uid(), |workspace| workspace.uid),
            env,
            limits,
            grace: GRACE,
            workspace: workspace.map_or(WorkspaceMount::None, |workspace| {
                WorkspaceMount::Directory { path: workspace.path.clone(), access }
            }),
            mounts: vec![BindMount {
                source: arguments,
                target: ARGUMENTS_TARGET.into(),
                access: MountAccess::ReadOnly,
            }],
            volumes: vec![],
            // The directory has no socket of the gateway: the tool has no way to it.
            socket_dir: directory.socket_dir(),
            init: self.init.clone(),
            has_tunnels: false,
            task,
        };
        let deadline = SystemTime::now() + call.timeout;
        let labels = OwnerLabels { owner, run_dir: directory.parent(), deadline };
        let request = SandboxRequest { spec, labels, directory: directory.path().to_owned() };
        Ok((directory, driver, request))
    }
}

impl SandboxJobRunner {
    /// Returns the root of a tool's sandbox and its driver: Docker Engine for an image, else the embedded driver.
    fn select_root(&self, image: Option<&str>) -> (RootSource, SandboxDriver) {
        if let Some(image) = image {
            let socket = self.docker_socket.clone();
            return (RootSource::Image(image.to_owned()), SandboxDriver::Docker { socket });
        }
        let settings = embedded::EmbeddedDriverConfig {
            may_be_unlimited: self.may_be_unlimited,
            ..embedded::EmbeddedDriverConfig::default()
        };
        (RootSource::Host, SandboxDriver::Embedded(settings))
    }
}

/// Binds the socket that becomes a program's standard input and output. Every user may connect, because only this
/// process's user and the sandbox can enter the directory above.
fn bind_stdio(directory: &RunDirectory) -> anyhow::Result<UnixListener> {
    let path = directory.socket_dir().join(STDIO_SOCKET);
    let listener = UnixListener::bind(&path).context("the server's socket")?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}

/// Returns the reason why a server's program serves no more. `said` is the text of its standard error.
fn server_end(ended: &SandboxExit, said: &str) -> String {
    match ended.cause {
        Some(StopReason::Deadline) => return "its time is over".to_owned(),
        Some(_) => return "it was stopped".to_owned(),
        None => {}
    }
    if let Some(message) = &ended.not_started {
        return format!("it cannot be started: {message}");
    }
    if ended.oom_killed {
        return "it needed more memory than it has".to_owned();
    }
    let status = ended.exit_code.map_or("unknown".to_owned(), |code| code.to_string());
    // The end of the text says more than its beginning.
    let start = said.floor_char_boundary(said.len().saturating_sub(MAX_MESSAGE_BYTES));
    match said[start..].trim() {
        "" => format!("it has ended with status {status}"),
        said => format!("it has ended with status {status}: {said}"),
    }
}

/// Returns the result of a call whose sandbox has ended.
fn job_result<W: tokio::io::AsyncWrite + Unpin>(
    ended: &SandboxExit,
    output: OutputCapture<W>,
    (timeout, limit): (Duration, usize),
) -> Result<String, ToolProgramError> {
    let (stdout, stderr) = (output.stdout.finish(), output.stderr.finish());
    let is_too_large = stdout.truncated || stderr.truncated;
    match ended.cause {
        Some(_) if is_too_large => return Err(ToolProgramError::too_large(limit)),
        Some(StopReason::Deadline) => return Err(ToolProgramError::timed_out(timeout)),
        Some(_) => return Err(ToolProgramError::stopped()),
        None => {}
    }
    if let Some(message) = &ended.not_started {
        return Err(ToolProgramError::failed(format!("the tool cannot be started: {message}")));
    }
    if ended.oom_killed {
        let message = "the tool needed more memory than it has".to_owned();
        let (outcome, code) = (ToolOutcome::Failed, "tool_oom_killed");
        return Err(ToolProgramError { outcome, code, message });
    }
    if is_too_large {
        return Err(ToolProgramError::too_large(limit));
    }
    if ended.exit_code != Some(0) {
        let status = ended.exit_code.map_or("unknown".to_owned(), |code| code.to_string());
        let end = stderr.text.floor_char_boundary(MAX_MESSAGE_BYTES);
        let said = stderr.text[..end].trim();
        return Err(ToolProgramError::failed(format!(
            "the tool has ended with status {status}: {said}"
        )));
    }
    let result = ProgramResult {
        exit_code: 0,
        stderr: &stderr.text,
        stdout: ProgramOutput::from_text(&stdout.text)?,
    };
    serde_json::to_string(&result)
        .map_err(|_| ToolProgramError::failed("the tool's output cannot be written as JSON"))
}

/// The result of a program that has ended well.
#[derive(Serialize)]
struct ProgramResult<'a> {
    exit_code: i32,
    stderr: &'a str,
    stdout: ProgramOutput<'a>,
}

/// The standard output of a program, as the program wrote it.
#[derive(Serialize)]
#[serde(untagged)]
enum ProgramOutput<'a> {
    Json(&'a RawValue),
    Text(&'a str),
}

impl<'a> ProgramOutput<'a> {
    /// An object with a key twice is JSON that two readers read differently, so it is no result.
    fn from_text(text: &'a str) -> Result<Self, ToolProgramError> {
        let Ok(json) = serde_json::from_str(text) else { return Ok(Self::Text(text)) };
        // The check is about objects, and the output may be any value.
        match check_document(format!("{{\"stdout\":{text}}}").as_bytes()) {
            Err(error @ JsonError::DuplicateKey { .. }) => {
                Err(ToolProgramError::failed(format!("the tool's output is ambiguous: {error}")))
            }
            // A value that is too complex for the check is not changed either.
            _ => Ok(Self::Json(json)),
        }
    }
}

/// The time between SIGTERM and SIGKILL. Our choice: a tool has nothing to save.
const GRACE: Duration = Duration::from_secs(1);

/// The shortest time between two log lines about sandboxes that cannot be made. Our choice.
const FAILURE_LOG_INTERVAL: Duration = Duration::from_mins(1);

/// The longest text of a tool's standard error in the message of its failure, in bytes.
const MAX_MESSAGE_BYTES: usize = 1024;

/// The most bytes of a server's standard error that are kept. Our choice: the traces of two languages' errors.
const MAX_SERVER_MESSAGE_BYTES: usize = 16 * 1024;
