//! One run in a sandbox, from its socket to its result: the gateway serves in this process, the sandbox is at the
//! other end.
//!
//! **Invariant:** a run that has begun ends in a [`RunResult`], whatever goes wrong, and what it was made of is
//! gone by then; what a killed process leaves is taken away by [`sweep`], which the next run begins with.
//!
//! Where a sandbox is to be there sooner than it can be made, [`warm_pool`] are kept ready; where runs follow each other in the
//! same one, there are [`long_running`].

mod agent;
pub mod agents;
pub mod branch_delivery;
mod directory;
mod envelope;
pub mod gateway_container;
pub mod long_running;
mod openclaw;
pub mod quota;
mod request;
mod result;
mod run_gateway;
mod spans;
pub mod sweep;
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
use crate::gateway::process::{GatewayHost, RunShutdown};
use crate::gateway::run::AgentRun;
use crate::llm::budget::BudgetLedger;
use crate::relay::delivery::outbox::PullRequestText;
use crate::sandbox::output::{CapturedOutput, HeadTailBuffer, OutputCapture};
use crate::sandbox::spec::{MountAccess, OwnerLabels, WorkspaceMount};
use crate::sandbox::{
    self, OwnerProcess, SandboxDriver, SandboxExit, SandboxHandle, SandboxSpec, StopReason,
    UserRange, host_path,
};

pub use agent::{AgentInvocation, ChatMessage, ChatRole};
pub use agents::DriverChoice;
pub use envelope::{AgentEnvelope, AgentEnvelopeError};
pub use request::{GatewayOverrides, HostEnvironment, MODEL_VARIABLE, RunRequest};
pub use result::{RunErrorCode, RunResult, RunTimings};

use branch_delivery::{DeliveryTarget, FinishedRun, TrackedWorkspace};
use directory::RunDirectory;
use gateway_container::PreparedGatewayContainer;
use quota::{QuotaExceededError, WorkspaceQuota};
use result::RunResultParts;
use run_gateway::{GatewaySignals, RunGatewayBackend};
use sweep::LeftoverSweeper;

/// One run, as its host asks for it.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// The run's gateway. Where it listens is chosen here.
    pub config: GatewayConfig,
    /// The run's sandbox. Its run id and socket are those of the gateway.
    pub spec: SandboxSpec,
    /// The agent of the catalog that the sandbox is for, if it is for one.
    pub agent: Option<AgentInvocation>,
    /// The branch that the run's work is for, if it is for one.
    pub target: Option<DeliveryTarget>,
    /// What the sandbox is given of this machine has to be below one of these.
    pub roots: Vec<PathBuf>,
    /// Where runs have their directories.
    pub run_dir: PathBuf,
    /// The users of this machine that sandboxes run as.
    pub uids: UserRange,
    /// Who makes the sandbox.
    pub driver: SandboxDriver,
    /// Where this machine's engine is, if it has one: whoever makes this sandbox, runs before may have left something there.
    pub docker_socket: PathBuf,
    /// The container that serves the gateway; without one, this process does.
    pub proxy: Option<gateway_container::GatewayContainerConfig>,
    /// Where this process has its runs' gateways, if it has others.
    pub seats: Option<GatewayHost>,
}

impl RunPlan {
    /// The model that its program is told to use.
    pub fn model(&self) -> Option<&str> {
        self.spec.env.get(MODEL_VARIABLE).map(String::as_str)
    }

    /// Checks everything that can be checked without making anything.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.proxy.is_some() && self.target.is_some() {
            bail!(
                "what becomes of a branch is written to the run's log, which a gateway in a container keeps; leave `--proxy container` out"
            );
        }
        self.spec.check()?;
        self.driver.check(&self.spec)?;
        Ok(host_path::check_host_paths(
            &self.spec,
            self.sandbox_users(),
            &self.roots,
            &self.private_paths(),
        )?)
    }

    /// The users that its sandbox may have. What the operator lets it write is the shared user's, before and after it.
    fn sandbox_users(&self) -> UserRange {
        let SandboxSpec { workspace, mounts, volumes, .. } = &self.spec;
        let given = mounts.iter().map(|mount| mount.access);
        let given = given.chain(volumes.iter().map(|volume| volume.access));
        let workspace = match workspace {
            WorkspaceMount::Directory { access, .. } => Some(*access),
            WorkspaceMount::None | WorkspaceMount::Fresh => None,
        };
        let may_write = given.chain(workspace).any(|access| access == MountAccess::ReadWrite);
        if may_write && self.uids.only_user().is_none() {
            UserRange::SHARED_USER
        } else {
            self.uids
        }
    }

    /// What no sandbox may see, because it is the gateway's or the runner's own.
    fn private_paths(&self) -> Vec<PathBuf> {
        let own = [&self.run_dir, &self.docker_socket].map(PathBuf::as_path);
        self.config.private_paths().chain(own).map(Path::to_owned).collect()
    }

    /// What takes away what killed runs of the same installation have left.
    pub fn leftover_sweeper(&self) -> LeftoverSweeper {
        LeftoverSweeper {
            docker_socket: self.docker_socket.clone(),
            run_dir: self.run_dir.clone(),
            apply: true,
            all: false,
        }
    }
}

