//! Bytes as lower-case hexadecimal text.

/// Writes `bytes` into `text`, which is twice as long.
///
/// ```
/// let mut text = [0; 4];
/// cogni_gateway::base::hex::encode_hex(&[0x0a, 0xff], &mut text);
/// assert_eq!(&text, b"0aff");
/// ```
pub fn encode_hex(bytes: &[u8], text: &mut [u8]) {
    debug_assert_eq!(text.len(), bytes.len() * 2);
    for (pair, byte) in text.chunks_exact_mut(2).zip(bytes) {
        pair.copy_from_slice(&PAIRS[usize::from(*byte)]);
    }
}

/// Reads exactly `N` bytes from digits of either case; `None` for anything else.
///
/// ```
/// use cogni_gateway::base::hex::decode_hex;
/// assert_eq!(decode_hex("0aFF"), Some([0x0a, 0xff]));
/// assert_eq!(decode_hex::<2>("0a"), None);
/// ```
pub fn decode_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = decode_digit(pair[0])? << 4 | decode_digit(pair[1])?;
    }
    Some(bytes)
}

/// The SHA-256 digest of `bytes` as text.
pub fn sha256_hex(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    let mut text = [0; 64];
    encode_hex(digest.as_ref(), &mut text);
    String::from_utf8_lossy(&text).into_owned()
}

fn decode_digit(character: u8) -> Option<u8> {
    char::from(character).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

const HEX_DIGITS: &[u8; 16] = b"0123456789abcdef";

/// The digits of each byte.
static PAIRS: [[u8; 2]; 256] = {
    let mut pairs = [[0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [HEX_DIGITS[byte >> 4], HEX_DIGITS[byte & 15]];
        byte += 1;
    }
    pairs
};
