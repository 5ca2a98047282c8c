//! The runs of a process: each with its own budget, records and metrics, on connections that they share.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::control::{self, By, Control};
use super::descriptors::Share;
use crate::audit::record::Started;
use crate::audit::{self, Recovered};
use crate::base::drain::{Drain, Drained};
use crate::budget::{Ledger, Past};
use crate::config::{Config, RunSpec};
use crate::gateway::Gateway;
use crate::gateway::limits::{ProcessCapacity, RunCapacity};
use crate::gateway::policy::{self, Policy};
use crate::gateway::registry::{Gateways, Registry};
use crate::gateway::server;
use crate::observe::access_log;
use crate::observe::metrics::{self, Metrics};
use crate::observe::trace::{Trace, Tracer};
use crate::run::{Run, gate};
use crate::upstream::Upstream;
use crate::upstream::outage::FailureLog;

/// A handle to the runs of a process, by which they are opened, changed and closed while it serves.
#[derive(Clone)]
pub struct Runs(Arc<Host>);

/// What the runs of a process share.
struct Host {
    base: Mutex<Arc<Base>>,
    /// Whether runs come and go; a run on a socket of its own ends with its process.
    has_many: bool,
    audit_dir: Option<PathBuf>,
    drain_timeout: Duration,
    server: server::Config,
    /// What one run may hold of the process's descriptors.
    share: Share,
    capacity: Arc<ProcessCapacity>,
    /// One for each worker.
    upstreams: Vec<Arc<Upstream>>,
    metrics: Arc<Metrics>,
    tracer: Tracer,
    /// For what is of no run; those of the runs go to the same place.
    access_log: access_log::Log,
    registry: Arc<Registry>,
    open: Mutex<HashMap<String, Open>>,
    /// Those whose records are being opened, which takes a while.
    opening: Mutex<HashSet<String>>,
    /// Those that are no longer open, and whose records are not closed yet.
    closing: Mutex<HashMap<String, Closing>>,
    tasks: Drain,
}

/// What a run has that says nothing else.
struct Base {
    config: Config,
    policy: Policy,
    /// Who has put it in force since the start.
    by: Option<By>,
}

/// A run that is open, for its operator.
#[derive(Clone)]
struct Open {
    control: Arc<Control>,
    /// How it was described, where there are others.
    spec: Option<RunSpec>,
}

/// How far the closing of a run has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// Its calls are waited for, or its records are being written for the first time.
    Draining,
    /// The end of its records could not be written. It is kept in memory, and tried again until that works.
    Unwritten,
}

impl Runs {
    /// No runs yet, and what they will share. `tasks` are those of the process. Must be called within a runtime.
    pub(super) fn new(config: &Config, tasks: Drain) -> anyhow::Result<Self> {
        Self::of(config, config.shared.is_some(), tasks)
    }

    /// As [`new`](Self::new), for runs that come and go with sockets of their own.
    pub(super) fn for_seats(config: &Config, tasks: Drain) -> anyhow::Result<Self> {
        Self::of(config, true, tasks)
    }

    fn of(config: &Config, has_many: bool, tasks: Drain) -> anyhow::Result<Self> {
        let base = Base::new(config, None)?;
        let failures = Arc::new(FailureLog::new(&config.upstream.url));
        let upstreams = (0..config.workers)
            .map(|_| Upstream::sharing(&config.upstream, Arc::clone(&failures)).map(Arc::new))
            .collect::<io::Result<Vec<_>>>()
            .context("the upstream's authorities cannot be loaded")?;
        for upstream in &upstreams {
            close_idle(Arc::clone(upstream), &tasks);
        }
        let provider = config.upstream.kind.name();
        let metrics = Arc::new(Metrics::new(provider)?);
        let tracer = Tracer::start(&config.telemetry, provider, metrics.spans())
            .context("the collector's authorities cannot be loaded")?;
        let share = Share::of(config);
        let capacity = ProcessCapacity::new(&config.server, share.process_requests, has_many);
        let capacity = Arc::new(capacity);
        tasks.spawn(Arc::clone(&capacity).give_back_memory(tasks.clone()));
        let nobody = access_log::Identity { run: "-", attempt: "-" };
        Ok(Self(Arc::new(Host {
            base: Mutex::new(Arc::new(base)),
            has_many,
            audit_dir: config.shared.as_ref().and_then(|shared| shared.audit_dir.clone()),
            drain_timeout: config.drain_timeout,
            server: config.server.clone(),
            share,
            capacity,
            upstreams,
            metrics,
            tracer,
            access_log: access_log::Log::open_bounded(
                &config.access_log,
                &nobody,
                config.access_log_max_bytes,
            )?,
            registry: Arc::default(),
            open: Mutex::default(),
            opening: Mutex::default(),
            closing: Mutex::default(),
            tasks,
        })))
    }

