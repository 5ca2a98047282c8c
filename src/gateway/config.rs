//! The operator's configuration: defaults, then a TOML file, then the environment, then flags.
//!
//! Each module has its own `Config`; this module composes them, and no lower module imports this one. Secrets come from
//! the environment or from files that the environment names, never from the TOML file and never from flags.

mod misspelling;
pub mod setting;
mod shared_listener;

use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Serialize};

use crate::base::canonical;
use crate::base::regular_file::read_regular_file;
use crate::base::serde_words;
use crate::base::time::MAX_TIME;
use crate::base::unix::{MAX_PATH_BYTES, SocketPermissions};
use crate::gateway::pipeline::policy;
use crate::gateway::pipeline::rule::RuleSet;
use crate::gateway::pipeline::server;
use crate::gateway::run::{RunIdentity, ToolSettings};
use crate::gateway::upstream;
use crate::gateway::upstream::UpstreamKind;
use crate::llm::budget::{BudgetLimits, price};
use crate::llm::request::{self, MODEL_NAME_RULE, capability_of_model, is_model_name};
use crate::telemetry::access_log::{self, AccessLogDestination, AccessLogFormat};
use crate::telemetry::audit;
use crate::telemetry::trace;

pub use misspelling::check_variable_names;
pub use setting::{ConfigSetting, SETTINGS};
pub use shared_listener::{SharedListenerConfig, SharedRunConfig};

/// The complete configuration of a gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    #[serde(skip)]
    pub identity: RunIdentity,
    /// The files that the configuration was read from, including the files of secrets, and other files that sandboxes
    /// must not see.
    #[serde(skip)]
    pub files: Vec<PathBuf>,
    /// Further files that decide about runs, such as the definitions of tools. A sandbox may see them, and must not change
    /// them.
    #[serde(skip)]
    pub decisive_files: Vec<PathBuf>,
    #[serde(skip_serializing)]
    pub listen: ListenConfig,
    /// The listener of many runs. If it is set, the process serves many runs instead of one run on its own socket.
    #[serde(skip_serializing)]
    pub shared: Option<SharedListenerConfig>,
    /// True if the file has a `[serve]` table. The service parses that table itself, from
    /// [`GatewayConfig::service_file`].
    #[serde(rename = "serve", skip_serializing, deserialize_with = "deserialize_presence")]
    pub has_service_table: bool,
    /// The file that contains the `[serve]` table.
    #[serde(skip)]
    pub service_file: Option<ConfigFile>,
    /// The size of the service around the runs; `None` without a service.
    #[serde(skip)]
    pub service_size: Option<ServiceSize>,
    pub server: server::HttpServerConfig,
    pub upstream: upstream::UpstreamConfig,
    pub budget: BudgetLimits,
    pub prices: price::PriceConfig,
    pub policy: policy::PolicyConfig,
    /// The tools of the runs. The wing of the tools parses the table.
    #[serde(skip_serializing_if = "ToolSettings::is_empty")]
    pub tools: ToolSettings,
    pub audit: audit::AuditConfig,
    #[serde(skip_serializing)]
    pub access_log: AccessLogDestination,
    /// The form of the access log's lines. The variable `LOG_FORMAT` selects the form, as for the process's own log.
    #[serde(skip)]
    pub access_log_format: AccessLogFormat,
    /// The largest size of the access log in bytes, if the log is a file. At this size the file is renamed with the
    /// suffix `.1`, and a new file begins.
    pub access_log_max_bytes: u64,
    #[serde(skip_serializing)]
    pub metrics: MetricsConfig,
    #[serde(skip_serializing)]
    pub telemetry: trace::TracingConfig,
    #[serde(skip_serializing)]
    pub admin: AdminConfig,
    /// The number of threads that serve connections. Each thread has its own runtime and upstream connections.
    pub workers: usize,
    /// The time for open calls to end after SIGTERM. The default fits into the 10 s of `docker stop`.
    #[serde(with = "humantime_serde")]
    pub drain_timeout: Duration,
}

