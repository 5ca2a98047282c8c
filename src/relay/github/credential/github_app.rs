//! A GitHub App: signs requests as itself, and gets tokens for the repositories where it is installed.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::prelude::*;
use http::Method;
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::json;

use crate::base::secret::SecretString;
use crate::relay::github::client::{GithubClient, GithubError, repository_path};
use crate::relay::repo::repository::HostedRepository;

/// An app with its private key and its current tokens.
pub struct GithubApp {
    /// The app's client ID or its number.
    id: String,
    key: RsaKeyPair,
    /// One cell for each repository. A caller that requests a token holds the cell's lock, and other callers wait for
    /// it.
    tokens: Mutex<HashMap<String, Arc<TokenCell>>>,
}

type TokenCell = tokio::sync::Mutex<Option<InstallationToken>>;

#[derive(Clone)]
struct InstallationToken {
    token: SecretString,
    expires: SystemTime,
}

#[derive(Deserialize)]
struct InstallationResponse {
    id: u64,
}

#[derive(Deserialize)]
struct AccessTokenResponse {
    token: SecretString,
    expires_at: String,
}

impl GithubApp {
    /// Creates an app from the private key in the form in which GitHub provides it: PEM, in PKCS#1 or PKCS#8.
    ///
    /// # Errors
    /// Returns [`GithubError::InvalidAppKey`] if the text is not an RSA key in PEM, or if the key is shorter than 2048
    /// bits.
    pub fn new(id: &str, private_key: &SecretString) -> Result<Self, GithubError> {
        let der = PrivateKeyDer::from_pem_slice(private_key.expose_secret().as_bytes())
            .map_err(|_| GithubError::InvalidAppKey("it is not a private key in PEM"))?;
        let key = match &der {
            PrivateKeyDer::Pkcs1(der) => RsaKeyPair::from_der(der.secret_pkcs1_der()),
            PrivateKeyDer::Pkcs8(der) => RsaKeyPair::from_pkcs8(der.secret_pkcs8_der()),
            _ => return Err(GithubError::InvalidAppKey("it is not one of RSA")),
        };
        let key = key.map_err(|_| {
            GithubError::InvalidAppKey("it is not one of RSA with 2048 bits or more")
        })?;
        Ok(Self { id: id.to_owned(), key, tokens: Mutex::default() })
    }

    /// Returns the current token for a repository, or requests a new one. Callers at the same time get the same token.
    pub(super) async fn token(
        &self,
        api: &GithubClient,
        repository: &HostedRepository,
    ) -> Result<SecretString, GithubError> {
        let cell = self.token_cell(repository);
        // The lock is held during the request. Callers that wait here find the new token and send no request.
        let mut cached = cell.lock().await;
        if let Some(cached) = cached.as_ref().filter(|cached| cached.is_fresh()) {
            return Ok(cached.token.clone());
        }
        let new = api.retry_policy().retry(|| self.request_token(api, repository)).await?;
        Ok(cached.insert(new).token.clone())
    }

    /// Asks the forge for the app's own data, which only a valid signature gives.
    pub(super) async fn check(&self, api: &GithubClient) -> Result<IgnoredAny, GithubError> {
        api.get(&self.sign_jwt(SystemTime::now())?, "/app").await
    }

    /// Forgets the token of a repository, so that the next caller requests a new one.
    pub(super) async fn invalidate(&self, repository: &HostedRepository) {
        *self.token_cell(repository).lock().await = None;
    }

    /// Returns the cell of a repository. The lock of the map is never held across an await.
    fn token_cell(&self, repository: &HostedRepository) -> Arc<TokenCell> {
        let name = format!("{}/{}", repository.owner(), repository.name()).to_ascii_lowercase();
        // This lock only protects the map. A caller waits for a request on the cell's own lock.
        let mut cells = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        cells.entry(name).or_default().clone()
    }

    /// Requests a new token from the forge.
    async fn request_token(
        &self,
        api: &GithubClient,
        repository: &HostedRepository,
    ) -> Result<InstallationToken, GithubError> {
        let signed = self.sign_jwt(SystemTime::now())?;
        // The app signs as itself, asks for its installation, and gets a token for that installation.
        let installation: InstallationResponse =
            api.get(&signed, &repository_path(repository, "/installation")).await?;
        let address = format!("/app/installations/{}/access_tokens", installation.id);
        // The token gets the fewest permissions: one repository, commits and pull requests.
        let scope = json!({
            "repositories": [repository.name()],
            "permissions": { "contents": "write", "pull_requests": "write" },
        });
        let response: AccessTokenResponse =
            api.call_once(&signed, Method::POST, &address, Some(&scope)).await?;
        // A token with an unknown end could not be renewed in time.
        let expires = humantime::parse_rfc3339(&response.expires_at)
            .map_err(|_| GithubError::NoResponse("a token without an end".to_owned()))?;
        Ok(InstallationToken { token: response.token, expires })
    }

    /// Returns the app's signed identity (RFC 7519). It is valid for nine minutes, since GitHub allows ten, and begins
    /// a minute ago, since clocks differ.
    fn sign_jwt(&self, now: SystemTime) -> Result<SecretString, GithubError> {
        let (issued, expires) = signature_period(now);
        let header = json!({ "alg": "RS256", "typ": "JWT" }).to_string();
        let claims = json!({ "iat": issued, "exp": expires, "iss": self.id }).to_string();
        let mut text = String::new();
        BASE64_URL_SAFE_NO_PAD.encode_string(header, &mut text);
        text.push('.');
        BASE64_URL_SAFE_NO_PAD.encode_string(claims, &mut text);
        let mut signature = vec![0; self.key.public().modulus_len()];
        self.key
            .sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), text.as_bytes(), &mut signature)
            .map_err(|_| GithubError::InvalidAppKey("it does not sign"))?;
        text.push('.');
        BASE64_URL_SAFE_NO_PAD.encode_string(signature, &mut text);
        Ok(SecretString::new(text))
    }
}

impl InstallationToken {
    /// Returns true if the token is valid for long enough to be used.
    fn is_fresh(&self) -> bool {
        let left = self.expires.duration_since(SystemTime::now()).unwrap_or_default();
        left > MIN_TOKEN_LIFETIME
    }
}

impl fmt::Debug for GithubApp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GithubApp").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Returns the seconds since 1970 at which the validity of a signature begins and ends. A machine without a set clock
/// may be in the first minute of 1970.
fn signature_period(now: SystemTime) -> (u64, u64) {
    let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    (now.saturating_sub(60), now + 540)
}

/// The least remaining time of a token that is used again. Tokens are valid for an hour, and a large push takes
/// minutes.
const MIN_TOKEN_LIFETIME: Duration = Duration::from_mins(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_at_its_start_makes_no_underflow() {
        assert_eq!(signature_period(UNIX_EPOCH), (0, 540));
        assert_eq!(signature_period(UNIX_EPOCH - Duration::from_secs(1)), (0, 540));
        assert_eq!(signature_period(UNIX_EPOCH + Duration::from_secs(100)), (40, 640));
    }
}
