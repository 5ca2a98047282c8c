//! What the operator wants: defaults, then a TOML file, then the environment, then flags.
//!
//! A room's own `Config` is composed here and imported by nothing below. Secrets come from the
//! environment or from files named there, never from the TOML file and never from flags.

mod misspelling;
pub mod setting;
mod shared_listener;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Serialize};

use crate::base::canonical;
use crate::base::serde_words;
use crate::base::time::MAX_TIME;
use crate::base::unix::SocketPermissions;
use crate::gateway::pipeline::policy;
use crate::gateway::pipeline::rule::RuleSet;
use crate::gateway::pipeline::server;
use crate::gateway::run::RunIdentity;
use crate::gateway::upstream;
use crate::gateway::upstream::UpstreamKind;
use crate::llm::budget::{BudgetLimits, price};
use crate::llm::request::{self, MODEL_NAME_RULE, capability_of_model, is_model_name};
use crate::telemetry::access_log::{self, AccessLogDestination};
use crate::telemetry::audit;
use crate::telemetry::trace;

pub use misspelling::check_variable_names;
pub use setting::{ConfigSetting, SETTINGS};
pub use shared_listener::{SharedListenerConfig, SharedRunConfig};

/// Everything a gateway needs to know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    #[serde(skip)]
    pub identity: RunIdentity,
    /// The files that all of this was read from, those of secrets among them, and others that are kept from sandboxes.
    #[serde(skip)]
    pub files: Vec<PathBuf>,
    #[serde(skip_serializing)]
    pub listen: ListenConfig,
    /// Many runs behind one listener, in place of one run on its socket.
    #[serde(skip_serializing)]
    pub shared: Option<SharedListenerConfig>,
    /// True if the file has a `[serve]` table. The service reads that table itself, from [`GatewayConfig::service_file`].
    #[serde(rename = "serve", skip_serializing, deserialize_with = "deserialize_presence")]
    pub has_service_table: bool,
    /// The file that has the `[serve]` table.
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
    pub audit: audit::AuditConfig,
    #[serde(skip_serializing)]
    pub access_log: AccessLogDestination,
    /// Bytes of an access log that is a file. At the limit it is moved to its name with `.1`, and begun anew.
    pub access_log_max_bytes: u64,
    #[serde(skip_serializing)]
    pub metrics: MetricsConfig,
    #[serde(skip_serializing)]
    pub telemetry: trace::TracingConfig,
    #[serde(skip_serializing)]
    pub admin: AdminConfig,
    /// Threads that serve connections; each has its own runtime and upstream connections.
    pub workers: usize,
    /// How long open calls may go on after SIGTERM. Fits into the 10 s of `docker stop`.
    #[serde(with = "humantime_serde")]
    pub drain_timeout: Duration,
}

/// A configuration file as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFile {
    pub path: PathBuf,
    pub text: String,
}

/// The runs and connections of a service, which share the descriptors of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceSize {
    pub max_runs: usize,
    /// Connections to the service's API.
    pub max_connections: usize,
}

/// The run's socket.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ListenConfig {
    pub socket_path: PathBuf,
    /// Octal, as a text: `"0600"`.
    #[serde(deserialize_with = "deserialize_mode")]
    pub socket_mode: u32,
    /// Needs the right to change owners.
    pub socket_uid: Option<u32>,
    pub socket_gid: Option<u32>,
    /// Whose processes may connect; empty is whoever can reach the socket.
    pub require_uid: Vec<u32>,
}

/// The operator's socket; none by default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdminConfig {
    /// Who can open it may change every run. Never in a directory that a sandbox sees.
    pub socket_path: Option<PathBuf>,
}

/// Where Prometheus scrapes; nowhere by default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsConfig {
    pub address: Option<SocketAddr>,
    /// What `/sd` says, where Prometheus reaches this process at another address than it is asked at.
    pub advertise: Option<String>,
}

