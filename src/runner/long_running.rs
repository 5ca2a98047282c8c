//! Sandboxes that outlive their runs: one for each agent and branch, or whatever else its runs have in common.
//!
//! The runs of a [`SandboxKey`] come one after the other into the same sandbox and find the same workspace. Everything
//! else is each run's own: its socket, its gateway with its log and budget, its variables and its output. Of its
//! processes, and of what it wrote to memory, nothing is left for the next. A sandbox is made when the first run comes,
//! and again after so many runs, at an age, when it was idle, or when it is not well.
//!
//! **Invariant:** no run begins in a sandbox in which anything of another still runs, or whose run's socket is there.

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
use super::directory::{RunDirectory, remove_run_dir};
use super::quota::{QuotaExceededError, WorkspaceQuota};
use super::run_gateway::RunGatewayBackend;
use super::{PreparedRun, RunPlan, SandboxSource, configure_socket};
use crate::sandbox::spec::{MountAccess, OwnerLabels, SandboxLimits, WorkspaceMount};
use crate::sandbox::{
    self, LongRunningSandbox, OwnerProcess, SandboxDriver, SandboxSpec, UserRange,
};

pub use key::{SandboxKey, SandboxKeyScope};
use persistent_workspace::PersistentWorkspace;
pub(super) use session::SandboxSession;
use workspace_store::{WorkspaceOwner, WorkspaceStore};

/// The resident sandboxes of a process, kept in order by [`LongRunningPool::maintain`].
pub struct LongRunningPool {
    /// Where workspaces are that live on.
    place: PathBuf,
    terms: LongRunningPoolLimits,
    rooms: Mutex<HashMap<String, Arc<Room<Option<LongRunningEntry>>>>>,
    /// One for each sandbox that may be there at a time.
    seats: Arc<Semaphore>,
    closed: CancellationToken,
}

/// For how much a sandbox is good, and how many there are.
#[derive(Clone, Copy, Debug)]
pub struct LongRunningPoolLimits {
    /// Sandboxes at a time.
    pub most: usize,
    /// Runs in one sandbox.
    pub runs: u32,
    /// What its root was made of may have changed since.
    pub max_age: Duration,
    /// Since its last run.
    pub max_idle: Duration,
    /// How long a run waits for the one before it, and how long for a place where all are in use.
    pub wait: Duration,
}

/// A key that is one run's, until its sandbox is claimed.
pub struct SandboxKeyGuard(LongRunningEntryGuard);

/// Why a run has no place in a resident sandbox. It can still be run as every other.
#[derive(Debug, thiserror::Error)]
pub enum LongRunningClaimError {
    #[error("another run of `{0}` goes on")]
    Busy(String),
    #[error("there are {0} resident sandboxes, and all are in use")]
    Full(usize),
    #[error("{0} runs wait for the run before them, and no more may")]
    Crowded(usize),
    #[error("the resident sandboxes are being taken away")]
    Closed,
    #[error("it was cancelled while it waited")]
    Cancelled,
    #[error("a resident sandbox has no {0}")]
    Never(&'static str),
    #[error(
        "{exceeded}, with what `{who}` has kept from its runs before; an operator can make an end of that with \
         `cogni-gateway forget {id} --apply`"
    )]
    NoRoom { who: String, id: String, exceeded: QuotaExceededError },
    #[error(transparent)]
    Order(#[from] anyhow::Error),
}

/// A key's sandbox, and its directory while there is none.
struct LongRunningEntry {
    kind: SandboxProfile,
    /// Nobody forgets it meanwhile.
    home: Arc<PersistentWorkspace>,
    id: String,
    directory: RunDirectory,
    resident: Option<LongRunningSandbox>,
    born: Instant,
    /// What its sandbox says of itself: until when it is not left behind, whoever looks.
    deadline: SystemTime,
    used: Instant,
    runs: u32,
    seat: Option<OwnedSemaphorePermit>,
}

/// What a run needs of its stay.
struct RunRequirements {
    kind: SandboxProfile,
    home: Arc<PersistentWorkspace>,
    max_runtime: Duration,
}

