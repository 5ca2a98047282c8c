//! The flags of the relay, for every command that has them.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use http::Uri;
use http::uri::Scheme;

use crate::base::private_dir;
use crate::base::regular_file::read_regular_file;
use crate::base::secret::SecretString;
use crate::base::shell::quote_word;
use crate::relay::delivery::{DeliveryConfig, DeliveryService, ForgeAccess, KnownSecret};
use crate::relay::git::{HttpProxy, OutboundConfig};
use crate::relay::github::client::{GithubClient, GithubConfig};
use crate::relay::github::credential::{ForgeCredential, GithubApp};
use crate::relay::repo::repository::is_local;
use crate::relay::repo::review;
use crate::relay::repo::review::SHORTEST_KNOWN;
use crate::service::config::default_state_directory;
use crate::telemetry::audit;

/// The flag for the directory of persistent state.
#[derive(Clone, Debug, clap::Args)]
pub struct StateDirArgs {
    /// Directory of persistent state: grants, records, billing, mirrors, pending deliveries [default: /var/lib/cogni,
    /// or a user's own state directory]
    #[arg(long, value_name = "DIR", env = "COGNI_STATE_DIR")]
    state_dir: Option<PathBuf>,
}

/// The flags of the relay. The relay's secrets come from variables or files.
#[derive(Clone, Debug, clap::Args)]
pub struct RelayArgs {
    #[command(flatten)]
    state: StateDirArgs,

    /// File with the review rules; missing settings are as in config/relay.toml
    #[arg(long, value_name = "FILE", env = "COGNI_RELAY_CONFIG")]
    relay_config: Option<PathBuf>,

    /// Committer of the relay's commits
    #[arg(
        long,
        value_name = "NAME <EMAIL>",
        env = "COGNI_RELAY_COMMITTER",
        default_value = "cogni-gateway <cogni-gateway@localhost>"
    )]
    relay_committer: String,

    /// GitHub's API; `https://HOST/api/v3` for GitHub Enterprise
    #[arg(
        long,
        value_name = "URL",
        env = "GITHUB_API_URL",
        default_value = "https://api.github.com"
    )]
    github_api_url: Uri,

    /// PEM file of authorities to trust instead of the system's, for the API and for git. Both use `HTTPS_PROXY` and
    /// `NO_PROXY`
    #[arg(long, value_name = "PATH", env = "GITHUB_CA_FILE")]
    github_ca_file: Option<PathBuf>,

    /// File with the token that pushes [env: `GITHUB_TOKEN` or `GITHUB_TOKEN_FILE`]
    #[arg(long, value_name = "PATH")]
    github_token_file: Option<PathBuf>,

    /// The client id of a GitHub App, which is used instead of a token
    #[arg(long, value_name = "ID", env = "GITHUB_APP_ID")]
    github_app_id: Option<String>,

    /// File with the app's private key, in PEM
    #[arg(long, value_name = "PATH", env = "GITHUB_APP_KEY_FILE", requires = "github_app_id")]
    github_app_key_file: Option<PathBuf>,
}

/// The secrets of a run's own configuration, from a flag, a file or a variable.
#[derive(Clone, Debug, Default)]
pub struct RunSecrets {
    pub upstream: Option<SecretString>,
    /// The key that signs audit logs and provenance statements.
    pub signing: Option<SecretString>,
}

impl RunSecrets {
    pub fn from_config(config: &crate::gateway::config::GatewayConfig) -> Self {
        Self {
            upstream: Some(config.upstream.api_key.clone()),
            signing: config.audit.signing_key.clone(),
        }
    }
}

impl StateDirArgs {
    /// Returns the directory that the flag or the variable names.
    pub fn explicit_path(&self) -> Option<PathBuf> {
        self.state_dir.clone()
    }

    pub fn path(&self) -> PathBuf {
        self.state_dir.clone().unwrap_or_else(default_state_directory)
    }

    /// Returns the flag that a printed command needs to find the same state directory, or nothing for the default
    /// directory.
    pub fn flag(&self) -> String {
        let given = self.state_dir.as_ref();
        given.map_or_else(String::new, |path| {
            format!(" --state-dir {}", quote_word(&path.to_string_lossy()))
        })
    }
}

impl RelayArgs {
    /// Returns the state directory that the flag or the variable names.
    pub fn state_dir(&self) -> Option<PathBuf> {
        self.state.state_dir.clone()
    }

    /// Returns the state directory, named or default.
    pub fn state_path(&self) -> PathBuf {
        self.state.path()
    }

    /// Returns the flag for a printed command, like [`StateDirArgs::flag`].
    pub fn state_flag(&self) -> String {
        self.state.flag()
    }

