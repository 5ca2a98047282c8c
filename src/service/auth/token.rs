//! The token of a grant: 256 random bits behind a prefix that scanners for secrets can look for.

use ring::rand::{SecureRandom, SystemRandom};

use crate::base::secret::SecretString;
use crate::base::{b64, hex};

/// A new token.
///
/// # Errors
/// The kernel gives no random bytes.
pub(super) fn mint_token() -> Result<SecretString, ring::error::Unspecified> {
    let mut bytes = [0; TOKEN_RANDOM_BYTES];
    SystemRandom::new().fill(&mut bytes)?;
    let mut text = TOKEN_PREFIX.to_owned();
    b64::encode_base64(&bytes, &mut text);
    Ok(SecretString::new(text))
}

/// What is stored of a token; `None` of what cannot be one.
///
/// The token is found by this, so nothing is compared byte by byte with what somebody sends, and how long that takes
/// says nothing: who would learn from it has to find texts with a chosen beginning of their hash, and would then know
/// a hash.
pub(super) fn hash_token(token: &str) -> Option<String> {
    let mut bytes = [0; TOKEN_RANDOM_BYTES];
    let length = b64::decode_base64(token.strip_prefix(TOKEN_PREFIX)?, &mut bytes)?;
    (length == TOKEN_RANDOM_BYTES).then(|| hex::sha256_hex(token.as_bytes()))
}

/// "cogni grant".
const TOKEN_PREFIX: &str = "cgr_";

const TOKEN_RANDOM_BYTES: usize = 32;
