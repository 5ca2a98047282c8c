//! The address of a repository, with one spelling for each repository, whatever its URL was.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use http::Uri;
use http::uri::{Authority, Scheme};
use serde::{Deserialize, Serialize};

use crate::base::host_reach::{HostReach, is_canonical_host};

/// A repository on a forge, or on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "StoredRepository", into = "StoredRepository")]
pub enum RepositoryUrl {
    Hosted(HostedRepository),
    /// A bare repository on this machine, by its absolute path. It has no forge, so no pull request can be opened.
    Local(PathBuf),
}

/// A repository on a forge. Its names keep the case of the URL, although forges ignore case.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostedRepository {
    is_tls: bool,
    authority: Authority,
    owner: String,
    name: String,
    reach: HostReach,
}

/// The stored form of a repository. Rows of earlier versions have no `reach`. Their work has begun already, so their
/// host may also have a private address.
#[derive(Serialize, Deserialize)]
struct StoredRepository {
    repository: String,
    #[serde(default = "default_reach")]
    reach: HostReach,
}

/// The reason why a text does not name a repository. The message does not repeat the text, which may have a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the repository's URL {0}; give `https://host/owner/name`, `git@host:owner/name` or `/path/to/bare.git`"
)]
pub struct RepositoryUrlError(&'static str);

impl RepositoryUrl {
    /// Parses a URL as people copy it. The URL comes from the operator; see [`RepositoryUrl::with_reach`] for the URL
    /// of a client. A URL for SSH means the same repository over HTTPS, where a token is accepted.
    ///
    /// ```
    /// # use cogni_gateway::relay::repo::repository::RepositoryUrl;
    /// let one: RepositoryUrl = "git@github.com:Acme/site.git".parse()?;
    /// assert_eq!(one.clone_url(), "https://github.com/Acme/site.git");
    /// assert_eq!(one.canonical_key(), "github.com/acme/site");
    /// # Ok::<(), cogni_gateway::relay::repo::repository::RepositoryUrlError>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the URL has an unsupported form, or one that would reveal a secret.
    pub fn parse(text: &str) -> Result<Self, RepositoryUrlError> {
        if let Some(path) = text.strip_prefix("file://") {
            return parse_local(path);
        }
        if text.starts_with('/') {
            return parse_local(text);
        }
        // A query, a fragment, a backslash or an escape could make git and this parser read different addresses.
        let is_plain =
            text.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '?' | '#' | '\\' | '%'));
        if !is_plain {
            return Err(RepositoryUrlError("has characters that it cannot have"));
        }
        // The short form of SSH, `git@HOST:OWNER/NAME`, is not a URL, so it is parsed before the URL parser runs.
        if let Some((host, path)) = text.strip_prefix("git@").and_then(|rest| rest.split_once(':'))
        {
            return parse_hosted(true, host, path);
        }
        if let Some(rest) = text.strip_prefix("ssh://git@") {
            let (host, path) =
                rest.split_once('/').ok_or(RepositoryUrlError("has no owner and name"))?;
            // The port of a URL for SSH is SSH's, and says nothing about HTTPS.
            let port = host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
            return parse_hosted(true, port.map_or(host, |(host, _)| host), path);
        }
        let uri: Uri = text.parse().map_err(|_| RepositoryUrlError("is not a URL"))?;
        let authority = uri.authority().ok_or(RepositoryUrlError("has no host"))?.as_str();
        // A password in a URL would be stored, displayed, and passed to git as an argument.
        if authority.contains('@') {
            return Err(RepositoryUrlError(USER_INFO_MESSAGE));
        }
        let path = uri.path();
        match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTPS => parse_hosted(true, authority, path),
            // Without TLS, a token may only travel within this machine.
            Some(scheme) if *scheme == Scheme::HTTP && is_local(&uri) => {
                parse_hosted(false, authority, path)
            }
            Some(scheme) if *scheme == Scheme::HTTP => {
                Err(RepositoryUrlError("would send a token over a network in the clear"))
            }
            _ => Err(RepositoryUrlError("has a scheme that is not read")),
        }
    }

    /// Replaces the range of addresses that the repository's host may have.
    #[must_use]
    pub fn with_reach(self, reach: HostReach) -> Self {
        match self {
            Self::Hosted(hosted) => Self::Hosted(HostedRepository { reach, ..hosted }),
            Self::Local(path) => Self::Local(path),
        }
    }

    /// Returns the URL that git gets.
    pub fn clone_url(&self) -> String {
        match self {
            Self::Hosted(hosted) => hosted.clone_url(),
            Self::Local(path) => format!("file://{}", path.display()),
        }
    }

    /// Returns a key that is equal for every spelling of the address. Leases and stored rows use this key.
    pub fn canonical_key(&self) -> String {
        match self {
            Self::Hosted(HostedRepository { authority, owner, name, .. }) => {
                format!("{authority}/{owner}/{name}").to_ascii_lowercase()
            }
            Self::Local(path) => format!("file://{}", path.display()),
        }
    }

    pub fn as_hosted(&self) -> Option<&HostedRepository> {
        match self {
            Self::Hosted(hosted) => Some(hosted),
            Self::Local(_) => None,
        }
    }
}