    /// Returns the paths that only this process may read or write: no run may mount them.
    pub fn private_paths(&self, variable: impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
        let of_a_secret = |name: &str| variable(name).filter(|path| !path.is_empty());
        let token = self.github_token_file.clone();
        let token = token.or_else(|| of_a_secret("GITHUB_TOKEN_FILE").map(PathBuf::from));
        let given = [token, self.github_app_key_file.clone(), self.relay_config.clone()];
        given.into_iter().flatten().chain([self.state.path()]).collect()
    }

    /// Replaces the state directory.
    #[must_use]
    pub fn with_state_dir(self, state_dir: PathBuf) -> Self {
        Self { state: StateDirArgs { state_dir: Some(state_dir) }, ..self }
    }

    /// Opens the relay. Collects the secrets of this host that must not appear in delivered work: `keys` if given,
    /// otherwise the secrets of the variables. The function blocks.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or has invalid content.
    pub fn open_service(
        self,
        variable: impl Fn(&str) -> Option<String>,
        keys: RunSecrets,
    ) -> anyhow::Result<DeliveryService> {
        let state = self.state.path();
        // 0711: other users may pass through to files that they may read, but cannot list the directory.
        private_dir::make(&state, 0o711)
            .context("the state directory cannot be used; see `--state-dir`")?;
        let review = match &self.relay_config {
            Some(path) => load_relay_config(path)?,
            None => review::RelayConfig::default(),
        };
        // The signing key is also a secret that work must not contain, so it is resolved first.
        let signing_key = match non_empty_secret(keys.signing) {
            None => load_signing_key(&variable, &state)?,
            Some(given) => given,
        };
        let keys = RunSecrets { signing: Some(signing_key), ..keys };
        let settings = DeliveryConfig {
            state: canonical_state_dir(&state)?,
            review,
            committer: self.parse_committer()?,
            access: self.forge_access(&variable)?,
            network: self.network_config(&variable)?,
            signing_key: keys.signing.clone(),
            known_secrets: self.collect_known_secrets(&variable, keys)?,
        };
        Ok(DeliveryService::open(settings)?)
    }

    /// Collects the secrets to search for in work. The forge's token is not among them: tokens change, and the token of
    /// a delivery is always searched for.
    fn collect_known_secrets(
        &self,
        variable: &impl Fn(&str) -> Option<String>,
        keys: RunSecrets,
    ) -> anyhow::Result<Vec<KnownSecret>> {
        const UPSTREAM_KEY_VARIABLE: &str = "LITELLM_MASTER_KEY";
        let upstream_key = match non_empty_secret(keys.upstream) {
            None => read_secret(None, UPSTREAM_KEY_VARIABLE, variable)?,
            given => given,
        };
        let app_key = self.github_app_key_file.as_deref().map(read_text_file).transpose()?;
        let password =
            self.network_config(variable)?.proxy.as_ref().and_then(HttpProxy::url_password);
        let all = [
            (UPSTREAM_KEY_VARIABLE, upstream_key),
            ("AUDIT_SIGNING_KEY", keys.signing),
            ("GITHUB_APP_KEY_FILE", app_key.map(|key| SecretString::new(key.trim()))),
            ("HTTPS_PROXY", password),
        ];
        let known = all.into_iter().filter_map(|(name, secret)| Some((name, secret?)));
        // A short secret would be found in ordinary text.
        let known = known.filter(|(_, secret)| secret.expose_secret().len() >= SHORTEST_KNOWN);
        Ok(known.map(|(name, secret)| KnownSecret { name, secret }).collect())
    }

