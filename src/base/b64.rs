//! Base64 (RFC 4648): one spelling for what we write, every usual one for what people type.

/// Writes `bytes` in the URL alphabet, without padding, at the end of `text`.
///
/// ```
/// let mut text = String::new();
/// cogni_gateway::base::b64::encode_base64(&[0xfb, 0xff], &mut text);
/// assert_eq!(text, "-_8");
/// ```
pub fn encode_base64(bytes: &[u8], text: &mut String) {
    for group in bytes.chunks(3) {
        let [first, second, third] = [0, 1, 2].map(|at| group.get(at).copied().unwrap_or_default());
        let bits = u32::from_be_bytes([0, first, second, third]);
        for digit in 0..=group.len() {
            let sextet = bits >> (18 - 6 * digit) & 0x3f;
            text.push(char::from(BASE64_DIGITS[sextet as usize]));
        }
    }
}

/// Reads what [`encode_base64`] wrote into `bytes` and says how much it was.
///
/// `None` for anything else: padding, the other alphabet, more than there is room for, and a last digit
/// with bits that mean nothing, which would be a second spelling of the same bytes.
///
/// ```
/// # use cogni_gateway::base::b64::decode_base64;
/// let mut bytes = [0; 2];
/// assert_eq!((decode_base64("-_8", &mut bytes), bytes), (Some(2), [0xfb, 0xff]));
/// for other in ["-_8=", "+/8", "-_9", "-_8A", "-_8AA", "-"] {
///     assert_eq!(decode_base64(other, &mut bytes), None, "{other}");
/// }
/// ```
pub fn decode_base64(text: &str, bytes: &mut [u8]) -> Option<usize> {
    let mut filled = 0;
    let (mut bits, mut count) = (0_u32, 0);
    for digit in text.bytes() {
        bits = (bits << 6 | decode_digit(digit)?) & 0xffff;
        count += 6;
        if count >= 8 {
            count -= 8;
            *bytes.get_mut(filled)? = u8::try_from(bits >> count & 0xff).expect("masked to a byte");
            filled += 1;
        }
    }
    // Six bits left are a digit too many; set ones would be lost.
    (count < 6 && bits & ((1 << count) - 1) == 0).then_some(filled)
}

/// Reads exactly `N` bytes as people write them: in either alphabet, padded or not.
pub fn decode_any_base64<const N: usize>(text: &str) -> Option<[u8; N]> {
    let text = if text.len().is_multiple_of(4) { text.trim_end_matches('=') } else { text };
    let mut bytes = [0; N];
    let length = decode_base64(&text.replace('+', "-").replace('/', "_"), &mut bytes)?;
    (length == N).then_some(bytes)
}

fn decode_digit(digit: u8) -> Option<u32> {
    let value = match digit {
        b'A'..=b'Z' => digit - b'A',
        b'a'..=b'z' => digit - b'a' + 26,
        b'0'..=b'9' => digit - b'0' + 52,
        b'-' => 62,
        b'_' => 63,
        _ => return None,
    };
    Some(u32::from(value))
}

const BASE64_DIGITS: &[u8; 64] =
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