/// Checks that runs can have their directories and sockets below a directory, as far as its path and mode say.
///
/// # Errors
/// The sockets' paths would be too long, or the directory is there and other users may change what is in it.
pub fn check_run_dir(run_dir: &Path) -> anyhow::Result<()> {
    let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
    RunDirectory::check_length(run_dir, &owner)?;
    if run_dir.exists() { Ok(private_dir::check(run_dir)?) } else { Ok(()) }
}

/// Where a run is executed.
enum SandboxSource {
    /// In a sandbox of its own, until it is run.
    Own(Option<Box<SandboxHandle>>),
    /// In one that other runs come into, too.
    Resident(Box<long_running::SandboxSession>),
}

impl SandboxSource {
    async fn run<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
    ) -> Result<SandboxExit, sandbox::SandboxError> {
        match self {
            Self::Own(sandbox) => {
                let sandbox = sandbox.take().expect("a run is run once");
                Box::pin(sandbox.run(output, until)).await
            }
            Self::Resident(turn) => Box::pin(turn.run(output, until)).await,
        }
    }
}

/// How whoever has begun a run has it in hand until its end.
#[derive(Debug, Default)]
pub struct RunHandles {
    /// Ends its program. When that has ended it changes nothing any more: the work is brought to its branch.
    pub cancel: CancellationToken,
    /// Leaves the rest of the delivery, once it is in the outbox, to whoever takes it up there.
    pub leave: CancellationToken,
    /// Is told what the agent has answered as soon as it has ended, before anything becomes of its work.
    pub answered: Option<oneshot::Sender<AgentEnvelope>>,
}

/// A run whose socket is bound and whose log is open, or whose gateway's container has all it needs for that.
#[must_use = "a slot that was claimed for it is left behind if it does not run"]
pub struct PreparedRun {
    gateway: RunGatewayBackend,
    run: String,
    driver: SandboxDriver,
    order: sandbox::SandboxRequest,
    sandbox: SandboxSource,
    /// The sandbox's, and with a slot the run's own, which keeps its name.
    directories: Vec<RunDirectory>,
    is_agent: bool,
    target: Option<Box<TrackedWorkspace>>,
    /// Where the workspace is a directory that was made for it.
    quota: Option<WorkspaceQuota>,
}

impl PreparedRun {
    /// Checks everything that can be checked without an engine, then binds the socket. Must be called within a
    /// runtime.
    ///
    /// # Errors
    /// What is wrong with the order, or cannot be bound or opened.
    pub fn new(order: RunPlan) -> anyhow::Result<Self> {
        let target = order.target.clone();
        Self::prepare(order)
            .inspect_err(|_| target.iter().for_each(DeliveryTarget::discard_workspace))
    }

    fn prepare(order: RunPlan) -> anyhow::Result<Self> {
        order.check()?;
        let users = order.sandbox_users();
        let RunPlan { mut config, mut spec, agent, target, run_dir, driver, proxy, seats, .. } =
            order;
        let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
        let directory =
            RunDirectory::create_for_users(users, &run_dir, &config.identity.run, &owner)?;
        spec.uid = directory.uid();
        if spec.workspace == WorkspaceMount::Fresh {
            let path = directory.create_workspace()?;
            spec.workspace = WorkspaceMount::Directory { path, access: MountAccess::ReadWrite };
        }
        configure_socket(&mut config, &mut spec, &directory);
        if proxy.is_some() {
            // That container keeps the user of its image, which is another than the sandbox's.
            config.listen.socket_mode = 0o666;
        }
        if let Some(target) = &target {
            target.prepare_sandbox(&mut spec)?;
        }
        if let Some(agent) = &agent {
            agent.prepare_sandbox(&mut spec, &directory, target.is_some())?;
        }
        let own = spec.workspace_path().map(Path::to_owned);
        let own = own.filter(|path| target.is_some() || *path == directory.workspace_path());
        let quota = own.map(|path| WorkspaceQuota::new(path, spec.limits.max_workspace));
        let policy = config.digest();
        let run = config.identity.run.clone();
        let deadline = SystemTime::now() + spec.limits.max_runtime;
        let stamp = OwnerLabels { owner, run_dir: directory.parent(), deadline };
        let gateway = match proxy {
            None => RunGatewayBackend::open(config, seats.as_ref())?,
            Some(proxy) => {
                let proxy = PreparedGatewayContainer::prepare(proxy, &config, &directory, &stamp)?;
                RunGatewayBackend::Container(Box::new(proxy))
            }
        };
        if let (Some(run), Some(agent)) = (gateway.run(), &agent) {
            spans::record_agent(&run, &agent.entry.name);
        }
        let order = sandbox::SandboxRequest { spec, stamp, directory: directory.path().to_owned() };
        let sandbox =
            SandboxSource::Own(Some(Box::new(SandboxHandle::new(&driver, order.clone())?)));
        let (directories, is_agent) = (vec![directory], agent.is_some());
        let post = |target: DeliveryTarget| {
            target.register_workspace(&order, &driver, &policy).map(Box::new)
        };
        let target = target.map(post).transpose()?;
        Ok(Self { gateway, run, driver, order, sandbox, directories, is_agent, target, quota })
    }

