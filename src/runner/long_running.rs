//! Long-running (sandbox) sandboxes, which outlive their runs. Each [`SandboxKey`] has a sandbox: usually an agent and
//! a branch.
//!
//! The runs of a [`SandboxKey`] use the same sandbox one after the other, and find the same workspace. Everything else
//! belongs to a single run: the socket, the gateway with its log and budget, the variables and the output. The next run
//! finds none of an earlier run's processes, and nothing that it wrote to memory. A sandbox is made for the first run.
//! It is replaced after a number of runs, at a maximum age, after an idle time, or when it is unhealthy.
//!
//! **Invariant:** no run begins in a sandbox in which a process of another run still runs, or which still has another
//! run's socket.

mod key;
mod persistent_workspace;
mod session;
pub mod workspace_store;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use tokio::sync::{Mutex as Room, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::branch_delivery::DeliveryTarget;
use super::conversation::AgentInvocation;
use super::directory::{RunDirectory, remove_run_dir};
use super::quota::{QuotaExceededError, WorkspaceQuota};
use super::run_gateway::RunGatewayBackend;
use super::workspace::ObstaclePolicy;
use super::{PreparedRun, RunInputs, RunPlan, SandboxSource, configure_socket};
use crate::sandbox::spec::{MountAccess, OwnerLabels, SandboxLimits, WorkspaceMount};
use crate::sandbox::{
    self, LongRunningSandbox, OwnerProcess, SandboxDriver, SandboxSpec, UserRange,
};

pub use key::{SandboxKey, SandboxKeyScope};
use persistent_workspace::PersistentWorkspace;
pub(super) use session::SandboxSession;
use workspace_store::{WorkspaceOwner, WorkspaceStore};

/// The long-running sandboxes of a process. [`LongRunningPool::maintain`] removes old and unhealthy sandboxes.
pub struct LongRunningPool {
    /// The directory of the persistent workspaces.
    directory: PathBuf,
    limits: LongRunningPoolLimits,
    entries: Mutex<HashMap<String, Arc<Room<Option<LongRunningEntry>>>>>,
    /// The capacity: a permit for each sandbox that may exist at the same time.
    permits: Arc<Semaphore>,
    closed: CancellationToken,
}

/// The limits of a pool and of its sandboxes.
#[derive(Clone, Copy, Debug)]
pub struct LongRunningPoolLimits {
    /// The maximum number of sandboxes at the same time.
    pub max_sandboxes: usize,
    /// The maximum number of runs in one sandbox.
    pub max_runs: u32,
    /// The maximum age of a sandbox. The image or directory of its root may have changed since its start.
    pub max_age: Duration,
    /// The maximum time since the sandbox's last run.
    pub max_idle: Duration,
    /// The maximum time that a run waits for the previous run of its key, and for a free sandbox of a full pool.
    pub wait: Duration,
}

/// The lock on a key. The lock's holder is the only run of the key, and may claim the key's sandbox.
pub struct SandboxKeyGuard(LongRunningEntryGuard);

/// An error of a run that cannot use a long-running sandbox. The caller can still start the run in a sandbox of its
/// own.
#[derive(Debug, thiserror::Error)]
pub enum LongRunningClaimError {
    #[error("another run of `{0}` goes on")]
    Busy(String),
    #[error("there are {0} long-running sandboxes, and all are in use")]
    Full(usize),
    #[error("{0} runs wait for the run before them, and no more may")]
    TooManyWaiting(usize),
    #[error("the long-running sandboxes are being removed, because the process ends")]
    Closed,
    #[error("the run was cancelled while it waited for a long-running sandbox")]
    Cancelled,
    #[error("a long-running sandbox has no {0}")]
    Unsupported(&'static str),
    #[error(
        "{exceeded}, including the files of earlier runs of `{who}`; an operator can delete the workspace with \
         `cogni-gateway forget {id} --apply`"
    )]
    WorkspaceFull { who: String, id: String, exceeded: QuotaExceededError },
    #[error(transparent)]
    Failed(#[from] anyhow::Error),
}

/// The entry of a key: its workspace, its directory, and its sandbox, if the sandbox is started.
struct LongRunningEntry {
    profile: SandboxProfile,
    /// The key's workspace, which is locked: no process prunes the workspace while the entry exists.
    workspace: Arc<PersistentWorkspace>,
    id: String,
    directory: RunDirectory,
    sandbox: Option<LongRunningSandbox>,
    created: Instant,
    /// The deadline in the sandbox's label. A sweep that cannot see the owner process keeps the sandbox until then.
    deadline: SystemTime,
    used: Instant,
    runs: u32,
    permit: Option<OwnedSemaphorePermit>,
}

/// The requirements of a run on the key's entry.
struct RunRequirements {
    profile: SandboxProfile,
    workspace: Arc<PersistentWorkspace>,
    max_runtime: Duration,
}

/// The properties of a sandbox that cannot change from run to run.
#[derive(Clone, Debug, PartialEq)]
struct SandboxProfile {
    driver: SandboxDriver,
    spec: SandboxSpec,
}

type LongRunningEntryGuard = OwnedMutexGuard<Option<LongRunningEntry>>;

impl LongRunningPool {
    /// Makes an empty pool whose workspaces are in `store`. The first run of a key makes the key's sandbox.
    pub fn new(store: &WorkspaceStore, limits: LongRunningPoolLimits) -> Self {
        let (directory, permits) =
            (store.root_dir().to_owned(), Arc::new(Semaphore::new(limits.max_sandboxes)));
        Self {
            directory,
            limits,
            entries: Mutex::default(),
            permits,
            closed: CancellationToken::new(),
        }
    }

