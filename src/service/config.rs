//! The `[serve]` table of the configuration file: the service's addresses, directories, limits and times.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{anyhow, bail};
use serde::Deserialize;

use crate::base::serde_words;
use crate::base::time::MAX_TIME;
use crate::gateway::config::{GatewayConfig, ServiceSize};
use crate::runner::agents::DriverChoice;
use crate::sandbox::UserRange;
use crate::service::billing::store::MIN_RETENTION;

/// The settings of the HTTP service for agents, chats and runs: `cogni-gateway serve`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServiceConfig {
    pub listen: ListenAddress,
    /// True if the service serves every client that can connect, without a grant. Allowed only on a loopback address or
    /// a unix socket.
    pub insecure_no_auth: bool,
    /// The directory of all state that must survive the process. No sandbox ever sees its content. `None` means the
    /// default of every command: [`ServiceConfig::state_directory()`].
    pub state_dir: Option<PathBuf>,
    /// The parent of the runs' directories, which are removed with their runs.
    pub run_dir: PathBuf,
    /// The directory with a file for each agent. `None` means the agents that this program contains.
    pub agents_dir: Option<PathBuf>,
    /// The driver for agents whose files name none.
    pub driver: DriverChoice,
    pub docker_socket: PathBuf,
    /// True if the embedded driver may run without limits on memory, processes and processors.
    pub allow_unlimited: bool,
    /// The range of user ids that sandboxes run as.
    pub uids: UserRange,
    /// The maximum number of concurrent runs. Further runs wait in the queue.
    pub max_runs: usize,
    /// The maximum number of runs in the queue. The service refuses further runs. With 0 no run waits.
    pub max_queued_runs: usize,
    /// The maximum number of runs of one grant in the queue, so that one grant cannot fill the queue.
    pub max_queued_runs_per_grant: usize,
    /// The maximum time that a run waits in the queue before it ends without having begun.
    #[serde(with = "humantime_serde")]
    pub max_queue_wait: Duration,
    /// The maximum number of open connections. On further connections the service answers only health checks and
    /// reports of costs.
    pub max_connections: usize,
    /// The maximum number of concurrent watchers of one grant.
    pub max_watchers: usize,
    /// The maximum time that a client may take for the head of a request, and for its body.
    #[serde(with = "humantime_serde")]
    pub request_timeout: Duration,
    /// The time between SIGTERM and SIGKILL, for a sandbox.
    #[serde(with = "humantime_serde")]
    pub grace: Duration,
    /// The maximum time that runs may continue after the service receives SIGTERM.
    #[serde(with = "humantime_serde")]
    pub drain_timeout: Duration,
    /// The time for which ended runs are stored.
    #[serde(with = "humantime_serde")]
    pub retention: Duration,
    /// The maximum bytes of the outputs, results and events that the ended runs of one grant keep. Above it, the oldest
    /// runs lose theirs.
    pub max_kept_bytes: u64,
    /// True if no pull request shows the user's request, whatever the request says.
    pub hide_requests: bool,
    /// The time for which an unused workspace of a long-running sandbox is stored.
    #[serde(with = "humantime_serde")]
    pub workspace_retention: Duration,
    /// The time for which audit logs are stored, at least as long as their runs. `None` stores them forever.
    #[serde(with = "humantime_serde")]
    pub audit_retention: Option<Duration>,
    /// The time for which the billing store keeps the calls of forgotten runs. `None` keeps the calls forever.
    #[serde(with = "humantime_serde")]
    pub billing_retention: Option<Duration>,
    /// The time for which a call may lack a receipt, before its run is flagged.
    #[serde(with = "humantime_serde")]
    pub receipt_bound: Duration,
    /// The interval between queries to LiteLLM for calls without a receipt.
    #[serde(with = "humantime_serde")]
    pub reconcile_every: Duration,
}

/// The address on which a service listens.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum ListenAddress {
    Tcp(SocketAddr),
    /// A unix socket that only its owner can open.
    Unix(PathBuf),
}

/// The table of the file that the service reads. The gateway reads the other tables.
#[derive(Deserialize)]
struct ServiceFile {
    serve: ServiceConfig,
}

impl ServiceConfig {
    /// Reads the `[serve]` table of the file that a gateway's configuration was read from. Returns `None` if the file
    /// has no such table.
    ///
    /// # Errors
    /// Returns an error that shows the line if the table is not valid.
    pub fn from_gateway_config(config: &GatewayConfig) -> anyhow::Result<Option<Self>> {
        let Some(file) = &config.service_file else { return Ok(None) };
        let read: ServiceFile = serde_words::from_toml(&file.text).map_err(|said| {
            anyhow!("`{}` is not a valid configuration: {said}", file.path.display())
        })?;
        Ok(Some(read.serve))
    }