    /// Reads the network settings from the standard variables. They are not flags, because a proxy's address may
    /// contain a password.
    fn network_config(
        &self,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> anyhow::Result<OutboundConfig> {
        // Other programs accept both spellings of these variables.
        let either = |name: &str| {
            let given = [variable(name), variable(&name.to_ascii_lowercase())];
            given.into_iter().flatten().find(|given| !given.is_empty())
        };
        let except = either("NO_PROXY").unwrap_or_default();
        let proxy =
            either("HTTPS_PROXY").map(|url| HttpProxy::parse_proxy(&url, &except)).transpose();
        let ca_file = self.github_ca_file.as_deref().map(std::path::absolute).transpose()?;
        Ok(OutboundConfig { ca_file, proxy: proxy.context("`HTTPS_PROXY`")? })
    }

    /// Checks the committer, because the text becomes a line of a commit object.
    fn parse_committer(&self) -> anyhow::Result<String> {
        let given = &self.relay_committer;
        let parts = given.strip_suffix('>').and_then(|rest| rest.split_once(" <"));
        // Line ends or angle brackets would forge further parts of the commit's header.
        let is_plain = |text: &str| {
            !text.is_empty() && !text.contains(['<', '>']) && !text.chars().any(char::is_control)
        };
        match parts {
            Some((name, email)) if is_plain(name) && is_plain(email) => Ok(given.clone()),
            _ => bail!("`--relay-committer` is `{}`; give `Name <email>`", given.escape_debug()),
        }
    }

    /// Returns the forge's API and the relay's credential, or `None` if no credential is given.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or has invalid content.
    pub fn forge_access(
        &self,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> anyhow::Result<Option<ForgeAccess>> {
        let token = read_secret(self.github_token_file.as_deref(), "GITHUB_TOKEN", variable)?;
        // An app's key file without its id is refused by the flags' own rules.
        let credential = match (token, &self.github_app_id, &self.github_app_key_file) {
            (Some(_), Some(_), _) => bail!("both a token and an app are given; give one of them"),
            (Some(token), None, _) => ForgeCredential::Token(token),
            (None, Some(id), Some(path)) => ForgeCredential::App(Box::new(GithubApp::new(
                id,
                &SecretString::new(read_text_file(path)?),
            )?)),
            (None, Some(_), None) => {
                bail!("`GITHUB_APP_ID` is given without `GITHUB_APP_KEY_FILE`")
            }
            (None, None, _) => return Ok(None),
        };
        let url = self.github_api_url.clone();
        // A token without encryption is acceptable only on this machine.
        if url.scheme() != Some(&Scheme::HTTPS) && !is_local(&url) {
            bail!(
                "`GITHUB_API_URL` would send a token over a network in the clear; give `https://`"
            );
        }
        let config = GithubConfig {
            url,
            network: self.network_config(variable)?,
            ..GithubConfig::default()
        };
        let api = GithubClient::new(config).context("cannot read the certificate authorities for GitHub; name a PEM file in `GITHUB_CA_FILE`")?;
        Ok(Some(ForgeAccess { api, credential }))
    }
}

fn non_empty_secret(key: Option<SecretString>) -> Option<SecretString> {
    key.filter(|key| !key.is_empty())
}

/// Returns the directory without symlinks, as the outbox stores it.
fn canonical_state_dir(state: &Path) -> anyhow::Result<PathBuf> {
    let real = state.canonicalize()?;
    if real.to_str().is_none() {
        bail!("`{}` is not UTF-8; choose another `--state-dir`", real.display());
    }
    Ok(real)
}

/// Reads a file of review rules and limits.
///
/// # Errors
/// Returns an error if the file cannot be read or has invalid content.
pub(super) fn load_relay_config(path: &Path) -> anyhow::Result<review::RelayConfig> {
    review::RelayConfig::parse(&read_text_file(path)?)
        .with_context(|| format!("`{}`", path.display()))
}

/// Returns the key that signs statements and logs: the gateway's key, or the key in the state directory, which is
/// created if it is missing.
pub(super) fn load_signing_key(
    variable: &impl Fn(&str) -> Option<String>,
    state: &Path,
) -> anyhow::Result<SecretString> {
    match read_secret(None, "AUDIT_SIGNING_KEY", variable)? {
        Some(given) => Ok(given),
        None => Ok(audit::load_or_create_seed(&state.join(audit::KEY_FILE_NAME))?),
    }
}

/// Reads a secret from the file that a flag or the variable `NAME_FILE` names, or from the variable itself.
fn read_secret(
    flag: Option<&Path>,
    name: &str,
    variable: &impl Fn(&str) -> Option<String>,
) -> anyhow::Result<Option<SecretString>> {
    let variable = |name: &str| variable(name).filter(|given| !given.is_empty());
    let file =
        flag.map(Path::to_owned).or_else(|| variable(&format!("{name}_FILE")).map(PathBuf::from));
    // Two sources may contradict each other, so both together are an error.
    let text = match (file, variable(name)) {
        (Some(_), Some(_)) => bail!("both `{name}` and its file are given; give one of them"),
        (Some(path), None) => Some(read_text_file(&path)?),
        (None, given) => given,
    };
    Ok(text.map(|text| SecretString::new(text.trim())))
}

fn read_text_file(path: &Path) -> anyhow::Result<String> {
    read_regular_file(path, MAX_FILE_BYTES)
        .with_context(|| format!("`{}` cannot be read", path.display()))
}

/// The largest file of options, keys or rules. Our choice: a wrong path cannot fill the memory.
const MAX_FILE_BYTES: u64 = 1 << 20;
