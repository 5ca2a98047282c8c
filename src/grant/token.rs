//! The token of a grant: 256 random bits behind a prefix that scanners for secrets can look for.

use ring::rand::{SecureRandom, SystemRandom};

use crate::base::secret::Secret;
use crate::base::{b64, hex};

/// A new token.
///
/// # Errors
/// The kernel gives no random bytes.
pub(super) fn mint() -> Result<Secret, ring::error::Unspecified> {
    let mut bytes = [0; BYTES];
    SystemRandom::new().fill(&mut bytes)?;
    let mut text = PREFIX.to_owned();
    b64::encode(&bytes, &mut text);
    Ok(Secret::new(text))
}

/// What is stored of a token; `None` of what cannot be one.
///
/// The token is found by this, so nothing is compared byte by byte with what somebody sends, and how long that takes
/// says nothing: who would learn from it has to find texts with a chosen beginning of their hash, and would then know
/// a hash.
pub(super) fn hash(token: &str) -> Option<String> {
    let mut bytes = [0; BYTES];
    let length = b64::decode(token.strip_prefix(PREFIX)?, &mut bytes)?;
    (length == BYTES).then(|| hex::sha256(token.as_bytes()))
}

/// "cogni grant".
const PREFIX: &str = "cgr_";

const BYTES: usize = 32;
