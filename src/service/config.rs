//! The service: where it listens, and where it keeps what.

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

/// Agents, chats and runs over HTTP: `cogni-gateway serve`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServiceConfig {
    pub listen: ListenAddress,
    /// Serve whoever can connect, without a grant; only on a loopback address or a unix socket.
    pub insecure_no_auth: bool,
    /// Everything that has to outlive the process. Nothing in it is ever shown to a sandbox. Without it, it is where every
    /// command looks: [`ServiceConfig::state_directory()`].
    pub state_dir: Option<PathBuf>,
    /// Where runs have their directories, which go with them.
    pub run_dir: PathBuf,
    /// A file for each agent; without it, those that this program brings along.
    pub agents_dir: Option<PathBuf>,
    /// For agents that do not say.
    pub driver: DriverChoice,
    pub docker_socket: PathBuf,
    /// Whether the embedded driver may do without limits on memory, processes and processors.
    pub allow_unlimited: bool,
    /// The users of this machine that sandboxes run as.
    pub uids: UserRange,
    /// At the same time; more are refused.
    pub max_runs: usize,
    /// Open at the same time; of further ones only those for health and reports of costs are answered.
    pub max_connections: usize,
    /// Watchers of runs at the same time, of each grant.
    pub max_watchers: usize,
    /// How long a client may take for the head of a request, and for its body.
    #[serde(with = "humantime_serde")]
    pub request_timeout: Duration,
    /// Between SIGTERM and SIGKILL, for a sandbox.
    #[serde(with = "humantime_serde")]
    pub grace: Duration,
    /// How long runs may go on after SIGTERM.
    #[serde(with = "humantime_serde")]
    pub drain_timeout: Duration,
    /// How long runs that have ended are remembered.
    #[serde(with = "humantime_serde")]
    pub retention: Duration,
    /// How long the workspace of a resident sandbox is kept that nobody uses.
    #[serde(with = "humantime_serde")]
    pub workspace_retention: Duration,
    /// How long audit logs are kept, and never for less than their runs; without it, for ever.
    #[serde(with = "humantime_serde")]
    pub audit_retention: Option<Duration>,
    /// How long the books keep the calls of runs that are forgotten; without it, for ever.
    #[serde(with = "humantime_serde")]
    pub billing_retention: Option<Duration>,
    /// How long a call may go without a receipt before its run is flagged.
    #[serde(with = "humantime_serde")]
    pub receipt_bound: Duration,
    /// How often LiteLLM is asked about calls without a receipt.
    #[serde(with = "humantime_serde")]
    pub reconcile_every: Duration,
}

/// Where a service listens.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum ListenAddress {
    Tcp(SocketAddr),
    /// Open to its owner only.
    Unix(PathBuf),
}

/// The table of the file that the service reads. The gateway reads the other tables.
#[derive(Deserialize)]
struct ServiceFile {
    serve: ServiceConfig,
}

impl ServiceConfig {
    /// Reads the `[serve]` table of the file that a gateway's configuration was read from; `None` if the file has no such table.
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

    /// The part of these settings that the gateway needs, to share out the descriptors of the process.
    pub fn size(&self) -> ServiceSize {
        ServiceSize { max_runs: self.max_runs, max_connections: self.max_connections }
    }

    /// # Errors
    /// What does not fit together, and what to do about it.
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
        self.validate_times()?;
        match &self.listen {
            ListenAddress::Tcp(address) if self.insecure_no_auth && !address.ip().is_loopback() => {
                bail!(
                    "`serve.insecure_no_auth` is `true` and `serve.listen` is `{address}`; whoever reaches that address \
                 could run agents: listen on 127.0.0.1 or on a unix socket, or ask for grants"
                )
            }
            ListenAddress::Unix(path) if path.starts_with(&self.run_dir) => bail!(
                "`serve.listen` is `unix:{}`, below `serve.run_dir`, where sandboxes have their sockets; give it a \
                 directory of its own",
                path.display()
            ),
            _ => Ok(()),
        }
    }

    /// What is longer cannot be counted to, and some must take a while.
    fn validate_times(&self) -> anyhow::Result<()> {
        let (any, some, a_while) =
            (Duration::ZERO, Duration::from_millis(1), Duration::from_secs(1));
        let times = [
            ("request_timeout", self.request_timeout, some),
            ("grace", self.grace, any),
            ("drain_timeout", self.drain_timeout, any),
            ("retention", self.retention, any),
            ("workspace_retention", self.workspace_retention, any),
            ("audit_retention", self.audit_retention.unwrap_or_default(), any),
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

    /// Says whether others may follow these while the service runs.
    ///
    /// # Errors
    /// What needs a restart.
    pub fn check_reloadable(&self, next: &Self) -> anyhow::Result<()> {
        // Agents are read again, from wherever they are now.
        let same = Self { agents_dir: self.agents_dir.clone(), ..next.clone() };
        if same != *self {
            bail!(
                "`[serve]` cannot change while it serves, but for `agents_dir`; restart for that"
            );
        }
        Ok(())
    }

    /// Where everything is that has to outlive the process.
    pub fn state_directory(&self) -> PathBuf {
        self.state_dir.clone().unwrap_or_else(default_state_directory)
    }

    /// The service's database.
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
            run_dir: PathBuf::from("/run/cogni"),
            agents_dir: None,
            driver: DriverChoice::Auto,
            docker_socket: PathBuf::from("/var/run/docker.sock"),
            allow_unlimited: false,
            uids: UserRange::DEFAULT_RANGE,
            // A sandbox is given 512 MiB by default, of which few use all.
            max_runs: 64,
            // A watcher for each of a thousand runs, and as many who look in between.
            max_connections: 4096,
            max_watchers: 1024,
            request_timeout: Duration::from_secs(30),
            grace: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
            retention: Duration::from_hours(30 * 24),
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
        given.parse().map_err(|allowed| format!("`{given}` is no place to listen; {allowed}"))
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

/// Where what outlives a process is kept when nobody says: for root the machine's place, for others their own (XDG Base
/// Directory Specification).
pub fn default_state_directory() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return PathBuf::from("/var/lib/cogni");
    }
    let absolute =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    state.unwrap_or_else(std::env::temp_dir).join("cogni")
}

/// In seconds.
const SECONDS_PER_DAY: u64 = 24 * 60 * 60;

/// Of whatever is counted here: more than any machine serves, and less than a semaphore takes.
const MAX_COUNT: usize = 1_000_000;
