//! The settings of many runs in one process, behind one listener.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::GatewayConfig;
use crate::base::{tls, trace_context};
use crate::gateway::pipeline::server::MAX_COUNT;
use crate::gateway::run::RunIdentity;
use crate::gateway::run::token::{
    MAX_AUDIENCE_BYTES, RunTokenKeys, RunTokenKeysError, is_audience,
};
use crate::gateway::upstream::UpstreamKind;
use crate::llm::budget::BudgetLimits;

/// The listener, and the runs that are open from the start.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SharedListenerConfig {
    pub listen: SocketAddr,
    pub tls_cert_file: Option<PathBuf>,
    pub tls_key_file: Option<PathBuf>,
    /// A file of certificate authorities, one of which must have issued a client's certificate.
    pub client_ca_file: Option<PathBuf>,
    /// A switch that allows serving without TLS, which is permitted on a loopback address only.
    pub plaintext: bool,
    /// The largest number of open connections of all runs together, on each worker. Further connections are closed.
    pub max_connections: usize,
    /// The longest time for a client's TLS handshake.
    #[serde(with = "humantime_serde")]
    pub handshake_timeout: Duration,
    /// A file with lines of `id = key`. The first key signs run tokens; all keys verify them.
    pub token_keys_file: PathBuf,
    /// The name of this installation in run tokens. With a name, only tokens of this name are accepted.
    pub token_audience: Option<String>,
    /// The directory in which each run has an audit log, named after the run.
    pub audit_dir: Option<PathBuf>,
    pub runs: Vec<SharedRunConfig>,
}

/// The description of one run: its identity and its limits.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedRunConfig {
    pub run_id: String,
    #[serde(default = "first_attempt")]
    pub attempt: String,
    /// The billing account of the run.
    #[serde(default)]
    pub account: String,
    #[serde(default)]
    pub metadata: Map<String, Value>,
    /// The span that the run belongs to, as a W3C `traceparent`.
    #[serde(default)]
    pub traceparent: Option<trace_context::TraceContext>,
    /// The run's own limits. A limit that is set here wins over `[budget]`.
    #[serde(default)]
    pub budget: BudgetLimits,
}

impl SharedListenerConfig {
    /// Returns the files for TLS; `None` without TLS.
    pub fn tls_files(&self) -> Option<tls::TlsFiles<'_>> {
        Some(tls::TlsFiles {
            certificate: self.tls_cert_file.as_deref()?,
            key: self.tls_key_file.as_deref()?,
            client_authorities: self.client_ca_file.as_deref(),
        })
    }

    /// Reads the keys of run tokens, for this installation's audience.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or parsed.
    pub fn token_keys(&self) -> Result<RunTokenKeys, RunTokenKeysError> {
        Ok(RunTokenKeys::read_file(&self.token_keys_file)?
            .for_audience(self.token_audience.as_deref()))
    }

    /// Checks the settings of the listener.
    ///
    /// # Errors
    /// Returns an error if a setting is missing or contradicts another one. The error says what to do.
    pub fn validate(&self) -> anyhow::Result<()> {
        if self.token_keys_file.as_os_str().is_empty() {
            bail!("`shared.token_keys_file` is not set; tokens tell the runs apart");
        }
        if let Some(name) = self.token_audience.as_deref().filter(|name| !is_audience(name)) {
            bail!(
                "`shared.token_audience` is `{}`, which is no name; use 1 to {MAX_AUDIENCE_BYTES} letters, \
                 digits, `.`, `_`, `:`, `@`, `/` or `-`",
                name.escape_debug()
            );
        }
        let files = [&self.tls_cert_file, &self.tls_key_file, &self.client_ca_file];
        match (self.plaintext, self.tls_files().is_some()) {
            // Both are given: the operator may believe that TLS is on, so the choice must be explicit.
            (true, _) if files.into_iter().any(Option::is_some) => bail!(
                "`shared.plaintext` is `true` and files for TLS are given; take one of them out"
            ),
            // A token in clear text is a credential that any host on the way can copy.
            (true, _) if !self.listen.ip().is_loopback() => bail!(
                "`shared.plaintext` is `true` and `shared.listen` is `{}`; tokens must not cross a \
                 network in the clear: listen on 127.0.0.1, or give `shared.tls_cert_file` and \
                 `shared.tls_key_file`",
                self.listen
            ),
            (false, false) => bail!(
                "`shared.tls_cert_file` and `shared.tls_key_file` are not both set; give both, or say \
                 `plaintext = true` on a loopback address"
            ),
            _ if !(1..=MAX_COUNT).contains(&(self.max_connections as u64)) => {
                bail!(
                    "`shared.max_connections` is `{}`; give 1 to {MAX_COUNT}",
                    self.max_connections
                )
            }
            _ => Ok(()),
        }
    }
}

impl SharedRunConfig {
    /// Returns the configuration of this run in a process with many runs. Settings that the description omits are those
    /// of `base`.
    ///
    /// # Errors
    /// Returns an error if a name is not valid, or is missing.
    pub fn resolve_config(
        self,
        base: &GatewayConfig,
        audit_dir: Option<&Path>,
    ) -> anyhow::Result<GatewayConfig> {
        let Self { run_id, attempt, account, metadata, traceparent, budget } = self;
        if base.upstream.kind == UpstreamKind::Litellm && account.is_empty() {
            bail!("run `{run_id}` has no `account`; LiteLLM bills it as the end user");
        }
        // The deployment is the process's own. A description must not choose whose records its calls join.
        let deployment = base.identity.deployment.clone();
        let identity =
            RunIdentity { run: run_id, attempt, account, metadata, deployment, trace: traceparent };
        identity.validate()?;
        let mut config = GatewayConfig { budget: budget.or_defaults(&base.budget), ..base.clone() };
        config.audit.path = audit_dir.map(|folder| folder.join(run_file_name(&identity.run)));
        config.identity = identity;
        Ok(config)
    }
}

/// Returns the file name of a run's audit log. An id may contain `/`, which a file name must not. No id contains `%`,
/// so no two runs get the same name.
fn run_file_name(run: &str) -> String {
    run.replace('/', "%2F") + ".jsonl"
}

fn first_attempt() -> String {
    "0".to_owned()
}

impl Default for SharedListenerConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8443)),
            tls_cert_file: None,
            tls_key_file: None,
            client_ca_file: None,
            plaintext: false,
            // Four connections for each of a thousand runs.
            max_connections: 4096,
            handshake_timeout: Duration::from_secs(10),
            token_keys_file: PathBuf::new(),
            token_audience: None,
            audit_dir: None,
            runs: vec![],
        }
    }
}
