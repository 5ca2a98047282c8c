//! One run in a sandbox, from its socket to its result: the gateway serves in this process, the sandbox is at the
//! other end.
//!
//! **Invariant:** a run that has begun ends in a [`RunResult`], whatever goes wrong, and what it was made of is
//! gone by then; what a killed process leaves is taken away by [`sweep`], which the next run begins with.
//!
//! Where a sandbox is to be there sooner than it can be made, [`slots`] are kept ready; where runs follow each other in the
//! same one, there are [`residents`].

mod agent;
pub mod delivery;
mod directory;
mod envelope;
mod gateway;
mod openclaw;
pub mod proxy;
pub mod quota;
mod request;
pub mod residents;
mod result;
pub mod slots;
pub mod sweep;
mod traced;
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

use crate::app::{Seats, Shutdown};
use crate::base::private_dir;
use crate::budget::Ledger;
use crate::config::Config;
use crate::delivery::outbox::Words;
use crate::run::Run;
use crate::sandbox::output::{Capture, Captured, Output};
use crate::sandbox::spec::{Access, Stamp, Workspace};
use crate::sandbox::{self, Cause, Driver, Ended, Owner, RunSpec, Sandbox, UserRange, host_path};

pub use crate::catalog::Maker;
pub use agent::{Agent, Message, Role};
pub use envelope::{Envelope, Invalid};
pub use request::{Host, Llm, MODEL, Request};
pub use result::{ErrorCode, RunResult, Timings};

use delivery::{Posted, Source, Target};
use directory::Directory;
use gateway::{Gateway, Signals};
use proxy::Proxy;
use quota::{Exceeded, Quota};
use result::Outcome;
use sweep::Sweep;

/// One run, as its host asks for it.
#[derive(Clone, Debug)]
pub struct Order {
    /// The run's gateway. Where it listens is chosen here.
    pub config: Config,
    /// The run's sandbox. Its run id and socket are those of the gateway.
    pub spec: RunSpec,
    /// The agent of the catalog that the sandbox is for, if it is for one.
    pub agent: Option<Agent>,
    /// The branch that the run's work is for, if it is for one.
    pub target: Option<Target>,
    /// What the sandbox is given of this machine has to be below one of these.
    pub roots: Vec<PathBuf>,
    /// Where runs have their directories.
    pub run_dir: PathBuf,
    /// The users of this machine that sandboxes run as.
    pub uids: UserRange,
    /// Who makes the sandbox.
    pub driver: Driver,
    /// Where this machine's engine is, if it has one: whoever makes this sandbox, runs before may have left something there.
    pub docker_socket: PathBuf,
    /// The container that serves the gateway; without one, this process does.
    pub proxy: Option<proxy::Settings>,
    /// Where this process has its runs' gateways, if it has others.
    pub seats: Option<Seats>,
}

impl Order {
    /// The model that its program is told to use.
    pub fn model(&self) -> Option<&str> {
        self.spec.env.get(MODEL).map(String::as_str)
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
        Ok(host_path::check(&self.spec, self.users(), &self.roots, &self.private())?)
    }

    /// The users that its sandbox may have. What the operator lets it write is the shared user's, before and after it.
    fn users(&self) -> UserRange {
        let RunSpec { workspace, mounts, volumes, .. } = &self.spec;
        let given = mounts.iter().map(|mount| mount.access);
        let given = given.chain(volumes.iter().map(|volume| volume.access));
        let workspace = match workspace {
            Workspace::Directory { access, .. } => Some(*access),
            Workspace::None | Workspace::Fresh => None,
        };
        let may_write = given.chain(workspace).any(|access| access == Access::ReadWrite);
        if may_write && self.uids.single().is_none() { UserRange::SHARED } else { self.uids }
    }

    /// What no sandbox may see, because it is the gateway's or the runner's own.
    fn private(&self) -> Vec<PathBuf> {
        let own = [&self.run_dir, &self.docker_socket].map(PathBuf::as_path);
        self.config.private().chain(own).map(Path::to_owned).collect()
    }

