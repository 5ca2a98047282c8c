//! SHA-256 digests as text.

use ring::digest::{SHA256, digest};

/// Returns the SHA-256 digest of `bytes` as 64 lower-case hexadecimal digits.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex::encode(digest(&SHA256, bytes))
}
