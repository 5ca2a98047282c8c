//! The address of a tunnel: a host's name and a port, as a connection's `url`, a `CONNECT` request and the requests in
//! the tunnel give it.

use std::fmt::{self, Display, Formatter};
use std::net::IpAddr;
use std::sync::Arc;

use http::uri::Authority;
use http::{Uri, header, request};

/// A host's name in small letters, and a port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TunnelAddress {
    pub(super) host: Arc<str>,
    pub(super) port: u16,
}

impl TunnelAddress {
    /// Returns the address of a server for tunnels.
    ///
    /// # Errors
    /// Returns a message if the server has no name. Clients do not say in TLS which address they mean, only which name.
    pub(super) fn from_authority(authority: &Authority) -> Result<Self, &'static str> {
        let host = authority.host();
        if host.starts_with('[') || host.parse::<IpAddr>().is_ok() {
            return Err("needs a host's name in `url`; give a name, or take `tunnel` out");
        }
        if host.len() > MAX_HOST_BYTES || host.ends_with('.') {
            return Err("needs a host's name of at most 253 bytes without a dot at its end");
        }
        Ok(Self::new(host, authority.port_u16().unwrap_or(HTTPS_PORT)))
    }

    /// Parses the target of a `CONNECT` request.
    ///
    /// # Errors
    /// Returns the reason why the target is no host and port.
    pub(super) fn from_target(target: &Uri) -> Result<Self, &'static str> {
        let is_authority = target.scheme().is_none() && matches!(target.path(), "" | "/");
        let authority = target.authority().filter(|_| is_authority && target.query().is_none());
        let authority = authority.ok_or("names no host and port")?;
        if authority.as_str().contains('@') {
            return Err("names a user");
        }
        let port = authority.port_u16().ok_or("names no port")?;
        Ok(Self::new(authority.host(), port))
    }

    fn new(host: &str, port: u16) -> Self {
        Self { host: host.to_ascii_lowercase().into(), port }
    }

    /// Checks that a request in the tunnel is for this address. The server would otherwise decide by `Host` which of its
    /// sites answers.
    ///
    /// # Errors
    /// Returns what is wrong with the request.
    pub(super) fn check_head(&self, head: &request::Parts) -> Result<(), &'static str> {
        if head.uri.authority().is_some() || head.uri.scheme().is_some() {
            return Err("has an address instead of a path");
        }
        let mut hosts = head.headers.get_all(header::HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else {
            return Err("does not have one `host`");
        };
        let host = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
        let is_own = |host: &Authority| {
            let has_port = host.as_str() != host.host();
            let port = if has_port { host.port_u16() } else { Some(HTTPS_PORT) };
            host.host().eq_ignore_ascii_case(&self.host) && port == Some(self.port)
        };
        // A user in the authority makes it longer than the host and the port.
        match host.filter(|host| !host.as_str().contains('@')) {
            Some(host) if is_own(&host) => Ok(()),
            _ => Err("is for another host than the tunnel"),
        }
    }

    /// Returns the origin of the pages that the server has, as browsers write it.
    pub(super) fn origin(&self) -> String {
        format!("https://{self}")
    }

    /// Returns the host and the port.
    pub(super) fn to_text(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

impl Display for TunnelAddress {
    /// Writes the port only if it is not the usual one, like an address in a browser.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.port {
            HTTPS_PORT => f.write_str(&self.host),
            port => write!(f, "{}:{port}", self.host),
        }
    }
}

/// The port of `https`.
const HTTPS_PORT: u16 = 443;

/// The longest name of a host (RFC 1035, section 2.3.4).
const MAX_HOST_BYTES: usize = 253;
