//! Access control: tokens, and apps that sign their own requests.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::prelude::*;
use http::header::AUTHORIZATION;
use http::request::Parts;
use ring::signature::{RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};
use serde::Deserialize;

/// The accepted tokens, and the apps that can request tokens.
#[derive(Debug)]
pub(super) struct FakeAccess {
    tokens: Vec<String>,
    /// The tokens issued to apps, with their repositories and their expiry.
    issued: BTreeMap<String, IssuedToken>,
    apps: Vec<FakeGithubApp>,
    pub(super) lifetime: u64,
}

#[derive(Debug)]
struct IssuedToken {
    names: Vec<String>,
    expires: u64,
}

#[derive(Clone, Debug)]
pub(super) struct FakeGithubApp {
    id: String,
    public_key: Vec<u8>,
    pub(super) installation: u64,
    pub(super) names: Vec<String>,
}

/// The claims of an app's JSON web token.
#[derive(Deserialize)]
struct AppClaims {
    iss: String,
    iat: u64,
    exp: u64,
}

impl Default for FakeAccess {
    fn default() -> Self {
        Self { tokens: vec![], issued: BTreeMap::new(), apps: vec![], lifetime: 3600 }
    }
}

impl FakeAccess {
    pub(super) fn accept_token(&mut self, token: &str) {
        self.tokens.push(token.to_owned());
    }

    pub(super) fn install_app(&mut self, app: &str, public_key: &[u8], names: &[&str]) {
        self.apps.push(FakeGithubApp {
            id: app.to_owned(),
            public_key: public_key.to_owned(),
            // Ids of different kinds begin at different numbers, so that a mix-up fails a test.
            installation: 7000 + self.apps.len() as u64,
            names: names.iter().map(|&name| name.to_owned()).collect(),
        });
    }

    pub(super) fn revoke_all(&mut self) {
        self.issued.clear();
    }

    /// Issues a token for some repositories. Returns the token and its expiry in Unix seconds.
    pub(super) fn issue_token(&mut self, names: Vec<String>) -> (String, u64) {
        let expires = unix_seconds() + self.lifetime;
        // The prefix is that of GitHub's installation tokens.
        let token = format!("ghs_standin{:03}", self.issued.len() + 1);
        self.issued.insert(token.clone(), IssuedToken { names, expires });
        (token, expires)
    }

    /// Returns true if the request's token is valid for the repository.
    pub(super) fn can_access(&self, head: &Parts, name: &str) -> bool {
        bearer_token(head).is_some_and(|token| {
            let issued = self.issued.get(&token);
            self.tokens.contains(&token)
                || issued.is_some_and(|issued| {
                    issued.expires > unix_seconds() && issued.names.iter().any(|one| one == name)
                })
        })
    }

    /// Returns true if the request's token is valid. A request without a valid token does not learn which repositories
    /// exist.
    pub(super) fn knows_token(&self, head: &Parts) -> bool {
        bearer_token(head).is_some_and(|token| {
            let issued = self.issued.get(&token);
            self.tokens.contains(&token)
                || issued.is_some_and(|issued| issued.expires > unix_seconds())
        })
    }

    /// Returns the app that signed the request.
    pub(super) fn find_app(&self, head: &Parts) -> Option<&FakeGithubApp> {
        let token = bearer_token(head)?;
        // A JSON web token is `header.claims.signature`; the signature covers everything before the last dot.
        let (signed, signature) = token.rsplit_once('.')?;
        let claims: AppClaims =
            serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(signed.split_once('.')?.1).ok()?)
                .ok()?;
        // The claims name the key, so that they are read before the signature is verified.
        let app = self.apps.iter().find(|app| app.id == claims.iss)?;
        let key = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, &app.public_key);
        key.verify(signed.as_bytes(), &BASE64_URL_SAFE_NO_PAD.decode(signature).ok()?).ok()?;
        // GitHub refuses signatures for longer than ten minutes, and signatures of the future.
        let is_timely = claims.iat <= unix_seconds()
            && claims.exp > unix_seconds()
            && claims.exp <= unix_seconds() + 600;
        is_timely.then_some(app)
    }
}

/// Returns the request's token. GitHub's API receives the token as a bearer token, and git sends it as a password.
fn bearer_token(head: &Parts) -> Option<String> {
    let (kind, value) = head.headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    if kind.eq_ignore_ascii_case("bearer") || kind.eq_ignore_ascii_case("token") {
        return Some(value.to_owned());
    }
    let pair = BASE64_STANDARD.decode(value).ok()?;
    let pair = String::from_utf8(pair).ok()?;
    pair.split_once(':').map(|(_, password)| password.to_owned())
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