/// What cannot be changed from run to run.
#[derive(Clone, Debug, PartialEq)]
struct SandboxProfile {
    driver: SandboxDriver,
    spec: SandboxSpec,
}

type LongRunningEntryGuard = OwnedMutexGuard<Option<LongRunningEntry>>;

impl LongRunningPool {
    /// With their workspaces on `shelf`. Nothing is made before the first run.
    pub fn new(shelf: &WorkspaceStore, terms: LongRunningPoolLimits) -> Self {
        let (place, seats) = (shelf.root_dir().to_owned(), Arc::new(Semaphore::new(terms.most)));
        Self { place, terms, rooms: Mutex::default(), seats, closed: CancellationToken::new() }
    }

    /// Gives the key's sandbox to a run, which keeps it until it has ended, or is dropped. Waits for the run before it.
    /// Must be called within a runtime.
    ///
    /// # Errors
    /// Why there is none for this run, or what is wrong with its order.
    pub async fn claim(
        &self,
        key: &SandboxKey,
        order: RunPlan,
    ) -> Result<PreparedRun, LongRunningClaimError> {
        Box::pin(self.claim_with_cancel(&CancellationToken::new(), key, order)).await
    }

    /// The same, for whoever waits until `cancel` only. What has begun by then is not broken off.
    ///
    /// # Errors
    /// As [`LongRunningPool::claim`].
    pub async fn claim_with_cancel(
        &self,
        cancel: &CancellationToken,
        key: &SandboxKey,
        order: RunPlan,
    ) -> Result<PreparedRun, LongRunningClaimError> {
        check_plan(&order)?;
        let entered = self.lock_key(cancel, key).await?;
        Box::pin(self.claim_locked(cancel, entered, key, order)).await
    }

    /// The same, for whoever has entered already.
    ///
    /// # Errors
    /// As [`LongRunningPool::claim`].
    pub async fn claim_locked(
        &self,
        cancel: &CancellationToken,
        SandboxKeyGuard(mut held): SandboxKeyGuard,
        key: &SandboxKey,
        order: RunPlan,
    ) -> Result<PreparedRun, LongRunningClaimError> {
        check_plan(&order)?;
        self.clean_entry(&mut held).await?;
        let users = order.sandbox_users();
        if held.as_ref().is_some_and(|stay| !users.contains(stay.home.uid())) {
            drop_sandbox(&mut held).await;
        }
        let RunPlan { mut config, mut spec, agent, target, run_dir, driver, seats, .. } = order;
        let had = held.as_ref().map(|stay| Arc::clone(&stay.home));
        let tenant = key.owner(target.as_ref().map(DeliveryTarget::branch_ref));
        let home = self.open_workspace(key, tenant, had, users).await?;
        spec.uid = home.uid();
        let path = home.workspace();
        let quota = WorkspaceQuota::new(path.clone(), spec.limits.max_workspace);
        if let Some(target) = &target {
            let (home, kept, target) = (Arc::clone(&home), key.kept.clone(), target.clone());
            let (uid, max_workspace) = (home.uid(), spec.limits.max_workspace);
            let feed = move |incoming: &_| target.checkout_into(incoming, uid, max_workspace);
            let fill = move || home.replace_content(&kept, feed);
            spawn_blocking(fill).await.context("the workspace was not filled")??;
        }
        if let Err(exceeded) = quota.check().await {
            // So that it can be forgotten at once.
            drop_sandbox(&mut held).await;
            return Err(LongRunningClaimError::NoRoom {
                who: key.display_name(),
                id: key.name(),
                exceeded,
            });
        }
        spec.workspace = WorkspaceMount::Directory { path, access: MountAccess::ReadWrite };
        let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
        let own = RunDirectory::create(&run_dir, &config.identity.run, &owner)?;
        if let Some(agent) = &agent {
            agent.prepare_sandbox(&mut spec, &own, target.is_some())?;
        }
        let (kind, max_runtime) = (SandboxProfile::new(&driver, &spec), spec.limits.max_runtime);
        let need = RunRequirements { kind, home, max_runtime };
        let stay = self.ensure_entry(cancel, &mut held, need, &own).await?;
        configure_socket(&mut config, &mut spec, &stay.directory);
        let deadline = SystemTime::now() + spec.limits.max_runtime;
        let stamp = OwnerLabels { owner, run_dir: own.parent(), deadline };
        let policy = config.digest();
        let gateway = RunGatewayBackend::open(config, seats.as_ref())?;
        tracing::info!(run = spec.run, resident = stay.id, "claimed a resident sandbox");
        let directory = own.path().to_owned();
        let turn = SandboxSession::new(held, self.terms, spec.clone());
        let order = sandbox::SandboxRequest { spec, stamp, directory };
        let target = match target {
            Some(target) => {
                let (order, driver) = (order.clone(), driver.clone());
                let post = move || target.register_workspace(&order, &driver, &policy);
                let posted =
                    spawn_blocking(post).await.context("the workspace was not written down")??;
                Some(Box::new(posted))
            }
            None => None,
        };
        Ok(PreparedRun {
            gateway,
            run: order.spec.run.clone(),
            driver,
            order,
            sandbox: SandboxSource::Resident(Box::new(turn)),
            directories: vec![own],
            is_agent: agent.is_some(),
            target,
            quota: Some(quota),
        })
    }

