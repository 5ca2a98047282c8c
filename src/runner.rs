//! One run in a sandbox, from its socket to its result. The gateway serves the run's socket, in this process or in a
//! container, and the sandbox connects to the socket.
//!
//! **Invariant:** a run that has begun ends in a [`RunResult`], whatever goes wrong, and its sandbox and its directory
//! are removed before the result is returned. The [`sweep`] at the start of the next run removes the leftovers of a
//! killed process.
//!
//! Three parts end a run at its deadline. `wait_for_stop` decides that the run is over. The driver then sends SIGTERM, and
//! SIGKILL after the grace. If this process has died, an embedded sandbox has ended with it; in a container of an engine
//! the watchdog of `cogni-init` ends the agent, a little later than this process would have.
//!
//! The [`warm_pool`] keeps sandboxes ready for runs that cannot wait for a new one. A [`long_running`] sandbox serves
//! several runs, one after the other.

mod agent;
pub mod agents;
pub mod branch_delivery;
mod conversation;
mod directory;
mod envelope;
pub mod gateway_container;
mod gateway_signals;
pub mod long_running;
mod openclaw;
pub mod quota;
mod request;
mod result;
mod run_gateway;
mod spans;
pub mod sweep;
pub mod tool_jobs;
pub mod tool_opener;
pub mod warm_pool;
mod workspace;

use std::future::pending;
use std::mem;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, bail};
use tokio::io::AsyncWrite;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span};

use crate::base::private_dir;
use crate::gateway::config::GatewayConfig;
use crate::gateway::process::RunShutdown;
use crate::gateway::run::AgentRun;
use crate::llm::budget::{BudgetLedger, BudgetLimits, Nanodollars};
use crate::relay::delivery::outbox::PullRequestText;
use crate::sandbox::output::{CapturedOutput, HeadTailBuffer, OutputCapture};
use crate::sandbox::spec::{MountAccess, OwnerLabels, WorkspaceMount};
use crate::sandbox::{
    self, OwnerProcess, SandboxDriver, SandboxExit, SandboxHandle, SandboxSpec, StopReason,
    UserRange,
    host_path::{self, OwnPaths},
};
use crate::tools::approval::store::ApprovalStore;

pub use agents::DriverChoice;
pub use conversation::{AgentInvocation, ChatMessage, ChatRole, MODEL_VARIABLE};
pub use envelope::{AgentEnvelope, AgentEnvelopeError};
pub use request::{GatewayOverrides, HostEnvironment, MAX_REQUEST_BYTES, RunRequest};
pub use result::{RunErrorCode, RunResult, RunTimings};
pub use run_gateway::GatewayServer;

use branch_delivery::{BranchRequest, DeliveryTarget, FinishedRun, TrackedWorkspace};
use directory::RunDirectory;
use gateway_signals::GatewaySignals;
use quota::{QuotaExceededError, WorkspaceQuota};
use result::RunResultParts;
use run_gateway::RunGatewayBackend;
use sweep::LeftoverSweeper;
use tool_jobs::SandboxJobRunner;
use tool_opener::RunToolOpener;
use workspace::ObstaclePolicy;

/// The plan of one run: its gateway, its sandbox, its agent and its branch. [`RunRequest::resolve`] makes the plan, and
/// a [`PreparedRun`] starts it. Until then the plan does not change.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// The configuration of the run's gateway. The runner chooses the socket's path.
    pub config: GatewayConfig,
    pub gateway: GatewayServer,
    /// The run's sandbox. The runner sets the sandbox's run ID and socket to those of the gateway.
    pub spec: SandboxSpec,
    /// The agent of the catalog that the sandbox is for, if it is for one.
    pub agent: Option<AgentInvocation>,
    /// The branch that the run's work is for, if it is for one.
    pub branch: Option<BranchRequest>,
    /// The directories of this machine that the sandbox may mount from. Every host path of the sandbox has to be below
    /// one of these directories.
    pub roots: Vec<PathBuf>,
    /// The parent of the runs' directories.
    pub run_dir: PathBuf,
    /// The users of this machine that sandboxes run as.
    pub uids: UserRange,
    /// The driver that makes the sandbox.
    pub driver: SandboxDriver,
    /// The socket of this machine's Docker engine. The sweep needs the socket with every driver, because earlier runs
    /// may have left containers in the engine.
    pub docker_socket: PathBuf,
}

