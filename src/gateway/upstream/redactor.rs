//! Masks the gateway's credential in a body that passes frame by frame, and finds the credential in a header.

use bytes::{Bytes, BytesMut};
use memchr::memmem;

use crate::base::hex;
use crate::base::secret::SecretString;

/// A filter that replaces each byte of the secrets by an asterisk, so that the announced length of the body stays true.
#[derive(Clone, Debug)]
pub struct SecretRedactor {
    secrets: Vec<SecretString>,
    /// The end of the body so far, if a secret may begin there. These bytes wait for the next frame.
    tail: BytesMut,
}

impl SecretRedactor {
    /// Creates a redactor for a key and for the key's digest, by which LiteLLM names keys.
    pub(super) fn new(key: &SecretString) -> Self {
        let secrets = if key.expose_secret().len() < MIN_SECRET_BYTES {
            vec![]
        } else {
            vec![key.clone(), SecretString::new(hex::sha256_hex(key.expose_secret().as_bytes()))]
        };
        Self { secrets, tail: BytesMut::new() }
    }

    /// Returns true if a text contains a secret.
    pub(super) fn contains_secret(&self, text: &[u8]) -> bool {
        self.secrets
            .iter()
            .map(|secret| secret.expose_secret().as_bytes())
            .any(|secret| text.len() >= secret.len() && memmem::find(text, secret).is_some())
    }

    /// Returns the part of the body so far that is free of secrets and may pass.
    pub fn redact_frame(&mut self, frame: &[u8]) -> Bytes {
        // The bytes that were held back come first, so a secret over two frames is found as a whole.
        self.tail.extend_from_slice(frame);
        for secret in &self.secrets {
            let secret = secret.expose_secret().as_bytes();
            // The positions are collected first, because the search borrows the bytes that are overwritten next.
            let found: Vec<_> = memmem::find_iter(&self.tail, secret).collect();
            for at in found {
                self.tail[at..at + secret.len()].fill(b'*');
            }
        }
        // The end may be the beginning of one secret or the other. The longer one decides how much is held back.
        let begun = self
            .secrets
            .iter()
            .map(|secret| partial_secret_length(&self.tail, secret.expose_secret().as_bytes()));
        let kept = begun.max().unwrap_or_default();
        self.tail.split_to(self.tail.len() - kept).freeze()
    }

    /// Returns the bytes that were held back. The body has ended, so they cannot become a secret any more.
    pub fn redact_rest(self) -> Bytes {
        self.tail.freeze()
    }
}

/// Returns the number of bytes at the end that may be the beginning of a secret.
fn partial_secret_length(bytes: &[u8], secret: &[u8]) -> usize {
    // A whole secret would have been masked before, so one byte less than a secret is the longest candidate.
    let start = bytes.len().saturating_sub(secret.len() - 1);
    let tail = &bytes[start..];
    let candidates = memchr::memchr_iter(secret[0], tail);
    // The first match is the longest one.
    candidates.map(|at| &tail[at..]).find(|rest| secret.starts_with(rest)).map_or(0, <[u8]>::len)
}

/// The shortest key that is masked, in bytes. A shorter key is no secret and would occur in any text.
const MIN_SECRET_BYTES: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_masked_however_the_body_is_cut() {
        let key = SecretString::new("sk-abcabd");
        let digest = hex::sha256_hex(b"sk-abcabd");
        let body = format!("x sk-abcsk-abcabd and sk-abca {digest}; sk-ab");
        let masked = format!("x sk-abc********* and sk-abca {}; sk-ab", "*".repeat(64));
        for size in 1..body.len() {
            let mut redactor = SecretRedactor::new(&key);
            let mut passed = vec![];
            for frame in body.as_bytes().chunks(size) {
                passed.extend_from_slice(&redactor.redact_frame(frame));
            }
            passed.extend_from_slice(&redactor.redact_rest());
            assert_eq!(String::from_utf8(passed).unwrap(), masked, "frames of {size}");
        }
    }
}
