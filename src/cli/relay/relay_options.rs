//! The relay's flags, wherever there is one.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use http::Uri;
use http::uri::Scheme;

use crate::base::private_dir;
use crate::base::secret::SecretString;
use crate::cli::run::output_renderer::quote_word;
use crate::relay::delivery::{DeliveryConfig, DeliveryService, ForgeAccess, KnownSecret};
use crate::relay::git::{HttpProxy, OutboundConfig};
use crate::relay::github::client::{GithubClient, GithubConfig};
use crate::relay::github::credential::{ForgeCredential, GithubApp};
use crate::relay::repo::repository::is_local;
use crate::relay::repo::review;
use crate::relay::repo::review::SHORTEST_KNOWN;
use crate::service::config::default_state_directory;
use crate::telemetry::audit;

/// Where the relay keeps what outlives a run.
#[derive(Clone, Debug, clap::Args)]
pub struct StateDirArgs {
    /// What outlives a run: grants, records, books, mirrors, work that is not delivered yet [default: /var/lib/cogni, or a user's own state directory]
    #[arg(long, value_name = "DIR", env = "COGNI_STATE_DIR")]
    state_dir: Option<PathBuf>,
}

/// Everything that a relay is made of. Its secrets are in variables, or in files.
#[derive(Clone, Debug, clap::Args)]
pub struct RelayArgs {
    #[command(flatten)]
    state: StateDirArgs,

    /// What is welcome, and what is held; what it does not say is as in config/relay.toml
    #[arg(long, value_name = "FILE", env = "COGNI_RELAY_CONFIG")]
    relay_config: Option<PathBuf>,

    /// Who makes the relay's commits
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

    /// PEM file of authorities to trust instead of the system's, for the API and for git. Both go by `HTTPS_PROXY` and
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

/// The keys that a run's own configuration has, by a flag, a file or a variable.
#[derive(Clone, Debug, Default)]
pub struct RunSecrets {
    pub upstream: Option<SecretString>,
    /// What audit logs are signed with, and so statements.
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
    /// Where somebody says.
    pub fn explicit_path(&self) -> Option<PathBuf> {
        self.state_dir.clone()
    }

    pub fn path(&self) -> PathBuf {
        self.state_dir.clone().unwrap_or_else(default_state_directory)
    }

    /// Returns what a command that is printed for pasting needs, so that it looks at the same place: nothing where that is
    /// the default.
    pub fn flag(&self) -> String {
        let given = self.state_dir.as_ref();
        given.map_or_else(String::new, |path| {
            format!(" --state-dir {}", quote_word(&path.to_string_lossy()))
        })
    }
}

impl RelayArgs {
    /// Where it is told to keep what outlives a run.
    pub fn state_dir(&self) -> Option<PathBuf> {
        self.state.state_dir.clone()
    }

    /// Where it keeps what outlives a run.
    pub fn state_path(&self) -> PathBuf {
        self.state.path()
    }

    /// As [`StateDirArgs::flag`].
    pub fn state_flag(&self) -> String {
        self.state.flag()
    }

    /// What is read and written here for us alone.
    pub fn private_paths(&self, variable: impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
        let of_a_secret = |name: &str| variable(name).filter(|path| !path.is_empty());
        let token = self.github_token_file.clone();
        let token = token.or_else(|| of_a_secret("GITHUB_TOKEN_FILE").map(PathBuf::from));
        let given = [token, self.github_app_key_file.clone(), self.relay_config.clone()];
        given.into_iter().flatten().chain([self.state.path()]).collect()
    }

    /// Has it keep that in a directory, whatever it was told.
    #[must_use]
    pub fn with_state_dir(self, state_dir: PathBuf) -> Self {
        Self { state: StateDirArgs { state_dir: Some(state_dir) }, ..self }
    }

