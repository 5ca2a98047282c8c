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

use super::directory::RunDirectory;
use super::quota::WorkspaceQuota;
use super::run_gateway::RunGatewayBackend;
use super::{PreparedRun, RunPlan, SandboxSource, configure_socket};
use crate::sandbox::spec::{
    BindMount, MountAccess, OwnerLabels, RootSource, SandboxLimits, WorkspaceMount,
};
use crate::sandbox::{self, OwnerProcess, SandboxDriver, SandboxSpec, UserRange, WarmSlot};

/// Slots of one kind, kept ready by [`WarmPool::maintain`].
pub struct WarmPool {
    kind: SlotProfile,
    stock: WarmPoolConfig,
    run_dir: PathBuf,
    uids: UserRange,
    ready: Mutex<VecDeque<ReadySlot>>,
    /// To be taken away.
    spent: Mutex<Vec<ReadySlot>>,
    /// One was claimed.
    changed: Notify,
}

/// How many slots are kept, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct WarmPoolConfig {
    pub count: usize,
    /// An older one is replaced: what its root was made of may have changed since.
    pub max_age: Duration,
}

/// Why a run has no slot. It can still be run as every other.
#[derive(Debug, thiserror::Error)]
pub enum WarmClaimError {
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
struct SlotProfile {
    driver: SandboxDriver,
    root: RootSource,
    init: PathBuf,
    workspace: WorkspaceMount,
    /// The program of an agent, where that is ours.
    program: Option<BindMount>,
    limits: SandboxLimits,
}

struct ReadySlot {
    id: String,
    slot: WarmSlot,
    directory: RunDirectory,
    workspace: WorkspaceMount,
    born: Instant,
}

/// What a run has beside its slot.
struct SlotBinding {
    gateway: RunGatewayBackend,
    spec: SandboxSpec,
    stamp: OwnerLabels,
    name: RunDirectory,
}

impl WarmPool {
    /// For runs such as `order`. Nothing is started before [`WarmPool::maintain`].
    ///
    /// # Errors
    /// What is wrong with the order, or why there are no slots for such runs.
    pub fn new(order: &RunPlan, stock: WarmPoolConfig) -> Result<Self, WarmClaimError> {
        let kind = SlotProfile::from_plan(order)?;
        order.check()?;
        let (run_dir, uids) = (order.run_dir.clone(), order.uids);
        let (ready, spent, changed) = (Mutex::default(), Mutex::default(), Notify::new());
        Ok(Self { kind, stock, run_dir, uids, ready, spent, changed })
    }

    /// How many are ready.
    pub fn ready_count(&self) -> usize {
        lock_mutex(&self.ready).len()
    }

    /// Gives a slot to a run. Its workspace may be filled before it is run. Must be called within a runtime.
    ///
    /// # Errors
    /// Why there is none for this run, or what is wrong with its order.
    pub fn claim(&self, order: RunPlan) -> Result<PreparedRun, WarmClaimError> {
        order.check()?;
        self.kind.check_compatible(&SlotProfile::from_plan(&order)?)?;
        let ready = self.take_oldest_usable().ok_or(WarmClaimError::NoneReady)?;
        self.changed.notify_one();
        match self.bind_slot(&order, &ready) {
            Ok(SlotBinding { gateway, spec, stamp, name }) => {
                tracing::info!(run = spec.run, slot = ready.id, "claimed a slot");
                let directory = ready.directory.path().to_owned();
                let sandbox = ready.slot.claim(&spec);
                let quota = spec.workspace_path();
                let quota = quota
                    .map(|path| WorkspaceQuota::new(path.to_owned(), spec.limits.max_workspace));
                Ok(PreparedRun {
                    gateway,
                    run: spec.run.clone(),
                    driver: order.driver,
                    order: sandbox::SandboxRequest { spec, stamp, directory },
                    sandbox: SandboxSource::Own(Some(Box::new(sandbox))),
                    directories: vec![ready.directory, name],
                    is_agent: order.agent.is_some(),
                    target: None,
                    quota,
                })
            }
            Err(error) => {
                lock_mutex(&self.spent).push(ready);
                Err(error.into())
            }
        }
    }

    /// Opens the run's log, and binds its socket where the slot finds it.
    fn bind_slot(&self, order: &RunPlan, ready: &ReadySlot) -> anyhow::Result<SlotBinding> {
        let (mut config, mut spec) = (order.config.clone(), order.spec.clone());
        let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
        let name = RunDirectory::create(&self.run_dir, &config.identity.run, &owner)?;
        spec.uid = ready.directory.uid();
        configure_socket(&mut config, &mut spec, &ready.directory);
        spec.workspace = ready.workspace.clone();
        if let Some(agent) = &order.agent {
            agent.prepare_sandbox(&mut spec, &ready.directory, false)?;
        }
        let deadline = SystemTime::now() + spec.limits.max_runtime;
        let stamp = OwnerLabels { owner, run_dir: name.parent(), deadline };
        let gateway = RunGatewayBackend::open(config, order.seats.as_ref())?;
        Ok(SlotBinding { gateway, spec, stamp, name })
    }

