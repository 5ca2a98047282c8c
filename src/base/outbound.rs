//! Connections from this program to a server elsewhere: trusted authorities and the proxy.

use std::path::PathBuf;

use http::Uri;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};

use crate::base::secret::SecretString;

/// The way to every server. Without anything it is straight, and trusts whom the system trusts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutboundConfig {
    /// PEM file of authorities to trust instead of the system's; its path is absolute.
    pub ca_file: Option<PathBuf>,
    pub proxy: Option<HttpProxy>,
}

impl OutboundConfig {
    /// The proxy to a server; none where the server is reached without one. A proxy carries TLS and nothing else.
    pub fn proxy_for(&self, server: &Uri) -> Option<Intercept> {
        let proxy = self.proxy.as_ref()?;
        let matcher =
            Matcher::builder().https(proxy.url().expose_secret()).no(&*proxy.except).build();
        matcher.intercept(server)
    }
}

/// The proxy that carries TLS to a host. The proxy sees the host's name and not the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpProxy {
    /// `http://[USER:PASSWORD@]HOST[:PORT]`
    url: SecretString,
    /// Hosts that are reached without it, as everybody writes them in `NO_PROXY`.
    except: String,
}

/// The text names no proxy. It is not repeated: it may hold a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the proxy cannot be used; give `http://HOST:PORT`")]
pub struct ProxyUrlError;

impl HttpProxy {
    /// Reads a proxy's address as `HTTPS_PROXY` has it; without a scheme it is `http://`.
    ///
    /// # Errors
    /// Returns an error if the text is not a proxy's address, or the proxy needs TLS to itself or SOCKS.
    pub fn parse_proxy(url: &str, except: &str) -> Result<Self, ProxyUrlError> {
        let url = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        let uri: Uri = url.parse().map_err(|_| ProxyUrlError)?;
        let is_plain =
            uri.scheme_str() == Some("http") && uri.host().is_some_and(|host| !host.is_empty());
        if !is_plain || except.chars().any(char::is_control) {
            return Err(ProxyUrlError);
        }
        Ok(Self { url: SecretString::new(url), except: except.to_owned() })
    }

    pub fn url(&self) -> &SecretString {
        &self.url
    }

    /// Returns the password in the proxy's URL, which logs must not show.
    pub fn url_password(&self) -> Option<SecretString> {
        let (user, _) = self.url.expose_secret().split_once("://")?.1.rsplit_once('@')?;
        Some(SecretString::new(user.split_once(':')?.1))
    }
}