    /// Opens a run. Blocks on the disk; must be called within a runtime.
    ///
    /// # Errors
    /// This process serves one run only, the run is open already, its description is not good, or its records cannot be opened.
    pub fn open(&self, spec: RunSpec) -> anyhow::Result<Arc<Run>> {
        self.check_shared()?;
        let base = Arc::clone(&self.0.base());
        let config = self.0.config_of(&spec, &base)?;
        let gateways = self.0.open(config, Some(spec), &base)?;
        Ok(Arc::clone(&gateways[0].run))
    }

    /// Closes a run. New calls are refused at once; those that are open may end within the drain timeout,
    /// then they are cut. Then its records are closed, and some minutes later its metrics go away.
    ///
    /// It goes on where nobody waits for it. Records that cannot be closed, since the disk is full, are tried again in the
    /// background until they can, or the process ends.
    ///
    /// # Errors
    /// This process serves one run only, there is no such run, or its records could not be closed at once.
    pub async fn close(&self, run: &str) -> anyhow::Result<Drained> {
        self.check_shared()?;
        self.begin_closing(run)?.await.context("closing the run was given up")?
    }

    /// Has a run closed as [`close`](Self::close) does. Must be called within a runtime.
    ///
    /// # Errors
    /// There is no such run.
    pub(super) fn begin_closing(
        &self,
        run: &str,
    ) -> anyhow::Result<oneshot::Receiver<anyhow::Result<Drained>>> {
        let (host, name) = (Arc::clone(&self.0), run.to_owned());
        let gateways = {
            // Locked meanwhile: a run is never neither open nor closing before its records are closed.
            let mut closing = host.closing();
            let gateways = host.registry.remove(run);
            let gateways = gateways.ok_or_else(|| anyhow!("run `{run}` is not open"))?;
            closing.insert(name.clone(), Closing::Draining);
            gateways
        };
        let (done, closed) = oneshot::channel();
        self.0.tasks.spawn(async move {
            let first = Arc::clone(&host).close(Arc::clone(&gateways)).await;
            let is_closed = first.is_ok();
            if !is_closed {
                host.closing().insert(name.clone(), Closing::Unwritten);
            }
            let _nobody_waits = done.send(first);
            if !is_closed {
                host.write_out(&gateways).await;
            }
            host.closing().remove(&name);
        });
        Ok(closed)
    }

    /// How far the closing of a run has come; `None` where it is open, closed, or was never there.
    pub fn closing(&self, run: &str) -> Option<Closing> {
        self.0.closing().get(run).copied()
    }

    /// Ends the calls of a run, whose records stay open: new calls are refused at once, and open ones end within the drain
    /// timeout. Then the run may be [closed](Self::close).
    pub(super) async fn end_calls(&self, gateway: &Gateway) -> Drained {
        self.0.end_calls(gateway).await
    }

    /// Closes a run that was opened and never served. Blocks on the disk.
    ///
    /// # Errors
    /// There is no such run, or its records could not be closed.
    pub(super) fn close_unserved(&self, run: &str) -> anyhow::Result<()> {
        let gateways = self.0.registry.remove(run);
        let gateways = gateways.ok_or_else(|| anyhow!("run `{run}` is not open"))?;
        self.0.close_unserved(&gateways)
    }

    /// Says whether runs can be opened and closed here.
    ///
    /// # Errors
    /// This process serves one run only.
    pub fn check_shared(&self) -> anyhow::Result<()> {
        if self.0.has_many {
            return Ok(());
        }
        bail!("this process serves one run, on its own socket; the run begins and ends with it")
    }

    /// The runs that are open, in no order.
    pub fn list(&self) -> Vec<Arc<Run>> {
        self.0.registry.all().iter().map(|gateways| Arc::clone(&gateways[0].run)).collect()
    }

    /// The operator's handles on all runs, in no order.
    pub fn controls(&self) -> Vec<Arc<Control>> {
        self.0.opened().values().map(|open| Arc::clone(&open.control)).collect()
    }

