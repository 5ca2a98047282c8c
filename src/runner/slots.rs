//! Sandboxes that are kept ready, so that a run can begin sooner than one can be made.
//!
//! A pool has slots of one kind: the same root, first process, limits and driver. A run of this kind claims one, has it
//! to itself, and takes it along when it ends; then another is made.
//!
//! **Invariant:** no slot is ever used twice, nor used when it is old. What a slot has of a run, it has by its claim.

use std::collections::VecDeque;
use std::mem;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::directory::Directory;
use super::gateway::Gateway;
use super::quota::Quota;
use super::{Inside, Order, Prepared, place};
use crate::sandbox::spec::{Access, Limits, Mount, Root, Stamp, Workspace};
use crate::sandbox::{self, Driver, Owner, RunSpec, Slot, UserRange};

/// Slots of one kind, kept ready by [`Pool::keep`].
pub struct Pool {
    kind: Kind,
    stock: Stock,
    run_dir: PathBuf,
    uids: UserRange,
    ready: Mutex<VecDeque<Ready>>,
    /// To be taken away.
    spent: Mutex<Vec<Ready>>,
    /// One was claimed.
    changed: Notify,
}

/// How many slots are kept, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Stock {
    pub count: usize,
    /// An older one is replaced: what its root was made of may have changed since.
    pub max_age: Duration,
}