/// The inputs of a run that a process gets when the run begins, because it may have to wait for them.
#[derive(Clone, Debug, Default)]
pub struct RunInputs {
    /// The lease of the branch in the run's plan.
    pub target: Option<DeliveryTarget>,
    /// The models that an agent's settings list, if the plan lists none.
    pub models: Vec<String>,
    /// The place where people answer questions about the run's tool calls.
    pub approvals: Option<ApprovalStore>,
}

impl RunPlan {
    /// Returns the model that the run's program has to use, if the sandbox's environment names a model.
    pub fn model(&self) -> Option<&str> {
        self.spec.env.get(MODEL_VARIABLE).map(String::as_str)
    }

    /// Returns this plan with at most the given limit of money, if a limit is given.
    #[must_use]
    pub fn with_max_cost(mut self, limit: Option<Nanodollars>) -> Self {
        let limit = BudgetLimits { max_cost_usd: limit, ..BudgetLimits::default() };
        self.config.budget = self.config.budget.capped_by(&limit);
        self
    }

    /// Checks everything that can be checked without making anything.
    ///
    /// # Errors
    /// Returns an error if the branch and the gateway's container exclude each other, if the driver cannot make the
    /// sandbox, or if the sandbox may not mount one of its host paths.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.is_gateway_in_container() && self.branch.is_some() {
            bail!(
                "a run with a branch cannot have its gateway in a container: the container keeps the audit log that the delivery is written to; leave out `--proxy container`"
            );
        }
        self.spec.check()?;
        self.driver.check(&self.spec)?;
        Ok(host_path::check_host_paths(
            &self.spec,
            self.sandbox_users(),
            &self.roots,
            &self.own_paths(),
        )?)
    }

    /// Checks the plan, and that its branch is leased.
    fn check_inputs(&self, inputs: &RunInputs) -> anyhow::Result<()> {
        if inputs.target.as_ref().map(DeliveryTarget::branch) != self.branch.as_ref() {
            bail!("a run begins with the lease of the branch in its plan, and with no other");
        }
        self.check()
    }

    fn is_gateway_in_container(&self) -> bool {
        matches!(self.gateway, GatewayServer::Container(_))
    }

    /// Returns the users that the sandbox may run as. A sandbox that may write to an operator's directory runs as the
    /// shared user, because the directory's files belong to the shared user before and after the run.
    fn sandbox_users(&self) -> UserRange {
        let SandboxSpec { workspace, mounts, volumes, .. } = &self.spec;
        let accesses = mounts.iter().map(|mount| mount.access);
        let accesses = accesses.chain(volumes.iter().map(|volume| volume.access));
        let workspace = match workspace {
            WorkspaceMount::Directory { access, .. } => Some(*access),
            WorkspaceMount::None | WorkspaceMount::Fresh => None,
        };
        let may_write = accesses.chain(workspace).any(|access| access == MountAccess::ReadWrite);
        // A range of a single user leaves no choice.
        if may_write && self.uids.only_user().is_none() {
            UserRange::SHARED_USER
        } else {
            self.uids
        }
    }

    /// Returns the paths of this program: the gateway's paths, the run directory and the engine's socket.
    fn own_paths(&self) -> OwnPaths {
        let own = [&self.run_dir, &self.docker_socket].map(PathBuf::as_path);
        OwnPaths {
            private: self.config.private_paths().chain(own).map(Path::to_owned).collect(),
            decisive: self.config.decisive_paths().map(Path::to_owned).collect(),
        }
    }

    /// Returns the sweeper that removes the leftovers of killed runs of the same installation.
    pub fn leftover_sweeper(&self) -> LeftoverSweeper {
        LeftoverSweeper {
            docker_socket: self.docker_socket.clone(),
            run_dir: self.run_dir.clone(),
            apply: true,
            all: false,
        }
    }
}

/// Checks that a directory's path and mode allow runs to have their directories and sockets below the directory.
///
/// # Errors
/// Returns an error if the sockets' paths would be too long, or if the directory exists and other users may change its
/// content.
pub fn check_run_dir(run_dir: &Path) -> anyhow::Result<()> {
    let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
    RunDirectory::check_length(run_dir, &owner)?;
    if run_dir.exists() { Ok(private_dir::check(run_dir)?) } else { Ok(()) }
}