/// A configuration file as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFile {
    pub path: PathBuf,
    pub text: String,
}

/// The numbers of runs and connections of a service, which share the descriptors of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceSize {
    pub max_runs: usize,
    /// The number of connections to the service's API.
    pub max_connections: usize,
}

/// The settings of the run's socket.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ListenConfig {
    pub socket_path: PathBuf,
    /// The socket's permissions, as an octal text: `"0600"`.
    #[serde(deserialize_with = "deserialize_mode")]
    pub socket_mode: u32,
    /// The socket's owner. Setting an owner needs the right to change owners.
    pub socket_uid: Option<u32>,
    pub socket_gid: Option<u32>,
    /// The users whose processes may connect. Empty admits every process that can reach the socket.
    pub require_uid: Vec<u32>,
}

/// The settings of the operator's socket; by default there is no such socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdminConfig {
    /// The socket's path. A process that can open the socket may change every run, so the path must not be in a
    /// directory that a sandbox sees.
    pub socket_path: Option<PathBuf>,
}

/// The settings of the metrics listener; by default there is no such listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsConfig {
    pub address: Option<SocketAddr>,
    /// The address in the `/sd` document, if Prometheus reaches this process at another address than that of the
    /// request.
    pub advertise: Option<String>,
}

impl GatewayConfig {
    /// The largest configuration file. Our choice: it holds hundreds of agents' tools.
    pub const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;

    /// Reads a TOML file. Settings that the file omits keep their defaults.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or is not a valid configuration. The error shows the line.
    pub fn read_file(path: &Path) -> anyhow::Result<Self> {
        let text = read_regular_file(path, Self::MAX_FILE_BYTES)
            .with_context(|| format!("cannot read `{}`", path.display()))?;
        let mut config: Self = serde_words::from_toml(&text)
            .map_err(|said| anyhow!("`{}` is not a valid configuration: {said}", path.display()))?;
        // The service reads its own table later, from the text as it was now: both readers see one version of the file.
        if config.has_service_table {
            config.service_file = Some(ConfigFile { path: path.to_owned(), text });
        }
        Ok(config)
    }

    /// Returns true if a service runs around the gateway: its file has a `[serve]` table, or `serve` is the command.
    fn is_service(&self) -> bool {
        self.has_service_table || self.service_size.is_some()
    }

    /// Returns a digest of the settings that judge a run's calls, so that the records of two runs can be compared. The
    /// digest does not cover secrets, the run's identity, the paths of its files and sockets, or the service around it.
    pub fn digest(&self) -> String {
        canonical::digest("config 1", self).expect("each setting has a form in JSON")
    }

    /// Returns the paths of the files that only the gateway may read or write.
    pub fn private_paths(&self) -> impl Iterator<Item = &Path> {
        let access_log = match &self.access_log {
            AccessLogDestination::File(path) => Some(path),
            AccessLogDestination::Off
            | AccessLogDestination::Stdout
            | AccessLogDestination::Stderr => None,
        };
        let written = [self.audit.path.as_ref(), access_log, self.admin.socket_path.as_ref()];
        self.files.iter().chain(written.into_iter().flatten()).map(PathBuf::as_path)
    }

    /// Returns the paths of the files that decide about runs, which no sandbox may change.
    pub fn decisive_paths(&self) -> impl Iterator<Item = &Path> {
        let named = [&self.prices.file, &self.upstream.ca_file];
        let named = named.into_iter().flatten();
        self.decisive_files.iter().chain(named).map(PathBuf::as_path)
    }