    /// Takes away sandboxes that are old, idle or not well, until `stop`; and then all of them, each when its run is
    /// over. Their workspaces stay.
    pub async fn maintain(&self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            for room in self.all_entries() {
                let Ok(mut held) = room.try_lock_owned() else { continue };
                let Some(stay) = &mut *held else { continue };
                if !stay.is_reusable(&self.terms).await {
                    drop_sandbox(&mut held).await;
                }
            }
            self.remove_empty_entries();
            tokio::select! {
                () = sleep(CHECK_INTERVAL) => (),
                () = stop.cancelled() => (),
            }
        }
        self.closed.cancel();
        for room in self.all_entries() {
            drop_sandbox(&mut room.lock_owned().await).await;
        }
    }

    /// How many sandboxes there are, or are about to be.
    pub fn count(&self) -> usize {
        self.terms.most - self.seats.available_permits()
    }

    fn entry_for(&self, key: &SandboxKey) -> Arc<Room<Option<LongRunningEntry>>> {
        let mut rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(rooms.entry(key.name()).or_default())
    }

    fn all_entries(&self) -> Vec<Arc<Room<Option<LongRunningEntry>>>> {
        let rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        rooms.values().map(Arc::clone).collect()
    }

    /// Nobody waits for one that is only ours.
    fn remove_empty_entries(&self) {
        let mut rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        rooms.retain(|_, room| {
            Arc::strong_count(room) > 1 || room.try_lock().is_ok_and(|held| held.is_some())
        });
    }

    /// Takes the key if no other run has it.
    pub fn try_lock_key(&self, key: &SandboxKey) -> Option<SandboxKeyGuard> {
        self.entry_for(key).try_lock_owned().ok().map(SandboxKeyGuard)
    }

    /// Returns when the key is this run's.
    ///
    /// # Errors
    /// Another run has it for too long, or `cancel` comes first.
    pub async fn lock_key(
        &self,
        cancel: &CancellationToken,
        key: &SandboxKey,
    ) -> Result<SandboxKeyGuard, LongRunningClaimError> {
        let held = timeout(self.terms.wait, self.entry_for(key).lock_owned());
        let held =
            cancel.run_until_cancelled(held).await.ok_or(LongRunningClaimError::Cancelled)?;
        held.map(SandboxKeyGuard).map_err(|_| LongRunningClaimError::Busy(key.display_name()))
    }

    /// Returns when nothing of another run runs there.
    async fn clean_entry(
        &self,
        held: &mut LongRunningEntryGuard,
    ) -> Result<(), LongRunningClaimError> {
        if self.closed.is_cancelled() {
            return Err(LongRunningClaimError::Closed);
        }
        // Of a run that was given up in its midst the program may run on, in the workspace that is to be filled.
        if held.as_ref().is_some_and(LongRunningEntry::is_dirty) {
            drop_sandbox(held).await;
        }
        Ok(())
    }

    /// The key's, which nobody forgets as long as it is held.
    async fn open_workspace(
        &self,
        key: &SandboxKey,
        tenant: WorkspaceOwner,
        had: Option<Arc<PersistentWorkspace>>,
        users: UserRange,
    ) -> Result<Arc<PersistentWorkspace>, LongRunningClaimError> {
        if let Some(home) = had {
            home.write_owner(&tenant).context("the workspace cannot be used")?;
            return Ok(home);
        }
        let (place, name, earlier) = (self.place.clone(), key.name(), key.legacy_name());
        let taking = async {
            loop {
                let (place, name, tenant) = (place.clone(), name.clone(), tenant.clone());
                let earlier = earlier.clone();
                let open = move || {
                    if let Some(earlier) = earlier {
                        persistent_workspace::adopt_legacy_workspace(
                            &place, &earlier, &name, &tenant,
                        );
                    }
                    PersistentWorkspace::open(&place, &name, &tenant, users)
                };
                let opened = spawn_blocking(open).await.context("there is no workspace")??;
                match opened {
                    Some(home) => return anyhow::Ok(Arc::new(home)),
                    None => sleep(RETRY_INTERVAL).await,
                }
            }
        };
        let taken = timeout(self.terms.wait, taking).await;
        Ok(taken.map_err(|_| LongRunningClaimError::Busy(key.display_name()))??)
    }

    /// What the key has by now, with nothing in it that this run could not be given.
    async fn ensure_entry<'held>(
        &self,
        cancel: &CancellationToken,
        held: &'held mut LongRunningEntryGuard,
        need: RunRequirements,
        run: &RunDirectory,
    ) -> Result<&'held mut LongRunningEntry, LongRunningClaimError> {
        if held.as_ref().is_some_and(|stay| !stay.matches(&need, &self.terms)) {
            drop_sandbox(held).await;
        }
        let seat = match &mut **held {
            Some(LongRunningEntry { seat: Some(_), .. }) => None,
            _ => Some(self.reserve_capacity(cancel).await?),
        };
        if held.is_none() {
            **held = Some(LongRunningEntry::new(need.kind, need.home, run)?);
        }
        let stay = held.as_mut().expect("it was made just now");
        stay.seat = stay.seat.take().or(seat);
        Ok(stay)
    }

    /// Where there is none, the sandbox goes that was idle for the longest time. One that somebody has may only be on
    /// its way out, or become idle in a moment, so it is looked more than once; whoever takes one away finishes that.
    async fn reserve_capacity(
        &self,
        cancel: &CancellationToken,
    ) -> Result<OwnedSemaphorePermit, LongRunningClaimError> {
        let end = Instant::now() + self.terms.wait;
        let mut seat = pin!(Arc::clone(&self.seats).acquire_owned());
        let mut pause = Duration::ZERO;
        loop {
            tokio::select! {
                biased;
                seat = &mut seat => return Ok(seat.expect("nobody closes them")),
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
                    return Err(LongRunningClaimError::Full(self.terms.most));
                }
                None => RETRY_INTERVAL,
            };
        }
    }

    fn longest_idle(&self) -> Option<LongRunningEntryGuard> {
        let idle = self.all_entries().into_iter().filter_map(|room| room.try_lock_owned().ok());
        let idle = idle.filter(|held| held.as_ref().is_some_and(|stay| stay.seat.is_some()));
        idle.min_by_key(|held| held.as_ref().map(|stay| stay.used))
    }
}