/// The sandbox that a run is executed in.
enum SandboxSource {
    /// A sandbox of the run's own; `None` once the run has started.
    OneShot(Option<Box<SandboxHandle>>),
    /// A session in a long-running sandbox, which serves other runs, too.
    LongRunning(Box<long_running::SandboxSession>),
}

impl SandboxSource {
    async fn run<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
    ) -> Result<SandboxExit, sandbox::SandboxError> {
        match self {
            Self::OneShot(sandbox) => {
                let sandbox = sandbox.take().expect("a run is run once");
                Box::pin(sandbox.run(output, until)).await
            }
            Self::LongRunning(turn) => Box::pin(turn.run(output, until)).await,
        }
    }
}

/// The handles by which a caller controls a run until the run's end.
#[derive(Debug, Default)]
pub struct RunHandles {
    /// Ends the run's program. After the program has ended the token has no effect: the work is delivered.
    pub cancel: CancellationToken,
    /// Stops waiting for the delivery, once the delivery is in the outbox. A later attempt finishes the delivery.
    pub detach_delivery: CancellationToken,
    /// Receives the agent's answer as soon as the agent has ended, before the agent's work is delivered.
    pub on_answer: Option<oneshot::Sender<AgentEnvelope>>,
}

/// A run that is ready to start. Its socket is bound and its audit log is open; if a container serves the gateway,
/// everything that the container needs is written.
#[must_use = "a warm sandbox that was claimed for the run is left over if the run does not start"]
pub struct PreparedRun {
    gateway: RunGatewayBackend,
    run: String,
    driver: SandboxDriver,
    request: sandbox::SandboxRequest,
    sandbox: SandboxSource,
    /// The sandbox's directory. A run in a warm sandbox has a second directory, its own, which reserves the run's name.
    directories: Vec<RunDirectory>,
    is_agent: bool,
    target: Option<Box<TrackedWorkspace>>,
    /// The bound of the workspace, if the workspace is a directory that was made for the run.
    quota: Option<WorkspaceQuota>,
}

impl PreparedRun {
    /// Checks everything that can be checked without an engine, then binds the socket. Must be called within a
    /// runtime.
    ///
    /// # Errors
    /// Returns an error if the plan fails its check, the socket cannot be bound, or a file cannot be made or opened.
    pub fn new(plan: RunPlan, inputs: RunInputs) -> anyhow::Result<Self> {
        let target = inputs.target.clone();
        // A branch's workspace is outside of the run's directory, so that directory's removal does not remove it.
        Self::prepare(plan, inputs)
            .inspect_err(|_| target.iter().for_each(DeliveryTarget::discard_workspace))
    }

