//! One call of git, from its words to what it said.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use http::Uri;
use http::uri::Scheme;

use super::cat_file::{BatchPart, BatchReader};
use super::hardening::{SAFE_ENVIRONMENT, SAFE_SETTINGS};
use super::process::{self, GitLimits, OutputSink};
use super::{GitEnvironment, GitError, OutboundConfig};
use crate::base::host_reach::{HostReach, HostReachError};
use crate::base::secret::SecretString;

/// What git is to be told. Words are arguments of their own, never a shell's.
#[must_use = "nothing happens before it is run"]
pub struct GitCommand<'a> {
    place: &'a GitEnvironment,
    subcommand: &'static str,
    settings: Vec<String>,
    words: Vec<OsString>,
    environment: Vec<(&'static str, OsString)>,
    input: GitInput,
    limits: GitLimits,
    secrets: Vec<SecretString>,
}

/// What git reads.
#[derive(Debug, Default)]
pub enum GitInput {
    #[default]
    Nothing,
    Bytes(Vec<u8>),
    /// From where it stands.
    File(File),
}

impl<'a> GitCommand<'a> {
    pub(super) fn new(place: &'a GitEnvironment, subcommand: &'static str) -> Self {
        Self {
            place,
            subcommand,
            settings: vec![],
            words: vec![],
            environment: vec![],
            input: GitInput::Nothing,
            limits: GitLimits::default(),
            secrets: vec![],
        }
    }

    pub fn arg(mut self, word: impl AsRef<OsStr>) -> Self {
        self.words.push(word.as_ref().to_owned());
        self
    }

    pub fn args<W: AsRef<OsStr>>(mut self, words: impl IntoIterator<Item = W>) -> Self {
        self.words.extend(words.into_iter().map(|word| word.as_ref().to_owned()));
        self
    }

    /// A setting of this call alone, `key=value`.
    pub fn config(mut self, setting: impl Into<String>) -> Self {
        self.settings.push(setting.into());
        self
    }

    /// The repository. Without one there is none: git does not look for it.
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

    /// An HTTP header for the server at `url`, and for no other: its value is in the environment of this call alone.
    pub fn http_header(mut self, url: &str, value: &SecretString) -> Self {
        // Git has no other way to be given a setting that is not in its arguments.
        self = self.env("GIT_CONFIG_COUNT", "1");
        self = self.env("GIT_CONFIG_KEY_0", format!("http.{url}.extraHeader"));
        self = self.env("GIT_CONFIG_VALUE_0", value.expose_secret());
        self.redact_secret(value)
    }

    /// For a call that talks to a remote: by which way, to which addresses, and whom it trusts there. No other call is told.
    ///
    /// # Errors
    /// The remote's host leads to no address within `reach`. A proxy looks names up itself: there, only the text is judged.
    pub fn with_remote(mut self, remote: &Uri, reach: HostReach) -> Result<Self, HostReachError> {
        let place = self.place;
        let OutboundConfig { ca_file, proxy } = &place.network;
        if let Some(ca_file) = ca_file {
            // In place of the system's, not beside them: the empty directory takes the place of its own.
            self = self.env("GIT_SSL_CAINFO", ca_file);
            self = self.env("GIT_SSL_CAPATH", &place.home);
        }
        let host = remote.host().unwrap_or_default().trim_matches(['[', ']']);
        if let Some(proxy) = proxy.as_ref().filter(|_| place.network.proxy_for(remote).is_some()) {
            if !reach.allows_host(host) {
                return Err(HostReachError::NotPublic { host: host.to_owned() });
            }
            self = self.env("https_proxy", proxy.url().expose_secret());
            return Ok(proxy
                .url_password()
                .iter()
                .fold(self.redact_secret(proxy.url()), Self::redact_secret));
        }
        let is_tls = remote.scheme() == Some(&Scheme::HTTPS);
        let port = remote.port_u16().unwrap_or(if is_tls { HTTPS_PORT } else { HTTP_PORT });
        let addresses = reach.resolve_host(host, port)?;
        Ok(self.with_pinned_addresses((host, port), &addresses))
    }

    /// Has git connect to these addresses where it would look the host's name up.
    pub fn with_pinned_addresses(self, (host, port): (&str, u16), addresses: &[IpAddr]) -> Self {
        let addresses: Vec<_> = addresses
            .iter()
            .map(|address| match address {
                IpAddr::V4(address) => address.to_string(),
                IpAddr::V6(address) => format!("[{address}]"),
            })
            .collect();
        // An address is not looked up.
        if host.parse::<IpAddr>().is_ok() {
            return self;
        }
        self.config(format!("http.curloptResolve={host}:{port}:{}", addresses.join(",")))
    }

    /// What must not be in anything that comes back.
    pub fn redact_secret(mut self, secret: &SecretString) -> Self {
        self.secrets.push(secret.clone());
        self
    }

    /// Runs it, and returns what it printed.
    pub fn output_bytes(self) -> Result<Vec<u8>, GitError> {
        let mut output = vec![];
        self.run_to_sink(&mut OutputSink::Bytes(&mut output))?;
        Ok(output)
    }