    /// The operator's handle on one run.
    pub fn control(&self, run: &str) -> Option<Arc<Control>> {
        self.0.opened().get(run).map(|open| Arc::clone(&open.control))
    }

    /// Puts another configuration in force for every run, or for none. Runs that it describes anew are
    /// changed; they are opened and closed only by [`Runs::open`] and [`Runs::close`]. One that is just being opened has it
    /// when it is open.
    ///
    /// # Errors
    /// What is wrong with it, or cannot change while runs are served.
    pub fn reload(&self, by: By, fresh: Config) -> anyhow::Result<()> {
        let mut base = self.0.base();
        let next = Base::new(&fresh, Some(by))?;
        control::check_lasting(&base.config, &next.config)?;
        let described = fresh.shared.map(|shared| shared.runs).unwrap_or_default();
        let mut changes = vec![];
        for Open { control, spec } in self.0.opened().values().cloned() {
            let again = described.iter().find(|new| new.run_id == control.run().identity.run);
            let config = match again.cloned().or(spec) {
                Some(spec) => self.0.config_of(&spec, &next)?,
                None => next.config.clone(),
            };
            let in_force = control.lay_over(&config);
            control.check(&in_force)?;
            let policy = next.policy_of(&in_force)?;
            changes.push((control, config, (in_force, policy)));
        }
        for (control, given, in_force) in changes {
            control.put(by, given, in_force);
        }
        *base = Arc::new(next);
        Ok(())
    }

    /// Puts another configuration in force for runs that are opened from now on.
    ///
    /// # Errors
    /// What is wrong with it; nothing has changed.
    pub(super) fn renew(&self, by: By, fresh: &Config) -> anyhow::Result<()> {
        let next = Base::new(fresh, Some(by))?;
        *self.0.base() = Arc::new(next);
        Ok(())
    }

    pub(super) fn access_log(&self) -> &access_log::Log {
        &self.0.access_log
    }

    pub(super) fn metrics(&self) -> &Arc<Metrics> {
        &self.0.metrics
    }

    pub(super) fn registry(&self) -> &Arc<Registry> {
        &self.0.registry
    }

    /// Opens the one run of a process that has no others.
    pub(super) fn open_only(&self) -> anyhow::Result<Gateways> {
        let base = Arc::clone(&self.0.base());
        self.0.open(base.config.clone(), None, &base)
    }

    /// Opens a run whose socket is its own.
    pub(super) fn open_seat(&self, config: Config) -> anyhow::Result<Gateways> {
        let base = Arc::clone(&self.0.base());
        self.0.open(config, None, &base)
    }

    /// Closes the records of all runs, whose calls have ended, and sends out what was measured and logged.
    ///
    /// # Errors
    /// One that could not be closed; the others are.
    pub(super) async fn finish(&self) -> anyhow::Result<()> {
        // Those that are just being closed are in no list.
        self.0.tasks.finish(self.0.drain_timeout).await;
        for gateways in self.0.registry.all() {
            gateways[0].access_log.write_repeats();
        }
        self.0.access_log.write_repeats();
        self.0.access_log.flush();
        let finished = self.finish_records().await;
        self.0.tracer.finish().await;
        finished
    }

    /// Side by side: each waits for the disk, and a thousand in a row take longer than a container has to stop.
    async fn finish_records(&self) -> anyhow::Result<()> {
        let finish = |run: Arc<Run>| tokio::task::spawn_blocking(move || finish(&run));
        let finishing: Vec<_> = self.list().into_iter().map(finish).collect();
        let mut finished = Ok(());
        for run in finishing {
            finished = finished.and(run.await?);
        }
        finished
    }

    /// Everything there is to scrape.
    pub(super) fn scrape(&self) -> Vec<u8> {
        for gateways in self.0.registry.all() {
            let gateway = &gateways[0];
            gateway.metrics.audit_lag(&gateway.run.audit.lag());
        }
        let metrics = &self.0.metrics;
        metrics.access_log_lost(self.0.access_log.lost());
        metrics.sweep(Instant::now());
        metrics.render()
    }
}

impl Base {
    fn new(config: &Config, by: Option<By>) -> anyhow::Result<Self> {
        let config = Config { shared: None, ..config.clone() };
        Ok(Self { policy: control::compile(&config)?, config, by })
    }

    /// The policy of a run. Rules are compiled, and prices read, once for all that have the same: what becomes of a file
    /// meanwhile is no run's business before it is read again.
    fn policy_of(&self, config: &Config) -> anyhow::Result<Policy> {
        control::compile_like((&self.config, &self.policy), config)
    }
}