    fn prepare(plan: RunPlan, inputs: RunInputs) -> anyhow::Result<Self> {
        // Each step below needs the steps before it:
        // 1. the checks, which make nothing;
        // 2. the run's directory, which reserves the sandbox's user;
        // 3. the workspace, which belongs to that user, and the socket's place in the directory;
        // 4. the gateway, which binds the socket and opens the audit log;
        // 5. the sandbox's handle, which starts nothing yet;
        // 6. the outbox's row for the workspace, the last step: the row makes a later process look for work there.
        plan.check_inputs(&inputs)?;
        let users = plan.sandbox_users();
        let RunPlan {
            mut config, gateway, mut spec, agent, run_dir, driver, docker_socket, ..
        } = plan;
        let RunInputs { target, models, approvals } = inputs;
        let agent = agent.map(|agent| agent.with_default_models(models));
        let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
        let directory =
            RunDirectory::create_for_users(users, &run_dir, &config.identity.run, &owner)?;
        spec.uid = directory.uid();
        if spec.workspace == WorkspaceMount::Fresh {
            let path = directory.create_workspace()?;
            spec.workspace = WorkspaceMount::Directory { path, access: MountAccess::ReadWrite };
        }
        configure_socket(&mut config, &mut spec, &directory);
        if let Some(target) = &target {
            target.prepare_sandbox(&mut spec)?;
        }
        if let Some(agent) = &agent {
            // A branch may have what an earlier agent has committed. Any other workspace is new or the operator's.
            let is_repository = target.is_some();
            let obstacles =
                if is_repository { ObstaclePolicy::Remove } else { ObstaclePolicy::Refuse };
            agent.prepare_sandbox(&mut spec, &directory, is_repository, obstacles)?;
        }
        // An operator's own directory has no bound: it may hold much before the run begins.
        let own = spec.workspace_path().map(Path::to_owned);
        let own = own.filter(|path| target.is_some() || *path == directory.workspace_path());
        let quota = own.map(|path| WorkspaceQuota::new(path, spec.limits.max_workspace));
        let policy = config.digest();
        let run = config.identity.run.clone();
        let deadline = SystemTime::now() + spec.limits.max_runtime;
        let labels = OwnerLabels { owner, run_dir: directory.parent(), deadline };
        // Only here is everything known that the sandboxes of the run's tools need.
        let jobs = SandboxJobRunner::for_run(&spec, &driver, docker_socket, users, &labels.run_dir);
        config.tools.opener =
            Some(Arc::new(RunToolOpener { jobs: Some(Arc::new(jobs)), approvals, lookup: None }));
        let gateway = RunGatewayBackend::open(gateway, config, &directory, &labels)?;
        if let (Some(run), Some(agent)) = (gateway.run(), &agent) {
            spans::record_agent(&run, &agent.entry.name);
        }
        let request =
            sandbox::SandboxRequest { spec, labels, directory: directory.path().to_owned() };
        let sandbox =
            SandboxSource::OneShot(Some(Box::new(SandboxHandle::new(&driver, request.clone())?)));
        let (directories, is_agent) = (vec![directory], agent.is_some());
        let post = |target: DeliveryTarget| {
            target.register_workspace(&request, &driver, &policy).map(Box::new)
        };
        let target = target.map(post).transpose()?;
        Ok(Self { gateway, run, driver, request, sandbox, directories, is_agent, target, quota })
    }

    /// Returns a token that cuts short the grace period of the run's program, once that period has begun. In a
    /// long-running sandbox the token has no effect.
    pub fn force_kill_token(&self) -> CancellationToken {
        match &self.sandbox {
            SandboxSource::OneShot(Some(sandbox)) => sandbox.force_kill_token(),
            SandboxSource::OneShot(None) | SandboxSource::LongRunning(_) => {
                CancellationToken::new()
            }
        }
    }

    /// Returns the path of the run's workspace on this machine, if the run has a workspace.
    pub fn workspace_path(&self) -> Option<&Path> {
        self.request.spec.workspace_path()
    }

    /// Returns the run's budget ledger, or `None` if a container serves the gateway and keeps the ledger.
    pub fn ledger(&self) -> Option<Arc<BudgetLedger>> {
        self.gateway.run().map(|run| Arc::clone(&run.ledger))
    }

    /// Returns the number of bytes that are kept of the program's standard output, and of its standard error.
    pub fn max_output_bytes(&self) -> usize {
        self.request.spec.limits.max_output_bytes
    }

    /// Runs the sandbox to its end, or until `cancel`. Writes the program's output to `live` as the output arrives.
    pub async fn run<W: AsyncWrite + Unpin>(self, cancel: CancellationToken, live: W) -> RunResult {
        let output = OutputCapture::new(self.max_output_bytes(), live);
        Box::pin(self.run_with_output(output, RunHandles { cancel, ..RunHandles::default() })).await
    }

    /// Runs the sandbox as [`run`](Self::run) does, with the caller's own output capture and handles.
    pub async fn run_with_output<W: AsyncWrite + Unpin>(
        self,
        output: OutputCapture<W>,
        handles: RunHandles,
    ) -> RunResult {
        let span = self.gateway.run().map_or_else(Span::none, |run| run.log_span());
        Box::pin(self.run_inner(output, handles)).instrument(span).await
    }