impl GatewayConfig {
    /// Reads a TOML file; what it leaves out keeps its default.
    ///
    /// # Errors
    /// The file cannot be read, or says what is not understood; the error shows where.
    pub fn read_file(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("cannot read `{}`", path.display()))?;
        let mut config: Self = serde_words::from_toml(&text)
            .map_err(|said| anyhow!("`{}` is not a valid configuration: {said}", path.display()))?;
        if config.has_service_table {
            config.service_file = Some(ConfigFile { path: path.to_owned(), text });
        }
        Ok(config)
    }

    /// Returns true if a service runs around the gateway: its file has a `[serve]` table, or `serve` is the command.
    fn is_service(&self) -> bool {
        self.has_service_table || self.service_size.is_some()
    }

    /// Returns a digest of the settings that judge a run's calls, so that the records of two runs can be compared. Secrets, the
    /// run's identity, the places of its files and sockets, and the service around it are no part of it.
    pub fn digest(&self) -> String {
        canonical::digest("config 1", self).expect("each setting has a form in JSON")
    }

    /// What is read and written here for us alone.
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

    /// Checks the whole.
    ///
    /// # Errors
    /// What is missing or does not fit together, and what to do about it.
    pub fn validate(&self) -> anyhow::Result<()> {
        match (&self.shared, self.is_service()) {
            (None, false) => self.validate_identity()?,
            (Some(shared), false) => shared.validate()?,
            (None, true) => self.validate_service()?,
            (Some(_), true) => {
                bail!("both `[shared]` and `[serve]` are given; one process is one of them")
            }
        }
        if self.upstream.api_key.is_empty() {
            bail!(
                "`LITELLM_MASTER_KEY` is not set; give the upstream's key there, or its file in `LITELLM_MASTER_KEY_FILE`"
            );
        }
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
        self.validate_times()?;
        self.validate_body_limits()?;
        self.check_models()?;
        self.server.validate()?;
        self.telemetry.validate()?;
        RuleSet::compile_rules(&self.policy.rules)?;
        Ok(())
    }

    /// A service has no operator's socket, and its threads are those of the machine.
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

    /// Clocks must be able to count to each time.
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

    /// A body of the size that is allowed must have room.
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

    /// What a request may not name is of no use in a list, and the upstream would read it in a way of its own.
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

    /// Says which models search the web although the run may not, as their operator has named them.
    pub fn warn_of_searching_models(&self) {
        let request::BodyPolicy { models, aliases, capabilities, .. } = &self.policy.body;
        for model in models.iter().chain(aliases.values()) {
            if let Some(capability) = capability_of_model(model)
                && !capabilities.contains(&capability)
            {
                tracing::warn!(
                    model,
                    capability = capability.name(),
                    "a model does by itself what the run is not granted, and the gateway cannot keep it from that; \
                     take it out of the list, or grant the capability"
                );
            }
        }
    }

    /// Says whether budgets outlast a restart, as they do by the audit logs of their runs.
    ///
    /// # Errors
    /// They do not, and nothing allows that.
    pub fn check_budgets_durable(&self) -> anyhow::Result<()> {
        let (name, is_recorded) = match &self.shared {
            Some(shared) => ("shared.audit_dir", shared.audit_dir.is_some()),
            None => ("AUDIT_LOG_PATH", self.audit.path.is_some()),
        };
        let runs = self.shared.iter().flat_map(|shared| &shared.runs);
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
            listen: ListenConfig::default(),
            shared: None,
            has_service_table: false,
            service_file: None,
            service_size: None,
            server: server::HttpServerConfig::default(),
            upstream: upstream::UpstreamConfig::default(),
            budget: BudgetLimits::default(),
            prices: price::PriceConfig::default(),
            policy: policy::PolicyConfig::default(),
            audit: audit::AuditConfig::default(),
            access_log: AccessLogDestination::default(),
            access_log_max_bytes: access_log::MAX_FILE_BYTES,
            metrics: MetricsConfig::default(),
            telemetry: trace::TracingConfig::default(),
            admin: AdminConfig::default(),
            workers: 1,
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

/// Reads over a table that another reader takes, and returns that it is there.
fn deserialize_presence<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<bool, D::Error> {
    serde::de::IgnoredAny::deserialize(deserializer).map(|_| true)
}

/// Each is a thread with a runtime and connections of its own; more than a machine has processors help nobody.
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
