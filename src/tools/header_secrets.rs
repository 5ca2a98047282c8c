//! The secrets in the value of a header. A server may repeat each of them without the rest of the value.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use crate::base::secret::SecretString;

/// Returns the secrets in a header's value: each word behind the scheme, without its `name=`, and the text that such a
/// word is the Base64 of, such as `user:password`. Shorter words are left out, unless all are short.
pub(super) fn list_header_secrets(value: &SecretString) -> Vec<SecretString> {
    let text = value.expose_secret().trim();
    let words = match text.split_once([' ', '\t']) {
        Some((scheme, rest)) if is_scheme(scheme) => rest,
        _ => text,
    };
    let words = words.split([' ', '\t', ';', ',']).map(|word| {
        // The padding of Base64 is no `name=`.
        let named = word.split_once('=').map(|(_, value)| value);
        let named = named.filter(|value| value.bytes().any(|byte| byte != b'='));
        named.unwrap_or(word).trim_matches('"')
    });
    let long = words.filter(|word| word.len() >= MIN_WORD_BYTES);
    let mut secrets: Vec<_> = long.flat_map(list_word_secrets).collect();
    if secrets.is_empty() {
        secrets.push(SecretString::new(text));
    }
    secrets
}

/// Returns a word, and what it is the Base64 of: the whole text, and its part behind a colon.
fn list_word_secrets(word: &str) -> Vec<SecretString> {
    let mut secrets = vec![SecretString::new(word)];
    let decoded = LENIENT_BASE64.decode(word.replace('-', "+").replace('_', "/"));
    let decoded = decoded.ok().and_then(|bytes| String::from_utf8(bytes).ok());
    if let Some(decoded) = decoded.filter(|text| !text.contains(char::is_control)) {
        if let Some((_, password)) = decoded.split_once(':') {
            secrets.push(SecretString::new(password));
        }
        secrets.push(SecretString::new(decoded));
    }
    secrets
}

/// Returns true if a word may be the name of a scheme, such as `Bearer`.
fn is_scheme(word: &str) -> bool {
    word.len() <= MAX_SCHEME_BYTES
        && word.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'-')
}

/// Base64 as servers read it: with or without padding.
const LENIENT_BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The shortest word that is a secret of its own, in bytes. Shorter ones, such as the `dark` of `theme=dark`, stand in
/// many texts by chance.
const MIN_WORD_BYTES: usize = 8;

/// The longest name of a scheme, in bytes. Our choice: the longest known one has 14.
const MAX_SCHEME_BYTES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_secrets_of_a_header_are_told_from_what_is_around_them() {
        let values: [(&str, &[&str]); 9] = [
            ("Bearer ghp_0123456789 ", &["ghp_0123456789"]),
            ("ghp_0123456789==", &["ghp_0123456789=="]),
            ("session=SECRET0123456789; theme=dark", &["SECRET0123456789"]),
            ("Token token=\"SECRET0123456789\", n=1", &["SECRET0123456789"]),
            ("hunter2", &["hunter2"]),
            ("Key hunter2", &["Key hunter2"]),
            ("k3y-0123456789 other-0123456789", &["k3y-0123456789", "other-0123456789"]),
            ("basic dTpodW50ZXIy", &["dTpodW50ZXIy", "hunter2", "u:hunter2"]),
            ("x=dTpodW50ZXIyMg==", &["dTpodW50ZXIyMg==", "hunter22", "u:hunter22"]),
        ];
        for (value, expected) in values {
            let secrets = list_header_secrets(&SecretString::new(value));
            let secrets: Vec<_> = secrets.iter().map(SecretString::expose_secret).collect();
            assert_eq!(secrets, expected, "{value}");
        }
    }
}