    /// Checks the whole configuration.
    ///
    /// # Errors
    /// Returns an error if a setting is missing or contradicts another one. The error says what to do.
    pub fn validate(&self) -> anyhow::Result<()> {
        // The kinds of process have different duties: one run, many runs, or a service that describes its runs itself.
        match (&self.shared, self.is_service()) {
            (None, false) => self.validate_identity()?,
            (Some(shared), false) => shared.validate()?,
            (None, true) => self.validate_service()?,
            (Some(_), true) => {
                bail!("both `[shared]` and `[serve]` are given; remove one of the two tables")
            }
        }
        if self.upstream.api_key.is_empty() {
            bail!(
                "`LITELLM_MASTER_KEY` is not set; give the upstream's key there, or its file in `LITELLM_MASTER_KEY_FILE`"
            );
        }
        // The directory of the run's socket is mounted into the sandbox. The admin socket there would give the agent
        // control.
        let sandboxed = self.listen.socket_path.parent();
        if let Some(admin) = self.admin.socket_path.as_deref()
            && admin.parent() == sandboxed
        {
            bail!(
                "`ADMIN_SOCKET_PATH` is `{}`, in the directory of the run's socket, which the sandbox sees; give it a directory of its own",
                admin.display()
            );
        }
        if !(1..=MAX_WORKERS).contains(&self.workers) {
            bail!("`WORKERS` is `{}`; give 1 to {MAX_WORKERS}", self.workers);
        }
        self.validate_paths()?;
        self.validate_times()?;
        self.validate_waits()?;
        self.validate_body_limits()?;
        self.check_models()?;
        self.server.validate()?;
        self.telemetry.validate()?;
        // The rules are compiled for their errors only; each policy compiles them again.
        RuleSet::compile_rules(&self.policy.rules)?;
        self.tools.check()
    }

    /// Checks that the files and sockets that the process makes can have their names.
    fn validate_paths(&self) -> anyhow::Result<()> {
        let sockets = [
            ("listen.socket_path", Some(&*self.listen.socket_path)),
            ("admin.socket_path", self.admin.socket_path.as_deref()),
        ];
        let files = [
            ("audit.path", self.audit.path.as_deref()),
            ("access_log", self.access_log.file_path()),
        ];
        for (name, path) in sockets.into_iter().chain(files) {
            if path.is_some_and(|path| path.as_os_str().as_bytes().contains(&0)) {
                bail!("`{name}` has a zero byte, which no path has; take it out");
            }
        }
        for (name, path) in sockets {
            if let Some(path) = path.filter(|path| path.as_os_str().len() > MAX_PATH_BYTES) {
                bail!(
                    "`{name}` is `{}`, which is longer than the {MAX_PATH_BYTES} bytes of a socket's path; give a shorter one",
                    path.display()
                );
            }
        }
        Ok(())
    }

    /// Checks the settings of a service. A service has no operator's socket, and one thread for each processor.
    fn validate_service(&self) -> anyhow::Result<()> {
        if self.admin != AdminConfig::default() {
            bail!(
                "`[admin]` is for `cogni-gateway proxy` and `cogni-gateway shared`; take it out: `POST \
                 /api/v1/runs/ID/cancel` ends a run of a service"
            );
        }
        if self.workers != Self::default().workers {
            bail!(
                "`workers` is `{}`; take it out: a service has a thread for each processor",
                self.workers
            );
        }
        Ok(())
    }

    /// Checks that no wait has ended before it begins.
    fn validate_waits(&self) -> anyhow::Result<()> {
        let waits = [
            ("budget.deadline", self.budget.deadline, "to set none"),
            ("server.header_timeout", Some(self.server.header_timeout), "for the default"),
            ("server.write_timeout", Some(self.server.write_timeout), "for the default"),
            ("upstream.connect_timeout", Some(self.upstream.connect_timeout), "for the default"),
            (
                "upstream.first_byte_timeout",
                Some(self.upstream.first_byte_timeout),
                "for the default",
            ),
            ("upstream.idle_timeout", Some(self.upstream.idle_timeout), "for the default"),
            ("policy.body_timeout", Some(self.policy.body_timeout), "for the default"),
        ];
        match waits.into_iter().find(|(_, given, _)| *given == Some(Duration::ZERO)) {
            Some((name, _, purpose)) => bail!(
                "`{name}` is `0s`, so every call would fail; give a longer time, or leave it out {purpose}"
            ),
            None => Ok(()),
        }
    }

