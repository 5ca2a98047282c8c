//! The runs of a process: each has its own budget, records and metrics, and all share the upstream connections.

mod closing;

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::sync::Semaphore;

use super::background::{spawn_flush_loop, spawn_idle_closer};
use super::control::{self, ChangeSource, ServedRunHandle};
use super::descriptors::DescriptorShare;
use super::run_audit::{finish_run, open_audit_log};
use crate::base::host_lookups::HostLookups;
use crate::base::keyed_permits::KeyedPermits;
use crate::base::task_group::TaskGroup;
use crate::gateway::config::{GatewayConfig, SharedRunConfig};
use crate::gateway::pipeline::RunGateway;
use crate::gateway::pipeline::limits::{ProcessCapacity, RunCapacity};
use crate::gateway::pipeline::policy::{self, GatewayPolicy};
use crate::gateway::pipeline::registry::{GatewayRegistry, PerWorkerGateways};
use crate::gateway::pipeline::server;
use crate::gateway::run::{AgentRun, ToolProcess};
use crate::gateway::upstream::UpstreamClient;
use crate::gateway::upstream::outage::FailureLog;
use crate::llm::budget::{BudgetLedger, PriorUsage};
use crate::telemetry::access_log;
use crate::telemetry::audit::RecoveredRun;
use crate::telemetry::metrics::MetricsRegistry;
use crate::telemetry::trace::ProcessTracer;

/// A handle to the runs of a process. The handle opens, changes and closes runs while the process serves them.
#[derive(Clone)]
pub struct RunManager(Arc<RunManagerShared>);

/// The state that the runs of a process share.
struct RunManagerShared {
    base: Mutex<Arc<RunDefaults>>,
    /// True if runs come and go. A run on a socket of its own ends with its process.
    has_many: bool,
    audit_dir: Option<PathBuf>,
    drain_timeout: Duration,
    server: server::HttpServerConfig,
    /// The limits of one run on the process's descriptors.
    share: DescriptorShare,
    capacity: Arc<ProcessCapacity>,
    /// The upstream clients, one for each worker.
    upstreams: Vec<Arc<UpstreamClient>>,
    metrics: Arc<MetricsRegistry>,
    /// Permits for the programs that print the credentials of connections.
    programs: Arc<KeyedPermits>,
    lookups: Arc<HostLookups>,
    tunnels: Arc<KeyedPermits>,
    tracer: ProcessTracer,
    /// The access log for lines that belong to no run. The runs' lines go to the same file.
    access_log: access_log::AccessLog,
    registry: Arc<GatewayRegistry>,
    open: Mutex<HashMap<String, OpenRun>>,
    /// The names of runs whose records are being opened, which takes a while.
    opening: Mutex<HashSet<String>>,
    /// The runs that are no longer open and whose records are not closed yet.
    closing: Mutex<HashMap<String, RunClosingState>>,
    tasks: TaskGroup,
}

/// The default settings of a run. The run's description may replace some of them.
struct RunDefaults {
    config: GatewayConfig,
    policy: GatewayPolicy,
    /// The origin of these settings; `None` for the settings of the start.
    by: Option<ChangeSource>,
}

/// An open run, with the operator's handle on it.
#[derive(Clone)]
struct OpenRun {
    control: Arc<ServedRunHandle>,
    /// The run's description, for a run on a shared listener.
    spec: Option<SharedRunConfig>,
}

/// The progress of closing a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunClosingState {
    /// The process waits for the run's calls, or writes the end of the run's records for the first time.
    Draining,
    /// The end of the run's records could not be written. The process holds the end in memory and retries the write.
    WriteFailed,
}

impl RunManager {
    /// Creates a manager without runs. `tasks` is the process's task group. Must be called within a runtime.
    pub(super) fn new(config: &GatewayConfig, tasks: TaskGroup) -> anyhow::Result<Self> {
        Self::with_sockets(config, config.shared.is_some(), tasks)
    }

    /// Creates a manager for runs that come and go and have sockets of their own. Must be called within a runtime.
    pub(super) fn with_private_sockets(
        config: &GatewayConfig,
        tasks: TaskGroup,
    ) -> anyhow::Result<Self> {
        Self::with_sockets(config, true, tasks)
    }

