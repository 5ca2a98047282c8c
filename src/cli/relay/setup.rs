//! The relay's flags, wherever there is one.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use http::Uri;
use http::uri::Scheme;

use crate::audit;
use crate::base::private_dir;
use crate::base::secret::Secret;
use crate::cli::run::shown::quoted;
use crate::config::default_state;
use crate::delivery::{Access, Known, Relay, Settings};
use crate::forge::credential::{App, Credential};
use crate::forge::github::{Api, Config};
use crate::git::{Network, Proxy};
use crate::relay::judge;
use crate::relay::judge::SHORTEST_KNOWN;
use crate::relay::repository::is_here;

/// Where the relay keeps what outlives a run.
#[derive(Clone, Debug, clap::Args)]
pub struct StateDir {
    /// What outlives a run: grants, records, books, mirrors, work that is not delivered yet [default: /var/lib/cogni, or a user's own state directory]
    #[arg(long, value_name = "DIR", env = "COGNI_STATE_DIR")]
    state_dir: Option<PathBuf>,
}

/// Everything that a relay is made of. Its secrets are in variables, or in files.
#[derive(Clone, Debug, clap::Args)]
pub struct Setup {
    #[command(flatten)]
    state: StateDir,

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
pub struct Keys {
    pub upstream: Option<Secret>,
    /// What audit logs are signed with, and so statements.
    pub signing: Option<Secret>,
}

impl Keys {
    pub fn of(config: &crate::config::Config) -> Self {
        Self {
            upstream: Some(config.upstream.api_key.clone()),
            signing: config.audit.signing_key.clone(),
        }
    }
}

impl StateDir {
    /// Where somebody says.
    pub fn given(&self) -> Option<PathBuf> {
        self.state_dir.clone()
    }

    pub fn path(&self) -> PathBuf {
        self.state_dir.clone().unwrap_or_else(default_state)
    }

    /// Returns what a command that is printed for pasting needs, so that it looks at the same place: nothing where that is
    /// the default.
    pub fn flag(&self) -> String {
        let given = self.state_dir.as_ref();
        given.map_or_else(String::new, |path| {
            format!(" --state-dir {}", quoted(&path.to_string_lossy()))
        })
    }
}

impl Setup {
    /// Where it is told to keep what outlives a run.
    pub fn state_dir(&self) -> Option<PathBuf> {
        self.state.state_dir.clone()
    }

    /// Where it keeps what outlives a run.
    pub fn state_path(&self) -> PathBuf {
        self.state.path()
    }

    /// As [`StateDir::flag`].
    pub fn state_flag(&self) -> String {
        self.state.flag()
    }

    /// What is read and written here for us alone.
    pub fn private(&self, variable: impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
        let of_a_secret = |name: &str| variable(name).filter(|path| !path.is_empty());
        let token = self.github_token_file.clone();
        let token = token.or_else(|| of_a_secret("GITHUB_TOKEN_FILE").map(PathBuf::from));
        let given = [token, self.github_app_key_file.clone(), self.relay_config.clone()];
        given.into_iter().flatten().chain([self.state.path()]).collect()
    }

    /// Has it keep that in a directory, whatever it was told.
    #[must_use]
    pub fn at(self, state_dir: PathBuf) -> Self {
        Self { state: StateDir { state_dir: Some(state_dir) }, ..self }
    }

    /// Opens the relay. The secrets of this host that must not be in anybody's work are found here: `keys`, where they are
    /// given, else those of their variables. Blocks.
    ///
    /// # Errors
    /// A file cannot be read, or what is in it is not what it should be.
    pub fn open(
        self,
        variable: impl Fn(&str) -> Option<String>,
        keys: Keys,
    ) -> anyhow::Result<Relay> {
        let state = self.state.path();
        private_dir::make(&state, 0o711)
            .context("the state directory cannot be used; see `--state-dir`")?;
        let judge = match &self.relay_config {
            Some(path) => judge_config(path)?,
            None => judge::Config::default(),
        };
        let signing_key = match given(keys.signing) {
            None => signing_key(&variable, &state)?,
            Some(given) => given,
        };
        let keys = Keys { signing: Some(signing_key), ..keys };
        let settings = Settings {
            state: written(&state)?,
            judge,
            committer: self.committer()?,
            access: self.access(&variable)?,
            network: self.network(&variable)?,
            signing_key: keys.signing.clone(),
            known: self.known(&variable, keys)?,
        };
        Ok(Relay::open(settings)?)
    }