    async fn run_inner<W: AsyncWrite + Unpin>(
        self,
        mut output: OutputCapture<W>,
        handles: RunHandles,
    ) -> RunResult {
        let RunHandles { cancel, detach_delivery, on_answer } = handles;
        let Self { gateway, run, driver, request, directories, .. } = self;
        let Self { mut sandbox, is_agent, target, quota, .. } = self;
        let (start, limits) = (Instant::now(), request.spec.limits);
        let deadline = start + limits.max_runtime;
        let deadline = gateway.deadline().map_or(deadline, |end| deadline.min(end.into()));
        // Two futures run side by side until both have ended. `serve` is the gateway. `live` is the sandbox, then the
        // delivery. Each arrow is a token, from the side that cancels it to the side that waits for it:
        //
        //     caller ── cancel ─────────────────────────────────┐
        //     gateway ─ signals.gone, signals.exhausted ────────┼─▶ wait_for_stop ─▶ the sandbox ends
        //     clock, quota ─────────────────────────────────────┘
        //     gateway ─ signals.ready ─▶ the sandbox starts
        //     sandbox has ended ─ closing.calls ─▶ gateway ─ closing.calls_ended ─▶ the delivery starts
        //     delivery has ended ─ closing.records ─▶ gateway closes the audit log
        //     caller ── detach_delivery ─▶ the delivery stays in the outbox, for a later attempt
        let (signals, closing) = (gateway.signals(), RunShutdown::default());
        let mut until = pin!(wait_for_stop(&signals, &cancel, deadline, quota.as_ref()));
        tracing::info!(run, root = %request.spec.root, "starting the sandbox");
        let agent_run = gateway.run();
        let trace = agent_run.as_ref().and_then(|run| run.trace.clone());
        let serve = gateway.serve(&signals, closing.clone());
        let live = async {
            let sandbox_start = SystemTime::now();
            // 1. The sandbox starts only when the gateway serves. A run that is stopped earlier never has a sandbox.
            let ended = tokio::select! {
                biased;
                () = signals.ready.cancelled() => {
                    Box::pin(sandbox.run(&mut output, until)).await
                }
                cause = until.as_mut() => Ok(SandboxExit { cause: Some(cause), ..SandboxExit::default() }),
            };
            if let Some(trace) = &trace {
                spans::record_sandbox_span(trace, driver.name(), sandbox_start, &ended);
            }
            // 2. The caller receives the answer before the work is delivered, which may take minutes.
            output.close_listener().await;
            let delivery_start = SystemTime::now();
            let (stdout, answer) = read_output(&mut output, is_agent).await;
            let heard = answer.as_ref().and_then(|answer| answer.as_ref().ok());
            send_answer(on_answer, heard, agent_run.as_deref());
            // 3. The gateway has answered its last call before the work is collected, so that nothing in the workspace
            //    can reach the upstream. The audit log stays open for the result of the delivery.
            //    A job of a tool may write to the workspace until then, so the workspace is measured until then, too.
            closing.calls.cancel();
            let ended =
                quota::check_drained(ended, quota.as_ref(), &closing, agent_run.as_deref()).await;
            // 4. The work is collected even from a failed or cancelled run, but not if the sandbox was not made or was
            //    lost. Then the outbox still names the workspace, and a later process recovers the work.
            let relayed = match (&target, &agent_run, &ended) {
                (Some(target), Some(run), Ok(ended)) => {
                    let is_ok = ended.cause.is_none() && ended.exit_code == Some(0);
                    let text = heard.map(pull_request_text).unwrap_or_default();
                    let source =
                        FinishedRun { run, is_ok, text, detach_delivery: &detach_delivery };
                    Some(Box::pin(target.deliver(&driver, &request, source)).await)
                }
                _ => None,
            };
            if let (Some(trace), Some(relayed)) = (&trace, &relayed) {
                spans::record_delivery_span(trace, delivery_start, relayed);
            }
            // 5. Every record of the run is written, so the gateway may close the audit log.
            closing.records.cancel();
            (ended, stdout, answer, relayed)
        };
        let ((served, calls), (ended, stdout, answer, relayed)) = tokio::join!(serve, live);
        let is_gone = matches!(sandbox, SandboxSource::OneShot(_));
        // The next run of a long-running sandbox may use the workspace from here on, so the session ends only now.
        drop(sandbox);
        for directory in directories {
            directory.remove().await;
        }
        log_exit(&ended, is_gone);
        RunResultParts {
            ended,
            served,
            calls,
            stdout,
            stderr: output.stderr.finish(),
            answer,
            relayed,
            is_exhausted: signals.exhausted.is_cancelled(),
            max_workspace: limits.max_workspace,
            elapsed: start.elapsed(),
        }
        .into_result(run)
    }
}