    /// Gives the sandbox of a key to a run. The caller holds the key's lock ([`LongRunningPool::lock_key`]); the run holds
    /// the lock and the sandbox until the run has ended or is dropped. `cancel` does not interrupt a step that has begun.
    /// Must be called within a runtime.
    ///
    /// # Errors
    /// Returns `Unsupported` if the run cannot use a long-running sandbox, `Full` if other runs have all sandboxes,
    /// `WorkspaceFull` if the workspace is full, `Closed` if the pool is closed, `Cancelled` if `cancel` came first, and
    /// `Failed` for every other failure.
    pub async fn claim(
        &self,
        cancel: &CancellationToken,
        SandboxKeyGuard(mut guard): SandboxKeyGuard,
        key: &SandboxKey,
        (plan, inputs): (RunPlan, RunInputs),
    ) -> Result<PreparedRun, LongRunningClaimError> {
        check_plan(&plan, &inputs)?;
        // 1. No process of an earlier run may be alive, because the next steps change the workspace.
        self.clean_entry(&mut guard).await?;
        let users = plan.sandbox_users();
        if guard.as_ref().is_some_and(|entry| !users.contains(entry.workspace.uid())) {
            drop_sandbox(&mut guard).await;
        }
        // 2. The workspace is locked, filled with the branch, and measured.
        let RunPlan { mut config, gateway, mut spec, agent, run_dir, driver, .. } = plan;
        let RunInputs { target, models, .. } = inputs;
        let current_workspace = guard.as_ref().map(|entry| Arc::clone(&entry.workspace));
        let tenant = key.owner(target.as_ref().map(DeliveryTarget::branch_ref));
        let home = self.open_workspace(key, tenant, current_workspace, users).await?;
        spec.uid = home.uid();
        let path = home.workspace();
        let quota = WorkspaceQuota::new(path.clone(), spec.limits.max_workspace);
        if let Some(target) = &target {
            let max_workspace = spec.limits.max_workspace;
            home.checkout_branch(key.kept.clone(), target.clone(), max_workspace).await?;
        }
        if let Err(exceeded) = quota.check().await {
            // The entry's lock on the workspace is released, so that an operator can prune the workspace at once.
            drop_sandbox(&mut guard).await;
            return Err(LongRunningClaimError::WorkspaceFull {
                who: key.display_name(),
                id: key.name(),
                exceeded,
            });
        }
        // 3. The entry is made or reused. Its sandbox starts later, when the run starts.
        spec.workspace = WorkspaceMount::Directory { path, access: MountAccess::ReadWrite };
        let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
        let run_directory = RunDirectory::create(&run_dir, &config.identity.run, &owner)?;
        let is_agent = agent.is_some();
        let agent = agent.map(|agent| agent.with_default_models(models));
        let held = (guard, spec, run_directory);
        let (mut guard, mut spec, run_directory) =
            write_agent_files(agent, target.is_some(), held).await?;
        let (profile, max_runtime) = (SandboxProfile::new(&driver, &spec), spec.limits.max_runtime);
        let requirements = RunRequirements { profile, workspace: home, max_runtime };
        let entry = self.ensure_entry(cancel, &mut guard, requirements, &run_directory).await?;
        // 4. The run's gateway binds its socket in the sandbox's directory. The outbox's row comes last, so that a
        //    failed claim leaves no row.
        configure_socket(&mut config, &mut spec, &entry.directory);
        let deadline = SystemTime::now() + spec.limits.max_runtime;
        let labels = OwnerLabels { owner, run_dir: run_directory.parent(), deadline };
        let policy = config.digest();
        let gateway = RunGatewayBackend::open(gateway, config, &entry.directory, &labels)?;
        tracing::info!(run = spec.run, sandbox = entry.id, "claimed a long-running sandbox");
        let session = SandboxSession::new(guard, self.limits, spec.clone());
        let request =
            sandbox::SandboxRequest { spec, labels, directory: run_directory.path().to_owned() };
        let target = match target {
            Some(target) => {
                let (request, driver) = (request.clone(), driver.clone());
                let register = move || target.register_workspace(&request, &driver, &policy);
                let tracked =
                    spawn_blocking(register).await.context("the workspace was not recorded")??;
                Some(Box::new(tracked))
            }
            None => None,
        };
        Ok(PreparedRun {
            gateway,
            run: request.spec.run.clone(),
            driver,
            request,
            sandbox: SandboxSource::LongRunning(Box::new(session)),
            directories: vec![run_directory],
            is_agent,
            target,
            quota: Some(quota),
        })
    }