    /// Returns the settings that the gateway needs to divide the descriptors of the process.
    pub fn size(&self) -> ServiceSize {
        ServiceSize { max_runs: self.max_runs, max_connections: self.max_connections }
    }

    /// Checks that the settings are valid together.
    ///
    /// # Errors
    /// Returns an error that names the wrong setting and the remedy.
    pub fn validate(&self) -> anyhow::Result<()> {
        let counts = [
            ("max_runs", self.max_runs),
            ("max_connections", self.max_connections),
            ("max_watchers", self.max_watchers),
        ];
        if let Some((name, given)) =
            counts.into_iter().find(|(_, given)| !(1..=MAX_COUNT).contains(given))
        {
            bail!("`serve.{name}` is `{given}`; give 1 to {MAX_COUNT}");
        }
        let queues = [
            ("max_queued_runs", self.max_queued_runs),
            ("max_queued_runs_per_grant", self.max_queued_runs_per_grant),
        ];
        if let Some((name, given)) = queues.into_iter().find(|(_, given)| *given > MAX_QUEUED_RUNS)
        {
            bail!("`serve.{name}` is `{given}`; give 0 to {MAX_QUEUED_RUNS}");
        }
        if self.max_kept_bytes < MIN_KEPT_BYTES {
            bail!(
                "`serve.max_kept_bytes` is `{}`; give at least {MIN_KEPT_BYTES}, so that a run keeps its records at its end",
                self.max_kept_bytes
            );
        }
        self.validate_times()?;
        match &self.listen {
            // A service without grants must not be reachable over the network: every client could run agents at the
            // operator's cost.
            ListenAddress::Tcp(address) if self.insecure_no_auth && !address.ip().is_loopback() => {
                bail!(
                    "`serve.insecure_no_auth` is `true` and `serve.listen` is `{address}`; every client that reaches that \
                     address could run agents: listen on 127.0.0.1 or on a unix socket, or ask for grants"
                )
            }
            // The directories that sandboxes mount are below `run_dir`; the API's socket must not be among them.
            ListenAddress::Unix(path) if path.starts_with(&self.run_dir) => bail!(
                "`serve.listen` is `unix:{}`, below `serve.run_dir`, where sandboxes have their sockets; give it a \
                 directory of its own",
                path.display()
            ),
            _ => Ok(()),
        }
    }

    /// Checks that each time is between its minimum and the longest time that the service can count.
    fn validate_times(&self) -> anyhow::Result<()> {
        // The minimum of each time: a request needs some time, and LiteLLM is queried once a second at most.
        let (any, some, a_while) =
            (Duration::ZERO, Duration::from_millis(1), Duration::from_secs(1));
        let times = [
            ("max_queue_wait", self.max_queue_wait, a_while),
            ("request_timeout", self.request_timeout, some),
            ("grace", self.grace, any),
            ("drain_timeout", self.drain_timeout, any),
            ("retention", self.retention, any),
            ("workspace_retention", self.workspace_retention, any),
            ("audit_retention", self.audit_retention.unwrap_or_default(), any),
            // `None` means forever, so the shortest allowed time stands in for it and always passes.
            ("billing_retention", self.billing_retention.unwrap_or(MIN_RETENTION), MIN_RETENTION),
            ("receipt_bound", self.receipt_bound, any),
            ("reconcile_every", self.reconcile_every, a_while),
        ];
        let wrong =
            times.into_iter().find(|(_, given, least)| !(*least..=MAX_TIME).contains(given));
        let Some((name, given, least)) = wrong else { return Ok(()) };
        let (given, least) = (humantime::format_duration(given), humantime::format_duration(least));
        bail!(
            "`serve.{name}` is `{given}`; give {least} to {}d",
            MAX_TIME.as_secs() / SECONDS_PER_DAY
        )
    }

    /// Checks that a reload may replace these settings with `next` while the service runs.
    ///
    /// # Errors
    /// Returns an error if a setting changes that needs a restart.
    pub fn check_reloadable(&self, next: &Self) -> anyhow::Result<()> {
        // The agents are read again at each reload, so their directory may change.
        // A comparison of all fields at once, so that a new setting needs a restart until it is named here.
        let same = Self { agents_dir: self.agents_dir.clone(), ..next.clone() };
        if same != *self {
            bail!(
                "`[serve]` cannot change while the service runs, except for `agents_dir`; restart the service"
            );
        }
        Ok(())
    }

