//! What the operator wants: defaults, then a TOML file, then the environment, then flags.
//!
//! A room's own `Config` is composed here and imported by nothing below. Secrets come from the
//! environment or from files named there, never from the TOML file and never from flags.

mod misspelling;
mod serve;
pub mod setting;
mod shared;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Serialize};

use crate::audit;
use crate::base::canonical;
use crate::base::serde_words;
use crate::base::unix::Permissions;
use crate::body::{self, MODEL_NAME_RULE, capability_of_model, is_model_name};
use crate::budget::{Limits, price};
use crate::gateway::policy;
use crate::gateway::rule::Rules;
use crate::gateway::server;
use crate::observe::access_log::{self, Destination};
use crate::observe::trace;
use crate::run::Identity;
use crate::upstream;
use crate::upstream::Kind;

pub use misspelling::check_variable_names;
pub use serve::{LONGEST, Place, Serve, default_state};
pub use setting::{SETTINGS, Setting};
pub use shared::{RunSpec, Shared};

/// Everything a gateway needs to know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    #[serde(skip)]
    pub identity: Identity,
    /// The files that all of this was read from, those of secrets among them, and others that are kept from sandboxes.
    #[serde(skip)]
    pub files: Vec<PathBuf>,
    #[serde(skip_serializing)]
    pub listen: Listen,
    /// Many runs behind one listener, in place of one run on its socket.
    #[serde(skip_serializing)]
    pub shared: Option<Shared>,
    /// Many runs that this process itself begins, for whoever asks over HTTP.
    #[serde(skip_serializing)]
    pub serve: Option<Serve>,
    pub server: server::Config,
    pub upstream: upstream::Config,
    pub budget: Limits,
    pub prices: price::Config,
    pub policy: policy::Config,
    pub audit: audit::Config,
    #[serde(skip_serializing)]
    pub access_log: Destination,
    /// Bytes of an access log that is a file. At the limit it is moved to its name with `.1`, and begun anew.
    pub access_log_max_bytes: u64,
    #[serde(skip_serializing)]
    pub metrics: Metrics,
    #[serde(skip_serializing)]
    pub telemetry: trace::Config,
    #[serde(skip_serializing)]
    pub admin: Admin,
    /// Threads that serve connections; each has its own runtime and upstream connections.
    pub workers: usize,
    /// How long open calls may go on after SIGTERM. Fits into the 10 s of `docker stop`.
    #[serde(with = "humantime_serde")]
    pub drain_timeout: Duration,
}

/// The run's socket.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Listen {
    pub socket_path: PathBuf,
    /// Octal, as a text: `"0600"`.
    #[serde(deserialize_with = "mode_from_text")]
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
pub struct Admin {
    /// Who can open it may change every run. Never in a directory that a sandbox sees.
    pub socket_path: Option<PathBuf>,
}

/// Where Prometheus scrapes; nowhere by default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Metrics {
    pub address: Option<SocketAddr>,
    /// What `/sd` says, where Prometheus reaches this process at another address than it is asked at.
    pub advertise: Option<String>,
}