    /// Checks that no duration is too long for the clocks to count to.
    fn validate_times(&self) -> anyhow::Result<()> {
        let times = [
            ("budget.deadline", self.budget.deadline.unwrap_or_default()),
            ("server.header_timeout", self.server.header_timeout),
            ("server.write_timeout", self.server.write_timeout),
            ("upstream.connect_timeout", self.upstream.connect_timeout),
            ("upstream.first_byte_timeout", self.upstream.first_byte_timeout),
            ("upstream.idle_timeout", self.upstream.idle_timeout),
            ("upstream.pool_idle_timeout", self.upstream.pool_idle_timeout),
            ("policy.body_timeout", self.policy.body_timeout),
            ("audit.sync_every", self.audit.sync_every),
            ("audit.checkpoint_interval", self.audit.checkpoint_interval),
            ("drain_timeout", self.drain_timeout),
        ];
        match times.into_iter().find(|(_, given)| *given > MAX_TIME) {
            Some((name, given)) => {
                let given = humantime::format_duration(given);
                bail!("`{name}` is `{given}`; give at most {} days", MAX_TIME.as_secs() / 86_400)
            }
            None => Ok(()),
        }
    }

    /// Checks that the memory limits have room for one body of the largest size.
    fn validate_body_limits(&self) -> anyhow::Result<()> {
        let most = self.policy.max_body_bytes;
        let bounds = [
            ("max_run_body_bytes", self.server.max_run_body_bytes),
            ("max_process_body_bytes", self.server.process_body_bytes()),
        ];
        match bounds.into_iter().find(|(_, bound)| *bound < most) {
            Some((name, bound)) => bail!(
                "`policy.max_body_bytes` is `{most}` and `server.{name}` is `{bound}`; one body must fit, so \
                 raise the second or lower the first"
            ),
            None => Ok(()),
        }
    }

    /// Checks the names of models. A request cannot name a model outside of this rule, and the upstream would interpret
    /// such a name in its own way.
    fn check_models(&self) -> anyhow::Result<()> {
        let request::BodyPolicy { models, aliases, .. } = &self.policy.body;
        let mut names = models.iter().chain(aliases.keys()).chain(aliases.values());
        match names.find(|name| !is_model_name(name)) {
            Some(name) => bail!(
                "`{}` in `policy.body.models` or `aliases` must be {MODEL_NAME_RULE}",
                name.escape_debug()
            ),
            None => Ok(()),
        }
    }

    /// Warns about models that search the web on their own, although the operator has not granted that to the run.
    pub fn warn_of_searching_models(&self) {
        let request::BodyPolicy { models, aliases, capabilities, .. } = &self.policy.body;
        // Aliases are names that clients use; their targets are the models that the upstream runs.
        for model in models.iter().chain(aliases.values()) {
            if let Some(capability) = capability_of_model(model)
                && !capabilities.contains(&capability)
            {
                tracing::warn!(
                    model,
                    capability = capability.name(),
                    "a model uses by itself a capability that the run is not granted, and the gateway cannot prevent that; \
                     remove the model from the list, or grant the capability"
                );
            }
        }
    }

