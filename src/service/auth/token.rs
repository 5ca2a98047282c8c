//! The token of a grant: 256 random bits behind a prefix that scanners for secrets can look for.

use base64::prelude::*;
use ring::rand::{SecureRandom, SystemRandom};

use crate::base::digest::sha256_hex;
use crate::base::secret::SecretString;

/// Generates a new token.
///
/// # Errors
/// Returns an error if the kernel returns no random bytes.
pub(super) fn mint_token() -> Result<SecretString, ring::error::Unspecified> {
    let mut bytes = [0; TOKEN_RANDOM_BYTES];
    SystemRandom::new().fill(&mut bytes)?;
    let mut text = TOKEN_PREFIX.to_owned();
    BASE64_URL_SAFE_NO_PAD.encode_string(bytes, &mut text);
    Ok(SecretString::new(text))
}

/// Returns the hash by which a token is stored; `None` if the text cannot be a token.
///
/// The service finds a grant by this hash, so no code compares a stored secret with a client's text byte by byte. The
/// time of the look-up leaks nothing useful: an attacker would need texts with a chosen beginning of their hash, and
/// would then learn only a hash.
pub(super) fn hash_token(token: &str) -> Option<String> {
    let mut bytes = [0; TOKEN_RANDOM_BYTES];
    let length =
        BASE64_URL_SAFE_NO_PAD.decode_slice(token.strip_prefix(TOKEN_PREFIX)?, &mut bytes).ok()?;
    // A text of another length is no token and costs no database read.
    (length == TOKEN_RANDOM_BYTES).then(|| sha256_hex(token.as_bytes()))
}

/// The prefix of tokens, for "cogni grant".
const TOKEN_PREFIX: &str = "cgr_";

/// The number of random bytes in a token. Our choice: 256 bits.
const TOKEN_RANDOM_BYTES: usize = 32;
