//! Sandboxes that outlive their runs: one for each agent and branch, or whatever else its runs have in common.
//!
//! The runs of a [`Key`] come one after the other into the same sandbox and find the same workspace. Everything else is
//! each run's own: its socket, its gateway with its log and budget, its variables and its output. Of its processes, and
//! of what it wrote to memory, nothing is left for the next. A sandbox is made when the first run comes, and again after
//! so many runs, at an age, when it was idle, or when it is not well.
//!
//! **Invariant:** no run begins in a sandbox in which anything of another still runs, or whose run's socket is there.

mod home;
pub mod kept;
mod key;
mod turn;

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

use super::delivery::Target;
use super::directory::{Directory, remove};
use super::gateway::Gateway;
use super::quota::{Exceeded, Quota};
use super::{Inside, Order, Prepared, place};
use crate::sandbox::spec::{Access, Limits, Stamp, Workspace};
use crate::sandbox::{self, Driver, Owner, Resident, RunSpec, UserRange};

use home::Home;
use kept::{Shelf, Tenant};
pub use key::{Key, Scope};
pub(super) use turn::Turn;

/// The resident sandboxes of a process, kept in order by [`Residents::keep`].
pub struct Residents {
    /// Where workspaces are that live on.
    place: PathBuf,
    terms: Terms,
    rooms: Mutex<HashMap<String, Arc<Room<Option<Stay>>>>>,
    /// One for each sandbox that may be there at a time.
    seats: Arc<Semaphore>,
    closed: CancellationToken,
}

/// For how much a sandbox is good, and how many there are.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
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
pub struct Entered(Held);

/// Why a run has no place in a resident sandbox. It can still be run as every other.
#[derive(Debug, thiserror::Error)]
pub enum Unclaimed {
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
    NoRoom { who: String, id: String, exceeded: Exceeded },
    #[error(transparent)]
    Order(#[from] anyhow::Error),
}

/// A key's sandbox, and its directory while there is none.
struct Stay {
    kind: Kind,
    /// Nobody forgets it meanwhile.
    home: Arc<Home>,
    id: String,
    directory: Directory,
    resident: Option<Resident>,
    born: Instant,
    /// What its sandbox says of itself: until when it is not left behind, whoever looks.
    deadline: SystemTime,
    used: Instant,
    runs: u32,
    seat: Option<OwnedSemaphorePermit>,
}

/// What a run needs of its stay.
struct Need {
    kind: Kind,
    home: Arc<Home>,
    max_runtime: Duration,
}

/// What cannot be changed from run to run.
#[derive(Clone, Debug, PartialEq)]
struct Kind {
    driver: Driver,
    spec: RunSpec,
}

type Held = OwnedMutexGuard<Option<Stay>>;

impl Residents {
    /// With their workspaces on `shelf`. Nothing is made before the first run.
    pub fn new(shelf: &Shelf, terms: Terms) -> Self {
        let (place, seats) = (shelf.place().to_owned(), Arc::new(Semaphore::new(terms.most)));
        Self { place, terms, rooms: Mutex::default(), seats, closed: CancellationToken::new() }
    }

    /// Gives the key's sandbox to a run, which keeps it until it has ended, or is dropped. Waits for the run before it.
    /// Must be called within a runtime.
    ///
    /// # Errors
    /// Why there is none for this run, or what is wrong with its order.
    pub async fn claim(&self, key: &Key, order: Order) -> Result<Prepared, Unclaimed> {
        Box::pin(self.claim_until(&CancellationToken::new(), key, order)).await
    }

    /// The same, for whoever waits until `cancel` only. What has begun by then is not broken off.
    ///
    /// # Errors
    /// As [`Residents::claim`].
    pub async fn claim_until(
        &self,
        cancel: &CancellationToken,
        key: &Key,
        order: Order,
    ) -> Result<Prepared, Unclaimed> {
        check(&order)?;
        let entered = self.enter(cancel, key).await?;
        Box::pin(self.claim_entered(cancel, entered, key, order)).await
    }

