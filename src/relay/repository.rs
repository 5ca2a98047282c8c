//! Which repository: one spelling for each, whatever its URL was.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use http::Uri;
use http::uri::{Authority, Scheme};
use serde::{Deserialize, Serialize};

use crate::base::reach::{Reach, is_host};

/// A repository on a forge, or on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Stored", into = "Stored")]
pub enum Repository {
    Hosted(Hosted),
    /// A bare repository, by its absolute path. Nothing is asked about it, and nothing can be requested there.
    Local(PathBuf),
}

/// A repository on a forge. Its names keep the case they were given in; forges ignore it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Hosted {
    is_tls: bool,
    authority: Authority,
    owner: String,
    name: String,
    reach: Reach,
}

/// A repository as it is written down. Rows of earlier versions have no `reach`; their work has begun already.
#[derive(Serialize, Deserialize)]
struct Stored {
    repository: String,
    #[serde(default = "named")]
    reach: Reach,
}

/// Why a text names no repository. It is not repeated: some people put a password there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the repository's URL {0}; give `https://host/owner/name`, `git@host:owner/name` or `/path/to/bare.git`"
)]
pub struct Invalid(&'static str);

impl Repository {
    /// Reads a URL as people copy it, from the operator; see [`Repository::within`] for a tenant's. One for SSH means the same repository over HTTPS, where a token is good.
    ///
    /// ```
    /// # use cogni_gateway::relay::repository::Repository;
    /// let one: Repository = "git@github.com:Acme/site.git".parse()?;
    /// assert_eq!(one.clone_url(), "https://github.com/Acme/site.git");
    /// assert_eq!(one.key(), "github.com/acme/site");
    /// # Ok::<(), cogni_gateway::relay::repository::Invalid>(())
    /// ```
    ///
    /// # Errors
    /// It has a form that is not read, or one that would give a secret away.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        if let Some(path) = text.strip_prefix("file://") {
            return local(path);
        }
        if text.starts_with('/') {
            return local(text);
        }
        let is_plain =
            text.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '?' | '#' | '\\' | '%'));
        if !is_plain {
            return Err(Invalid("has characters that it cannot have"));
        }
        if let Some((host, path)) = text.strip_prefix("git@").and_then(|rest| rest.split_once(':'))
        {
            return hosted(true, host, path);
        }
        if let Some(rest) = text.strip_prefix("ssh://git@") {
            let (host, path) = rest.split_once('/').ok_or(Invalid("has no owner and name"))?;
            // The port is that of SSH.
            let port = host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
            return hosted(true, port.map_or(host, |(host, _)| host), path);
        }
        let uri: Uri = text.parse().map_err(|_| Invalid("is not a URL"))?;
        let authority = uri.authority().ok_or(Invalid("has no host"))?.as_str();
        if authority.contains('@') {
            return Err(Invalid(USER));
        }
        let path = uri.path();
        match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTPS => hosted(true, authority, path),
            Some(scheme) if *scheme == Scheme::HTTP && is_here(&uri) => {
                hosted(false, authority, path)
            }
            Some(scheme) if *scheme == Scheme::HTTP => {
                Err(Invalid("would send a token over a network in the clear"))
            }
            _ => Err(Invalid("has a scheme that is not read")),
        }
    }

    /// The same repository, whose host leads this far.
    #[must_use]
    pub fn within(self, reach: Reach) -> Self {
        match self {
            Self::Hosted(hosted) => Self::Hosted(Hosted { reach, ..hosted }),
            Self::Local(path) => Self::Local(path),
        }
    }

    /// What git is given.
    pub fn clone_url(&self) -> String {
        match self {
            Self::Hosted(hosted) => hosted.clone_url(),
            Self::Local(path) => format!("file://{}", path.display()),
        }
    }

    /// The same for every spelling: what leases and stored rows go by.
    pub fn key(&self) -> String {
        match self {
            Self::Hosted(Hosted { authority, owner, name, .. }) => {
                format!("{authority}/{owner}/{name}").to_ascii_lowercase()
            }
            Self::Local(path) => format!("file://{}", path.display()),
        }
    }

    pub fn hosted(&self) -> Option<&Hosted> {
        match self {
            Self::Hosted(hosted) => Some(hosted),
            Self::Local(_) => None,
        }
    }
}

