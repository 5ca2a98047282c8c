//! The upstream's address.

use std::fmt;
use std::str::FromStr;

use http::Uri;
use http::uri::{Authority, PathAndQuery};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A scheme, a host and a port: the upstream's URL without the route.
#[derive(Clone, PartialEq, Eq)]
pub struct UpstreamUrl {
    scheme: UpstreamScheme,
    authority: Authority,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamScheme {
    /// HTTP/1.1 without encryption.
    Http,
    /// HTTP/2 with prior knowledge, without encryption.
    H2c,
    /// TLS, with HTTP/2 if the server offers HTTP/2.
    Https,
}

/// An error for a text that is not a valid upstream address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{value}` is not an upstream: {why}; give `host:port`, `http://host:port`, `https://host[:port]` or `h2c://host:port`"
)]
pub struct UpstreamUrlError {
    value: String,
    why: &'static str,
}

impl UpstreamUrl {
    pub fn scheme(&self) -> UpstreamScheme {
        self.scheme
    }

    pub fn host(&self) -> &str {
        self.authority.host().trim_start_matches('[').trim_end_matches(']')
    }

    pub fn port(&self) -> u16 {
        self.authority.port_u16().unwrap_or(match self.scheme {
            UpstreamScheme::Http | UpstreamScheme::H2c => 80,
            UpstreamScheme::Https => 443,
        })
    }

    /// Returns the absolute URL of a route. `name` is the end of the path for routes that end with a name; `query`
    /// comes from the configuration.
    pub fn route_uri(&self, path: &'static str, name: Option<&str>, query: Option<&str>) -> Uri {
        let scheme = if self.scheme == UpstreamScheme::Https { "https" } else { "http" };
        let path = match (name, query) {
            // The usual case: the path is static, so nothing is copied or checked.
            (None, None) => PathAndQuery::from_static(path),
            (name, query) => {
                let (name, mark) =
                    (name.unwrap_or_default(), if query.is_some() { "?" } else { "" });
                let path = format!("{path}{name}{mark}{}", query.unwrap_or_default());
                path.parse().expect("a name of a route and a listed query are valid in a URL")
            }
        };
        Uri::builder()
            .scheme(scheme)
            .authority(self.authority.clone())
            .path_and_query(path)
            .build()
            .expect("a scheme, an authority and a path make a URL")
    }

    /// Returns `host[:port]` in the form of the `Host` header.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }
}

impl FromStr for UpstreamUrl {
    type Err = UpstreamUrlError;

    fn from_str(text: &str) -> Result<Self, UpstreamUrlError> {
        let invalid = |why| UpstreamUrlError { value: text.to_owned(), why };
        let (scheme, rest) = match text.split_once("://") {
            None => (UpstreamScheme::Http, text),
            Some(("http", rest)) => (UpstreamScheme::Http, rest),
            Some(("https", rest)) => (UpstreamScheme::Https, rest),
            Some(("h2c", rest)) => (UpstreamScheme::H2c, rest),
            Some(_) => return Err(invalid("the scheme is unknown")),
        };
        // One slash at the end is a common spelling and means no path.
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '?', '#']) {
            return Err(invalid("a path is not allowed, the gateway adds its own"));
        }
        // A password in the URL would be displayed with every error and in the logs.
        if rest.contains('@') {
            return Err(invalid("credentials do not belong here"));
        }
        let authority: Authority = rest.parse().map_err(|_| invalid("the host is not valid"))?;
        if authority.host().is_empty() {
            return Err(invalid("the host is missing"));
        }
        // `Authority` accepts a port that is out of range or empty and then returns no port. Without this check, such a
        // port would become the default port. A colon within `[…]` belongs to an IPv6 address.
        if rest.rsplit_once(':').is_some_and(|(host, port)| {
            !host.ends_with(':') && !rest.ends_with(']') && port.parse::<u16>().is_err()
        }) {
            return Err(invalid("the port is not a number from 0 to 65535"));
        }
        Ok(Self { scheme, authority })
    }
}

impl Default for UpstreamUrl {
    /// Returns LiteLLM's address in the deployment that this gateway replaces.
    fn default() -> Self {
        Self { scheme: UpstreamScheme::Http, authority: Authority::from_static("litellm:4000") }
    }
}

impl fmt::Display for UpstreamUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.scheme {
            UpstreamScheme::Http => "http",
            UpstreamScheme::H2c => "h2c",
            UpstreamScheme::Https => "https",
        };
        write!(f, "{scheme}://{}", self.authority)
    }
}

impl fmt::Debug for UpstreamUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for UpstreamUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for UpstreamUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