    /// Returns the directory of all state that must survive the process.
    pub fn state_directory(&self) -> PathBuf {
        self.state_dir.clone().unwrap_or_else(default_state_directory)
    }

    /// Returns the path of the service's database.
    pub fn database_path(&self) -> PathBuf {
        self.state_directory().join("state.db")
    }
}

impl Default for ServiceConfig {
    fn default() -> Self {
        Self {
            listen: ListenAddress::Tcp(SocketAddr::from(([127, 0, 0, 1], 7070))),
            insecure_no_auth: false,
            state_dir: None,
            run_dir: default_run_directory(),
            agents_dir: None,
            driver: DriverChoice::Auto,
            docker_socket: PathBuf::from("/var/run/docker.sock"),
            allow_unlimited: false,
            uids: UserRange::DEFAULT_RANGE,
            // Our choice: a sandbox may use 512 MiB by default, and few sandboxes use all of it.
            max_runs: 64,
            // Our choice: sixteen times the places, which is some hours of runs of ten minutes, and a few MiB of memory.
            max_queued_runs: 1024,
            max_queued_runs_per_grant: 256,
            // Our choice: twice the time that a full queue of runs of ten minutes takes.
            max_queue_wait: Duration::from_hours(6),
            // Our choice: a watcher for each of a thousand runs, and room for as many further clients.
            max_connections: 4096,
            max_watchers: 1024,
            request_timeout: Duration::from_secs(30),
            grace: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
            retention: Duration::from_hours(30 * 24),
            // Our choice: a thousand of the longest runs, and a hundred thousand ordinary ones.
            max_kept_bytes: 4 << 30,
            hide_requests: false,
            workspace_retention: Duration::from_hours(30 * 24),
            audit_retention: None,
            billing_retention: None,
            receipt_bound: Duration::from_mins(15),
            reconcile_every: Duration::from_mins(5),
        }
    }
}

impl FromStr for ListenAddress {
    type Err = &'static str;

    fn from_str(given: &str) -> Result<Self, Self::Err> {
        match given.strip_prefix("unix:") {
            Some(path) if Path::new(path).is_absolute() => Ok(Self::Unix(path.into())),
            Some(_) => Err("give an absolute path, such as unix:/run/cogni-api/api.sock"),
            None => given.parse().map(Self::Tcp).map_err(
                |_| "give an IP address and a port, such as 127.0.0.1:7070, or unix:/path",
            ),
        }
    }
}

impl TryFrom<String> for ListenAddress {
    type Error = String;

    fn try_from(given: String) -> Result<Self, String> {
        given
            .parse()
            .map_err(|allowed| format!("`{given}` is not an address to listen on; {allowed}"))
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Returns the default directory for state that must survive a process: the machine's directory for root, the user's
/// own for other users (XDG Base Directory Specification).
pub fn default_state_directory() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return PathBuf::from("/var/lib/cogni");
    }
    let state = absolute_path_of("XDG_STATE_HOME")
        .or_else(|| Some(absolute_path_of("HOME")?.join(".local/state")));
    state.unwrap_or_else(std::env::temp_dir).join("cogni")
}

/// Returns the default directory for the directories of runs: the machine's directory for root, the user's own for
/// other users. Without a session there is no runtime directory, and the directory is below `/tmp`.
pub fn default_run_directory() -> PathBuf {
    let user = rustix::process::geteuid();
    if user.is_root() {
        return PathBuf::from("/run/cogni");
    }
    match absolute_path_of("XDG_RUNTIME_DIR") {
        Some(runtime) => runtime.join("cogni"),
        None => PathBuf::from(format!("/tmp/cogni-{}", user.as_raw())),
    }
}

/// Returns the path in a variable. The XDG specification requires absolute paths; a relative path is ignored.
fn absolute_path_of(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// The minimum of `max_kept_bytes`. Our choice: three of the longest runs with the default limits.
const MIN_KEPT_BYTES: u64 = 16 << 20;

/// The number of seconds in a day.
const SECONDS_PER_DAY: u64 = 24 * 60 * 60;

/// The maximum number of queued runs. Our choice: each change of the queue walks through all of it.
const MAX_QUEUED_RUNS: usize = 10_000;

/// The maximum of each count in this table. Our choice: more than any machine serves, and less than a semaphore's
/// maximum.
const MAX_COUNT: usize = 1_000_000;