/// Why a run has no slot. It can still be run as every other.
#[derive(Debug, thiserror::Error)]
pub enum Unclaimed {
    #[error("no slot is ready")]
    NoneReady,
    #[error("a slot cannot be given {0} any more")]
    Late(&'static str),
    #[error("a slot is told by cogni-init what it is for, and cannot do without")]
    NoInit,
    #[error("the slots have another {0}")]
    Other(&'static str),
    #[error(transparent)]
    Order(#[from] anyhow::Error),
}

/// What slots have in common with the runs that they are for.
#[derive(Clone, Debug, PartialEq)]
struct Kind {
    driver: Driver,
    root: Root,
    init: PathBuf,
    workspace: Workspace,
    /// The program of an agent, where that is ours.
    program: Option<Mount>,
    limits: Limits,
}

struct Ready {
    id: String,
    slot: Slot,
    directory: Directory,
    workspace: Workspace,
    born: Instant,
}

/// What a run has beside its slot.
struct Bound {
    gateway: Gateway,
    spec: RunSpec,
    stamp: Stamp,
    name: Directory,
}

impl Pool {
    /// For runs such as `order`. Nothing is started before [`Pool::keep`].
    ///
    /// # Errors
    /// What is wrong with the order, or why there are no slots for such runs.
    pub fn new(order: &Order, stock: Stock) -> Result<Self, Unclaimed> {
        let kind = Kind::of(order)?;
        order.check()?;
        let (run_dir, uids) = (order.run_dir.clone(), order.uids);
        let (ready, spent, changed) = (Mutex::default(), Mutex::default(), Notify::new());
        Ok(Self { kind, stock, run_dir, uids, ready, spent, changed })
    }

    /// How many are ready.
    pub fn ready(&self) -> usize {
        lock(&self.ready).len()
    }

    /// Gives a slot to a run. Its workspace may be filled before it is run. Must be called within a runtime.
    ///
    /// # Errors
    /// Why there is none for this run, or what is wrong with its order.
    pub fn claim(&self, order: Order) -> Result<Prepared, Unclaimed> {
        order.check()?;
        self.kind.suits(&Kind::of(&order)?)?;
        let ready = self.take().ok_or(Unclaimed::NoneReady)?;
        self.changed.notify_one();
        match self.bind(&order, &ready) {
            Ok(Bound { gateway, spec, stamp, name }) => {
                tracing::info!(run = spec.run, slot = ready.id, "claimed a slot");
                let directory = ready.directory.path().to_owned();
                let sandbox = ready.slot.claim(&spec);
                let quota = spec.workspace_path();
                let quota =
                    quota.map(|path| Quota::new(path.to_owned(), spec.limits.max_workspace));
                Ok(Prepared {
                    gateway,
                    run: spec.run.clone(),
                    driver: order.driver,
                    order: sandbox::Order { spec, stamp, directory },
                    sandbox: Inside::Own(Some(Box::new(sandbox))),
                    directories: vec![ready.directory, name],
                    is_agent: order.agent.is_some(),
                    target: None,
                    quota,
                })
            }
            Err(error) => {
                lock(&self.spent).push(ready);
                Err(error.into())
            }
        }
    }

    /// Opens the run's log, and binds its socket where the slot finds it.
    fn bind(&self, order: &Order, ready: &Ready) -> anyhow::Result<Bound> {
        let (mut config, mut spec) = (order.config.clone(), order.spec.clone());
        let owner = Owner::this().context("`/proc` cannot be read")?;
        let name = Directory::create(&self.run_dir, &config.identity.run, &owner)?;
        spec.uid = ready.directory.uid();
        place(&mut config, &mut spec, &ready.directory);
        spec.workspace = ready.workspace.clone();
        if let Some(agent) = &order.agent {
            agent.prepare(&mut spec, &ready.directory, false)?;
        }
        let deadline = SystemTime::now() + spec.limits.max_runtime;
        let stamp = Stamp { owner, run_dir: name.parent(), deadline };
        let gateway = Gateway::open(config, order.seats.as_ref())?;
        Ok(Bound { gateway, spec, stamp, name })
    }

    /// Keeps the stock until `stop`, which is the way to end it, and then takes away what is left of it.
    pub async fn keep(&self, stop: CancellationToken) {
        let mut pause = FIRST_PAUSE;
        while !stop.is_cancelled() {
            self.take_away_spent().await;
            let mut wait = LOOK;
            if self.ready() < self.stock.count {
                match Box::pin(self.make(&stop)).await {
                    Ok(ready) => {
                        lock(&self.ready).push_back(ready);
                        pause = FIRST_PAUSE;
                        continue;
                    }
                    Err(_) if stop.is_cancelled() => break,
                    Err(error) => tracing::warn!("cannot make a slot: {error:#}"),
                }
                wait = pause;
                pause = (pause * 2).min(LAST_PAUSE);
            }
            tokio::select! {
                () = sleep(wait) => (),
                () = self.changed.notified(), if wait == LOOK => (),
                () = stop.cancelled() => (),
            }
        }
        let all = lock(&self.ready).drain(..).collect::<Vec<_>>();
        lock(&self.spent).extend(all);
        self.take_away_spent().await;
    }

    /// The oldest that is good.
    fn take(&self) -> Option<Ready> {
        loop {
            let ready = lock(&self.ready).pop_front()?;
            if self.is_good(&ready) {
                return Some(ready);
            }
            lock(&self.spent).push(ready);
        }
    }

    fn is_good(&self, ready: &Ready) -> bool {
        ready.slot.is_waiting() && ready.born.elapsed() < self.stock.max_age
    }

    async fn take_away_spent(&self) {
        let bad: Vec<_> = {
            let mut ready = lock(&self.ready);
            let (good, bad) = ready.drain(..).partition(|ready| self.is_good(ready));
            *ready = good;
            bad.into()
        };
        let spent = mem::take(&mut *lock(&self.spent));
        for Ready { slot, directory, .. } in bad.into_iter().chain(spent) {
            slot.remove().await;
            directory.remove().await;
        }
    }

    async fn make(&self, stop: &CancellationToken) -> anyhow::Result<Ready> {
        let Kind { driver, root, init, workspace, program, limits } = &self.kind;
        let owner = Owner::this().context("`/proc` cannot be read")?;
        let id = format!("slot-{}", Uuid::now_v7());
        let directory = Directory::create_for(self.uids, &self.run_dir, &id, &owner)?;
        let workspace = match workspace {
            Workspace::Fresh => {
                let path = directory.make_workspace()?;
                Workspace::Directory { path, access: Access::ReadWrite }
            }
            other => other.clone(),
        };
        let deadline = SystemTime::now() + self.stock.max_age + limits.max_runtime;
        let order = sandbox::Order {
            spec: RunSpec {
                run: id.clone(),
                root: root.clone(),
                argv: vec![],
                uid: directory.uid(),
                env: [].into(),
                limits: *limits,
                grace: Duration::ZERO,
                workspace: workspace.clone(),
                mounts: program.iter().cloned().collect(),
                volumes: vec![],
                socket_dir: directory.socket_dir(),
                init: Some(init.clone()),
                has_gateway: true,
            },
            stamp: Stamp { owner, run_dir: directory.parent(), deadline },
            directory: directory.path().to_owned(),
        };
        let slot = Slot::start(driver, order, stop.cancelled()).await?;
        tracing::debug!(slot = id, "a slot is ready");
        Ok(Ready { id, slot, directory, workspace, born: Instant::now() })
    }
}

impl Kind {
    fn of(Order { driver, spec, agent, target, proxy, .. }: &Order) -> Result<Self, Unclaimed> {
        if target.is_some() {
            return Err(Unclaimed::Late("a branch to work on"));
        }
        if proxy.is_some() {
            return Err(Unclaimed::Late("a gateway in a container"));
        }
        if !spec.mounts.is_empty() {
            return Err(Unclaimed::Late("a mount"));
        }
        if !spec.volumes.is_empty() {
            return Err(Unclaimed::Late("a volume"));
        }
        if matches!(spec.workspace, Workspace::Directory { .. }) {
            return Err(Unclaimed::Late("a directory as its workspace"));
        }
        Ok(Self {
            driver: driver.clone(),
            root: spec.root.clone(),
            init: spec.init.clone().ok_or(Unclaimed::NoInit)?,
            // An agent is never without one.
            workspace: if agent.is_some() { Workspace::Fresh } else { spec.workspace.clone() },
            program: agent.as_ref().and_then(|agent| agent.program(spec)),
            limits: spec.limits,
        })
    }

    fn suits(&self, of_run: &Self) -> Result<(), Unclaimed> {
        // How long a run takes and how much it says is not the sandbox's own limit.
        let Limits { max_runtime, max_output_bytes, max_workspace, .. } = of_run.limits;
        let limits = Limits { max_runtime, max_output_bytes, max_workspace, ..self.limits };
        let differ = [
            ("driver", self.driver != of_run.driver),
            ("root", self.root != of_run.root),
            ("first process", self.init != of_run.init),
            ("kind of workspace", self.workspace != of_run.workspace),
            ("program", self.program != of_run.program),
            ("limit of memory, processes or processors", limits != of_run.limits),
        ];
        match differ.into_iter().find(|(_, differs)| *differs) {
            Some((what, _)) => Err(Unclaimed::Other(what)),
            None => Ok(()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often it is looked whether all of them still wait.
const LOOK: Duration = Duration::from_millis(500);

/// Before another try to make one, and again before the next.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_mins(1);