    /// Ends the grace that its program has, once that has begun, before the time; not in a resident sandbox.
    pub fn force_kill_token(&self) -> CancellationToken {
        match &self.sandbox {
            SandboxSource::Own(Some(sandbox)) => sandbox.force_kill_token(),
            SandboxSource::Own(None) | SandboxSource::Resident(_) => CancellationToken::new(),
        }
    }

    /// The run's workspace on this machine, where it has one.
    pub fn workspace_path(&self) -> Option<&Path> {
        self.order.spec.workspace_path()
    }

    /// What the run may spend, for whoever follows it; a gateway in a container keeps that to itself.
    pub fn ledger(&self) -> Option<Arc<BudgetLedger>> {
        self.gateway.run().map(|run| Arc::clone(&run.ledger))
    }

    /// What is kept of each of its two streams.
    pub fn max_output_bytes(&self) -> usize {
        self.order.spec.limits.max_output_bytes
    }

    /// Runs the sandbox to its end, or until `cancel`. `live` is given what it prints, as it comes.
    pub async fn run<W: AsyncWrite + Unpin>(self, cancel: CancellationToken, live: W) -> RunResult {
        let output = OutputCapture::new(self.max_output_bytes(), live);
        Box::pin(self.run_with_output(output, RunHandles { cancel, ..RunHandles::default() })).await
    }

    /// As [`run`](Self::run), for who listens in another way.
    pub async fn run_with_output<W: AsyncWrite + Unpin>(
        self,
        output: OutputCapture<W>,
        reins: RunHandles,
    ) -> RunResult {
        let span = self.gateway.run().map_or_else(Span::none, |run| run.log_span());
        Box::pin(self.run_inner(output, reins)).instrument(span).await
    }

    async fn run_inner<W: AsyncWrite + Unpin>(
        self,
        mut output: OutputCapture<W>,
        reins: RunHandles,
    ) -> RunResult {
        let RunHandles { cancel, leave, answered } = reins;
        let Self { gateway, run, driver, order, mut sandbox, directories, is_agent, target, quota } =
            self;
        let (begun, limits) = (Instant::now(), order.spec.limits);
        let deadline = begun + limits.max_runtime;
        let deadline = gateway.deadline().map_or(deadline, |end| deadline.min(end.into()));
        let (signals, closing) = (gateway.signals(), RunShutdown::default());
        let mut until = pin!(wait_for_stop(&signals, &cancel, deadline, quota.as_ref()));
        tracing::info!(run, root = %order.spec.root, "starting the sandbox");
        let here = gateway.run();
        let trace = here.as_ref().and_then(|run| run.trace.clone());
        let serve = gateway.serve(&signals, closing.clone());
        let live = async {
            let asked = SystemTime::now();
            let ended = tokio::select! {
                biased;
                () = signals.ready.cancelled() => {
                    Box::pin(sandbox.run(&mut output, until)).await
                }
                cause = until.as_mut() => Ok(SandboxExit { cause: Some(cause), ..SandboxExit::default() }),
            };
            let ended = check_final_size(ended, quota.as_ref()).await;
            if let Some(trace) = &trace {
                spans::record_sandbox_span(trace, driver.name(), asked, &ended);
            }
            output.close_listener().await;
            let asked = SystemTime::now();
            let (stdout, answer) = read_output(&mut output, is_agent).await;
            let heard = answer.as_ref().and_then(|answer| answer.as_ref().ok());
            send_answer(answered, heard, here.as_deref());
            // Nothing of the agent's is served while its work is taken out: what is in the workspace reaches nobody. The log
            // stays open for what becomes of the work.
            closing.calls.cancel();
            closing.quiet.cancelled().await;
            let relayed = match (&target, &here, &ended) {
                (Some(target), Some(run), Ok(ended)) => {
                    let is_ok = ended.cause.is_none() && ended.exit_code == Some(0);
                    let words = heard.map(pull_request_text).unwrap_or_default();
                    let source = FinishedRun { run, is_ok, words, leave: &leave };
                    Some(Box::pin(target.deliver(&driver, &order, source)).await)
                }
                _ => None,
            };
            if let (Some(trace), Some(relayed)) = (&trace, &relayed) {
                spans::record_delivery_span(trace, asked, relayed);
            }
            closing.records.cancel();
            (ended, stdout, answer, relayed)
        };
        let ((served, calls), (ended, stdout, answer, relayed)) = tokio::join!(serve, live);
        let is_gone = matches!(sandbox, SandboxSource::Own(_));
        // Nothing is done in the workspace any more.
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
            elapsed: begun.elapsed(),
        }
        .into_result(run)
    }
}