    /// Removes old, idle and unhealthy sandboxes until `stop`. Then closes the pool and removes every sandbox when its
    /// run is over. The workspaces stay.
    pub async fn maintain(&self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            for shared_entry in self.all_entries() {
                // A locked entry has a run, which checks the sandbox itself.
                let Ok(mut guard) = shared_entry.try_lock_owned() else { continue };
                let Some(entry) = &mut *guard else { continue };
                if !entry.is_reusable(&self.limits).await {
                    drop_sandbox(&mut guard).await;
                }
            }
            self.remove_empty_entries();
            tokio::select! {
                () = sleep(CHECK_INTERVAL) => (),
                () = stop.cancelled() => (),
            }
        }
        self.closed.cancel();
        for shared_entry in self.all_entries() {
            drop_sandbox(&mut shared_entry.lock_owned().await).await;
        }
    }

    /// Returns the number of sandboxes that exist or are about to be made.
    pub fn count(&self) -> usize {
        self.limits.max_sandboxes - self.permits.available_permits()
    }

    fn entry_for(&self, key: &SandboxKey) -> Arc<Room<Option<LongRunningEntry>>> {
        let mut rooms = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(rooms.entry(key.name()).or_default())
    }

    fn all_entries(&self) -> Vec<Arc<Room<Option<LongRunningEntry>>>> {
        let rooms = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        rooms.values().map(Arc::clone).collect()
    }

