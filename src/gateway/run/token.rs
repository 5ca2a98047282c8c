//! Run tokens: who a caller is where the socket cannot tell, because many runs share a listener.
//!
//! ```text
//! cgr1.<key id>.<claims>.<mac>
//! ```
//!
//! The claims are JSON in base64: the run, the installation that serves it where that has a name, when the
//! token was issued, when it expires; nothing in them is secret. The last part is the HMAC-SHA256 of
//! everything before it. The whole fits into an API key's field and into a header, which is where an
//! unmodified client puts it.
//!
//! **Invariant:** nothing of a token is interpreted before its signature holds, except the id of the key.
//!
//! **Invariant:** a token has one spelling. Whoever changes a byte of it, anywhere, has no token.

mod keys;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ring::hmac;
use serde::{Deserialize, Serialize};

use super::is_name;
use crate::base::b64;

pub use keys::{RunTokenKeys, RunTokenKeysError};

/// What a token says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunTokenClaims {
    pub run: String,
    /// The installation that the token is for. Two that share keys and a run's id are told apart by it.
    #[serde(rename = "aud", default, skip_serializing_if = "Option::is_none")]
    pub audience: Option<String>,
    /// In seconds since 1970, as all times here.
    #[serde(rename = "iat")]
    pub issued: u64,
    /// The first second at which the token is worth nothing.
    #[serde(rename = "exp")]
    pub expires: u64,
}

/// Why a token proves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunTokenError {
    #[error("it does not have the form of a run token")]
    Form,
    #[error("it names a key that is not among ours")]
    UnknownKey,
    #[error("it was not signed with the key it names")]
    Signature,
    #[error(
        "it is for another installation; compare `shared.token_audience` with the token's `aud`"
    )]
    Audience,
    #[error("it was issued in the future; compare the clocks of the two machines")]
    Future,
    #[error("it has expired")]
    Expired,
}

/// Why a token cannot be made.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunTokenMintError {
    #[error("`{given}` is not a valid run id; {}", super::NAME_RULE)]
    Run { given: String },
    #[error("there is no key `{given}`; there are: {known}")]
    Key { given: String, known: String },
    #[error("a token must be valid for at least a second")]
    TooShort,
    #[error("a token may be valid for {} at most", humantime::format_duration(MAX_TOKEN_LIFETIME))]
    TooLong,
}

impl RunTokenKeys {
    /// Makes a token for `run` that is valid for `ttl`, signed with the named key or the first.
    ///
    /// # Errors
    /// The run has no valid name, there is no such key, or the time is out of bounds.
    pub fn mint_token(
        &self,
        run: &str,
        ttl: Duration,
        key_id: Option<&str>,
        now: SystemTime,
    ) -> Result<String, RunTokenMintError> {
        if !is_name(run) {
            return Err(RunTokenMintError::Run { given: run.to_owned() });
        }
        match ttl {
            ttl if ttl < Duration::from_secs(1) => return Err(RunTokenMintError::TooShort),
            ttl if ttl > MAX_TOKEN_LIFETIME => return Err(RunTokenMintError::TooLong),
            _ => {}
        }
        let issued = unix_seconds(now);
        let audience = self.audience().map(str::to_owned);
        let claims = RunTokenClaims {
            run: run.to_owned(),
            audience,
            issued,
            expires: issued + ttl.as_secs(),
        };
        self.sign_claims(&claims, key_id)
    }

    /// Signs claims as they are.
    ///
    /// # Errors
    /// There is no such key.
    pub fn sign_claims(
        &self,
        claims: &RunTokenClaims,
        key_id: Option<&str>,
    ) -> Result<String, RunTokenMintError> {
        let unknown = |given: &str| RunTokenMintError::Key {
            given: given.to_owned(),
            known: self.format_ids(),
        };
        let key = match key_id {
            Some(id) => self.find_key(id).ok_or_else(|| unknown(id))?,
            None => self.signing_key(),
        };
        let mut token = format!("{TOKEN_PREFIX}{}.", key.id());
        let claims = serde_json::to_vec(claims).expect("text and numbers are JSON");
        b64::encode_base64(&claims, &mut token);
        let mac = hmac::sign(key.hmac(), token.as_bytes());
        token.push('.');
        b64::encode_base64(mac.as_ref(), &mut token);
        Ok(token)
    }

