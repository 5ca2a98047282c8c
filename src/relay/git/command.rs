//! One call of git, from its arguments to its output.

use std::ffi::{OsStr, OsString};
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use http::Uri;
use http::uri::Scheme;
use tokio_util::sync::CancellationToken;

use super::cat_file::{BatchPart, BatchReader};
use super::hardening::{SAFE_ENVIRONMENT, SAFE_SETTINGS};
use super::process::{self, GitInput, GitLimits, OutputSink};
use super::stderr_text::without_hints;
use super::{GitEnvironment, GitError, OutboundConfig};
use crate::base::host_reach::{HostReach, HostReachError};
use crate::base::secret::SecretString;

/// A call of git that is being prepared. Each word is one argument; no shell is involved.
#[must_use = "nothing happens before it is run"]
pub struct GitCommand<'a> {
    git_environment: &'a GitEnvironment,
    cancel: &'a CancellationToken,
    subcommand: &'static str,
    config: Vec<String>,
    args: Vec<OsString>,
    environment: Vec<(&'static str, OsString)>,
    input: GitInput,
    limits: GitLimits,
    secrets: Vec<SecretString>,
}

impl<'a> GitCommand<'a> {
    pub(super) fn new(
        git_environment: &'a GitEnvironment,
        cancel: &'a CancellationToken,
        subcommand: &'static str,
    ) -> Self {
        Self {
            git_environment,
            cancel,
            subcommand,
            config: vec![],
            args: vec![],
            environment: vec![],
            input: GitInput::Empty,
            limits: GitLimits::default(),
            secrets: vec![],
        }
    }

    pub fn arg(mut self, word: impl AsRef<OsStr>) -> Self {
        self.args.push(word.as_ref().to_owned());
        self
    }

    pub fn args<W: AsRef<OsStr>>(mut self, words: impl IntoIterator<Item = W>) -> Self {
        self.args.extend(words.into_iter().map(|word| word.as_ref().to_owned()));
        self
    }

    /// Adds a setting, `key=value`, for this call alone.
    pub fn config(mut self, setting: impl Into<String>) -> Self {
        self.config.push(setting.into());
        self
    }

    /// Sets the repository. A call without a repository has none: git does not search for one.
    pub fn repository(self, git_dir: &Path) -> Self {
        self.env("GIT_DIR", git_dir)
    }

    pub fn env(mut self, name: &'static str, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name, value.as_ref().to_owned()));
        self
    }

    pub fn input(mut self, input: GitInput) -> Self {
        self.input = input;
        self
    }