impl HostedRepository {
    /// Returns the host, and its port if it is not the default port.
    pub fn authority(&self) -> &str {
        self.authority.as_str()
    }

    pub fn owner(&self) -> &str {
        &self.owner
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the range of addresses that the host may have.
    pub fn reach(&self) -> HostReach {
        self.reach
    }

    /// Returns the address of the server that has the repository.
    pub fn server_uri(&self) -> Uri {
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

fn parse_local(path: &str) -> Result<RepositoryUrl, RepositoryUrlError> {
    // Git would decode `%`, and a control character could end a line of git's protocol.
    if path.chars().any(|c| c.is_control() || c == '%') {
        return Err(RepositoryUrlError("has characters that it cannot have"));
    }
    let path = Path::new(path);
    let is_whole = path.is_absolute() && !path.components().any(|part| part.as_os_str() == "..");
    if !is_whole {
        return Err(RepositoryUrlError("names no absolute path"));
    }
    // `components` drops what makes no difference: doubled slashes, dots and the last slash.
    Ok(RepositoryUrl::Local(path.components().collect()))
}

fn parse_hosted(is_tls: bool, host: &str, path: &str) -> Result<RepositoryUrl, RepositoryUrlError> {
    let authority = parse_authority(host)?;
    let path = path.trim_start_matches('/').trim_end_matches('/');
    let (owner, name) = path.split_once('/').ok_or(RepositoryUrlError("has no owner and name"))?;
    // Forges treat `NAME` and `NAME.git` as the same repository.
    let name = name.strip_suffix(".git").unwrap_or(name);
    if !is_name_part(owner) || !is_name_part(name) {
        return Err(RepositoryUrlError("has an owner or a name that no repository has"));
    }
    let (owner, name) = (owner.to_owned(), name.to_owned());
    Ok(RepositoryUrl::Hosted(HostedRepository {
        is_tls,
        authority,
        owner,
        name,
        reach: default_reach(),
    }))
}

/// Parses a host into its one spelling, with its port, if there is one.
fn parse_authority(text: &str) -> Result<Authority, RepositoryUrlError> {
    if text.contains('@') {
        return Err(RepositoryUrlError(USER_INFO_MESSAGE));
    }
    let authority = Authority::from_str(text).map_err(|_| RepositoryUrlError("has no host"))?;
    let (host, after) = text.split_at(authority.host().len());
    // The dot at a name's end makes no difference to where the name leads.
    let host = host.strip_suffix('.').unwrap_or(host);
    // Only the canonical spelling is accepted: `127.1` and `0x7f000001` are also spellings of an address.
    let is_sound = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => host.parse::<Ipv6Addr>().is_err() && is_canonical_host(host),
    };
    if !is_sound {
        return Err(RepositoryUrlError(INVALID_HOST_MESSAGE));
    }
    let port = match after.strip_prefix(':') {
        None | Some("") => String::new(),
        Some(port) => {
            let port = port.parse::<u16>().ok().filter(|port| *port > 0);
            format!(":{}", port.ok_or(RepositoryUrlError("has a port that there is not"))?)
        }
    };
    Authority::try_from(format!("{host}{port}"))
        .map_err(|_| RepositoryUrlError(INVALID_HOST_MESSAGE))
}

/// Returns true if a text can be a name of a repository at GitHub; owners have fewer characters. Names of dots only are
/// refused, and names that begin like an option.
fn is_name_part(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let has_dots_only = text.bytes().all(|byte| byte == b'.');
    (1..=100).contains(&text.len())
        && text.bytes().all(is_inner)
        && !has_dots_only
        && !text.starts_with('-')
}

/// Returns true if the host is this machine itself.
pub fn is_local(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Formats the URL that git clones, which has no secret.
impl fmt::Display for RepositoryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.clone_url())
    }
}

impl FromStr for RepositoryUrl {
    type Err = RepositoryUrlError;

    fn from_str(text: &str) -> Result<Self, RepositoryUrlError> {
        Self::parse(text)
    }
}

impl TryFrom<StoredRepository> for RepositoryUrl {
    type Error = RepositoryUrlError;

    fn try_from(
        StoredRepository { repository, reach }: StoredRepository,
    ) -> Result<Self, RepositoryUrlError> {
        Ok(Self::parse(&repository)?.with_reach(reach))
    }
}

impl From<RepositoryUrl> for StoredRepository {
    fn from(repository: RepositoryUrl) -> Self {
        let reach = repository.as_hosted().map_or(HostReach::Named, HostedRepository::reach);
        Self { repository: repository.clone_url(), reach }
    }
}

fn default_reach() -> HostReach {
    HostReach::Named
}

const USER_INFO_MESSAGE: &str = "holds a user or a password, which has no place there";
const INVALID_HOST_MESSAGE: &str = "has a host that is neither a name nor an address in full";
