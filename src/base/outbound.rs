//! The settings of connections from this program to other servers: trusted authorities and the proxy.

use std::path::PathBuf;

use http::Uri;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};

use crate::base::secret::SecretString;

/// The settings of connections to all servers. The default is no proxy, and the authorities that the system trusts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutboundConfig {
    /// PEM file of authorities to trust instead of the system's; its path is absolute.
    pub ca_file: Option<PathBuf>,
    pub proxy: Option<HttpProxy>,
}

impl OutboundConfig {
    /// Returns the proxy for a server; `None` if the server is reached without a proxy. A proxy carries TLS only.
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
    /// The hosts that are reached without the proxy, in the format of `NO_PROXY`.
    except: String,
}

/// An error for a text that is not the address of a proxy. The message does not repeat the text, because the text may
/// hold a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the proxy cannot be used; give `http://HOST:PORT`")]
pub struct ProxyUrlError;

impl HttpProxy {
    /// Parses a proxy's address in the format of `HTTPS_PROXY`. An address without a scheme means `http://`.
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