    /// Removes entries without a sandbox from the map. An entry stays while another task holds a reference to it,
    /// because that task may wait for its lock.
    fn remove_empty_entries(&self) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|_, shared_entry| {
            Arc::strong_count(shared_entry) > 1
                || shared_entry.try_lock().is_ok_and(|guard| guard.is_some())
        });
    }

    /// Locks the key if no other run holds its lock.
    pub fn try_lock_key(&self, key: &SandboxKey) -> Option<SandboxKeyGuard> {
        self.entry_for(key).try_lock_owned().ok().map(SandboxKeyGuard)
    }

    /// Waits for the key's lock.
    ///
    /// # Errors
    /// Returns `Busy` if another run holds the lock for too long, and `Cancelled` if `cancel` comes first.
    pub async fn lock_key(
        &self,
        cancel: &CancellationToken,
        key: &SandboxKey,
    ) -> Result<SandboxKeyGuard, LongRunningClaimError> {
        let guard = timeout(self.limits.wait, self.entry_for(key).lock_owned());
        let guard =
            cancel.run_until_cancelled(guard).await.ok_or(LongRunningClaimError::Cancelled)?;
        guard.map(SandboxKeyGuard).map_err(|_| LongRunningClaimError::Busy(key.display_name()))
    }

    /// Removes the sandbox if a process of another run may still run in it.
    ///
    /// # Errors
    /// Returns `Closed` if the pool is closed.
    async fn clean_entry(
        &self,
        guard: &mut LongRunningEntryGuard,
    ) -> Result<(), LongRunningClaimError> {
        if self.closed.is_cancelled() {
            return Err(LongRunningClaimError::Closed);
        }
        // If a run was dropped before its end, its program may still write to the workspace, which is filled next.
        if guard.as_ref().is_some_and(LongRunningEntry::is_dirty) {
            drop_sandbox(guard).await;
        }
        Ok(())
    }

    /// Opens and locks the key's workspace. No process prunes the workspace while it is locked.
    async fn open_workspace(
        &self,
        key: &SandboxKey,
        tenant: WorkspaceOwner,
        current_workspace: Option<Arc<PersistentWorkspace>>,
        users: UserRange,
    ) -> Result<Arc<PersistentWorkspace>, LongRunningClaimError> {
        if let Some(home) = current_workspace {
            home.write_owner(&tenant).context("the workspace cannot be used")?;
            return Ok(home);
        }
        let (directory, name, earlier) = (self.directory.clone(), key.name(), key.legacy_name());
        let open_when_free = async {
            // The lock has no queue: another process or the pruning may hold it for a moment, so this loop polls.
            loop {
                let (directory, name, tenant) = (directory.clone(), name.clone(), tenant.clone());
                let earlier = earlier.clone();
                let open = move || {
                    if let Some(earlier) = earlier {
                        persistent_workspace::adopt_legacy_workspace(
                            &directory, &earlier, &name, &tenant,
                        );
                    }
                    PersistentWorkspace::open(&directory, &name, &tenant, users)
                };
                let opened = spawn_blocking(open).await.context("there is no workspace")??;
                match opened {
                    Some(home) => return anyhow::Ok(Arc::new(home)),
                    None => sleep(RETRY_INTERVAL).await,
                }
            }
        };
        let workspace = timeout(self.limits.wait, open_when_free).await;
        Ok(workspace.map_err(|_| LongRunningClaimError::Busy(key.display_name()))??)
    }

    /// Returns the key's entry. Replaces an entry that does not fit the run's requirements.
    async fn ensure_entry<'guard>(
        &self,
        cancel: &CancellationToken,
        guard: &'guard mut LongRunningEntryGuard,
        requirements: RunRequirements,
        run: &RunDirectory,
    ) -> Result<&'guard mut LongRunningEntry, LongRunningClaimError> {
        if guard.as_ref().is_some_and(|entry| !entry.matches(&requirements, &self.limits)) {
            drop_sandbox(guard).await;
        }
        // An entry may have lost its permit at the end of its last run, together with its sandbox.
        let permit = match &mut **guard {
            Some(LongRunningEntry { permit: Some(_), .. }) => None,
            _ => Some(self.reserve_capacity(cancel).await?),
        };
        if guard.is_none() {
            **guard =
                Some(LongRunningEntry::new(requirements.profile, requirements.workspace, run)?);
        }
        let entry = guard.as_mut().expect("the entry was made just now");
        entry.permit = entry.permit.take().or(permit);
        Ok(entry)
    }

    /// Returns a permit for one sandbox. If the pool is full, removes the sandbox that was idle for the longest time.
    /// If all sandboxes are in use, looks again until the timeout, because a run may end at any moment.
    async fn reserve_capacity(
        &self,
        cancel: &CancellationToken,
    ) -> Result<OwnedSemaphorePermit, LongRunningClaimError> {
        let end = Instant::now() + self.limits.wait;
        let mut permit = pin!(Arc::clone(&self.permits).acquire_owned());
        let mut pause = Duration::ZERO;
        loop {
            // The order counts: a free permit comes before every error. A removal below is not part of the select, so
            // that no error interrupts the removal.
            tokio::select! {
                biased;
                permit = &mut permit => return Ok(permit.expect("the semaphore is never closed")),
                () = self.closed.cancelled() => return Err(LongRunningClaimError::Closed),
                () = cancel.cancelled() => return Err(LongRunningClaimError::Cancelled),
                () = sleep(pause) => (),
            }
            pause = match self.longest_idle() {
                Some(mut idle) => {
                    drop_sandbox(&mut idle).await;
                    Duration::ZERO
                }
                None if Instant::now() >= end => {
                    return Err(LongRunningClaimError::Full(self.limits.max_sandboxes));
                }
                None => RETRY_INTERVAL,
            };
        }
    }

    fn longest_idle(&self) -> Option<LongRunningEntryGuard> {
        let idle = self
            .all_entries()
            .into_iter()
            .filter_map(|shared_entry| shared_entry.try_lock_owned().ok());
        let idle = idle.filter(|guard| guard.as_ref().is_some_and(|entry| entry.permit.is_some()));
        idle.min_by_key(|guard| guard.as_ref().map(|entry| entry.used))
    }
}