impl Host {
    fn config_of(&self, spec: &RunSpec, base: &Base) -> anyhow::Result<Config> {
        spec.clone().within(&base.config, self.audit_dir.as_deref())
    }

    fn open(
        &self,
        config: Config,
        spec: Option<RunSpec>,
        base: &Arc<Base>,
    ) -> anyhow::Result<Gateways> {
        let name = config.identity.run.clone();
        let _turn = self.turn(&name)?;
        let policy = base.policy_of(&config)?;
        let trace = self.tracer.trace(config.identity.trace());
        let (audit, recovered) = open_audit(&config, &policy, trace.as_deref())?;
        let past = Past { spent: recovered.spent, age: recovered.age };
        let ledger = Ledger::new(config.budget.clone(), past);
        let run = Arc::new(Run::new(config.identity.clone(), ledger, audit).traced(trace));
        let policy = Arc::new(policy::Live::from_pointee(policy));
        let gateways = self.gateways(&run, &policy);
        flush(Arc::clone(&run), &gateways[0].tasks);
        let control = Arc::new(Control::new(run, policy, config));
        // Held until it is in the list: a reload finds the run there, or is found here.
        let current = self.base();
        if let Some(spec) = spec.as_ref().filter(|_| !Arc::ptr_eq(base, &current)) {
            let caught_up = self.catch_up(&control, spec, &current);
            caught_up.or_else(|error| self.close_unserved(&gateways).and(Err(error)))?;
        }
        self.opened().insert(name.clone(), Open { control, spec });
        self.registry.insert(&name, Arc::clone(&gateways));
        drop(current);
        Ok(gateways)
    }

    /// Gives a run what was put in force while it was being opened.
    fn catch_up(&self, control: &Control, spec: &RunSpec, base: &Base) -> anyhow::Result<()> {
        let Some(by) = base.by else { return Ok(()) };
        let config = self.config_of(spec, base)?;
        control.check(&config)?;
        let policy = base.policy_of(&config)?;
        control.put(by, config.clone(), (config, policy));
        Ok(())
    }