    /// Runs it, and returns what it printed, where git writes ASCII.
    pub fn output_text(self) -> Result<String, GitError> {
        let what = self.subcommand.to_owned();
        String::from_utf8(self.output_bytes()?).map_err(|_| GitError::Senseless { what })
    }

    /// Runs it, and hands on what it prints, piece by piece.
    pub fn stream_output(self, mut take: impl FnMut(&[u8])) -> Result<(), GitError> {
        self.run_to_sink(&mut OutputSink::Pieces(&mut take))
    }

    /// Runs a `cat-file --batch`, and hands on the objects, part by part.
    pub fn read_objects(self, mut take: impl FnMut(BatchPart<'_>)) -> Result<(), GitError> {
        let what = self.subcommand.to_owned();
        let (mut reader, mut is_sound) = (BatchReader::default(), true);
        self.stream_output(|piece| is_sound &= is_sound && reader.push(piece, &mut take).is_ok())?;
        if is_sound { Ok(()) } else { Err(GitError::Senseless { what }) }
    }

    /// Runs it for what it does; what it prints is dropped.
    pub fn execute(self) -> Result<(), GitError> {
        self.stream_output(|_| ())
    }

    /// Runs it as a question that git answers by its exit code: 0 is yes, 1 is no.
    pub fn run_predicate(self) -> Result<bool, GitError> {
        let (ended, what) = self.spawn_and_wait(&mut OutputSink::Pieces(&mut |_| ()))?;
        match ended.status.code() {
            Some(0) => Ok(true),
            Some(1) => Ok(false),
            _ => Err(ended.into_error(what)),
        }
    }

    /// Runs it, and returns what it printed however it ended, with secrets left out, and how it ended.
    pub fn output_and_status(self) -> Result<(String, Result<(), GitError>), GitError> {
        let (mut output, secrets) = (vec![], self.secrets.clone());
        let (ended, what) = self.spawn_and_wait(&mut OutputSink::Bytes(&mut output))?;
        let output = redact_secrets(&String::from_utf8_lossy(&output), &secrets);
        Ok((output, ended.into_result(what)))
    }

    fn run_to_sink(self, sink: &mut OutputSink<'_>) -> Result<(), GitError> {
        let (ended, what) = self.spawn_and_wait(sink)?;
        ended.into_result(what)
    }

    fn spawn_and_wait(
        mut self,
        sink: &mut OutputSink<'_>,
    ) -> Result<(process::ProcessExit, &'static str), GitError> {
        let mut command = self.build_command();
        let input = std::mem::take(&mut self.input);
        let ended = process::run_process(&mut command, input, sink, &self.limits);
        let mut ended = ended.map_err(|fault| fault.into_error(self.subcommand))?;
        ended.said = redact_secrets(&ended.said, &self.secrets);
        Ok((ended, self.subcommand))
    }

    fn build_command(&self) -> Command {
        let GitEnvironment { program, home, .. } = self.place;
        let mut command = Command::new(program);
        command.env_clear().current_dir(home).env("HOME", home).env("XDG_CONFIG_HOME", home);
        // There is no repository but the one that is named.
        command.env("GIT_DIR", home.join("none"));
        command.envs(SAFE_ENVIRONMENT.iter().copied()).envs(self.environment.iter().cloned());
        for setting in SAFE_SETTINGS.iter().copied().chain(self.settings.iter().map(String::as_str))
        {
            command.args(["-c", setting]);
        }
        command.arg(self.subcommand).args(&self.words);
        command
    }
}

impl process::ProcessExit {
    fn into_result(self, what: &str) -> Result<(), GitError> {
        if self.status.success() { Ok(()) } else { Err(self.into_error(what)) }
    }

    fn into_error(self, what: &str) -> GitError {
        GitError::Failed { what: what.to_owned(), end: self.status, said: self.said }
    }
}

impl process::ProcessError {
    fn into_error(self, what: &str) -> GitError {
        let what = what.to_owned();
        match self {
            Self::Io(source) => GitError::Io(source),
            Self::Late(after) => GitError::Late { what, after },
            Self::TooMuch(limit) => GitError::TooMuch { what, limit },
        }
    }
}

/// Word by word: git and servers repeat parts of a header.
fn redact_secrets(text: &str, secrets: &[SecretString]) -> String {
    let words = secrets.iter().flat_map(|secret| secret.expose_secret().split_ascii_whitespace());
    let secret = words.filter(|word| word.len() >= MIN_SECRET_BYTES);
    secret.fold(text.to_owned(), |text, word| text.replace(word, "***"))
}

/// For paths that git takes as a list: none may have what separates or quotes one.
pub(crate) fn is_plain_path(path: &Path) -> bool {
    path.is_absolute() && !path.as_os_str().as_bytes().iter().any(|byte| b":\"\n".contains(byte))
}

/// `Basic` and `Bearer` are none.
const MIN_SECRET_BYTES: usize = 8;

const HTTPS_PORT: u16 = 443;
const HTTP_PORT: u16 = 80;