    /// Keeps the stock until `stop`, which is the way to end it, and then takes away what is left of it.
    pub async fn maintain(&self, stop: CancellationToken) {
        let mut pause = MIN_RETRY_DELAY;
        while !stop.is_cancelled() {
            self.remove_spent().await;
            let mut wait = CHECK_INTERVAL;
            if self.ready_count() < self.stock.count {
                match Box::pin(self.create_slot(&stop)).await {
                    Ok(ready) => {
                        lock_mutex(&self.ready).push_back(ready);
                        pause = MIN_RETRY_DELAY;
                        continue;
                    }
                    Err(_) if stop.is_cancelled() => break,
                    Err(error) => tracing::warn!("cannot make a slot: {error:#}"),
                }
                wait = pause;
                pause = (pause * 2).min(MAX_RETRY_DELAY);
            }
            tokio::select! {
                () = sleep(wait) => (),
                () = self.changed.notified(), if wait == CHECK_INTERVAL => (),
                () = stop.cancelled() => (),
            }
        }
        let all = lock_mutex(&self.ready).drain(..).collect::<Vec<_>>();
        lock_mutex(&self.spent).extend(all);
        self.remove_spent().await;
    }

    /// The oldest that is good.
    fn take_oldest_usable(&self) -> Option<ReadySlot> {
        loop {
            let ready = lock_mutex(&self.ready).pop_front()?;
            if self.is_usable(&ready) {
                return Some(ready);
            }
            lock_mutex(&self.spent).push(ready);
        }
    }

    fn is_usable(&self, ready: &ReadySlot) -> bool {
        ready.slot.is_waiting() && ready.born.elapsed() < self.stock.max_age
    }

    async fn remove_spent(&self) {
        let bad: Vec<_> = {
            let mut ready = lock_mutex(&self.ready);
            let (good, bad) = ready.drain(..).partition(|ready| self.is_usable(ready));
            *ready = good;
            bad.into()
        };
        let spent = mem::take(&mut *lock_mutex(&self.spent));
        for ReadySlot { slot, directory, .. } in bad.into_iter().chain(spent) {
            slot.remove().await;
            directory.remove().await;
        }
    }

    async fn create_slot(&self, stop: &CancellationToken) -> anyhow::Result<ReadySlot> {
        let SlotProfile { driver, root, init, workspace, program, limits } = &self.kind;
        let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
        let id = format!("slot-{}", Uuid::now_v7());
        let directory = RunDirectory::create_for_users(self.uids, &self.run_dir, &id, &owner)?;
        let workspace = match workspace {
            WorkspaceMount::Fresh => {
                let path = directory.create_workspace()?;
                WorkspaceMount::Directory { path, access: MountAccess::ReadWrite }
            }
            other => other.clone(),
        };
        let deadline = SystemTime::now() + self.stock.max_age + limits.max_runtime;
        let order = sandbox::SandboxRequest {
            spec: SandboxSpec {
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
            stamp: OwnerLabels { owner, run_dir: directory.parent(), deadline },
            directory: directory.path().to_owned(),
        };
        let slot = WarmSlot::start(driver, order, stop.cancelled()).await?;
        tracing::debug!(slot = id, "a slot is ready");
        Ok(ReadySlot { id, slot, directory, workspace, born: Instant::now() })
    }
}

impl SlotProfile {
    fn from_plan(
        RunPlan { driver, spec, agent, target, proxy, .. }: &RunPlan,
    ) -> Result<Self, WarmClaimError> {
        if target.is_some() {
            return Err(WarmClaimError::Late("a branch to work on"));
        }
        if proxy.is_some() {
            return Err(WarmClaimError::Late("a gateway in a container"));
        }
        if !spec.mounts.is_empty() {
            return Err(WarmClaimError::Late("a mount"));
        }
        if !spec.volumes.is_empty() {
            return Err(WarmClaimError::Late("a volume"));
        }
        if matches!(spec.workspace, WorkspaceMount::Directory { .. }) {
            return Err(WarmClaimError::Late("a directory as its workspace"));
        }
        Ok(Self {
            driver: driver.clone(),
            root: spec.root.clone(),
            init: spec.init.clone().ok_or(WarmClaimError::NoInit)?,
            // An agent is never without one.
            workspace: if agent.is_some() { WorkspaceMount::Fresh } else { spec.workspace.clone() },
            program: agent.as_ref().and_then(|agent| agent.program_mount(spec)),
            limits: spec.limits,
        })
    }

    fn check_compatible(&self, of_run: &Self) -> Result<(), WarmClaimError> {
        // How long a run takes and how much it says is not the sandbox's own limit.
        let SandboxLimits { max_runtime, max_output_bytes, max_workspace, .. } = of_run.limits;
        let limits = SandboxLimits { max_runtime, max_output_bytes, max_workspace, ..self.limits };
        let differ = [
            ("driver", self.driver != of_run.driver),
            ("root", self.root != of_run.root),
            ("first process", self.init != of_run.init),
            ("kind of workspace", self.workspace != of_run.workspace),
            ("program", self.program != of_run.program),
            ("limit of memory, processes or processors", limits != of_run.limits),
        ];
        match differ.into_iter().find(|(_, differs)| *differs) {
            Some((what, _)) => Err(WarmClaimError::Other(what)),
            None => Ok(()),
        }
    }
}

fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often it is looked whether all of them still wait.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Before another try to make one, and again before the next.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_mins(1);