    fn with_sockets(
        config: &GatewayConfig,
        has_many: bool,
        tasks: TaskGroup,
    ) -> anyhow::Result<Self> {
        let base = RunDefaults::new(config, None)?;
        let failures = Arc::new(FailureLog::new(&config.upstream.url));
        // A client belongs to one worker's thread. All clients share one log of failures, so a failure is logged once.
        let upstreams = (0..config.workers)
            .map(|_| UpstreamClient::sharing(&config.upstream, Arc::clone(&failures)).map(Arc::new))
            .collect::<io::Result<Vec<_>>>()
            .context("the upstream's authorities cannot be loaded")?;
        for upstream in &upstreams {
            spawn_idle_closer(Arc::clone(upstream), &tasks);
        }
        let provider = config.upstream.kind.name();
        let metrics = Arc::new(MetricsRegistry::new(provider)?);
        metrics.set_upstream_host(config.upstream.url.authority().as_str());
        let tracer =
            ProcessTracer::start_tracer(&config.telemetry, provider, metrics.span_counters())
                .context("the collector's authorities cannot be loaded")?;
        let share = DescriptorShare::from_current_limit(config);
        let capacity = ProcessCapacity::new(&config.server, share.process_requests, has_many);
        let capacity = Arc::new(capacity);
        tasks.spawn_task(Arc::clone(&capacity).trim_freed_memory(tasks.clone()));
        let no_run = access_log::AccessLogIdentity { run: "-", attempt: "-" };
        Ok(Self(Arc::new(RunManagerShared {
            base: Mutex::new(Arc::new(base)),
            has_many,
            audit_dir: config.shared.as_ref().and_then(|shared| shared.audit_dir.clone()),
            drain_timeout: config.drain_timeout,
            server: config.server.clone(),
            share,
            capacity,
            upstreams,
            metrics,
            programs: Arc::new(KeyedPermits::new(MAX_PROGRAMS, MAX_SAME_PROGRAMS)),
            lookups: Arc::new(HostLookups::new(MAX_LOOKUPS, MAX_RUN_LOOKUPS)),
            tunnels: Arc::new(KeyedPermits::new(MAX_TUNNELS, MAX_RUN_TUNNELS)),
            tracer,
            access_log: access_log::AccessLog::open_with_format(
                &config.access_log,
                &no_run,
                config.access_log_format,
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
    /// Returns an error if this process serves one run only, the run is open already, its description is not valid, or
    /// its records cannot be opened.
    pub fn open_run(&self, spec: SharedRunConfig) -> anyhow::Result<Arc<AgentRun>> {
        self.check_can_open_runs()?;
        let base = Arc::clone(&self.0.lock_defaults());
        let config = self.0.config_for(&spec, &base)?;
        let gateways = self.0.open_with_config(config, Some(spec), &base)?;
        Ok(Arc::clone(&gateways[0].run))
    }

    /// Checks that runs can be opened and closed in this process.
    ///
    /// # Errors
    /// Returns an error if this process serves one run only.
    pub fn check_can_open_runs(&self) -> anyhow::Result<()> {
        if self.0.has_many {
            return Ok(());
        }
        bail!("this process serves one run, on its own socket; the run begins and ends with it")
    }

    /// Returns the open runs, in no particular order.
    pub fn list_runs(&self) -> Vec<Arc<AgentRun>> {
        self.0.registry.all_runs().iter().map(|gateways| Arc::clone(&gateways[0].run)).collect()
    }

    /// Returns the operator's handles on all runs, in no particular order.
    pub fn list_handles(&self) -> Vec<Arc<ServedRunHandle>> {
        self.0.lock_opened().values().map(|open| Arc::clone(&open.control)).collect()
    }

    /// Returns the operator's handle on one run.
    pub fn find_handle(&self, run: &str) -> Option<Arc<ServedRunHandle>> {
        self.0.lock_opened().get(run).map(|open| Arc::clone(&open.control))
    }

    /// Puts another configuration in force for every run, or for none; no run is opened or closed. A run that is being
    /// opened at this time receives the configuration before it is open.
    ///
    /// # Errors
    /// Returns an error if the configuration is not valid, or changes a setting that a reload cannot change.
    pub fn reload_runs(&self, by: ChangeSource, new_config: GatewayConfig) -> anyhow::Result<()> {
        // 1. Hold the lock of the defaults: a run that is being opened must wait, or it would miss this reload.
        let mut base = self.0.lock_defaults();
        let next = RunDefaults::new(&new_config, Some(by))?;
        control::check_immutable_settings(&base.config, &next.config)?;
        let described = new_config.shared.map(|shared| shared.runs).unwrap_or_default();
        // 2. Check and compile the configuration of every run. Any error ends the function with nothing changed.
        let mut changes = vec![];
        for OpenRun { control, spec } in self.0.lock_opened().values().cloned() {
            // A run that the file no longer describes keeps its old description.
            let again = described.iter().find(|new| new.run_id == control.run().identity.run);
            let config = match again.cloned().or(spec) {
                Some(spec) => self.0.config_for(&spec, &next)?,
                None => next.config.clone(),
            };
            let in_force = control.merge_operator_changes(&config);
            control.check_change(&in_force)?;
            let policy = next.policy_for(&in_force)?;
            changes.push((control, config, (in_force, policy)));
        }
        // 3. Put the changes in force. No step can fail from here on.
        for (control, read_config, in_force) in changes {
            control.install_config(by, read_config, in_force);
        }
        *base = Arc::new(next);
        Ok(())
    }

    /// Puts another configuration in force for runs that are opened from now on.
    ///
    /// # Errors
    /// Returns an error if the configuration is not valid. In this case nothing has changed.
    pub(super) fn reload_defaults(
        &self,
        by: ChangeSource,
        new_config: &GatewayConfig,
    ) -> anyhow::Result<()> {
        let next = RunDefaults::new(new_config, Some(by))?;
        *self.0.lock_defaults() = Arc::new(next);
        Ok(())
    }

    pub(super) fn access_log_handle(&self) -> &access_log::AccessLog {
        &self.0.access_log
    }

    pub(super) fn metrics(&self) -> &Arc<MetricsRegistry> {
        &self.0.metrics
    }

    pub(super) fn registry(&self) -> &Arc<GatewayRegistry> {
        &self.0.registry
    }

    /// Opens the run of a process that serves one run only.
    pub(super) fn open_single(&self) -> anyhow::Result<PerWorkerGateways> {
        let base = Arc::clone(&self.0.lock_defaults());
        self.0.open_with_config(base.config.clone(), None, &base)
    }

    /// Opens a run that has a socket of its own.
    pub(super) fn open_hosted(&self, config: GatewayConfig) -> anyhow::Result<PerWorkerGateways> {
        let base = Arc::clone(&self.0.lock_defaults());
        self.0.open_with_config(config, None, &base)
    }

    /// Closes the records of all runs, whose calls have ended, and exports the remaining measurements and log lines.
    ///
    /// # Errors
    /// Returns the error of a run whose records could not be closed. The records of the other runs are closed.
    pub(super) async fn finish_all(&self) -> anyhow::Result<()> {
        // Runs that are being closed are no longer registered. The shutdown waits for the tasks that close them.
        self.0.tasks.shut_down(self.0.drain_timeout).await;
        for gateways in self.0.registry.all_runs() {
            gateways[0].access_log.write_repeats();
        }
        self.0.access_log.write_repeats();
        self.0.access_log.flush_log();
        let finished = self.finish_all_records().await;
        self.0.tracer.finish_export().await;
        finished
    }

    /// Closes the records of all runs at the same time. Each run waits for the disk, and a thousand runs in sequence
    /// would take longer than the grace period of a stopping container.
    async fn finish_all_records(&self) -> anyhow::Result<()> {
        let finish = |run: Arc<AgentRun>| tokio::task::spawn_blocking(move || finish_run(&run));
        let finishing: Vec<_> = self.list_runs().into_iter().map(finish).collect();
        let mut finished = Ok(());
        for run in finishing {
            finished = finished.and(run.await?);
        }
        finished
    }

    /// Returns the text of all metrics.
    pub(super) fn render_metrics(&self) -> Vec<u8> {
        for gateways in self.0.registry.all_runs() {
            let gateway = &gateways[0];
            gateway.metrics.set_audit_lag(&gateway.run.audit.lag());
        }
        let metrics = &self.0.metrics;
        metrics.set_lost_access_log_lines(self.0.access_log.lost_lines());
        metrics.remove_due_runs(Instant::now());
        metrics.render_text()
    }
}

impl RunDefaults {
    fn new(config: &GatewayConfig, by: Option<ChangeSource>) -> anyhow::Result<Self> {
        let config = GatewayConfig { shared: None, ..config.clone() };
        Ok(Self { policy: control::compile_policy(&config)?, config, by })
    }

    /// Compiles the policy of a run. Rules are compiled and prices are read once for all runs with the same settings. A
    /// changed file takes effect only when the process reads its configuration again.
    fn policy_for(&self, config: &GatewayConfig) -> anyhow::Result<GatewayPolicy> {
        control::compile_policy_sharing((&self.config, &self.policy), config)
    }
}

impl RunManagerShared {
    fn config_for(
        &self,
        spec: &SharedRunConfig,
        base: &RunDefaults,
    ) -> anyhow::Result<GatewayConfig> {
        spec.clone().resolve_config(&base.config, self.audit_dir.as_deref())
    }

    /// Opens a run in six steps, and registers the run last.
    fn open_with_config(
        &self,
        config: GatewayConfig,
        spec: Option<SharedRunConfig>,
        base: &Arc<RunDefaults>,
    ) -> anyhow::Result<PerWorkerGateways> {
        let name = config.identity.run.clone();
        // 1. Reserve the name, so that no second caller opens the same log.
        let _opening = self.acquire_opening(&name)?;
        // 2. Compile the policy before anything is opened.
        let policy = base.policy_for(&config)?;
        let trace = self.tracer.start_run_trace(config.identity.trace_context());
        // 3. Open the records. A log of an earlier process is continued, with the amount spent so far.
        let (audit, recovered) = open_audit_log(&config, &policy, trace.as_deref())?;
        let RecoveredRun { spent, age, recent, tools, recent_tools, .. } = recovered;
        let (connections, recent_connections) =
            (recovered.connections, recovered.recent_connections);
        let past = PriorUsage { spent, age, recent };
        let ledger = BudgetLedger::new(config.budget.clone(), past);
        ledger.restore_tool_spending(tools);
        ledger.restore_tool_rates(recent_tools);
        ledger.restore_connections(connections, recent_connections);
        let run = Arc::new(AgentRun::new(config.identity.clone(), ledger, audit).with_trace(trace));
        let policy = Arc::new(policy::SharedPolicy::from_pointee(policy));
        // 4. Make one gateway for each worker, and start the background flush.
        let gateways = self.per_worker_gateways(&run, &policy, &config)?;
        spawn_flush_loop(Arc::clone(&run), &gateways[0].tasks);
        let control = Arc::new(ServedRunHandle::new(run, policy, config));
        // 5. Apply a reload that happened in between. The lock is held until the run is registered: a reload either
        // finds the run in the list, or is found here.
        let current = self.lock_defaults();
        if let Some(spec) = spec.as_ref().filter(|_| !Arc::ptr_eq(base, &current)) {
            let caught_up = self.apply_missed_reload(&control, spec, &current);
            caught_up.or_else(|error| self.close_unserved(&gateways).and(Err(error)))?;
        }
        // 6. Register the run: first for the operator, then for the clients.
        self.lock_opened().insert(name.clone(), OpenRun { control, spec });
        self.registry.insert(&name, Arc::clone(&gateways));
        drop(current);
        Ok(gateways)
    }

    /// Applies a configuration to a run that was put in force while the run was being opened.
    fn apply_missed_reload(
        &self,
        control: &ServedRunHandle,
        spec: &SharedRunConfig,
        base: &RunDefaults,
    ) -> anyhow::Result<()> {
        // The defaults of the start have no origin. They cannot be newer than this run.
        let Some(by) = base.by else { return Ok(()) };
        let config = self.config_for(spec, base)?;
        control.check_change(&config)?;
        let policy = base.policy_for(&config)?;
        control.install_config(by, config.clone(), (config, policy));
        Ok(())
    }

    /// Reserves the name of a run that is being opened. No other caller can open this run until the guard is dropped.
    fn acquire_opening(&self, name: &str) -> anyhow::Result<RunOpeningGuard<'_>> {
        // `opening` is always locked before `open`, so that no two threads wait for each other. The lock is released on
        // return, but the name stays reserved.
        let mut opening = self.lock_opening();
        if self.lock_opened().contains_key(name) || !opening.insert(name.to_owned()) {
            bail!("run `{name}` is open already");
        }
        Ok(RunOpeningGuard { manager: self, name: name.to_owned() })
    }

    fn per_worker_gateways(
        &self,
        run: &Arc<AgentRun>,
        policy: &Arc<policy::SharedPolicy>,
        config: &GatewayConfig,
    ) -> anyhow::Result<PerWorkerGateways> {
        let identity = access_log::AccessLogIdentity {
            run: &run.identity.run,
            attempt: &run.identity.attempt,
        };
        let access_log = self.access_log.for_run(&identity);
        let access_log = Arc::new(match &run.trace {
            Some(trace) => access_log.with_trace(trace.trace_id()),
            None => access_log,
        });
        let metrics = self.metrics.run_metrics(&run.identity.run, &run.ledger);
        // The group is within the process's group: the run can end before the process, but not after it.
        let tasks = self.tasks.child_group();
        let process = Arc::clone(&self.capacity);
        let capacity = Arc::new(RunCapacity::new(&self.server, self.share.run_requests, process));
        let Self { metrics: of_all, programs, lookups, tunnels, .. } = self;
        let process = ToolProcess { tasks: &tasks, metrics: of_all, programs, lookups, tunnels };
        let tools = config.tools.open_tools(run, process)?;
        // Budget, policy, metrics and limits belong to the run; only the upstream client belongs to the worker.
        let gateway = |upstream: &Arc<UpstreamClient>| {
            Arc::new(RunGateway {
                run: Arc::clone(run),
                policy: Arc::clone(policy),
                upstream: Arc::clone(upstream),
                metrics: Arc::clone(&metrics),
                access_log: Arc::clone(&access_log),
                slots: Arc::new(Semaphore::new(self.share.run_connections)),
                capacity: Arc::clone(&capacity),
                tasks: tasks.clone(),
                tools: tools.clone(),
            })
        };
        Ok(self.upstreams.iter().map(gateway).collect())
    }

    fn lock_defaults(&self) -> MutexGuard<'_, Arc<RunDefaults>> {
        self.base.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_opened(&self) -> MutexGuard<'_, HashMap<String, OpenRun>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_opening(&self) -> MutexGuard<'_, HashSet<String>> {
        self.opening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_closing(&self) -> MutexGuard<'_, HashMap<String, RunClosingState>> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A guard of the right to open the run of a name. Dropping the guard frees the name.
struct RunOpeningGuard<'a> {
    manager: &'a RunManagerShared,
    name: String,
}

impl Drop for RunOpeningGuard<'_> {
    fn drop(&mut self) {
        self.manager.lock_opening().remove(&self.name);
    }
}

/// The most programs that print credentials at one time, of all runs and for one command line. Our choice: each is a process
/// of this machine, which an agent's request starts.
const MAX_PROGRAMS: usize = 16;
const MAX_SAME_PROGRAMS: usize = 4;

/// The most look-ups of hosts that have not ended, of all runs and of one run. Our choice: each holds one of the 512 threads
/// that the process has for work that blocks, and a run asks for few hosts at once.
const MAX_LOOKUPS: usize = 64;
const MAX_RUN_LOOKUPS: usize = 8;

/// The most open tunnels of all runs and of one run. Our choice: npm opens about 15 connections to a host, and each tunnel
/// holds the buffers of TLS, about 100 KiB.
const MAX_TUNNELS: usize = 1024;
const MAX_RUN_TUNNELS: usize = 64;