/// Removes the key's entry with its sandbox. The permit is returned after the sandbox is gone.
async fn drop_sandbox(guard: &mut LongRunningEntryGuard) {
    if let Some(LongRunningEntry { sandbox, directory, permit, .. }) = guard.take() {
        if let Some(sandbox) = sandbox {
            Box::pin(sandbox.remove()).await;
        }
        directory.remove().await;
        drop(permit);
    }
}

/// Writes an agent's files into its workspace. Earlier runs of the key had the workspace, and what they left in the way may
/// take minutes to remove: no worker waits for that, and the key stays locked if the run is cancelled meanwhile.
async fn write_agent_files(
    agent: Option<AgentInvocation>,
    is_repository: bool,
    (guard, mut spec, directory): (LongRunningEntryGuard, SandboxSpec, RunDirectory),
) -> anyhow::Result<(LongRunningEntryGuard, SandboxSpec, RunDirectory)> {
    let write = move || {
        if let Some(agent) = agent {
            let obstacles = ObstaclePolicy::Remove;
            agent.prepare_sandbox(&mut spec, &directory, is_repository, obstacles)?;
        }
        anyhow::Ok((guard, spec, directory))
    };
    spawn_blocking(write).await.context("the agent's files were not written")?
}

fn check_plan(plan: &RunPlan, inputs: &RunInputs) -> Result<(), LongRunningClaimError> {
    if plan.is_gateway_in_container() {
        return Err(LongRunningClaimError::Unsupported("gateway in a container"));
    }
    if plan.spec.init.is_none() {
        return Err(LongRunningClaimError::Unsupported("first process but cogni-init"));
    }
    if matches!(plan.spec.workspace, WorkspaceMount::Directory { .. }) {
        return Err(LongRunningClaimError::Unsupported("other workspace than its own"));
    }
    Ok(plan.check_inputs(inputs)?)
}

impl SandboxProfile {
    /// Returns the profile of a run's sandbox. Values that may differ from run to run are replaced by fixed values, so
    /// that two profiles compare equal: the program, the variables, and the bounds of time, output and workspace.
    fn new(driver: &SandboxDriver, spec: &SandboxSpec) -> Self {
        let SandboxLimits { max_runtime, max_output_bytes, max_workspace, .. } =
            SandboxLimits::default();
        let spec = SandboxSpec {
            run: String::new(),
            argv: vec![],
            env: [].into(),
            limits: SandboxLimits { max_runtime, max_output_bytes, max_workspace, ..spec.limits },
            socket_dir: PathBuf::new(),
            grace: Duration::ZERO,
            has_tunnels: false,
            ..spec.clone()
        };
        Self { driver: driver.clone(), spec }
    }
}