    /// All but the token, which comes and goes: the one that work is delivered with must not be in it in any case.
    fn known(
        &self,
        variable: &impl Fn(&str) -> Option<String>,
        keys: Keys,
    ) -> anyhow::Result<Vec<Known>> {
        const UPSTREAM: &str = "LITELLM_MASTER_KEY";
        let upstream_key = match given(keys.upstream) {
            None => secret(None, UPSTREAM, variable)?,
            given => given,
        };
        let app_key = self.github_app_key_file.as_deref().map(read).transpose()?;
        let password = self.network(variable)?.proxy.as_ref().and_then(Proxy::password);
        let all = [
            (UPSTREAM, upstream_key),
            ("AUDIT_SIGNING_KEY", keys.signing),
            ("GITHUB_APP_KEY_FILE", app_key.map(|key| Secret::new(key.trim()))),
            ("HTTPS_PROXY", password),
        ];
        let known = all.into_iter().filter_map(|(name, secret)| Some((name, secret?)));
        let known = known.filter(|(_, secret)| secret.expose().len() >= SHORTEST_KNOWN);
        Ok(known.map(|(name, secret)| Known { name, secret }).collect())
    }

    /// The variables are those that everybody sets; they are not flags, since a proxy's address may hold a password.
    fn network(&self, variable: &impl Fn(&str) -> Option<String>) -> anyhow::Result<Network> {
        let either = |name: &str| {
            let given = [variable(name), variable(&name.to_ascii_lowercase())];
            given.into_iter().flatten().find(|given| !given.is_empty())
        };
        let except = either("NO_PROXY").unwrap_or_default();
        let proxy = either("HTTPS_PROXY").map(|url| Proxy::parse(&url, &except)).transpose();
        let ca_file = self.github_ca_file.as_deref().map(std::path::absolute).transpose()?;
        Ok(Network { ca_file, proxy: proxy.context("`HTTPS_PROXY`")? })
    }

    /// It becomes a line of a commit.
    fn committer(&self) -> anyhow::Result<String> {
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
    pub fn access(
        &self,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> anyhow::Result<Option<Access>> {
        let token = secret(self.github_token_file.as_deref(), "GITHUB_TOKEN", variable)?;
        let credential = match (token, &self.github_app_id, &self.github_app_key_file) {
            (Some(_), Some(_), _) => bail!("both a token and an app are given; give one of them"),
            (Some(token), None, _) => Credential::Token(token),
            (None, Some(id), Some(path)) => {
                Credential::App(Box::new(App::new(id, &Secret::new(read(path)?))?))
            }
            (None, Some(_), None) => {
                bail!("`GITHUB_APP_ID` is given without `GITHUB_APP_KEY_FILE`")
            }
            (None, None, _) => return Ok(None),
        };
        let url = self.github_api_url.clone();
        if url.scheme() != Some(&Scheme::HTTPS) && !is_here(&url) {
            bail!(
                "`GITHUB_API_URL` would send a token over a network in the clear; give `https://`"
            );
        }
        let config = Config { url, network: self.network(variable)?, ..Config::default() };
        let api = Api::new(config).context("the authorities that GitHub is checked by cannot be read; name a PEM file of them in `GITHUB_CA_FILE`")?;
        Ok(Some(Access { api, credential }))
    }
}

fn given(key: Option<Secret>) -> Option<Secret> {
    key.filter(|key| !key.is_empty())
}

/// Without symlinks, as the outbox writes it down.
fn written(state: &Path) -> anyhow::Result<PathBuf> {
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
pub(super) fn judge_config(path: &Path) -> anyhow::Result<judge::Config> {
    judge::Config::parse(&read(path)?).with_context(|| format!("`{}`", path.display()))
}

/// What signs statements and logs: as for the gateway, else what is kept with them.
pub(super) fn signing_key(
    variable: &impl Fn(&str) -> Option<String>,
    state: &Path,
) -> anyhow::Result<Secret> {
    match secret(None, "AUDIT_SIGNING_KEY", variable)? {
        Some(given) => Ok(given),
        None => Ok(audit::kept_seed(&state.join(audit::KEY_FILE))?),
    }
}

/// A secret: from the file that a flag or the variable `NAME_FILE` names, or from the variable itself.
fn secret(
    flag: Option<&Path>,
    name: &str,
    variable: &impl Fn(&str) -> Option<String>,
) -> anyhow::Result<Option<Secret>> {
    let variable = |name: &str| variable(name).filter(|given| !given.is_empty());
    let file =
        flag.map(Path::to_owned).or_else(|| variable(&format!("{name}_FILE")).map(PathBuf::from));
    let text = match (file, variable(name)) {
        (Some(_), Some(_)) => bail!("both `{name}` and its file are given; give one of them"),
        (Some(path), None) => Some(read(&path)?),
        (None, given) => given,
    };
    Ok(text.map(|text| Secret::new(text.trim())))
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("`{}` cannot be read", path.display()))
}