    /// The same, for whoever has entered already.
    ///
    /// # Errors
    /// As [`Residents::claim`].
    pub async fn claim_entered(
        &self,
        cancel: &CancellationToken,
        Entered(mut held): Entered,
        key: &Key,
        order: Order,
    ) -> Result<Prepared, Unclaimed> {
        check(&order)?;
        self.clean(&mut held).await?;
        let users = order.users();
        if held.as_ref().is_some_and(|stay| !users.contains(stay.home.uid())) {
            leave(&mut held).await;
        }
        let Order { mut config, mut spec, agent, target, run_dir, driver, seats, .. } = order;
        let had = held.as_ref().map(|stay| Arc::clone(&stay.home));
        let tenant = key.tenant(target.as_ref().map(Target::line));
        let home = self.home(key, tenant, had, users).await?;
        spec.uid = home.uid();
        let path = home.workspace();
        let quota = Quota::new(path.clone(), spec.limits.max_workspace);
        if let Some(target) = &target {
            let (home, kept, target) = (Arc::clone(&home), key.kept.clone(), target.clone());
            let (uid, max_workspace) = (home.uid(), spec.limits.max_workspace);
            let feed = move |incoming: &_| target.feed(incoming, uid, max_workspace);
            let fill = move || home.fill(&kept, feed);
            spawn_blocking(fill).await.context("the workspace was not filled")??;
        }
        if let Err(exceeded) = quota.check().await {
            // So that it can be forgotten at once.
            leave(&mut held).await;
            return Err(Unclaimed::NoRoom { who: key.shown(), id: key.name(), exceeded });
        }
        spec.workspace = Workspace::Directory { path, access: Access::ReadWrite };
        let owner = Owner::this().context("`/proc` cannot be read")?;
        let own = Directory::create(&run_dir, &config.identity.run, &owner)?;
        if let Some(agent) = &agent {
            agent.prepare(&mut spec, &own, target.is_some())?;
        }
        let (kind, max_runtime) = (Kind::new(&driver, &spec), spec.limits.max_runtime);
        let need = Need { kind, home, max_runtime };
        let stay = self.stay(cancel, &mut held, need, &own).await?;
        place(&mut config, &mut spec, &stay.directory);
        let deadline = SystemTime::now() + spec.limits.max_runtime;
        let stamp = Stamp { owner, run_dir: own.parent(), deadline };
        let policy = config.digest();
        let gateway = Gateway::open(config, seats.as_ref())?;
        tracing::info!(run = spec.run, resident = stay.id, "claimed a resident sandbox");
        let directory = own.path().to_owned();
        let turn = Turn::new(held, self.terms, spec.clone());
        let order = sandbox::Order { spec, stamp, directory };
        let target = match target {
            Some(target) => {
                let (order, driver) = (order.clone(), driver.clone());
                let post = move || target.post(&order, &driver, &policy);
                let posted =
                    spawn_blocking(post).await.context("the workspace was not written down")??;
                Some(Box::new(posted))
            }
            None => None,
        };
        Ok(Prepared {
            gateway,
            run: order.spec.run.clone(),
            driver,
            order,
            sandbox: Inside::Resident(Box::new(turn)),
            directories: vec![own],
            is_agent: agent.is_some(),
            target,
            quota: Some(quota),
        })
    }

    /// Takes away sandboxes that are old, idle or not well, until `stop`; and then all of them, each when its run is
    /// over. Their workspaces stay.
    pub async fn keep(&self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            for room in self.all() {
                let Ok(mut held) = room.try_lock_owned() else { continue };
                let Some(stay) = &mut *held else { continue };
                if !stay.is_worth_keeping(&self.terms).await {
                    leave(&mut held).await;
                }
            }
            self.forget_empty_rooms();
            tokio::select! {
                () = sleep(LOOK) => (),
                () = stop.cancelled() => (),
            }
        }
        self.closed.cancel();
        for room in self.all() {
            leave(&mut room.lock_owned().await).await;
        }
    }

    /// How many sandboxes there are, or are about to be.
    pub fn count(&self) -> usize {
        self.terms.most - self.seats.available_permits()
    }

    fn room(&self, key: &Key) -> Arc<Room<Option<Stay>>> {
        let mut rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(rooms.entry(key.name()).or_default())
    }

    fn all(&self) -> Vec<Arc<Room<Option<Stay>>>> {
        let rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        rooms.values().map(Arc::clone).collect()
    }

    /// Nobody waits for one that is only ours.
    fn forget_empty_rooms(&self) {
        let mut rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        rooms.retain(|_, room| {
            Arc::strong_count(room) > 1 || room.try_lock().is_ok_and(|held| held.is_some())
        });
    }

    /// Takes the key if no other run has it.
    pub fn try_enter(&self, key: &Key) -> Option<Entered> {
        self.room(key).try_lock_owned().ok().map(Entered)
    }

