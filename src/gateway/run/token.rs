//! Run tokens, which identify the run of a client. If many runs share a listener, the socket cannot identify the run.
//!
//! ```text
//! cgr1.<key id>.<claims>.<mac>
//! ```
//!
//! The claims are JSON in base64: the run, the name of the installation that serves the run if it has a name, the time
//! of issue and the time of expiry. The claims contain no secret. The last part is the HMAC-SHA256 of everything before
//! it. The whole fits into the field of an API key and into a header, where an unmodified client puts it.
//!
//! **Invariant:** the gateway interprets no part of a token before its signature is verified, except the id of the key.
//!
//! **Invariant:** a token has one spelling. A token with any byte changed is no token.

mod keys;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::prelude::*;
use ring::hmac;
use serde::{Deserialize, Serialize};

use super::is_name;

pub use keys::{RunTokenKeys, RunTokenKeysError};

/// The claims of a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunTokenClaims {
    pub run: String,
    /// The installation that the token is for. The name distinguishes two installations that share keys and a run's id.
    #[serde(rename = "aud", default, skip_serializing_if = "Option::is_none")]
    pub audience: Option<String>,
    /// The time of issue, in seconds since 1970, like all times here.
    #[serde(rename = "iat")]
    pub issued: u64,
    /// The first second at which the token is not valid any more.
    #[serde(rename = "exp")]
    pub expires: u64,
}

/// The reason why a token is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunTokenError {
    #[error("the text does not have the form of a run token")]
    Malformed,
    #[error("the token names a key that is not in the key file")]
    UnknownKey,
    #[error("the token was not signed with the key that it names")]
    WrongSignature,
    #[error(
        "the token is for another installation; compare `shared.token_audience` with the token's `aud`"
    )]
    OtherAudience,
    #[error("the token was issued in the future; compare the clocks of the two machines")]
    IssuedInFuture,
    #[error("the token has expired")]
    Expired,
}

/// The reason why a token cannot be made.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunTokenMintError {
    #[error("`{value}` is not a valid run id; {}", super::NAME_RULE)]
    InvalidRunId { value: String },
    #[error("there is no key `{value}`; there are: {known}")]
    UnknownKey { value: String, known: String },
    #[error("a token must be valid for at least a second")]
    TooShort,
    #[error("a token may be valid for {} at most", humantime::format_duration(MAX_TOKEN_LIFETIME))]
    TooLong,
}

