//! The text form of 32-byte keys in settings and key files.

use base64::engine::general_purpose::STANDARD_PAD_INDIFFERENT;
use base64::prelude::*;
use hex::FromHex;

/// Parses a key that is written as 64 hexadecimal digits, or in base64 of either alphabet, with or without padding.
///
/// ```
/// use cogni_gateway::base::key_bytes::parse_key_bytes;
/// for text in ["ff".repeat(32), "_".repeat(42) + "8", "/".repeat(42) + "8="] {
///     assert_eq!(parse_key_bytes(&text), Some([0xff; 32]), "{text}");
/// }
/// assert_eq!(parse_key_bytes(&"ff".repeat(31)), None);
/// ```
pub fn parse_key_bytes(text: &str) -> Option<[u8; 32]> {
    if let Ok(key) = FromHex::from_hex(text) {
        return Some(key);
    }
    let text = text.replace('-', "+").replace('_', "/");
    STANDARD_PAD_INDIFFERENT.decode(text).ok()?.try_into().ok()
}