    /// Opens the relay. The secrets of this host that must not be in anybody's work are found here: `keys`, where they are
    /// given, else those of their variables. Blocks.
    ///
    /// # Errors
    /// A file cannot be read, or what is in it is not what it should be.
    pub fn open_service(
        self,
        variable: impl Fn(&str) -> Option<String>,
        keys: RunSecrets,
    ) -> anyhow::Result<DeliveryService> {
        let state = self.state.path();
        private_dir::make(&state, 0o711)
            .context("the state directory cannot be used; see `--state-dir`")?;
        let judge = match &self.relay_config {
            Some(path) => load_relay_config(path)?,
            None => review::RelayConfig::default(),
        };
        let signing_key = match non_empty_secret(keys.signing) {
            None => load_signing_key(&variable, &state)?,
            Some(given) => given,
        };
        let keys = RunSecrets { signing: Some(signing_key), ..keys };
        let settings = DeliveryConfig {
            state: canonical_state_dir(&state)?,
            judge,
            committer: self.parse_committer()?,
            access: self.forge_access(&variable)?,
            network: self.network_config(&variable)?,
            signing_key: keys.signing.clone(),
            known: self.collect_known_secrets(&variable, keys)?,
        };
        Ok(DeliveryService::open(settings)?)
    }

    /// All but the token, which comes and goes: the one that work is delivered with must not be in it in any case.
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
        let known = known.filter(|(_, secret)| secret.expose_secret().len() >= SHORTEST_KNOWN);
        Ok(known.map(|(name, secret)| KnownSecret { name, secret }).collect())
    }

    /// The variables are those that everybody sets; they are not flags, since a proxy's address may hold a password.
    fn network_config(
        &self,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> anyhow::Result<OutboundConfig> {
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

    /// It becomes a line of a commit.
    fn parse_committer(&self) -> anyhow::Result<String> {
        let given = &self.relay_committer;
        let parts = given.strip_suffix('>').and_then(|rest| rest.split_once(" <"));
        let is_plain = |text: &str| {
            !text.is_empty() && !text.contains(['<', '>']) && !text.chars().any(char::is_control)
        };
        match parts {
            Some((name, email)) if is_plain(name) && is_plain(email) => Ok(given.clone()),
            _ => bail!("`--relay-committer` is `{}`; give `Name <email>`", given.escape_debug()),
        }
    }

    /// The forge, and what the relay shows to it, where anything is given.
    ///
    /// # Errors
    /// A file cannot be read, or what is in it is not what it should be.
    pub fn forge_access(
        &self,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> anyhow::Result<Option<ForgeAccess>> {
        let token = read_secret(self.github_token_file.as_deref(), "GITHUB_TOKEN", variable)?;
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
        let api = GithubClient::new(config).context("the authorities that GitHub is checked by cannot be read; name a PEM file of them in `GITHUB_CA_FILE`")?;
        Ok(Some(ForgeAccess { api, credential }))
    }
}

fn non_empty_secret(key: Option<SecretString>) -> Option<SecretString> {
    key.filter(|key| !key.is_empty())
}

/// Without symlinks, as the outbox writes it down.
fn canonical_state_dir(state: &Path) -> anyhow::Result<PathBuf> {
    let real = state.canonicalize()?;
    if real.to_str().is_none() {
        bail!("`{}` is not UTF-8; choose another `--state-dir`", real.display());
    }
    Ok(real)
}

/// Reads a file of rules and limits.
///
/// # Errors
/// The file cannot be read, or is not what it should be.
pub(super) fn load_relay_config(path: &Path) -> anyhow::Result<review::RelayConfig> {
    review::RelayConfig::parse(&read_text_file(path)?)
        .with_context(|| format!("`{}`", path.display()))
}

/// What signs statements and logs: as for the gateway, else what is kept with them.
pub(super) fn load_signing_key(
    variable: &impl Fn(&str) -> Option<String>,
    state: &Path,
) -> anyhow::Result<SecretString> {
    match read_secret(None, "AUDIT_SIGNING_KEY", variable)? {
        Some(given) => Ok(given),
        None => Ok(audit::load_or_create_seed(&state.join(audit::KEY_FILE_NAME))?),
    }
}

/// A secret: from the file that a flag or the variable `NAME_FILE` names, or from the variable itself.
fn read_secret(
    flag: Option<&Path>,
    name: &str,
    variable: &impl Fn(&str) -> Option<String>,
) -> anyhow::Result<Option<SecretString>> {
    let variable = |name: &str| variable(name).filter(|given| !given.is_empty());
    let file =
        flag.map(Path::to_owned).or_else(|| variable(&format!("{name}_FILE")).map(PathBuf::from));
    let text = match (file, variable(name)) {
        (Some(_), Some(_)) => bail!("both `{name}` and its file are given; give one of them"),
        (Some(path), None) => Some(read_text_file(&path)?),
        (None, given) => given,
    };
    Ok(text.map(|text| SecretString::new(text.trim())))
}

fn read_text_file(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("`{}` cannot be read", path.display()))
}