impl RunTokenKeys {
    /// Makes a token for `run` that is valid for `ttl`, signed with the named key or, without a name, with the first
    /// key.
    ///
    /// # Errors
    /// Returns an error if the run's name is not valid, the key does not exist, or the time is out of bounds.
    pub fn mint_token(
        &self,
        run: &str,
        ttl: Duration,
        key_id: Option<&str>,
        now: SystemTime,
    ) -> Result<String, RunTokenMintError> {
        if !is_name(run) {
            return Err(RunTokenMintError::InvalidRunId { value: run.to_owned() });
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

    /// Signs claims without checking them.
    ///
    /// # Errors
    /// Returns an error if the key does not exist.
    pub fn sign_claims(
        &self,
        claims: &RunTokenClaims,
        key_id: Option<&str>,
    ) -> Result<String, RunTokenMintError> {
        let unknown = |given: &str| RunTokenMintError::UnknownKey {
            value: given.to_owned(),
            known: self.format_ids(),
        };
        let key = match key_id {
            Some(id) => self.find_key(id).ok_or_else(|| unknown(id))?,
            None => self.signing_key(),
        };
        // The prefix and the key's id are signed, too: neither can be changed without the signature failing.
        let mut token = format!("{TOKEN_PREFIX}{}.", key.id());
        let claims = serde_json::to_vec(claims).expect("text and numbers are JSON");
        BASE64_URL_SAFE_NO_PAD.encode_string(&claims, &mut token);
        let mac = hmac::sign(key.hmac(), token.as_bytes());
        token.push('.');
        BASE64_URL_SAFE_NO_PAD.encode_string(mac.as_ref(), &mut token);
        Ok(token)
    }

    /// Verifies a token for the current time, and returns its claims.
    ///
    /// # Errors
    /// Returns an error if the token is not for this installation, was not signed by one of these keys, or is not valid
    /// now.
    pub fn verify_token(
        &self,
        token: &str,
        now: SystemTime,
    ) -> Result<RunTokenClaims, RunTokenError> {
        let claims = self.verify_signature(token)?;
        claims.check_validity_period(now)?;
        Ok(claims)
    }

    /// Verifies the signature and the installation of a token, and returns its claims, expired or not.
    ///
    /// # Errors
    /// Returns an error if the token was not signed by one of these keys, or is for another installation.
    pub fn verify_signature(&self, token: &str) -> Result<RunTokenClaims, RunTokenError> {
        let parts = RunTokenParts::split_token(token)?;
        // 1. The key's id is the one part that is used unverified. It only selects among the gateway's own keys.
        let key = self.find_key(parts.key_id).ok_or(RunTokenError::UnknownKey)?;
        // 2. A signature of another length is no signature: a shorter one would be easier to guess.
        let mut mac = [0; MAC_BYTES];
        if BASE64_URL_SAFE_NO_PAD.decode_slice(parts.mac, &mut mac) != Ok(MAC_BYTES) {
            return Err(RunTokenError::Malformed);
        }
        // 3. The comparison is constant in time, so its duration tells nothing about the right signature.
        hmac::verify(key.hmac(), parts.signed.as_bytes(), &mac)
            .map_err(|_| RunTokenError::WrongSignature)?;
        // 4. The claims are verified now and may be parsed.
        let claims = parts.decode_claims().ok_or(RunTokenError::Malformed)?;
        if claims.audience.as_deref() != self.audience() {
            return Err(RunTokenError::OtherAudience);
        }
        Ok(claims)
    }
}

impl RunTokenClaims {
    /// Returns the key id and the claims of a token without verification. The result is for display and proves nothing.
    pub fn decode_unverified(token: &str) -> Option<(&str, Self)> {
        let parts = RunTokenParts::split_token(token).ok()?;
        Some((parts.key_id, parts.decode_claims()?))
    }

    /// Checks that a token is valid at a time.
    ///
    /// # Errors
    /// Returns [`RunTokenError::Expired`] from the second of expiry on, and [`RunTokenError::IssuedInFuture`] if the
    /// time of issue is ahead by more than [`MAX_CLOCK_SKEW`].
    pub fn check_validity_period(&self, now: SystemTime) -> Result<(), RunTokenError> {
        let now = unix_seconds(now);
        // No tolerance here: an expired token must not be accepted, whatever the clocks of the two machines are.
        if now >= self.expires {
            return Err(RunTokenError::Expired);
        }
        if self.issued > now.saturating_add(MAX_CLOCK_SKEW.as_secs()) {
            return Err(RunTokenError::IssuedInFuture);
        }
        Ok(())
    }
}

/// The parts of a token. No part is verified.
struct RunTokenParts<'a> {
    /// The signed part: everything before the last dot.
    signed: &'a str,
    key_id: &'a str,
    claims: &'a str,
    mac: &'a str,
}

impl<'a> RunTokenParts<'a> {
    fn split_token(token: &'a str) -> Result<Self, RunTokenError> {
        // The length comes first: the input is not authenticated yet, and the buffer for the claims has this size.
        if token.len() > MAX_TOKEN_BYTES {
            return Err(RunTokenError::Malformed);
        }
        // From the right: the signature covers everything before the last dot, whatever the claims contain.
        let (signed, mac) = token.rsplit_once('.').ok_or(RunTokenError::Malformed)?;
        let rest = signed.strip_prefix(TOKEN_PREFIX).ok_or(RunTokenError::Malformed)?;
        let (key_id, claims) = rest.split_once('.').ok_or(RunTokenError::Malformed)?;
        Ok(Self { signed, key_id, claims, mac })
    }

    fn decode_claims(&self) -> Option<RunTokenClaims> {
        // The decoded claims are shorter than the token, which is at most this long.
        let mut json = [0; MAX_TOKEN_BYTES];
        let length = BASE64_URL_SAFE_NO_PAD.decode_slice(self.claims, &mut json).ok()?;
        let claims: RunTokenClaims = serde_json::from_slice(&json[..length]).ok()?;
        // Only our keys can sign, but a name with other characters would break log lines and headers.
        is_name(&claims.run).then_some(claims)
    }
}

/// Returns true if a text can name an installation in tokens.
pub fn is_audience(name: &str) -> bool {
    is_name(name) && name.len() <= MAX_AUDIENCE_BYTES
}

/// Returns the seconds since 1970. A time before 1970 counts as 0.
fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The start of every token: its kind and its version.
pub const TOKEN_PREFIX: &str = "cgr1.";

/// The largest token that is accepted, in bytes. The longest run id, key id and audience give a token under 450 bytes;
/// the value is our choice.
pub const MAX_TOKEN_BYTES: usize = 512;

/// The longest lifetime of a token. No run lasts longer, and a leaked token should not outlive its run by much. The
/// value is our choice.
pub const MAX_TOKEN_LIFETIME: Duration = Duration::from_hours(30 * 24);

/// The largest lead of the issuing machine's clock over this machine's clock. A token that is used a little early harms
/// no one; expiry has no such tolerance. The value is our choice.
pub const MAX_CLOCK_SKEW: Duration = Duration::from_mins(1);

/// The longest name of an installation, in bytes. Our choice: a label of a host name has at most 63 bytes.
pub const MAX_AUDIENCE_BYTES: usize = 64;

/// The length of a token's HMAC-SHA256, in bytes.
const MAC_BYTES: usize = 32;