    /// Returns when the key is this run's.
    ///
    /// # Errors
    /// Another run has it for too long, or `cancel` comes first.
    pub async fn enter(&self, cancel: &CancellationToken, key: &Key) -> Result<Entered, Unclaimed> {
        let held = timeout(self.terms.wait, self.room(key).lock_owned());
        let held = cancel.run_until_cancelled(held).await.ok_or(Unclaimed::Cancelled)?;
        held.map(Entered).map_err(|_| Unclaimed::Busy(key.shown()))
    }

    /// Returns when nothing of another run runs there.
    async fn clean(&self, held: &mut Held) -> Result<(), Unclaimed> {
        if self.closed.is_cancelled() {
            return Err(Unclaimed::Closed);
        }
        // Of a run that was given up in its midst the program may run on, in the workspace that is to be filled.
        if held.as_ref().is_some_and(Stay::is_spoiled) {
            leave(held).await;
        }
        Ok(())
    }

    /// The key's, which nobody forgets as long as it is held.
    async fn home(
        &self,
        key: &Key,
        tenant: Tenant,
        had: Option<Arc<Home>>,
        users: UserRange,
    ) -> Result<Arc<Home>, Unclaimed> {
        if let Some(home) = had {
            home.label(&tenant).context("the workspace cannot be used")?;
            return Ok(home);
        }
        let (place, name, earlier) = (self.place.clone(), key.name(), key.earlier_name());
        let taking = async {
            loop {
                let (place, name, tenant) = (place.clone(), name.clone(), tenant.clone());
                let earlier = earlier.clone();
                let open = move || {
                    if let Some(earlier) = earlier {
                        home::inherit(&place, &earlier, &name, &tenant);
                    }
                    Home::open(&place, &name, &tenant, users)
                };
                let opened = spawn_blocking(open).await.context("there is no workspace")??;
                match opened {
                    Some(home) => return anyhow::Ok(Arc::new(home)),
                    None => sleep(AGAIN).await,
                }
            }
        };
        let taken = timeout(self.terms.wait, taking).await;
        Ok(taken.map_err(|_| Unclaimed::Busy(key.shown()))??)
    }

    /// What the key has by now, with nothing in it that this run could not be given.
    async fn stay<'held>(
        &self,
        cancel: &CancellationToken,
        held: &'held mut Held,
        need: Need,
        run: &Directory,
    ) -> Result<&'held mut Stay, Unclaimed> {
        if held.as_ref().is_some_and(|stay| !stay.suits(&need, &self.terms)) {
            leave(held).await;
        }
        let seat = match &mut **held {
            Some(Stay { seat: Some(_), .. }) => None,
            _ => Some(self.take_seat(cancel).await?),
        };
        if held.is_none() {
            **held = Some(Stay::new(need.kind, need.home, run)?);
        }
        let stay = held.as_mut().expect("it was made just now");
        stay.seat = stay.seat.take().or(seat);
        Ok(stay)
    }

    /// Where there is none, the sandbox goes that was idle for the longest time. One that somebody has may only be on its
    /// way out, or become idle in a moment, so it is looked more than once; whoever takes one away finishes that.
    async fn take_seat(
        &self,
        cancel: &CancellationToken,
    ) -> Result<OwnedSemaphorePermit, Unclaimed> {
        let end = Instant::now() + self.terms.wait;
        let mut seat = pin!(Arc::clone(&self.seats).acquire_owned());
        let mut pause = Duration::ZERO;
        loop {
            tokio::select! {
                biased;
                seat = &mut seat => return Ok(seat.expect("nobody closes them")),
                () = self.closed.cancelled() => return Err(Unclaimed::Closed),
                () = cancel.cancelled() => return Err(Unclaimed::Cancelled),
                () = sleep(pause) => (),
            }
            pause = match self.longest_idle() {
                Some(mut idle) => {
                    leave(&mut idle).await;
                    Duration::ZERO
                }
                None if Instant::now() >= end => return Err(Unclaimed::Full(self.terms.most)),
                None => AGAIN,
            };
        }
    }

    fn longest_idle(&self) -> Option<Held> {
        let idle = self.all().into_iter().filter_map(|room| room.try_lock_owned().ok());
        let idle = idle.filter(|held| held.as_ref().is_some_and(|stay| stay.seat.is_some()));
        idle.min_by_key(|held| held.as_ref().map(|stay| stay.used))
    }
}

/// Leaves the key without a sandbox.
async fn leave(held: &mut Held) {
    if let Some(Stay { resident, directory, seat, .. }) = held.take() {
        if let Some(resident) = resident {
            Box::pin(resident.remove()).await;
        }
        directory.remove().await;
        drop(seat);
    }
}