impl Hosted {
    /// The host, with its port where it is not the usual one.
    pub fn authority(&self) -> &str {
        self.authority.as_str()
    }

    pub fn owner(&self) -> &str {
        &self.owner
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Which addresses its host may have.
    pub fn reach(&self) -> Reach {
        self.reach
    }

    /// The server that the repository is on.
    pub fn server(&self) -> Uri {
        let scheme = if self.is_tls { Scheme::HTTPS } else { Scheme::HTTP };
        let server = Uri::builder().scheme(scheme).authority(self.authority.clone());
        server.path_and_query("/").build().expect("it has all three parts")
    }

    pub fn clone_url(&self) -> String {
        let Self { is_tls, authority, owner, name, .. } = self;
        let scheme = if *is_tls { "https" } else { "http" };
        format!("{scheme}://{authority}/{owner}/{name}.git")
    }
}

fn local(path: &str) -> Result<Repository, Invalid> {
    // Git would decode the one, and the other ends a line of its own protocol.
    if path.chars().any(|c| c.is_control() || c == '%') {
        return Err(Invalid("has characters that it cannot have"));
    }
    let path = Path::new(path);
    let is_whole = path.is_absolute() && !path.components().any(|part| part.as_os_str() == "..");
    if !is_whole {
        return Err(Invalid("names no absolute path"));
    }
    // Without what makes no difference: doubled slashes, dots and the last slash.
    Ok(Repository::Local(path.components().collect()))
}

fn hosted(is_tls: bool, host: &str, path: &str) -> Result<Repository, Invalid> {
    let authority = authority(host)?;
    let path = path.trim_start_matches('/').trim_end_matches('/');
    let (owner, name) = path.split_once('/').ok_or(Invalid("has no owner and name"))?;
    let name = name.strip_suffix(".git").unwrap_or(name);
    if !is_part(owner) || !is_part(name) {
        return Err(Invalid("has an owner or a name that no repository has"));
    }
    let (owner, name) = (owner.to_owned(), name.to_owned());
    Ok(Repository::Hosted(Hosted { is_tls, authority, owner, name, reach: named() }))
}

/// A host in its one spelling, with its port where there is one.
fn authority(text: &str) -> Result<Authority, Invalid> {
    if text.contains('@') {
        return Err(Invalid(USER));
    }
    let authority = Authority::from_str(text).map_err(|_| Invalid("has no host"))?;
    let (host, after) = text.split_at(authority.host().len());
    // The dot at a name's end makes no difference to where the name leads.
    let host = host.strip_suffix('.').unwrap_or(host);
    let is_sound = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => host.parse::<Ipv6Addr>().is_err() && is_host(host),
    };
    if !is_sound {
        return Err(Invalid(ODD_HOST));
    }
    let port = match after.strip_prefix(':') {
        None | Some("") => String::new(),
        Some(port) => {
            let port = port.parse::<u16>().ok().filter(|port| *port > 0);
            format!(":{}", port.ok_or(Invalid("has a port that there is not"))?)
        }
    };
    Authority::try_from(format!("{host}{port}")).map_err(|_| Invalid(ODD_HOST))
}

/// What GitHub allows in the name of a repository; owners have fewer. No dots alone, nothing like an option.
fn is_part(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let has_dots_only = text.bytes().all(|byte| byte == b'.');
    (1..=100).contains(&text.len())
        && text.bytes().all(is_inner)
        && !has_dots_only
        && !text.starts_with('-')
}

/// Whether it never leaves this machine.
pub fn is_here(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// As it is cloned: a URL without a secret.
impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.clone_url())
    }
}

impl FromStr for Repository {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        Self::parse(text)
    }
}

impl TryFrom<Stored> for Repository {
    type Error = Invalid;

    fn try_from(Stored { repository, reach }: Stored) -> Result<Self, Invalid> {
        Ok(Self::parse(&repository)?.within(reach))
    }
}

impl From<Repository> for Stored {
    fn from(repository: Repository) -> Self {
        let reach = repository.hosted().map_or(Reach::Named, Hosted::reach);
        Self { repository: repository.clone_url(), reach }
    }
}

fn named() -> Reach {
    Reach::Named
}

const USER: &str = "holds a user or a password, which has no place there";
const ODD_HOST: &str = "has a host that is neither a name nor an address in full";