/// Returns a program's standard output, and the answer in that output if the program is an agent. The agent chooses the
/// bytes, so a blocking thread parses the bytes: a slow parse does not hold up the runtime.
async fn read_output<W>(
    output: &mut OutputCapture<W>,
    is_agent: bool,
) -> (CapturedOutput, Option<Result<AgentEnvelope, AgentEnvelopeError>>) {
    let printed = mem::replace(&mut output.stdout, HeadTailBuffer::new(0));
    let read = spawn_blocking(move || {
        let stdout = printed.finish();
        let answer = is_agent.then(|| AgentEnvelope::parse(&stdout.text));
        (stdout, answer)
    });
    // The task fails only if the parser has panicked. Then the run has no answer.
    read.await.unwrap_or_else(|_| {
        (CapturedOutput::default(), is_agent.then_some(Err(AgentEnvelopeError::Empty)))
    })
}

/// Waits until the sandbox has to end, and returns the reason.
async fn wait_for_stop(
    signals: &GatewaySignals,
    cancel: &CancellationToken,
    deadline: Instant,
    quota: Option<&WorkspaceQuota>,
) -> StopReason {
    tokio::select! {
        () = cancel.cancelled() => StopReason::Cancelled,
        () = signals.gone.cancelled() => StopReason::Cancelled,
        () = signals.exhausted.cancelled() => StopReason::BudgetExhausted,
        () = sleep_until(deadline) => StopReason::Deadline,
        _ = wait_for_quota(quota) => StopReason::WorkspaceFull,
    }
}

/// Waits until the workspace exceeds its bound. Waits forever if the workspace has no bound.
async fn wait_for_quota(quota: Option<&WorkspaceQuota>) -> QuotaExceededError {
    match quota {
        Some(quota) => quota.wait_until_exceeded().await,
        None => pending().await,
    }
}

/// Puts the run's ID and the socket's directory into the sandbox's specification, and the socket's path, owner and mode
/// into the gateway's configuration.
fn configure_socket(config: &mut GatewayConfig, spec: &mut SandboxSpec, directory: &RunDirectory) {
    spec.run.clone_from(&config.identity.run);
    spec.socket_dir = directory.socket_dir();
    config.listen.socket_path = spec.socket_dir.join("llm.sock");
    // Only root may change a file's owner. Root gives the socket to the sandbox's user. Any other user opens the socket
    // to every user, but the socket is below a directory that only its owner can enter.
    if directory.runs_as_root() {
        config.listen.socket_uid = Some(spec.uid);
        if !config.listen.require_uid.is_empty() {
            config.listen.require_uid = vec![spec.uid];
        }
    } else {
        config.listen.socket_mode = 0o666;
    }
}

/// Returns the texts of a pull request, from the agent's answer.
fn pull_request_text(answer: &AgentEnvelope) -> PullRequestText {
    PullRequestText::from_body(answer.text())
}

/// Sends the agent's answer to the caller, if the caller waits for an answer. Writes the buffered audit records first,
/// so that the caller finds the calls that led to the answer in the audit log.
fn send_answer(
    answered: Option<oneshot::Sender<AgentEnvelope>>,
    heard: Option<&AgentEnvelope>,
    run: Option<&AgentRun>,
) {
    let Some((answered, heard)) = answered.zip(heard) else { return };
    if let Some(run) = run {
        run.audit.flush_buffered();
    }
    // The caller may have dropped its receiver. That is no error of the run.
    let _ = answered.send(heard.clone());
}

fn log_exit(ended: &Result<SandboxExit, sandbox::SandboxError>, is_gone: bool) {
    match ended {
        Ok(SandboxExit { exit_code, cause, .. }) => {
            let cause = cause.map(tracing::field::debug);
            if is_gone {
                tracing::info!(exit_code, cause, "the sandbox has ended and is removed");
            } else {
                tracing::info!(exit_code, cause, "the run in a long-running sandbox has ended");
            }
        }
        Err(error) => tracing::warn!(%error, "the sandbox could not be made, or was lost"),
    }
}
