//! Estimates the tokens of audio, from the head of a WAV file. Other formats do not bound their own
//! length.
//!
//! An hour of compressed silence takes 30 KB, so audio in any other format counts as an hour and
//! three quarters. An uncompressed WAV file states its bytes per second, and the length of its data
//! gives the duration.

use super::Base64Decoder;

/// Returns the tokens of the audio in `bytes`. At most `most` bytes can follow the head. Returns
/// `None` if the duration is not bounded.
pub(super) fn tokens<I: Iterator<Item = u8>>(
    bytes: &mut Base64Decoder<I>,
    most: u64,
) -> Option<u64> {
    let rate = bytes_a_second(bytes)?;
    // If the allowance or the base64 ends early, the rest of the body bounds the length.
    // The data behind the head is counted, not stored.
    let read = bytes.by_ref().map(|_| 1_u64).sum();
    let length = if bytes.is_complete() { read } else { most };
    Some((length.saturating_mul(TOKENS_A_SECOND).div_ceil(rate)).clamp(1, UNREAD_TOKENS))
}

/// Returns the bytes per second, if the head is in the usual form and does not contradict itself.
fn bytes_a_second(bytes: &mut impl Iterator<Item = u8>) -> Option<u64> {
    let mut head = [0; HEAD_BYTES];
    for byte in &mut head {
        *byte = bytes.next()?;
    }
    let is_wave = head.starts_with(b"RIFF") && head[8..16] == *b"WAVEfmt ";
    let two = |at: usize| u64::from(u16::from_le_bytes([head[at], head[at + 1]]));
    let four = |at: usize| two(at) + (two(at + 2) << 16);
    let (format, channels, samples, stated_rate, bits) =
        (two(20), two(22), four(24), four(28), two(34));
    // Only uncompressed formats have a constant rate. The stated rate must equal samples, channels
    // and bits multiplied.
    let is_plain = matches!(format, PCM | FLOAT);
    let rate = samples.saturating_mul(channels).saturating_mul(bits / 8);
    // A false rate would make the audio look short, so the rate is capped at `MAX_RATE`.
    (is_wave && is_plain && rate > 0 && rate == stated_rate).then_some(rate.min(MAX_RATE))
}

/// The length of a WAV head, up to and including the bits per sample, in bytes.
const HEAD_BYTES: usize = 36;

const PCM: u64 = 1;
const FLOAT: u64 = 3;

/// The maximum rate in bytes per second: 48,000 samples of 16 bits in two channels.
const MAX_RATE: u64 = 192_000;

/// The tokens per second of audio that Gemini charges. OpenAI charges 10.
const TOKENS_A_SECOND: u64 = 32;

/// The tokens of audio whose length is unknown: an hour and three quarters.
pub(super) const UNREAD_TOKENS: u64 = 200_000;

#[cfg(test)]
mod tests {
    use super::tokens;
    use crate::base::rope::ByteRope;
    use crate::llm::request::media::base64::decode_string;
    use base64::prelude::*;

    fn wav(format: u16, channels: u16, samples: u32, told: u32, seconds: u32) -> Vec<u8> {
        let block = channels * 2;
        let mut head =
            [b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0".as_slice(), &format.to_le_bytes()].concat();
        head.extend(channels.to_le_bytes());
        head.extend(samples.to_le_bytes());
        head.extend(told.to_le_bytes());
        head.extend(block.to_le_bytes());
        head.extend(16_u16.to_le_bytes());
        head.resize(head.len() + (samples * u32::from(block) * seconds) as usize, 0);
        head
    }

    fn of(wav: &[u8], limit: usize) -> Option<u64> {
        let mut text = String::new();
        BASE64_URL_SAFE_NO_PAD.encode_string(wav, &mut text);
        let text = format!("{}\"", text.replace('-', "+").replace('_', "/"));
        let length = text.len() as u64;
        let rope: ByteRope = [text.into_bytes().into()].into_iter().collect();
        tokens(&mut decode_string(&rope, 0, limit), length)
    }

    /// G9: the bytes of a WAV give its length; a contradicting head counts as unreadable.
    #[test]
    fn a_wave_is_as_long_as_its_bytes() {
        let all = usize::MAX;
        assert_eq!(of(&wav(1, 1, 8000, 16_000, 10), all), Some(320));
        assert_eq!(of(&wav(1, 2, 44_100, 176_400, 3), all), Some(96));
        // A WAV that is not read completely counts with the rest of the body.
        assert!(of(&wav(1, 1, 8000, 16_000, 10), 1000).is_some_and(|tokens| tokens >= 320));
        // A rate above `MAX_RATE` is capped.
        let fast = of(&wav(1, 2, 192_000, 768_000, 1), all);
        assert_eq!(fast, Some(128));
        for (format, channels, samples, told) in [
            (1, 1, 8000, 4_000_000_000),
            (1, 1, 8000, 1),
            (1, 0, 8000, 0),
            (2, 1, 8000, 16_000),
            (0x31, 1, 8000, 16_000),
        ] {
            assert_eq!(of(&wav(format, channels, samples, told, 1), all), None);
        }
        for odd in [&b""[..], b"fLaC", b"RIFF\0\0\0\0AVI fmt "] {
            assert_eq!(of(odd, all), None);
        }
        assert_eq!(of(&wav(1, 1, 8000, 16_000, 1)[..30], all), None);
    }
}