/// Leaves the key without a sandbox.
async fn drop_sandbox(held: &mut LongRunningEntryGuard) {
    if let Some(LongRunningEntry { resident, directory, seat, .. }) = held.take() {
        if let Some(resident) = resident {
            Box::pin(resident.remove()).await;
        }
        directory.remove().await;
        drop(seat);
    }
}

fn check_plan(order: &RunPlan) -> Result<(), LongRunningClaimError> {
    if order.proxy.is_some() {
        return Err(LongRunningClaimError::Never("gateway in a container"));
    }
    if order.spec.init.is_none() {
        return Err(LongRunningClaimError::Never("first process but cogni-init"));
    }
    if matches!(order.spec.workspace, WorkspaceMount::Directory { .. }) {
        return Err(LongRunningClaimError::Never("other workspace than its own"));
    }
    Ok(order.check()?)
}

impl SandboxProfile {
    /// How long a run takes and how much it says is not the sandbox's own limit.
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
            ..spec.clone()
        };
        Self { driver: driver.clone(), spec }
    }
}

impl LongRunningEntry {
    /// Nothing is started yet.
    fn new(
        kind: SandboxProfile,
        home: Arc<PersistentWorkspace>,
        run: &RunDirectory,
    ) -> anyhow::Result<Self> {
        let id = format!("resident-{}", Uuid::now_v7());
        let owner = OwnerProcess::this_process().context("`/proc` cannot be read")?;
        let directory = RunDirectory::create(&run.parent(), &id, &owner)?;
        let (now, deadline) = (Instant::now(), SystemTime::now());
        let (born, used, resident, runs, seat) = (now, now, None, 0, None);
        Ok(Self { kind, home, id, directory, resident, born, deadline, used, runs, seat })
    }

