//! Warm sandboxes: sandboxes that are started in advance, so that a run does not wait for the start of its sandbox.
//!
//! A pool has warm sandboxes (slots) of one kind: the same root, first process, limits and driver. A run of this kind
//! claims a slot, uses it alone, and removes it at the run's end. The pool then makes another slot.
//!
//! **Invariant:** no slot is used twice, and no slot is used after its maximum age. A slot receives everything that
//! belongs to a run only when the run claims the slot.

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
use super::workspace::ObstaclePolicy;
use super::{PreparedRun, RunInputs, RunPlan, SandboxSource, configure_socket};
use crate::sandbox::spec::{
    BindMount, MountAccess, OwnerLabels, RootSource, SandboxLimits, SandboxTask, WorkspaceMount,
};
use crate::sandbox::{self, OwnerProcess, SandboxDriver, SandboxSpec, UserRange, WarmSlot};

/// A pool of slots of one kind. [`WarmPool::maintain`] keeps the pool filled.
pub struct WarmPool {
    profile: SlotProfile,
    config: WarmPoolConfig,
    run_dir: PathBuf,
    uids: UserRange,
    ready: Mutex<VecDeque<ReadySlot>>,
    /// The slots that [`WarmPool::maintain`] has to remove.
    spent: Mutex<Vec<ReadySlot>>,
    /// Notified when a run has claimed a slot.
    changed: Notify,
}

/// The number of ready slots and their maximum age.
#[derive(Clone, Copy, Debug)]
pub struct WarmPoolConfig {
    pub count: usize,
    /// The maximum age of a slot. An older slot is replaced, because the image or directory of its root may have
    /// changed since.
    pub max_age: Duration,
}

