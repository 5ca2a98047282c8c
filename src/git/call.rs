//! One call of git, from its words to what it said.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use http::Uri;
use http::uri::Scheme;

use super::batch::{Part, Reader};
use super::process::{self, Limits, Sink};
use super::seal::{ENVIRONMENT, SETTINGS};
use super::{Error, Network, Place};
use crate::base::reach::{HostError, Reach};
use crate::base::secret::Secret;

/// What git is to be told. Words are arguments of their own, never a shell's.
#[must_use = "nothing happens before it is run"]
pub struct Call<'a> {
    place: &'a Place,
    subcommand: &'static str,
    settings: Vec<String>,
    words: Vec<OsString>,
    environment: Vec<(&'static str, OsString)>,
    input: Input,
    limits: Limits,
    secrets: Vec<Secret>,
}

/// What git reads.
#[derive(Debug, Default)]
pub enum Input {
    #[default]
    Nothing,
    Bytes(Vec<u8>),
    /// From where it stands.
    File(File),
}

impl<'a> Call<'a> {
    pub(super) fn new(place: &'a Place, subcommand: &'static str) -> Self {
        Self {
            place,
            subcommand,
            settings: vec![],
            words: vec![],
            environment: vec![],
            input: Input::Nothing,
            limits: Limits::default(),
            secrets: vec![],
        }
    }

    pub fn word(mut self, word: impl AsRef<OsStr>) -> Self {
        self.words.push(word.as_ref().to_owned());
        self
    }

    pub fn words<W: AsRef<OsStr>>(mut self, words: impl IntoIterator<Item = W>) -> Self {
        self.words.extend(words.into_iter().map(|word| word.as_ref().to_owned()));
        self
    }

    /// A setting of this call alone, `key=value`.
    pub fn setting(mut self, setting: impl Into<String>) -> Self {
        self.settings.push(setting.into());
        self
    }

    /// The repository. Without one there is none: git does not look for it.
    pub fn repository(self, git_dir: &Path) -> Self {
        self.variable("GIT_DIR", git_dir)
    }

    pub fn variable(mut self, name: &'static str, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name, value.as_ref().to_owned()));
        self
    }

    pub fn input(mut self, input: Input) -> Self {
        self.input = input;
        self
    }

    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// An HTTP header for the server at `url`, and for no other: its value is in the environment of this call alone.
    pub fn header(mut self, url: &str, value: &Secret) -> Self {
        // Git has no other way to be given a setting that is not in its arguments.
        self = self.variable("GIT_CONFIG_COUNT", "1");
        self = self.variable("GIT_CONFIG_KEY_0", format!("http.{url}.extraHeader"));
        self = self.variable("GIT_CONFIG_VALUE_0", value.expose());
        self.secret(value)
    }

    /// For a call that talks to a remote: by which way, to which addresses, and whom it trusts there. No other call is told.
    ///
    /// # Errors
    /// The remote's host leads to no address within `reach`. A proxy looks names up itself: there, only the text is judged.
    pub fn over_network(mut self, remote: &Uri, reach: Reach) -> Result<Self, HostError> {
        let place = self.place;
        let Network { ca_file, proxy } = &place.network;
        if let Some(ca_file) = ca_file {
            // In place of the system's, not beside them: the empty directory takes the place of its own.
            self = self.variable("GIT_SSL_CAINFO", ca_file);
            self = self.variable("GIT_SSL_CAPATH", &place.home);
        }
        let host = remote.host().unwrap_or_default().trim_matches(['[', ']']);
        if let Some(proxy) = proxy.as_ref().filter(|_| place.network.proxy_to(remote).is_some()) {
            if !reach.allows_host(host) {
                return Err(HostError::NotPublic { host: host.to_owned() });
            }
            self = self.variable("https_proxy", proxy.url().expose());
            return Ok(proxy.password().iter().fold(self.secret(proxy.url()), Self::secret));
        }
        let is_tls = remote.scheme() == Some(&Scheme::HTTPS);
        let port = remote.port_u16().unwrap_or(if is_tls { HTTPS_PORT } else { HTTP_PORT });
        let addresses = reach.addresses(host, port)?;
        Ok(self.pinned((host, port), &addresses))
    }

    /// Has git connect to these addresses where it would look the host's name up.
    pub fn pinned(self, (host, port): (&str, u16), addresses: &[IpAddr]) -> Self {
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
        self.setting(format!("http.curloptResolve={host}:{port}:{}", addresses.join(",")))
    }

    /// What must not be in anything that comes back.
    pub fn secret(mut self, secret: &Secret) -> Self {
        self.secrets.push(secret.clone());
        self
    }

    /// Runs it, and returns what it printed.
    pub fn bytes(self) -> Result<Vec<u8>, Error> {
        let mut output = vec![];
        self.run(&mut Sink::Bytes(&mut output))?;
        Ok(output)
    }