    /// What a token says, if it may be believed now.
    ///
    /// # Errors
    /// Why it may not.
    pub fn verify_token(
        &self,
        token: &str,
        now: SystemTime,
    ) -> Result<RunTokenClaims, RunTokenError> {
        let claims = self.verify_signature(token)?;
        claims.check_validity_period(now)?;
        Ok(claims)
    }

    /// What one of our keys has signed for this installation, be it valid now or not.
    ///
    /// # Errors
    /// The token was not signed by us, or is for another installation.
    pub fn verify_signature(&self, token: &str) -> Result<RunTokenClaims, RunTokenError> {
        let parts = RunTokenParts::split_token(token)?;
        let key = self.find_key(parts.key_id).ok_or(RunTokenError::UnknownKey)?;
        let mut mac = [0; MAC_BYTES];
        if b64::decode_base64(parts.mac, &mut mac) != Some(MAC_BYTES) {
            return Err(RunTokenError::Form);
        }
        // Takes the same time wherever the two differ.
        hmac::verify(key.hmac(), parts.signed.as_bytes(), &mac)
            .map_err(|_| RunTokenError::Signature)?;
        let claims = parts.decode_claims().ok_or(RunTokenError::Form)?;
        if claims.audience.as_deref() != self.audience() {
            return Err(RunTokenError::Audience);
        }
        Ok(claims)
    }
}

impl RunTokenClaims {
    /// What a token says of itself and its key, for a person to read: it proves nothing.
    pub fn decode_unverified(token: &str) -> Option<(&str, Self)> {
        let parts = RunTokenParts::split_token(token).ok()?;
        Some((parts.key_id, parts.decode_claims()?))
    }

    /// Whether this is the time for the token.
    ///
    /// # Errors
    /// It is over, to the second; or it has not begun, by more than clocks differ.
    pub fn check_validity_period(&self, now: SystemTime) -> Result<(), RunTokenError> {
        let now = unix_seconds(now);
        if now >= self.expires {
            return Err(RunTokenError::Expired);
        }
        if self.issued > now.saturating_add(MAX_CLOCK_SKEW.as_secs()) {
            return Err(RunTokenError::Future);
        }
        Ok(())
    }
}

/// A token taken apart, and nothing of it believed.
struct RunTokenParts<'a> {
    /// Everything that the signature is of.
    signed: &'a str,
    key_id: &'a str,
    claims: &'a str,
    mac: &'a str,
}

impl<'a> RunTokenParts<'a> {
    fn split_token(token: &'a str) -> Result<Self, RunTokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(RunTokenError::Form);
        }
        let (signed, mac) = token.rsplit_once('.').ok_or(RunTokenError::Form)?;
        let rest = signed.strip_prefix(TOKEN_PREFIX).ok_or(RunTokenError::Form)?;
        let (key_id, claims) = rest.split_once('.').ok_or(RunTokenError::Form)?;
        Ok(Self { signed, key_id, claims, mac })
    }

    fn decode_claims(&self) -> Option<RunTokenClaims> {
        let mut json = [0; MAX_TOKEN_BYTES];
        let length = b64::decode_base64(self.claims, &mut json)?;
        let claims: RunTokenClaims = serde_json::from_slice(&json[..length]).ok()?;
        is_name(&claims.run).then_some(claims)
    }
}

/// Tells whether a text can name an installation in tokens.
pub fn is_audience(name: &str) -> bool {
    is_name(name) && name.len() <= MAX_AUDIENCE_BYTES
}

/// Before 1970 nothing was issued, and nothing has expired.
fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// What every token begins with: the kind and its version.
pub const TOKEN_PREFIX: &str = "cgr1.";

/// Longer than any token that we make: the longest run id, key id and audience are under 450 bytes. Ours.
pub const MAX_TOKEN_BYTES: usize = 512;

/// No run lasts longer, and a token that leaks should not outlive its run by much. Ours.
pub const MAX_TOKEN_LIFETIME: Duration = Duration::from_hours(30 * 24);

/// How far ahead of us the clock of the machine that issues tokens may be. Being early harms nobody; at
/// the other end, where it would, a token is worth nothing from its last second on. Ours.
pub const MAX_CLOCK_SKEW: Duration = Duration::from_mins(1);

/// The longest name of an installation. Ours: a host's name has 63 bytes between its dots.
pub const MAX_AUDIENCE_BYTES: usize = 64;

const MAC_BYTES: usize = 32;
