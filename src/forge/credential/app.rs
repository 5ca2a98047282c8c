//! A GitHub App: it signs for itself, and is given tokens for the repositories it is installed for.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::Method;
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::json;

use crate::base::b64;
use crate::base::secret::Secret;
use crate::forge::github::{Api, Error, path};
use crate::relay::repository::Hosted;

/// An app with its private key, and the tokens it has been given.
pub struct App {
    /// Its client id, or its number.
    id: String,
    key: RsaKeyPair,
    /// For each repository one place, which whoever asks for a token holds: others wait for that one.
    given: Mutex<HashMap<String, Arc<Place>>>,
}

type Place = tokio::sync::Mutex<Option<Given>>;

#[derive(Clone)]
struct Given {
    token: Secret,
    expires: SystemTime,
}

#[derive(Deserialize)]
struct Installation {
    id: u64,
}

#[derive(Deserialize)]
struct AccessToken {
    token: Secret,
    expires_at: String,
}

impl App {
    /// Reads the private key as GitHub hands it out: PEM, in PKCS#1 or PKCS#8.
    ///
    /// # Errors
    /// It is none, or too short.
    pub fn new(id: &str, private_key: &Secret) -> Result<Self, Error> {
        let der = PrivateKeyDer::from_pem_slice(private_key.expose().as_bytes())
            .map_err(|_| Error::Key("it is not a private key in PEM"))?;
        let key = match &der {
            PrivateKeyDer::Pkcs1(der) => RsaKeyPair::from_der(der.secret_pkcs1_der()),
            PrivateKeyDer::Pkcs8(der) => RsaKeyPair::from_pkcs8(der.secret_pkcs8_der()),
            _ => return Err(Error::Key("it is not one of RSA")),
        };
        let key = key.map_err(|_| Error::Key("it is not one of RSA with 2048 bits or more"))?;
        Ok(Self { id: id.to_owned(), key, given: Mutex::default() })
    }

    /// The token for a repository: the one it has, or else a new one. Those who ask meanwhile get the same.
    pub(super) async fn token(&self, api: &Api, repository: &Hosted) -> Result<Secret, Error> {
        let place = self.place(repository);
        let mut given = place.lock().await;
        if let Some(given) = given.as_ref().filter(|given| given.is_fresh()) {
            return Ok(given.token.clone());
        }
        let new = api.patience().keep(|| self.ask(api, repository)).await?;
        Ok(given.insert(new).token.clone())
    }

    /// Asks the forge what it knows of the app.
    pub(super) async fn check(&self, api: &Api) -> Result<IgnoredAny, Error> {
        api.get(&self.sign(SystemTime::now())?, "/app").await
    }

    pub(super) async fn forget(&self, repository: &Hosted) {
        *self.place(repository).lock().await = None;
    }

    fn place(&self, repository: &Hosted) -> Arc<Place> {
        let name = format!("{}/{}", repository.owner(), repository.name()).to_ascii_lowercase();
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        given.entry(name).or_default().clone()
    }

    async fn ask(&self, api: &Api, repository: &Hosted) -> Result<Given, Error> {
        let signed = self.sign(SystemTime::now())?;
        let installation: Installation =
            api.get(&signed, &path(repository, "/installation")).await?;
        let address = format!("/app/installations/{}/access_tokens", installation.id);
        let scope = json!({
            "repositories": [repository.name()],
            "permissions": { "contents": "write", "pull_requests": "write" },
        });
        let given: AccessToken = api.call(&signed, Method::POST, &address, Some(&scope)).await?;
        let expires = humantime::parse_rfc3339(&given.expires_at)
            .map_err(|_| Error::Unanswered("a token without an end".to_owned()))?;
        Ok(Given { token: given.token, expires })
    }

    /// What the app shows of itself (RFC 7519): good for nine minutes, since GitHub allows ten, and from a minute ago,
    /// since clocks differ.
    fn sign(&self, now: SystemTime) -> Result<Secret, Error> {
        let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let header = json!({ "alg": "RS256", "typ": "JWT" }).to_string();
        let claims = json!({ "iat": now - 60, "exp": now + 540, "iss": self.id }).to_string();
        let mut text = String::new();
        b64::encode(header.as_bytes(), &mut text);
        text.push('.');
        b64::encode(claims.as_bytes(), &mut text);
        let mut signature = vec![0; self.key.public().modulus_len()];
        self.key
            .sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), text.as_bytes(), &mut signature)
            .map_err(|_| Error::Key("it does not sign"))?;
        text.push('.');
        b64::encode(&signature, &mut text);
        Ok(Secret::new(text))
    }
}

impl Given {
    fn is_fresh(&self) -> bool {
        let left = self.expires.duration_since(SystemTime::now()).unwrap_or_default();
        left > MARGIN
    }
}

impl fmt::Debug for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("App").field("id", &self.id).finish_non_exhaustive()
    }
}

/// A token is good for an hour. One that has less than this left could end within a large push.
const MARGIN: Duration = Duration::from_mins(5);
