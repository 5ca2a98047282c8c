//! The repository that the work goes to, and how git is let in.

use crate::base::secret::Secret;
use crate::base::{b64, hex};

use super::git::Call;

/// A repository's address: `https://…`, a path on this machine, or, on this machine only, `http://…`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    url: String,
}

/// Why an address cannot be a remote's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{shown}` cannot be relayed to; {why}")]
pub struct Invalid {
    /// Without what could be a password.
    shown: String,
    why: &'static str,
}

impl Remote {
    /// Checks an address. It must not carry a credential: addresses are logged.
    pub fn parse(url: &str) -> Result<Self, Invalid> {
        let invalid = |why| Invalid { shown: without_user(url), why };
        if url.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
            return Err(invalid("an address has no spaces and no control characters"));
        }
        if url.starts_with('/') {
            return Ok(Self { url: format!("file://{url}") });
        }
        let (scheme, rest) = url.split_once("://").ok_or_else(|| invalid(SCHEMES))?;
        let authority = rest.split('/').next().unwrap_or_default();
        if authority.contains('@') {
            return Err(invalid(
                "take the user and the password out; the token has a place of its own",
            ));
        }
        match scheme {
            "https" if !authority.is_empty() => (),
            "http" if is_loopback(authority) => (),
            "http" => return Err(invalid("use https, or the token could be read on the way")),
            "file" if rest.starts_with('/') => (),
            _ => return Err(invalid(SCHEMES)),
        }
        Ok(Self { url: url.to_owned() })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// The same for all usual spellings of the address.
    pub(super) fn id(&self) -> String {
        let url = self.url.trim_end_matches('/').trim_end_matches(".git");
        let start = url.find("://").map_or(0, |at| at + 3);
        let host = start + url[start..].find('/').unwrap_or(url.len() - start);
        let spelling = url[..host].to_ascii_lowercase() + &url[host..];
        hex::sha256(spelling.as_bytes())[..ID_DIGITS].to_owned()
    }

    /// Lets a call in, where there is a token; GitHub takes it as the password of this user.
    pub(super) fn admit<'a>(&self, call: Call<'a>, token: Option<&Secret>) -> Call<'a> {
        let Some(token) = token.filter(|token| !token.is_empty()) else { return call };
        let mut basic = String::from("Authorization: Basic ");
        let from = basic.len();
        b64::encode(format!("x-access-token:{}", token.expose()).as_bytes(), &mut basic);
        // Servers want the older alphabet, and padding.
        let mut basic =
            basic[..from].to_owned() + &basic[from..].replace('-', "+").replace('_', "/");
        while (basic.len() - from) % 4 != 0 {
            basic.push('=');
        }
        call.header(&self.url, &Secret::new(basic)).secret(token)
    }
}

fn is_loopback(authority: &str) -> bool {
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    ["localhost", "127.0.0.1", "[::1]"].contains(&host)
}

fn without_user(url: &str) -> String {
    let shown: String = url.chars().take(MAX_SHOWN).flat_map(char::escape_debug).collect();
    match (shown.find("://"), shown.rfind('@')) {
        (Some(scheme), Some(user)) if scheme < user => {
            format!("{}***{}", &shown[..scheme + 3], &shown[user..])
        }
        _ => shown,
    }
}

const SCHEMES: &str = "use `https://HOST/PATH`, or a path on this machine";

const MAX_SHOWN: usize = 200;

const ID_DIGITS: usize = 16;