    pub fn limits(mut self, limits: GitLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Adds an HTTP header for the server at `url` and for no other server. The header's value is in the environment of
    /// this call alone.
    pub fn http_header(mut self, url: &str, value: &SecretString) -> Self {
        // This is the only way to pass git a setting that is not visible in its arguments.
        self = self.env("GIT_CONFIG_COUNT", "1");
        self = self.env("GIT_CONFIG_KEY_0", format!("http.{url}.extraHeader"));
        self = self.env("GIT_CONFIG_VALUE_0", value.expose_secret());
        self.redact_secret(value)
    }

    /// Sets proxy, addresses and trusted certificates for a call that connects to `remote`. Calls that do not connect
    /// get none of these settings.
    ///
    /// # Errors
    /// Returns an error if the remote's host resolves to no address within `reach`. A proxy resolves names itself, so
    /// with a proxy only the host's text is checked.
    pub fn with_remote(mut self, remote: &Uri, reach: HostReach) -> Result<Self, HostReachError> {
        let environment = self.git_environment;
        let OutboundConfig { ca_file, proxy } = &environment.network;
        if let Some(ca_file) = ca_file {
            // The operator's certificates replace the system's: the empty directory hides the system's directory.
            self = self.env("GIT_SSL_CAINFO", ca_file);
            self = self.env("GIT_SSL_CAPATH", &environment.home);
        }
        let host = remote.host().unwrap_or_default().trim_matches(['[', ']']);
        if let Some(proxy) =
            proxy.as_ref().filter(|_| environment.network.proxy_for(remote).is_some())
        {
            // The proxy chooses the address, so only the text of the host can be checked here.
            if !reach.allows_host(host) {
                return Err(HostReachError::NotPublic { host: host.to_owned() });
            }
            self = self.env("https_proxy", proxy.url().expose_secret());
            // The URL may carry a password. Neither the URL nor the password may appear in git's output.
            return Ok(proxy
                .url_password()
                .iter()
                .fold(self.redact_secret(proxy.url()), Self::redact_secret));
        }
        let is_tls = remote.scheme() == Some(&Scheme::HTTPS);
        let port = remote.port_u16().unwrap_or(if is_tls { HTTPS_PORT } else { HTTP_PORT });
        // The addresses that were checked are pinned, so that a second lookup by git cannot return others.
        let addresses = reach.resolve_host(host, port)?;
        Ok(self.with_pinned_addresses((host, port), &addresses))
    }

    /// Makes git connect to these addresses instead of resolving the host's name.
    pub fn with_pinned_addresses(self, (host, port): (&str, u16), addresses: &[IpAddr]) -> Self {
        let addresses: Vec<_> = addresses
            .iter()
            .map(|address| match address {
                IpAddr::V4(address) => address.to_string(),
                IpAddr::V6(address) => format!("[{address}]"),
            })
            .collect();
        // A host that is an address is never resolved, so there is nothing to pin.
        if host.parse::<IpAddr>().is_ok() {
            return self;
        }
        self.config(format!("http.curloptResolve={host}:{port}:{}", addresses.join(",")))
    }

    /// Removes `secret` from everything that the call returns.
    pub fn redact_secret(mut self, secret: &SecretString) -> Self {
        self.secrets.push(secret.clone());
        self
    }

    /// Runs the call and returns its standard output.
    pub fn output_bytes(self) -> Result<Vec<u8>, GitError> {
        let mut output = vec![];
        self.run_to_sink(&mut OutputSink::Bytes(&mut output))?;
        Ok(output)
    }

    /// Runs the call and returns its standard output, for subcommands that print ASCII.
    pub fn output_text(self) -> Result<String, GitError> {
        let command = self.subcommand.to_owned();
        String::from_utf8(self.output_bytes()?).map_err(|_| GitError::UnexpectedOutput { command })
    }

    /// Runs the call and passes its standard output to `take`, piece by piece.
    pub fn stream_output(self, mut take: impl FnMut(&[u8])) -> Result<(), GitError> {
        self.run_to_sink(&mut OutputSink::Chunks(&mut take))
    }

    /// Runs a `cat-file --batch` and passes the printed objects to `take`, part by part.
    pub fn read_objects(self, mut take: impl FnMut(BatchPart<'_>)) -> Result<(), GitError> {
        let command = self.subcommand.to_owned();
        let (mut reader, mut is_sound) = (BatchReader::default(), true);
        // After the first malformed piece the rest is only drained: the parser's state is no longer valid.
        self.stream_output(|piece| is_sound &= is_sound && reader.push(piece, &mut take).is_ok())?;
        if is_sound { Ok(()) } else { Err(GitError::UnexpectedOutput { command }) }
    }

    /// Runs the call for its effect and drops its output.
    pub fn execute(self) -> Result<(), GitError> {
        self.stream_output(|_| ())
    }

    /// Runs the call as a question that git answers by its exit code: 0 is yes, 1 is no.
    pub fn run_predicate(self) -> Result<bool, GitError> {
        let (ended, command) = self.spawn_and_wait(&mut OutputSink::Chunks(&mut |_| ()))?;
        match ended.status.code() {
            Some(0) => Ok(true),
            Some(1) => Ok(false),
            _ => Err(ended.into_error(command)),
        }
    }

    /// Runs the call and returns its standard output without secrets, and separately the call's success or failure. The
    /// output is returned in both cases.
    pub fn output_and_status(self) -> Result<(String, Result<(), GitError>), GitError> {
        let (mut output, secrets) = (vec![], self.secrets.clone());
        let (ended, command) = self.spawn_and_wait(&mut OutputSink::Bytes(&mut output))?;
        let output = redact_secrets(&String::from_utf8_lossy(&output), &secrets);
        Ok((output, ended.into_result(command)))
    }

    fn run_to_sink(self, sink: &mut OutputSink<'_>) -> Result<(), GitError> {
        let (ended, command) = self.spawn_and_wait(sink)?;
        ended.into_result(command)
    }

    fn spawn_and_wait(
        mut self,
        sink: &mut OutputSink<'_>,
    ) -> Result<(process::ProcessExit, &'static str), GitError> {
        let mut command = self.build_command();
        let input = std::mem::take(&mut self.input);
        let ended = process::run_process(&mut command, input, sink, (&self.limits, self.cancel));
        let mut ended = ended.map_err(|fault| fault.into_error(self.subcommand))?;
        // Every result passes here, so no secret leaves this module through git's error messages.
        let stderr = redact_secrets(&ended.stderr, &self.secrets);
        ended.stderr = without_hints(&stderr).collect::<Vec<_>>().join("\n");
        Ok((ended, self.subcommand))
    }

    fn build_command(&self) -> Command {
        let GitEnvironment { program, home, .. } = self.git_environment;
        let mut command = Command::new(program);
        command.env_clear().current_dir(home).env("HOME", home).env("XDG_CONFIG_HOME", home);
        // Git searches for a repository unless this variable names one, so it names a missing directory. `repository`
        // overrides the variable below.
        command.env("GIT_DIR", home.join("none"));
        command.envs(SAFE_ENVIRONMENT.iter().copied()).envs(self.environment.iter().cloned());
        for setting in SAFE_SETTINGS.iter().copied().chain(self.config.iter().map(String::as_str)) {
            // Arguments of `-c` have priority over every configuration file.
            command.args(["-c", setting]);
        }
        command.arg(self.subcommand).args(&self.args);
        command
    }
}

impl process::ProcessExit {
    fn into_result(self, command: &str) -> Result<(), GitError> {
        if self.status.success() { Ok(()) } else { Err(self.into_error(command)) }
    }

    fn into_error(self, command: &str) -> GitError {
        GitError::Failed { command: command.to_owned(), status: self.status, stderr: self.stderr }
    }
}

impl process::ProcessError {
    fn into_error(self, command: &str) -> GitError {
        let command = command.to_owned();
        match self {
            Self::Io(source) => GitError::Io(source),
            Self::Timeout(after) => GitError::Timeout { command, after },
            Self::Cancelled => GitError::Cancelled { command },
            Self::OutputTooLarge(limit) => GitError::OutputTooLarge { command, limit },
        }
    }
}

/// Replaces each word of the secrets by `***`. Git and servers repeat single words of a header, not only the whole
/// header.
fn redact_secrets(text: &str, secrets: &[SecretString]) -> String {
    let words = secrets.iter().flat_map(|secret| secret.expose_secret().split_ascii_whitespace());
    let secret = words.filter(|word| word.len() >= MIN_SECRET_BYTES);
    secret.fold(text.to_owned(), |text, word| text.replace(word, "***"))
}

/// Returns true if a path can be an item of one of git's path lists: the path is absolute and contains no character
/// that separates or quotes items.
pub(crate) fn is_plain_path(path: &Path) -> bool {
    path.is_absolute() && !path.as_os_str().as_bytes().iter().any(|byte| b":\"\n".contains(byte))
}

/// The shortest word that counts as a secret, in bytes (our choice). `Basic` and `Bearer` are shorter.
const MIN_SECRET_BYTES: usize = 8;

const HTTPS_PORT: u16 = 443;
const HTTP_PORT: u16 = 80;