    /// Checks that budgets outlast a restart. They do so if their runs have audit logs.
    ///
    /// # Errors
    /// Returns an error if the budgets do not outlast a restart, and the settings do not allow that.
    pub fn check_budgets_durable(&self) -> anyhow::Result<()> {
        let (name, is_recorded) = match &self.shared {
            Some(shared) => ("shared.audit_dir", shared.audit_dir.is_some()),
            None => ("AUDIT_LOG_PATH", self.audit.path.is_some()),
        };
        let runs = self.shared.iter().flat_map(|shared| &shared.runs);
        // Only limits that add up over the run are lost in a restart. Rates and concurrent calls start at zero in any
        // case.
        let is_limited = self.budget.counts_spending()
            || runs.into_iter().any(|run| run.budget.counts_spending());
        if is_recorded || !is_limited {
            return Ok(());
        }
        if !self.audit.allow_budget_reset {
            bail!(
                "there is a budget, and `{name}` is not set: without an audit log each restart begins the budget \
                 anew; set `{name}`, or say `ALLOW_BUDGET_RESET=true`"
            );
        }
        tracing::warn!("without an audit log each restart begins the budget anew; set `{name}`");
        Ok(())
    }

    fn validate_identity(&self) -> anyhow::Result<()> {
        let RunIdentity { run, account, .. } = &self.identity;
        if run.is_empty() {
            bail!(
                "`RUN_ID` is not set, and every call is recorded and billed under it; give `--run-id ID`"
            );
        }
        if self.upstream.kind == UpstreamKind::Litellm && account.is_empty() {
            bail!(
                "`BILLING_ACCOUNT_ID` is not set, and LiteLLM bills it as the end user; give `--billing-account-id ID`"
            );
        }
        Ok(self.identity.validate()?)
    }
}

impl ListenConfig {
    pub fn socket_permissions(&self) -> SocketPermissions {
        SocketPermissions { mode: self.socket_mode, uid: self.socket_uid, gid: self.socket_gid }
    }
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            identity: RunIdentity { attempt: "0".to_owned(), ..RunIdentity::default() },
            files: vec![],
            decisive_files: vec![],
            listen: ListenConfig::default(),
            shared: None,
            has_service_table: false,
            service_file: None,
            service_size: None,
            tools: ToolSettings::default(),
            server: server::HttpServerConfig::default(),
            upstream: upstream::UpstreamConfig::default(),
            budget: BudgetLimits::default(),
            prices: price::PriceConfig::default(),
            policy: policy::PolicyConfig::default(),
            audit: audit::AuditConfig::default(),
            access_log: AccessLogDestination::default(),
            access_log_format: AccessLogFormat::default(),
            access_log_max_bytes: access_log::MAX_FILE_BYTES,
            metrics: MetricsConfig::default(),
            telemetry: trace::TracingConfig::default(),
            admin: AdminConfig::default(),
            workers: 1,
            // Two seconds are left of the 10 s of `docker stop` for closing the records.
            drain_timeout: Duration::from_secs(8),
        }
    }
}

impl Default for ListenConfig {
    fn default() -> Self {
        Self {
            socket_path: PathBuf::from("/llm-sock/llm.sock"),
            socket_mode: 0o600,
            socket_uid: None,
            socket_gid: None,
            require_uid: vec![],
        }
    }
}

fn deserialize_mode<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    setting::parse_mode(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}

/// Skips a table that another reader parses, and returns that the table exists.
fn deserialize_presence<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<bool, D::Error> {
    serde::de::IgnoredAny::deserialize(deserializer).map(|_| true)
}

/// The largest number of workers. Each worker is a thread with its own runtime and connections; more workers than
/// processors gain nothing.
const MAX_WORKERS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::secret::SecretString;

    #[test]
    fn a_digest_tells_what_judges_and_not_whom_or_where() {
        let one = GatewayConfig::default();
        let mut other = one.clone();
        other.identity.run = "another".into();
        other.audit.path = Some("/var/log/another.jsonl".into());
        other.listen.socket_path = "/run/another.sock".into();
        other.upstream.api_key = SecretString::new("sk-another");
        assert_eq!(one.digest(), other.digest());
        other.budget.max_turns = Some(1);
        assert_ne!(one.digest(), other.digest());
        other = one.clone();
        other.upstream.ca_file = Some("/etc/ca.pem".into());
        assert_ne!(one.digest(), other.digest());
    }
}