/// An error of a run that cannot have a slot. The caller can still start the run in a sandbox of its own.
#[derive(Debug, thiserror::Error)]
pub enum WarmClaimError {
    #[error("no slot is ready")]
    NoneReady,
    #[error("a warm sandbox cannot take {0}: it is fixed when the sandbox is created")]
    FixedAtCreation(&'static str),
    #[error("warm sandboxes need `cogni-init` as their first process; leave out `--init none`")]
    NoInit,
    #[error("the run needs a different {0} than the warm sandboxes have")]
    ProfileMismatch(&'static str),
    #[error(transparent)]
    Failed(#[from] anyhow::Error),
}

/// The properties that the slots of a pool and their runs have in common.
#[derive(Clone, Debug, PartialEq)]
struct SlotProfile {
    driver: SandboxDriver,
    root: RootSource,
    init: PathBuf,
    workspace: WorkspaceMount,
    /// The mount of the agent's program, if the program is the project's own.
    program: Option<BindMount>,
    limits: SandboxLimits,
}

/// A started slot that waits for a run.
struct ReadySlot {
    id: String,
    slot: WarmSlot,
    directory: RunDirectory,
    workspace: WorkspaceMount,
    created: Instant,
}

/// The parts of a run that are made when the run claims a slot.
struct SlotBinding {
    gateway: RunGatewayBackend,
    spec: SandboxSpec,
    labels: OwnerLabels,
    name: RunDirectory,
}

impl WarmPool {
    /// Makes an empty pool for runs of the same kind as `plan`. [`WarmPool::maintain`] starts the slots.
    ///
    /// # Errors
    /// Returns `Late` or `NoInit` if runs of this kind cannot use slots, and `Order` if the plan fails its check.
    pub fn new(plan: &RunPlan, config: WarmPoolConfig) -> Result<Self, WarmClaimError> {
        let profile = SlotProfile::from_plan(plan)?;
        plan.check()?;
        let (run_dir, uids) = (plan.run_dir.clone(), plan.uids);
        let (ready, spent, changed) = (Mutex::default(), Mutex::default(), Notify::new());
        Ok(Self { profile, config, run_dir, uids, ready, spent, changed })
    }

    /// Returns the number of ready slots.
    pub fn ready_count(&self) -> usize {
        lock_mutex(&self.ready).len()
    }

    /// Gives a slot to a run. The caller may fill the run's workspace before the run starts. Must be called within a
    /// runtime.
    ///
    /// # Errors
    /// Returns `NoneReady` if no slot is ready, `Other` if the run needs another kind of slot, and `Order` if the plan
    /// fails its check or the run's gateway cannot be opened. Also returns the errors of [`WarmPool::new`].
    pub fn claim(&self, plan: RunPlan, inputs: RunInputs) -> Result<PreparedRun, WarmClaimError> {
        plan.check_inputs(&inputs)?;
        self.profile.check_compatible(&SlotProfile::from_plan(&plan)?)?;
        let ready = self.take_oldest_usable().ok_or(WarmClaimError::NoneReady)?;
        self.changed.notify_one();
        let (driver, is_agent) = (plan.driver.clone(), plan.agent.is_some());
        match self.bind_slot(plan, inputs.models, &ready) {
            Ok(SlotBinding { gateway, spec, labels, name }) => {
                tracing::info!(run = spec.run, slot = ready.id, "claimed a slot");
                // The limits of time, output and workspace are the run's, not the slot's.
                let directory = ready.directory.path().to_owned();
                let sandbox = ready.slot.claim(&spec);
                let quota = spec.workspace_path();
                let quota = quota
                    .map(|path| WorkspaceQuota::new(path.to_owned(), spec.limits.max_workspace));
                Ok(PreparedRun {
                    gateway,
                    run: spec.run.clone(),
                    driver,
                    request: sandbox::SandboxRequest { spec, labels, directory },
                    sandbox: SandboxSource::OneShot(Some(Box::new(sandbox))),
                    directories: vec![ready.directory, name],
                    is_agent,
                    target: None,
                    quota,
                })
            }
            // The slot may hold a part of the failed run's files, so no other run may have the slot.
            Err(error) => {
                lock_mutex(&self.spent).push(ready);
                Err(error.into())
            }
        }
    }

    /// Opens the run's audit log, and binds the run's socket in the slot's directory.
    fn bind_slot(
        &self,
        plan: RunPlan,
        models: Vec<String>,
        ready: &ReadySlot,
    ) -> anyhow::Result<SlotBinding> {
        let RunPlan { mut config, gateway, mut spec, agent, .. } = plan;
        let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
        // The run's own directory stays without a sandbox. It reserves the run's name against a second run.
        let name = RunDirectory::create(&self.run_dir, &config.identity.run, &owner)?;
        spec.uid = ready.directory.uid();
        configure_socket(&mut config, &mut spec, &ready.directory);
        spec.workspace = ready.workspace.clone();
        if let Some(agent) = agent.map(|agent| agent.with_default_models(models)) {
            agent.prepare_sandbox(&mut spec, &ready.directory, false, ObstaclePolicy::Refuse)?;
        }
        let deadline = SystemTime::now() + spec.limits.max_runtime;
        let labels = OwnerLabels { owner, run_dir: name.parent(), deadline };
        let gateway = RunGatewayBackend::open(gateway, config, &ready.directory, &labels)?;
        Ok(SlotBinding { gateway, spec, labels, name })
    }

    /// Keeps the pool filled until `stop`, and then removes the remaining slots. Cancel `stop` to end the future; a
    /// dropped future does not remove the slots.
    pub async fn maintain(&self, stop: CancellationToken) {
        let mut pause = MIN_RETRY_DELAY;
        while !stop.is_cancelled() {
            self.remove_spent().await;
            let mut wait = CHECK_INTERVAL;
            if self.ready_count() < self.config.count {
                match Box::pin(self.create_slot(&stop)).await {
                    // The loop continues without a wait until the pool is full.
                    Ok(ready) => {
                        lock_mutex(&self.ready).push_back(ready);
                        pause = MIN_RETRY_DELAY;
                        continue;
                    }
                    Err(_) if stop.is_cancelled() => break,
                    Err(error) => {
                        tracing::warn!(
                            "cannot start a warm sandbox; trying again later: {error:#}"
                        );
                    }
                }
                wait = pause;
                pause = (pause * 2).min(MAX_RETRY_DELAY);
            }
            // After a failure a claim does not cut the wait short: otherwise every claim would cause another attempt.
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

    /// Takes the oldest usable slot. Moves the unusable slots on the way to the spent slots.
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
        ready.slot.is_waiting() && ready.created.elapsed() < self.config.max_age
    }

    async fn remove_spent(&self) {
        // The locks are released before the first `await`: removing a slot takes long, and claims go on.
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
        let SlotProfile { driver, root, init, workspace, program, limits } = &self.profile;
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
        // The last possible run starts at the slot's maximum age and then takes its own time. A sweep that cannot see
        // this process keeps the slot at least until then.
        let deadline = SystemTime::now() + self.config.max_age + limits.max_runtime;
        let request = sandbox::SandboxRequest {
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
                has_tunnels: false,
                task: SandboxTask::Agent,
            },
            labels: OwnerLabels { owner, run_dir: directory.parent(), deadline },
            directory: directory.path().to_owned(),
        };
        let slot = WarmSlot::start(driver, request, stop.cancelled()).await?;
        tracing::debug!(slot = id, "a slot is ready");
        Ok(ReadySlot { id, slot, directory, workspace, created: Instant::now() })
    }
}

impl SlotProfile {
    fn from_plan(
        plan @ RunPlan { driver, spec, agent, branch, .. }: &RunPlan,
    ) -> Result<Self, WarmClaimError> {
        if branch.is_some() {
            return Err(WarmClaimError::FixedAtCreation("a branch to work on"));
        }
        if plan.is_gateway_in_container() {
            return Err(WarmClaimError::FixedAtCreation("a gateway in a container"));
        }
        if !spec.mounts.is_empty() {
            return Err(WarmClaimError::FixedAtCreation("a mount"));
        }
        if !spec.volumes.is_empty() {
            return Err(WarmClaimError::FixedAtCreation("a volume"));
        }
        if matches!(spec.workspace, WorkspaceMount::Directory { .. }) {
            return Err(WarmClaimError::FixedAtCreation("a directory as its workspace"));
        }
        Ok(Self {
            driver: driver.clone(),
            root: spec.root.clone(),
            init: spec.init.clone().ok_or(WarmClaimError::NoInit)?,
            // An agent always gets a workspace.
            workspace: if agent.is_some() { WorkspaceMount::Fresh } else { spec.workspace.clone() },
            program: agent.as_ref().and_then(|agent| agent.program_mount(spec)),
            limits: spec.limits,
        })
    }

    fn check_compatible(&self, of_run: &Self) -> Result<(), WarmClaimError> {
        // The runner enforces the bounds of time, output and workspace, so they may differ from the sandbox's limits.
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
            Some((difference, _)) => Err(WarmClaimError::ProfileMismatch(difference)),
            None => Ok(()),
        }
    }
}

fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The time between two checks of the slots (our choice).
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The wait after the first failure to make a slot (our choice). The wait doubles with each failure.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);

/// The maximum wait after a failure to make a slot (our choice).
const MAX_RETRY_DELAY: Duration = Duration::from_mins(1);