    /// Nobody else opens the run of this name meanwhile.
    fn turn(&self, name: &str) -> anyhow::Result<Turn<'_>> {
        let mut opening = self.opening();
        if self.opened().contains_key(name) || !opening.insert(name.to_owned()) {
            bail!("run `{name}` is open already");
        }
        Ok(Turn { host: self, name: name.to_owned() })
    }

    fn gateways(&self, run: &Arc<Run>, policy: &Arc<policy::Live>) -> Gateways {
        let identity =
            access_log::Identity { run: &run.identity.run, attempt: &run.identity.attempt };
        let access_log = self.access_log.for_run(&identity);
        let access_log = Arc::new(match &run.trace {
            Some(trace) => access_log.within(trace.id()),
            None => access_log,
        });
        let metrics = self.metrics.run(&run.identity.run, &run.ledger);
        let tasks = self.tasks.part();
        let process = Arc::clone(&self.capacity);
        let capacity = Arc::new(RunCapacity::new(&self.server, self.share.run_requests, process));
        let gateway = |upstream: &Arc<Upstream>| {
            Arc::new(Gateway {
                run: Arc::clone(run),
                policy: Arc::clone(policy),
                upstream: Arc::clone(upstream),
                metrics: Arc::clone(&metrics),
                access_log: Arc::clone(&access_log),
                slots: Arc::new(Semaphore::new(self.share.run_connections)),
                capacity: Arc::clone(&capacity),
                tasks: tasks.clone(),
            })
        };
        self.upstreams.iter().map(gateway).collect()
    }

    async fn close(self: Arc<Self>, gateways: Gateways) -> anyhow::Result<Drained> {
        let run = &gateways[0].run;
        let drained = self.end_calls(&gateways[0]).await;
        let name = run.identity.run.clone();
        tokio::task::spawn_blocking(move || self.finish(&gateways)).await??;
        tracing::info!(run = name, ?drained, "the run is closed");
        Ok(drained)
    }

    /// Refuses new calls of a run, and waits for those that are open, within the drain timeout.
    async fn end_calls(&self, Gateway { run, tasks, .. }: &Gateway) -> Drained {
        run.gate.set(gate::State::Draining);
        // On a listener that is shared, calls are told by their run that the time is up.
        let cut = async {
            tasks.cut().cancelled().await;
            run.gate.cut();
            std::future::pending().await
        };
        tokio::select! {
            drained = tasks.finish(self.drain_timeout) => drained,
            never = cut => never,
        }
    }

    /// Writes the end of a run's records again and again, until it is written or the process ends.
    async fn write_out(&self, gateways: &Gateways) {
        let Gateway { run, metrics, .. } = &*gateways[0];
        let mut pause = FIRST_PAUSE;
        loop {
            let is_last = self.tasks.closing().run_until_cancelled(sleep(pause)).await.is_none();
            let records = Arc::clone(run);
            let written = tokio::task::spawn_blocking(move || records.audit.write_out()).await;
            metrics.audit_lag(&run.audit.lag());
            let name = &run.identity.run;
            match written.map_err(anyhow::Error::from).and_then(|done| Ok(done?)) {
                Ok(()) => return tracing::info!(run = name, "the end of its audit log is written"),
                Err(error) if is_last => {
                    tracing::error!(run = name, "the end of its audit log is lost: {error:#}");
                    return;
                }
                Err(_) => pause = (pause * 2).min(LAST_PAUSE),
            }
        }
    }

    /// Closes a run that nobody could call yet. Blocks on the disk.
    fn close_unserved(&self, gateways: &Gateways) -> anyhow::Result<()> {
        gateways[0].run.gate.set(gate::State::Draining);
        gateways[0].tasks.closing().cancel();
        self.finish(gateways)
    }

    /// Ends the records of a run whose calls have ended. Blocks on the disk.
    fn finish(&self, gateways: &Gateways) -> anyhow::Result<()> {
        let Gateway { run, metrics, access_log, .. } = &*gateways[0];
        access_log.write_repeats();
        let name = &run.identity.run;
        // Nobody may change it any more: what ends its records is the last of them.
        self.opened().remove(name);
        let finished = finish(run);
        metrics.audit_lag(&run.audit.lag());
        self.metrics.retire(name, Instant::now() + metrics::RETENTION);
        finished
    }

    fn base(&self) -> MutexGuard<'_, Arc<Base>> {
        self.base.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn opened(&self) -> MutexGuard<'_, HashMap<String, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn opening(&self) -> MutexGuard<'_, HashSet<String>> {
        self.opening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closing(&self) -> MutexGuard<'_, HashMap<String, Closing>> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to open a run.
struct Turn<'a> {
    host: &'a Host,
    name: String,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.host.opening().remove(&self.name);
    }
}

fn open_audit(
    config: &Config,
    policy: &Policy,
    trace: Option<&Trace>,
) -> anyhow::Result<(audit::Log, Recovered)> {
    let started = Started {
        run: config.identity.run.clone(),
        attempt: config.identity.attempt.clone(),
        account: config.identity.account.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        policy: config.digest(),
        prices: policy.prices.digest().to_owned(),
        trace: trace.map(|trace| trace.id().to_string()),
        upstream: config.upstream.kind.name(),
    };
    let (log, recovered) = audit::Log::open(&config.audit, &started)?;
    if recovered.resumed {
        tracing::info!(run = started.run, spent = ?recovered.spent, crashed = recovered.crashed, torn_bytes = recovered.torn_bytes, "resumed the audit log");
    }
    Ok((log, recovered))
}

fn finish(run: &Run) -> anyhow::Result<()> {
    let name = &run.identity.run;
    run.finish().with_context(|| format!("the audit log of run `{name}` could not be closed"))
}

/// Writes out what is buffered, until the run ends.
fn flush(run: Arc<Run>, tasks: &Drain) {
    let closing = tasks.closing().clone();
    tasks.spawn(async move { flush_until(&run, &closing).await });
}

/// Writes out what is buffered of a run, until `end`.
pub(super) async fn flush_until(run: &Run, end: &CancellationToken) {
    let flush = async {
        loop {
            run.audit.unflushed().await;
            sleep(FLUSH_INTERVAL).await;
            run.audit.flush();
        }
    };
    end.run_until_cancelled(flush).await;
}

/// Closes connections that nobody has used for too long, until the process ends.
fn close_idle(upstream: Arc<Upstream>, tasks: &Drain) {
    let closing = tasks.closing().clone();
    tasks.spawn(async move {
        closing.run_until_cancelled(upstream.close_idle()).await;
    });
}

/// How late a record may reach the kernel when nothing pushes it out before.
const FLUSH_INTERVAL: Duration = Duration::from_millis(100);

/// Before the end of a run's records is written again.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(10);
