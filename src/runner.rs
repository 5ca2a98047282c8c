//! One run in a sandbox, from its socket to its result: the gateway serves in this process, the sandbox is at the
//! other end.
//!
//! **Invariant:** a run that has begun ends in a [`RunResult`], whatever goes wrong, and what it was made of is
//! gone by then; what a killed process leaves is taken away by [`sweep`], which the next run begins with.

mod agent;
mod conversation;
pub mod delivery;
mod directory;
mod request;
mod result;
pub mod sweep;

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use tokio::io::AsyncWrite;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::config::Config;
use crate::relay::outbox::Words;
use crate::sandbox::output::Output;
use crate::sandbox::spec::{Stamp, UID};
use crate::sandbox::{self, Cause, Driver, Ended, Owner, RunSpec, host_path};

pub use agent::{Agent, Envelope};
pub use request::{Host, Llm, MODEL, Maker, Request};
pub use result::{ErrorCode, RunResult, Timings};

use delivery::{Source, Target};
use directory::Directory;
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
    /// Who makes the sandbox.
    pub driver: Driver,
    /// Between SIGTERM and SIGKILL.
    pub grace: Duration,
}

impl Order {
    /// What takes away what killed runs of the same installation have left.
    pub fn sweep(&self) -> Sweep {
        Sweep {
            docker_socket: match &self.driver {
                Driver::Docker { socket } => socket.clone(),
                // Whoever has never asked an engine has left nothing with one.
                Driver::Embedded(_) => PathBuf::new(),
            },
            run_dir: self.run_dir.clone(),
            apply: true,
            all: false,
        }
    }
}

/// A run whose socket is bound and whose log is open.
pub struct Prepared {
    app: App,
    driver: Driver,
    sandbox: sandbox::Order,
    directory: Directory,
    is_agent: bool,
    target: Option<Target>,
    /// The hash of the gateway's configuration.
    policy: String,
}

impl Prepared {
    /// Checks everything that can be checked without an engine, then binds the socket. Must be called within a
    /// runtime.
    ///
    /// # Errors
    /// What is wrong with the order, or cannot be bound or opened.
    pub fn new(order: Order) -> anyhow::Result<Self> {
        let Order { mut config, mut spec, agent, target, roots, run_dir, driver, grace } = order;
        spec.check()?;
        driver.check(&spec)?;
        host_path::check(&spec, &roots)?;
        let owner = Owner::this().context("`/proc` cannot be read")?;
        let directory = Directory::create(&run_dir, &config.identity.run, &owner)?;
        spec.run.clone_from(&config.identity.run);
        spec.socket_dir = directory.socket_dir();
        if let Some(target) = &target {
            target.prepare(&mut spec, &directory)?;
        }
        if let Some(agent) = &agent {
            agent.prepare(&mut spec, &directory)?;
        }
        config.listen.socket_path = spec.socket_dir.join("llm.sock");
        // Whoever may give files away gives the socket to the agent. Others open it to all, behind a directory that
        // only they can enter.
        if directory.is_roots() {
            config.listen.socket_uid = Some(UID);
        } else {
            config.listen.socket_mode = 0o666;
        }
        let policy = config.digest();
        let app = App::build(config)?;
        let deadline = SystemTime::now() + spec.limits.max_runtime;
        let stamp = Stamp { owner, run_dir: directory.parent(), deadline };
        let sandbox = sandbox::Order { spec, stamp, directory: directory.path().to_owned(), grace };
        let is_agent = agent.is_some();
        Ok(Self { app, driver, sandbox, directory, is_agent, target, policy })
    }

    /// Runs the sandbox to its end, or until `cancel`. `live` is given what it prints, as it comes.
    pub async fn run<W: AsyncWrite + Unpin>(self, cancel: CancellationToken, live: W) -> RunResult {
        let Self { app, driver, sandbox, directory, is_agent, target, policy } = self;
        let begun = Instant::now();
        let run = app.runs().list().pop().expect("an app on a socket has one run");
        let limits = sandbox.spec.limits;
        let deadline = begun + limits.max_runtime;
        let deadline = run.ledger.deadline().map_or(deadline, |end| deadline.min(end.into()));
        let (gateway_stop, gateway_gone) = (CancellationToken::new(), CancellationToken::new());
        let until = async {
            tokio::select! {
                () = cancel.cancelled() => Cause::Cancelled,
                () = gateway_gone.cancelled() => Cause::Cancelled,
                () = run.ledger.exhausted().cancelled() => Cause::Budget,
                () = sleep_until(deadline) => Cause::Deadline,
            }
        };
        tracing::info!(run = run.identity.run, root = %sandbox.spec.root, "starting the sandbox");
        let mut output = Output::new(limits.max_output_bytes, live);
        let serve = async {
            let served = app.serve(gateway_stop.clone()).await;
            gateway_gone.cancel();
            served
        };
        let live = async {
            let ended = Box::pin(driver.run(&sandbox, &mut output, until)).await;
            // The log is open as long as the gateway serves.
            let relayed = match (&target, &ended) {
                (Some(target), Ok(ended)) => {
                    let is_ok = ended.cause.is_none() && ended.exit_code == Some(0);
                    let words = Words { body: said(is_agent, &output), ..Words::default() };
                    let source = Source { run: &run, policy: &policy, is_ok, words };
                    Some(Box::pin(target.deliver(&driver, &sandbox, source)).await)
                }
                _ => None,
            };
            gateway_stop.cancel();
            (ended, relayed)
        };
        let (served, (ended, relayed)) = tokio::join!(serve, live);
        drop(directory);
        log_end(&ended);
        Outcome {
            ended,
            served,
            stdout: output.stdout.finish(),
            stderr: output.stderr.finish(),
            is_agent,
            relayed,
            is_exhausted: run.ledger.exhausted().is_cancelled(),
            is_denied: run.ledger.is_denied(),
            elapsed: begun.elapsed(),
        }
        .into_result(&run)
    }
}

/// What an agent has answered, for whoever looks at its work.
fn said<W: AsyncWrite + Unpin>(is_agent: bool, output: &Output<W>) -> String {
    let stdout = || output.stdout.clone().finish().text;
    let envelope = is_agent.then(|| Envelope::parse(&stdout()).ok()).flatten();
    envelope.map(|envelope| envelope.text()).unwrap_or_default()
}

fn log_end(ended: &Result<Ended, sandbox::Error>) {
    match ended {
        Ok(ended) => {
            let cause = ended.cause.map(tracing::field::debug);
            tracing::info!(
                exit_code = ended.exit_code,
                cause,
                "the sandbox has ended and is removed"
            );
        }
        Err(error) => tracing::warn!(%error, "there was no sandbox, or it was lost"),
    }
}