    /// What takes away what killed runs of the same installation have left.
    pub fn sweep(&self) -> Sweep {
        Sweep {
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
    let owner = Owner::this().context("`/proc` cannot be read")?;
    Directory::check_length(run_dir, &owner)?;
    if run_dir.exists() { Ok(private_dir::check(run_dir)?) } else { Ok(()) }
}

/// Where a run is executed.
enum Inside {
    /// In a sandbox of its own, until it is run.
    Own(Option<Box<Sandbox>>),
    /// In one that other runs come into, too.
    Resident(Box<residents::Turn>),
}

impl Inside {
    async fn run<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut Output<W>,
        until: impl Future<Output = Cause>,
    ) -> Result<Ended, sandbox::Error> {
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
pub struct Reins {
    /// Ends its program. When that has ended it changes nothing any more: the work is brought to its branch.
    pub cancel: CancellationToken,
    /// Leaves the rest of the delivery, once it is in the outbox, to whoever takes it up there.
    pub leave: CancellationToken,
    /// Is told what the agent has answered as soon as it has ended, before anything becomes of its work.
    pub answered: Option<oneshot::Sender<Envelope>>,
}

/// A run whose socket is bound and whose log is open, or whose gateway's container has all it needs for that.
#[must_use = "a slot that was claimed for it is left behind if it does not run"]
pub struct Prepared {
    gateway: Gateway,
    run: String,
    driver: Driver,
    order: sandbox::Order,
    sandbox: Inside,
    /// The sandbox's, and with a slot the run's own, which keeps its name.
    directories: Vec<Directory>,
    is_agent: bool,
    target: Option<Box<Posted>>,
    /// Where the workspace is a directory that was made for it.
    quota: Option<Quota>,
}

impl Prepared {
    /// Checks everything that can be checked without an engine, then binds the socket. Must be called within a
    /// runtime.
    ///
    /// # Errors
    /// What is wrong with the order, or cannot be bound or opened.
    pub fn new(order: Order) -> anyhow::Result<Self> {
        let target = order.target.clone();
        Self::make(order).inspect_err(|_| target.iter().for_each(Target::abandon))
    }

    fn make(order: Order) -> anyhow::Result<Self> {
        order.check()?;
        let users = order.users();
        let Order { mut config, mut spec, agent, target, run_dir, driver, proxy, seats, .. } =
            order;
        let owner = Owner::this().context("`/proc` cannot be read")?;
        let directory = Directory::create_for(users, &run_dir, &config.identity.run, &owner)?;
        spec.uid = directory.uid();
        if spec.workspace == Workspace::Fresh {
            let path = directory.make_workspace()?;
            spec.workspace = Workspace::Directory { path, access: Access::ReadWrite };
        }
        place(&mut config, &mut spec, &directory);
        if proxy.is_some() {
            // That container keeps the user of its image, which is another than the sandbox's.
            config.listen.socket_mode = 0o666;
        }
        if let Some(target) = &target {
            target.prepare(&mut spec)?;
        }
        if let Some(agent) = &agent {
            agent.prepare(&mut spec, &directory, target.is_some())?;
        }
        let own = spec.workspace_path().map(Path::to_owned);
        let own = own.filter(|path| target.is_some() || *path == directory.workspace());
        let quota = own.map(|path| Quota::new(path, spec.limits.max_workspace));
        let policy = config.digest();
        let run = config.identity.run.clone();
        let deadline = SystemTime::now() + spec.limits.max_runtime;
        let stamp = Stamp { owner, run_dir: directory.parent(), deadline };
        let gateway = match proxy {
            None => Gateway::open(config, seats.as_ref())?,
            Some(proxy) => {
                let proxy = Proxy::prepare(proxy, &config, &directory, &stamp)?;
                Gateway::Container(Box::new(proxy))
            }
        };
        if let (Some(run), Some(agent)) = (gateway.run(), &agent) {
            traced::agent(&run, &agent.entry.name);
        }
        let order = sandbox::Order { spec, stamp, directory: directory.path().to_owned() };
        let sandbox = Inside::Own(Some(Box::new(Sandbox::new(&driver, order.clone())?)));
        let (directories, is_agent) = (vec![directory], agent.is_some());
        let post = |target: Target| target.post(&order, &driver, &policy).map(Box::new);
        let target = target.map(post).transpose()?;
        Ok(Self { gateway, run, driver, order, sandbox, directories, is_agent, target, quota })
    }

    /// Ends the grace that its program has, once that has begun, before the time; not in a resident sandbox.
    pub fn hurry(&self) -> CancellationToken {
        match &self.sandbox {
            Inside::Own(Some(sandbox)) => sandbox.hurry(),
            Inside::Own(None) | Inside::Resident(_) => CancellationToken::new(),
        }
    }

    /// The run's workspace on this machine, where it has one.
    pub fn workspace(&self) -> Option<&Path> {
        self.order.spec.workspace_path()
    }

    /// What the run may spend, for whoever follows it; a gateway in a container keeps that to itself.
    pub fn ledger(&self) -> Option<Arc<Ledger>> {
        self.gateway.run().map(|run| Arc::clone(&run.ledger))
    }

    /// What is kept of each of its two streams.
    pub fn max_output_bytes(&self) -> usize {
        self.order.spec.limits.max_output_bytes
    }

    /// Runs the sandbox to its end, or until `cancel`. `live` is given what it prints, as it comes.
    pub async fn run<W: AsyncWrite + Unpin>(self, cancel: CancellationToken, live: W) -> RunResult {
        let output = Output::new(self.max_output_bytes(), live);
        Box::pin(self.run_into(output, Reins { cancel, ..Reins::default() })).await
    }

    /// As [`run`](Self::run), for who listens in another way.
    pub async fn run_into<W: AsyncWrite + Unpin>(
        self,
        output: Output<W>,
        reins: Reins,
    ) -> RunResult {
        let span = self.gateway.run().map_or_else(Span::none, |run| run.log_span());
        Box::pin(self.drive(output, reins)).instrument(span).await
    }

    async fn drive<W: AsyncWrite + Unpin>(self, mut output: Output<W>, reins: Reins) -> RunResult {
        let Reins { cancel, leave, answered } = reins;
        let Self { gateway, run, driver, order, mut sandbox, .. } = self;
        let Self { directories, is_agent, target, quota, .. } = self;
        let (begun, limits) = (Instant::now(), order.spec.limits);
        let deadline = begun + limits.max_runtime;
        let deadline = gateway.deadline().map_or(deadline, |end| deadline.min(end.into()));
        let (signals, closing) = (gateway.signals(), Shutdown::default());
        let mut until = pin!(cause(&signals, &cancel, deadline, quota.as_ref()));
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
                cause = until.as_mut() => Ok(Ended { cause: Some(cause), ..Ended::default() }),
            };
            let ended = measured(ended, quota.as_ref()).await;
            if let Some(trace) = &trace {
                traced::sandbox(trace, driver.name(), asked, &ended);
            }
            output.end().await;
            let asked = SystemTime::now();
            let (stdout, answer) = read_output(&mut output, is_agent).await;
            let heard = answer.as_ref().and_then(|answer| answer.as_ref().ok());
            tell(answered, heard, here.as_deref());
            // Nothing of the agent's is served while its work is taken out: what is in the workspace reaches nobody. The log
            // stays open for what becomes of the work.
            closing.calls.cancel();
            closing.quiet.cancelled().await;
            let relayed = match (&target, &here, &ended) {
                (Some(target), Some(run), Ok(ended)) => {
                    let is_ok = ended.cause.is_none() && ended.exit_code == Some(0);
                    let words = heard.map(Envelope::text).map(Words::of).unwrap_or_default();
                    let source = Source { run, is_ok, words, leave: &leave };
                    Some(Box::pin(target.deliver(&driver, &order, source)).await)
                }
                _ => None,
            };
            if let (Some(trace), Some(relayed)) = (&trace, &relayed) {
                traced::relay(trace, asked, relayed);
            }
            closing.records.cancel();
            (ended, stdout, answer, relayed)
        };
        let ((served, calls), (ended, stdout, answer, relayed)) = tokio::join!(serve, live);
        let is_gone = matches!(sandbox, Inside::Own(_));
        // Nothing is done in the workspace any more.
        drop(sandbox);
        for directory in directories {
            directory.remove().await;
        }
        log_end(&ended, is_gone);
        Outcome {
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
    output: &mut Output<W>,
    is_agent: bool,
) -> (Captured, Option<Result<Envelope, Invalid>>) {
    let printed = mem::replace(&mut output.stdout, Capture::new(0));
    let read = spawn_blocking(move || {
        let stdout = printed.finish();
        let answer = is_agent.then(|| Envelope::parse(&stdout.text));
        (stdout, answer)
    });
    // It fails only where the reading has panicked, and then there is no answer.
    read.await.unwrap_or_else(|_| (Captured::default(), is_agent.then_some(Err(Invalid::Empty))))
}

/// Returns when the sandbox has to end.
async fn cause(
    signals: &Signals,
    cancel: &CancellationToken,
    deadline: Instant,
    quota: Option<&Quota>,
) -> Cause {
    tokio::select! {
        () = cancel.cancelled() => Cause::Cancelled,
        () = signals.gone.cancelled() => Cause::Cancelled,
        () = signals.exhausted.cancelled() => Cause::Budget,
        () = sleep_until(deadline) => Cause::Deadline,
        _ = exceeded(quota) => Cause::Workspace,
    }
}

/// Looks at the workspace once more when the program has ended: what it wrote last was seen by no other look.
async fn measured(
    ended: Result<Ended, sandbox::Error>,
    quota: Option<&Quota>,
) -> Result<Ended, sandbox::Error> {
    match (ended, quota) {
        (Ok(ended @ Ended { cause: None, .. }), Some(quota)) => {
            let cause = quota.check().await.err().map(|_| Cause::Workspace);
            Ok(Ended { cause, ..ended })
        }
        (ended, _) => ended,
    }
}

/// Returns when the workspace holds more than it may.
async fn exceeded(quota: Option<&Quota>) -> Exceeded {
    match quota {
        Some(quota) => quota.exceeded().await,
        None => pending().await,
    }
}

/// Tells the run's gateway where the sandbox finds its socket.
fn place(config: &mut Config, spec: &mut RunSpec, directory: &Directory) {
    spec.run.clone_from(&config.identity.run);
    spec.socket_dir = directory.socket_dir();
    config.listen.socket_path = spec.socket_dir.join("llm.sock");
    // Whoever may give files away gives the socket to the agent. Others open it to all, behind a directory that only
    // they can enter.
    if directory.is_roots() {
        config.listen.socket_uid = Some(spec.uid);
        if !config.listen.require_uid.is_empty() {
            config.listen.require_uid = vec![spec.uid];
        }
    } else {
        config.listen.socket_mode = 0o666;
    }
}

/// Whoever is told finds the calls that led to the answer in the log.
fn tell(answered: Option<oneshot::Sender<Envelope>>, heard: Option<&Envelope>, run: Option<&Run>) {
    let Some((answered, heard)) = answered.zip(heard) else { return };
    if let Some(run) = run {
        run.audit.flush();
    }
    // Nobody has to listen.
    let _ = answered.send(heard.clone());
}

fn log_end(ended: &Result<Ended, sandbox::Error>, is_gone: bool) {
    match ended {
        Ok(Ended { exit_code, cause, .. }) => {
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