fn check(order: &Order) -> Result<(), Unclaimed> {
    if order.proxy.is_some() {
        return Err(Unclaimed::Never("gateway in a container"));
    }
    if order.spec.init.is_none() {
        return Err(Unclaimed::Never("first process but cogni-init"));
    }
    if matches!(order.spec.workspace, Workspace::Directory { .. }) {
        return Err(Unclaimed::Never("other workspace than its own"));
    }
    Ok(order.check()?)
}

impl Kind {
    /// How long a run takes and how much it says is not the sandbox's own limit.
    fn new(driver: &Driver, spec: &RunSpec) -> Self {
        let Limits { max_runtime, max_output_bytes, max_workspace, .. } = Limits::default();
        let spec = RunSpec {
            run: String::new(),
            argv: vec![],
            env: [].into(),
            limits: Limits { max_runtime, max_output_bytes, max_workspace, ..spec.limits },
            socket_dir: PathBuf::new(),
            grace: Duration::ZERO,
            ..spec.clone()
        };
        Self { driver: driver.clone(), spec }
    }
}

impl Stay {
    /// Nothing is started yet.
    fn new(kind: Kind, home: Arc<Home>, run: &Directory) -> anyhow::Result<Self> {
        let id = format!("resident-{}", Uuid::now_v7());
        let owner = Owner::this().context("`/proc` cannot be read")?;
        let directory = Directory::create(&run.parent(), &id, &owner)?;
        let (now, deadline) = (Instant::now(), SystemTime::now());
        let (born, used, resident, runs, seat) = (now, now, None, 0, None);
        Ok(Self { kind, home, id, directory, resident, born, deadline, used, runs, seat })
    }

    /// Makes the sandbox, where there is none that is well, for a run that may take so long.
    async fn make(
        &mut self,
        terms: &Terms,
        max_runtime: Duration,
        stop: impl Future<Output = ()>,
    ) -> Result<(), sandbox::Error> {
        if let Some(resident) = &mut self.resident
            && resident.is_well().await
        {
            return Ok(());
        }
        if let Some(resident) = self.resident.take() {
            tracing::warn!(resident = self.id, "a resident sandbox is not well, and is replaced");
            Box::pin(resident.remove()).await;
        }
        self.deadline = SystemTime::now() + terms.max_age + max_runtime;
        let order = self.order();
        let order = order.map_err(|error| sandbox::Error::Resident(error.to_string()))?;
        self.resident = Some(Resident::start(&self.kind.driver, order, stop).await?);
        (self.born, self.runs) = (Instant::now(), 0);
        Ok(())
    }

    /// What a sandbox is made by.
    fn order(&self) -> io::Result<sandbox::Order> {
        // One that was made here before has left its own.
        let directory = self.directory.path().join("made");
        remove(&directory)?;
        fs::create_dir(&directory)?;
        let (Kind { spec, .. }, deadline) = (self.kind.clone(), self.deadline);
        let (run, socket_dir) = (self.id.clone(), self.directory.socket_dir());
        Ok(sandbox::Order {
            spec: RunSpec { run, socket_dir, ..spec },
            stamp: Stamp { owner: Owner::this()?, run_dir: self.directory.parent(), deadline },
            directory,
        })
    }

    fn suits(&self, need: &Need, terms: &Terms) -> bool {
        let end = SystemTime::now() + need.max_runtime;
        let is_over = self.resident.is_some() && end > self.deadline;
        self.kind == need.kind && !self.is_spoiled() && !self.is_worn(terms) && !is_over
    }

    /// Something of a run may be left in its sandbox.
    fn is_spoiled(&self) -> bool {
        self.resident.as_ref().is_some_and(|resident| !resident.is_ready())
    }

    /// It has had its time, or all its runs.
    fn is_worn(&self, terms: &Terms) -> bool {
        self.runs >= terms.runs || self.born.elapsed() >= terms.max_age
    }

    async fn is_worth_keeping(&mut self, terms: &Terms) -> bool {
        let is_over = self.is_worn(terms) || self.used.elapsed() >= terms.max_idle;
        match &mut self.resident {
            Some(resident) if !is_over => resident.is_well().await,
            _ => false,
        }
    }
}

/// For whoever waits for a workspace that is looked at, or for a place: somebody has it for the moment.
const AGAIN: Duration = Duration::from_millis(20);

/// How often it is looked after the sandboxes.
const LOOK: Duration = Duration::from_secs(1);