/// Reads what a program has printed on standard output, and the answer in it where the program is an agent. The bytes are
/// the agent's, so they are read on a thread that may be busy with them.
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
    // It fails only where the reading has panicked, and then there is no answer.
    read.await.unwrap_or_else(|_| {
        (CapturedOutput::default(), is_agent.then_some(Err(AgentEnvelopeError::Empty)))
    })
}

/// Returns when the sandbox has to end.
async fn wait_for_stop(
    signals: &GatewaySignals,
    cancel: &CancellationToken,
    deadline: Instant,
    quota: Option<&WorkspaceQuota>,
) -> StopReason {
    tokio::select! {
        () = cancel.cancelled() => StopReason::Cancelled,
        () = signals.gone.cancelled() => StopReason::Cancelled,
        () = signals.exhausted.cancelled() => StopReason::Budget,
        () = sleep_until(deadline) => StopReason::Deadline,
        _ = wait_for_quota(quota) => StopReason::Workspace,
    }
}

/// Looks at the workspace once more when the program has ended: what it wrote last was seen by no other look.
async fn check_final_size(
    ended: Result<SandboxExit, sandbox::SandboxError>,
    quota: Option<&WorkspaceQuota>,
) -> Result<SandboxExit, sandbox::SandboxError> {
    match (ended, quota) {
        (Ok(ended @ SandboxExit { cause: None, .. }), Some(quota)) => {
            let cause = quota.check().await.err().map(|_| StopReason::Workspace);
            Ok(SandboxExit { cause, ..ended })
        }
        (ended, _) => ended,
    }
}

/// Returns when the workspace holds more than it may.
async fn wait_for_quota(quota: Option<&WorkspaceQuota>) -> QuotaExceededError {
    match quota {
        Some(quota) => quota.wait_until_exceeded().await,
        None => pending().await,
    }
}

/// Tells the run's gateway where the sandbox finds its socket.
fn configure_socket(config: &mut GatewayConfig, spec: &mut SandboxSpec, directory: &RunDirectory) {
    spec.run.clone_from(&config.identity.run);
    spec.socket_dir = directory.socket_dir();
    config.listen.socket_path = spec.socket_dir.join("llm.sock");
    // Whoever may give files away gives the socket to the agent. Others open it to all, behind a directory that only
    // they can enter.
    if directory.runs_as_root() {
        config.listen.socket_uid = Some(spec.uid);
        if !config.listen.require_uid.is_empty() {
            config.listen.require_uid = vec![spec.uid];
        }
    } else {
        config.listen.socket_mode = 0o666;
    }
}

/// The texts of a pull request, from the agent's answer.
fn pull_request_text(answer: &AgentEnvelope) -> PullRequestText {
    PullRequestText::from_body(answer.text())
}

/// Whoever is told finds the calls that led to the answer in the log.
fn send_answer(
    answered: Option<oneshot::Sender<AgentEnvelope>>,
    heard: Option<&AgentEnvelope>,
    run: Option<&AgentRun>,
) {
    let Some((answered, heard)) = answered.zip(heard) else { return };
    if let Some(run) = run {
        run.audit.flush_buffered();
    }
    // Nobody has to listen.
    let _ = answered.send(heard.clone());
}

fn log_exit(ended: &Result<SandboxExit, sandbox::SandboxError>, is_gone: bool) {
    match ended {
        Ok(SandboxExit { exit_code, cause, .. }) => {
            let cause = cause.map(tracing::field::debug);
            if is_gone {
                tracing::info!(exit_code, cause, "the sandbox has ended and is removed");
            } else {
                tracing::info!(exit_code, cause, "the run in a resident sandbox has ended");
            }
        }
        Err(error) => tracing::warn!(%error, "there was no sandbox, or it was lost"),
    }
}