    /// Runs it, and returns what it printed, where git writes ASCII.
    pub fn text(self) -> Result<String, Error> {
        let what = self.subcommand.to_owned();
        String::from_utf8(self.bytes()?).map_err(|_| Error::Senseless { what })
    }

    /// Runs it, and hands on what it prints, piece by piece.
    pub fn pieces(self, mut take: impl FnMut(&[u8])) -> Result<(), Error> {
        self.run(&mut Sink::Pieces(&mut take))
    }

    /// Runs a `cat-file --batch`, and hands on the objects, part by part.
    pub fn objects(self, mut take: impl FnMut(Part<'_>)) -> Result<(), Error> {
        let what = self.subcommand.to_owned();
        let (mut reader, mut is_sound) = (Reader::default(), true);
        self.pieces(|piece| is_sound &= is_sound && reader.push(piece, &mut take).is_ok())?;
        if is_sound { Ok(()) } else { Err(Error::Senseless { what }) }
    }

    /// Runs it for what it does; what it prints is dropped.
    pub fn done(self) -> Result<(), Error> {
        self.pieces(|_| ())
    }

    /// Runs it as a question that git answers by its exit code: 0 is yes, 1 is no.
    pub fn is_so(self) -> Result<bool, Error> {
        let (ended, what) = self.end(&mut Sink::Pieces(&mut |_| ()))?;
        match ended.status.code() {
            Some(0) => Ok(true),
            Some(1) => Ok(false),
            _ => Err(ended.into_error(what)),
        }
    }

    /// Runs it, and returns what it printed however it ended, with secrets left out, and how it ended.
    pub fn told(self) -> Result<(String, Result<(), Error>), Error> {
        let (mut output, secrets) = (vec![], self.secrets.clone());
        let (ended, what) = self.end(&mut Sink::Bytes(&mut output))?;
        let output = redacted(&String::from_utf8_lossy(&output), &secrets);
        Ok((output, ended.into_result(what)))
    }

    fn run(self, sink: &mut Sink<'_>) -> Result<(), Error> {
        let (ended, what) = self.end(sink)?;
        ended.into_result(what)
    }

    fn end(mut self, sink: &mut Sink<'_>) -> Result<(process::Ended, &'static str), Error> {
        let mut command = self.command();
        let input = std::mem::take(&mut self.input);
        let ended = process::run(&mut command, input, sink, &self.limits);
        let mut ended = ended.map_err(|fault| fault.into_error(self.subcommand))?;
        ended.said = redacted(&ended.said, &self.secrets);
        Ok((ended, self.subcommand))
    }

    fn command(&self) -> Command {
        let Place { program, home, .. } = self.place;
        let mut command = Command::new(program);
        command.env_clear().current_dir(home).env("HOME", home).env("XDG_CONFIG_HOME", home);
        // There is no repository but the one that is named.
        command.env("GIT_DIR", home.join("none"));
        command.envs(ENVIRONMENT.iter().copied()).envs(self.environment.iter().cloned());
        for setting in SETTINGS.iter().copied().chain(self.settings.iter().map(String::as_str)) {
            command.args(["-c", setting]);
        }
        command.arg(self.subcommand).args(&self.words);
        command
    }
}

impl process::Ended {
    fn into_result(self, what: &str) -> Result<(), Error> {
        if self.status.success() { Ok(()) } else { Err(self.into_error(what)) }
    }

    fn into_error(self, what: &str) -> Error {
        Error::Failed { what: what.to_owned(), end: self.status, said: self.said }
    }
}

impl process::Fault {
    fn into_error(self, what: &str) -> Error {
        let what = what.to_owned();
        match self {
            Self::Io(source) => Error::Io(source),
            Self::Late(after) => Error::Late { what, after },
            Self::TooMuch(limit) => Error::TooMuch { what, limit },
        }
    }
}

/// Word by word: git and servers repeat parts of a header.
fn redacted(text: &str, secrets: &[Secret]) -> String {
    let words = secrets.iter().flat_map(|secret| secret.expose().split_ascii_whitespace());
    let secret = words.filter(|word| word.len() >= SHORTEST_SECRET);
    secret.fold(text.to_owned(), |text, word| text.replace(word, "***"))
}

/// For paths that git takes as a list: none may have what separates or quotes one.
pub(crate) fn is_plain(path: &Path) -> bool {
    path.is_absolute() && !path.as_os_str().as_bytes().iter().any(|byte| b":\"\n".contains(byte))
}

/// `Basic` and `Bearer` are none.
const SHORTEST_SECRET: usize = 8;

const HTTPS_PORT: u16 = 443;
const HTTP_PORT: u16 = 80;