impl Config {
    /// Reads a TOML file; what it leaves out keeps its default.
    ///
    /// # Errors
    /// The file cannot be read, or says what is not understood; the error shows where.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("cannot read `{}`", path.display()))?;
        serde_words::from_toml(&text)
            .map_err(|said| anyhow!("`{}` is not a valid configuration: {said}", path.display()))
    }

    /// Returns a digest of the settings that judge a run's calls, so that the records of two runs can be compared. Secrets, the
    /// run's identity, the places of its files and sockets, and the service around it are no part of it.
    pub fn digest(&self) -> String {
        canonical::digest("config 1", self).expect("each setting has a form in JSON")
    }

    /// What is read and written here for us alone.
    pub fn private(&self) -> impl Iterator<Item = &Path> {
        let access_log = match &self.access_log {
            Destination::File(path) => Some(path),
            Destination::Off | Destination::Stdout | Destination::Stderr => None,
        };
        let written = [self.audit.path.as_ref(), access_log, self.admin.socket_path.as_ref()];
        self.files.iter().chain(written.into_iter().flatten()).map(PathBuf::as_path)
    }

    /// Checks the whole.
    ///
    /// # Errors
    /// What is missing or does not fit together, and what to do about it.
    pub fn check(&self) -> anyhow::Result<()> {
        match (&self.shared, &self.serve) {
            (None, None) => self.check_identity()?,
            (Some(shared), None) => shared.check()?,
            (None, Some(serve)) => {
                self.check_served()?;
                serve.check()?;
            }
            (Some(_), Some(_)) => {
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
        self.check_times()?;
        self.check_bodies()?;
        self.check_models()?;
        self.server.check()?;
        self.telemetry.check()?;
        Rules::compile(&self.policy.rules)?;
        Ok(())
    }

    /// A service has no operator's socket, and its threads are those of the machine.
    fn check_served(&self) -> anyhow::Result<()> {
        if self.admin != Admin::default() {
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
    fn check_times(&self) -> anyhow::Result<()> {
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
        match times.into_iter().find(|(_, given)| *given > LONGEST) {
            Some((name, given)) => {
                let given = humantime::format_duration(given);
                bail!("`{name}` is `{given}`; give at most {} days", LONGEST.as_secs() / 86_400)
            }
            None => Ok(()),
        }
    }

    /// A body of the size that is allowed must have room.
    fn check_bodies(&self) -> anyhow::Result<()> {
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
        let body::Policy { models, aliases, .. } = &self.policy.body;
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
        let body::Policy { models, aliases, capabilities, .. } = &self.policy.body;
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
    pub fn check_budgets_last(&self) -> anyhow::Result<()> {
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

    fn check_identity(&self) -> anyhow::Result<()> {
        let Identity { run, account, .. } = &self.identity;
        if run.is_empty() {
            bail!(
                "`RUN_ID` is not set, and every call is recorded and billed under it; give `--run-id ID`"
            );
        }
        if self.upstream.kind == Kind::Litellm && account.is_empty() {
            bail!(
                "`BILLING_ACCOUNT_ID` is not set, and LiteLLM bills it as the end user; give `--billing-account-id ID`"
            );
        }
        Ok(self.identity.check()?)
    }
}

impl Listen {
    pub fn permissions(&self) -> Permissions {
        Permissions { mode: self.socket_mode, uid: self.socket_uid, gid: self.socket_gid }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            identity: Identity { attempt: "0".to_owned(), ..Identity::default() },
            files: vec![],
            listen: Listen::default(),
            shared: None,
            serve: None,
            server: server::Config::default(),
            upstream: upstream::Config::default(),
            budget: Limits::default(),
            prices: price::Config::default(),
            policy: policy::Config::default(),
            audit: audit::Config::default(),
            access_log: Destination::default(),
            access_log_max_bytes: access_log::MAX_FILE_BYTES,
            metrics: Metrics::default(),
            telemetry: trace::Config::default(),
            admin: Admin::default(),
            workers: 1,
            drain_timeout: Duration::from_secs(8),
        }
    }
}

impl Default for Listen {
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

fn mode_from_text<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    setting::mode(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}

/// Each is a thread with a runtime and connections of its own; more than a machine has processors help nobody.
const MAX_WORKERS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::secret::Secret;

    #[test]
    fn a_digest_tells_what_judges_and_not_whom_or_where() {
        let one = Config::default();
        let mut other = one.clone();
        other.identity.run = "another".into();
        other.audit.path = Some("/var/log/another.jsonl".into());
        other.listen.socket_path = "/run/another.sock".into();
        other.upstream.api_key = Secret::new("sk-another");
        assert_eq!(one.digest(), other.digest());
        other.budget.max_turns = Some(1);
        assert_ne!(one.digest(), other.digest());
        other = one.clone();
        other.upstream.ca_file = Some("/etc/ca.pem".into());
        assert_ne!(one.digest(), other.digest());
    }
}