    /// Makes the sandbox, where there is none that is well, for a run that may take so long.
    async fn ensure_sandbox(
        &mut self,
        terms: &LongRunningPoolLimits,
        max_runtime: Duration,
        stop: impl Future<Output = ()>,
    ) -> Result<(), sandbox::SandboxError> {
        if let Some(resident) = &mut self.resident
            && resident.is_healthy().await
        {
            return Ok(());
        }
        if let Some(resident) = self.resident.take() {
            tracing::warn!(resident = self.id, "a resident sandbox is not well, and is replaced");
            Box::pin(resident.remove()).await;
        }
        self.deadline = SystemTime::now() + terms.max_age + max_runtime;
        let order = self.sandbox_request();
        let order = order.map_err(|error| sandbox::SandboxError::Resident(error.to_string()))?;
        self.resident = Some(LongRunningSandbox::start(&self.kind.driver, order, stop).await?);
        (self.born, self.runs) = (Instant::now(), 0);
        Ok(())
    }

    /// What a sandbox is made by.
    fn sandbox_request(&self) -> io::Result<sandbox::SandboxRequest> {
        // One that was made here before has left its own.
        let directory = self.directory.path().join("made");
        remove_run_dir(&directory)?;
        fs::create_dir(&directory)?;
        let (SandboxProfile { spec, .. }, deadline) = (self.kind.clone(), self.deadline);
        let (run, socket_dir) = (self.id.clone(), self.directory.socket_dir());
        Ok(sandbox::SandboxRequest {
            spec: SandboxSpec { run, socket_dir, ..spec },
            stamp: OwnerLabels {
                owner: OwnerProcess::this_process()?,
                run_dir: self.directory.parent(),
                deadline,
            },
            directory,
        })
    }

    fn matches(&self, need: &RunRequirements, terms: &LongRunningPoolLimits) -> bool {
        let end = SystemTime::now() + need.max_runtime;
        let is_over = self.resident.is_some() && end > self.deadline;
        self.kind == need.kind && !self.is_dirty() && !self.is_expired(terms) && !is_over
    }

    /// Something of a run may be left in its sandbox.
    fn is_dirty(&self) -> bool {
        self.resident.as_ref().is_some_and(|resident| !resident.is_ready())
    }

    /// It has had its time, or all its runs.
    fn is_expired(&self, terms: &LongRunningPoolLimits) -> bool {
        self.runs >= terms.runs || self.born.elapsed() >= terms.max_age
    }

    async fn is_reusable(&mut self, terms: &LongRunningPoolLimits) -> bool {
        let is_over = self.is_expired(terms) || self.used.elapsed() >= terms.max_idle;
        match &mut self.resident {
            Some(resident) if !is_over => resident.is_healthy().await,
            _ => false,
        }
    }
}

/// For whoever waits for a workspace that is looked at, or for a place: somebody has it for the moment.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// How often it is looked after the sandboxes.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