impl LongRunningEntry {
    /// Makes an entry and its directory. The sandbox is not started yet.
    fn new(
        profile: SandboxProfile,
        workspace: Arc<PersistentWorkspace>,
        run: &RunDirectory,
    ) -> anyhow::Result<Self> {
        let id = format!("sandbox-{}", Uuid::now_v7());
        let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
        let directory = RunDirectory::create(&run.parent(), &id, &owner)?;
        let (now, deadline) = (Instant::now(), SystemTime::now());
        let (created, used, sandbox, runs, permit) = (now, now, None, 0, None);
        Ok(Self {
            profile,
            workspace,
            id,
            directory,
            sandbox,
            created,
            deadline,
            used,
            runs,
            permit,
        })
    }

    /// Starts the sandbox unless a healthy sandbox exists. `max_runtime` is the maximum time of the next run.
    async fn ensure_sandbox(
        &mut self,
        terms: &LongRunningPoolLimits,
        max_runtime: Duration,
        stop: impl Future<Output = ()>,
    ) -> Result<(), sandbox::SandboxError> {
        if let Some(sandbox) = &mut self.sandbox
            && sandbox.is_healthy().await
        {
            return Ok(());
        }
        if let Some(sandbox) = self.sandbox.take() {
            tracing::warn!(sandbox = self.id, "replacing an unhealthy long-running sandbox");
            Box::pin(sandbox.remove()).await;
        }
        self.deadline = SystemTime::now() + terms.max_age + max_runtime;
        let request = self.sandbox_request();
        let request =
            request.map_err(|error| sandbox::SandboxError::LongRunningLost(error.to_string()))?;
        self.sandbox = Some(LongRunningSandbox::start(&self.profile.driver, request, stop).await?);
        (self.created, self.runs) = (Instant::now(), 0);
        Ok(())
    }

    /// Returns the request to make the entry's sandbox.
    fn sandbox_request(&self) -> io::Result<sandbox::SandboxRequest> {
        // An earlier sandbox of this entry may have left this directory.
        let directory = self.directory.path().join("made");
        remove_run_dir(&directory)?;
        fs::create_dir(&directory)?;
        let (SandboxProfile { spec, .. }, deadline) = (self.profile.clone(), self.deadline);
        let (run, socket_dir) = (self.id.clone(), self.directory.socket_dir());
        Ok(sandbox::SandboxRequest {
            spec: SandboxSpec { run, socket_dir, ..spec },
            labels: OwnerLabels {
                owner: OwnerProcess::this_process()?,
                run_dir: self.directory.parent(),
                deadline,
            },
            directory,
        })
    }

    fn matches(&self, need: &RunRequirements, terms: &LongRunningPoolLimits) -> bool {
        let end = SystemTime::now() + need.max_runtime;
        let is_over = self.sandbox.is_some() && end > self.deadline;
        self.profile == need.profile && !self.is_dirty() && !self.is_expired(terms) && !is_over
    }

    /// Returns true if a part of an earlier run may remain in the sandbox.
    fn is_dirty(&self) -> bool {
        self.sandbox.as_ref().is_some_and(|sandbox| !sandbox.is_ready())
    }

    /// Returns true if the sandbox has reached its maximum age or its maximum number of runs.
    fn is_expired(&self, terms: &LongRunningPoolLimits) -> bool {
        self.runs >= terms.max_runs || self.created.elapsed() >= terms.max_age
    }

    async fn is_reusable(&mut self, terms: &LongRunningPoolLimits) -> bool {
        let is_over = self.is_expired(terms) || self.used.elapsed() >= terms.max_idle;
        match &mut self.sandbox {
            Some(sandbox) if !is_over => sandbox.is_healthy().await,
            _ => false,
        }
    }
}

/// The time between two attempts to lock a workspace, or to find an idle sandbox (our choice).
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The time between two checks of the sandboxes (our choice).
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
