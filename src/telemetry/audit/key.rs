//! Ed25519 keys, which sign checkpoints, and the check of their signatures.
//!
//! A checkpoint signs the hash of the record before it. That hash covers the whole chain, so one signature covers all
//! earlier records.

use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use hex::FromHex;
use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};

use super::{AuditError, chain::RecordHash};
use crate::base::key_bytes::parse_key_bytes;
use crate::base::regular_file::read_secret_file;
use crate::base::secret::SecretString;

/// A key pair that signs checkpoints and other statements of this machine.
pub struct AuditSigningKey {
    pair: Ed25519KeyPair,
    public: AuditPublicKey,
}

/// A public key, which is displayed as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AuditPublicKey([u8; 32]);

impl AuditSigningKey {
    /// Returns the configured key. Without a seed, it makes a key that exists only in this process.
    pub fn new(seed: Option<&SecretString>) -> Result<Self, AuditError> {
        let seed = match seed {
            Some(seed) => decode_key("signing key", seed.expose_secret())?,
            None => random_seed()?,
        };
        let pair =
            Ed25519KeyPair::from_seed_unchecked(&seed).expect("any 32 bytes are an ed25519 seed");
        let public = pair.public_key().as_ref().try_into().expect("a public key has 32 bytes");
        Ok(Self { pair, public: AuditPublicKey(public) })
    }

    pub fn public_key(&self) -> &AuditPublicKey {
        &self.public
    }

    /// Signs a message. Each kind of message must begin with a prefix of its own, so that a signature is valid for one
    /// kind only.
    pub fn sign_message(&self, text: &[u8]) -> [u8; 64] {
        self.pair.sign(text).as_ref().try_into().expect("an ed25519 signature has 64 bytes")
    }

    /// Signs all records up to the one with this hash. Returns the signature in hexadecimal.
    pub(super) fn sign_checkpoint(&self, head: &RecordHash) -> [u8; 128] {
        let mut text = [0; 128];
        hex::encode_to_slice(self.pair.sign(&checkpoint_message(head)), &mut text)
            .expect("a digit pair for each byte");
        text
    }
}

impl AuditPublicKey {
    /// Parses 32 bytes from 64 hexadecimal digits or from base64.
    pub fn parse_public_key(text: &str) -> Result<Self, AuditError> {
        decode_key("public key", text).map(Self)
    }

    /// Returns true if `signature` was made for `text` with the private half of this key.
    pub fn verify_message(&self, text: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ED25519, self.0).verify(text, signature).is_ok()
    }

    /// Returns true if `signature` (hexadecimal) was made for `head` with the private half of this key.
    pub(super) fn verify_checkpoint(&self, head: &RecordHash, signature: &str) -> bool {
        let key = UnparsedPublicKey::new(&ED25519, self.0);
        <[u8; 64]>::from_hex(signature)
            .is_ok_and(|signature| key.verify(&checkpoint_message(head), &signature).is_ok())
    }
}

/// Returns the seed in a file. Without a file, a new seed is written, readable by its owner only. Two processes that
/// start together use the seed of the first.
///
/// # Errors
/// Returns an error if the file cannot be made or read, or does not hold a seed.
pub fn load_or_create_seed(path: &Path) -> Result<SecretString, AuditError> {
    let failed = |source| AuditError::KeyFile { path: path.to_owned(), source };
    let text = match read_secret_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            write_new_seed(path, &random_seed()?).map_err(failed)?;
            read_secret_file(path)
        }
        read => read,
    };
    let seed = SecretString::new(text.map_err(failed)?.trim());
    AuditSigningKey::new(Some(&seed)).map(|_| seed)
}

/// Writes a seed to a new file. The file gets its name after its content is on disk: a power cut must not leave an
/// incomplete key, or lose a key that has signed something.
fn write_new_seed(path: &Path, seed: &[u8; 32]) -> io::Result<()> {
    let mut text = [b'\n'; 65];
    hex::encode_to_slice(seed, &mut text[..64]).expect("two digits for each byte");
    let folder = path.parent().unwrap_or(Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    // 1. Write the seed under a temporary name, and sync it.
    let fresh = path.with_extension(uuid::Uuid::now_v7().simple().to_string());
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&fresh)?;
    let linked = file.write_all(&text).and_then(|()| file.sync_all());
    // 2. Give the file its name. A link fails if another process was faster, and the seed of that process stays.
    let linked = linked.and_then(|()| fs::hard_link(&fresh, path));
    // 3. Remove the temporary name, and sync the directory.
    fs::remove_file(&fresh)?;
    match linked {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => File::open(folder)?.sync_all(),
    }
}

/// Shows the public key only.
impl fmt::Debug for AuditSigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SigningKey").field(&self.public).finish()
    }
}

impl fmt::Display for AuditPublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for AuditPublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Returns the bytes to sign: `cogni-gateway audit checkpoint v1 ` and the hash as the file has it. The prefix makes
/// the signature useless for any other message that this key may sign.
fn checkpoint_message(head: &RecordHash) -> [u8; CHECKPOINT_DOMAIN.len() + 64] {
    let mut statement = [0; CHECKPOINT_DOMAIN.len() + 64];
    statement[..CHECKPOINT_DOMAIN.len()].copy_from_slice(CHECKPOINT_DOMAIN);
    statement[CHECKPOINT_DOMAIN.len()..].copy_from_slice(head.as_bytes());
    statement
}

fn random_seed() -> Result<[u8; 32], AuditError> {
    let mut seed = [0; 32];
    SystemRandom::new().fill(&mut seed).map_err(|_| AuditError::NoRandomBytes)?;
    Ok(seed)
}

fn decode_key(what: &'static str, text: &str) -> Result<[u8; 32], AuditError> {
    let text = text.trim();
    let bytes = parse_key_bytes(text);
    bytes.ok_or(AuditError::InvalidKey { what, characters: text.chars().count() })
}

/// The name of the key file in a state directory.
pub const KEY_FILE_NAME: &str = "audit.key";

const CHECKPOINT_DOMAIN: &[u8] = b"cogni-gateway audit checkpoint v1 ";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_reads_the_same_from_hexadecimal_and_both_base64_alphabets() {
        let key = AuditPublicKey([0xfb; 32]);
        for text in [
            "fbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfb",
            "+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/s=",
            "-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_s\n",
        ] {
            assert_eq!(AuditPublicKey::parse_public_key(text).unwrap(), key, "{text}");
        }
    }

    #[test]
    fn a_wrong_key_is_described_and_not_repeated() {
        let error = AuditPublicKey::parse_public_key("hunter2").unwrap_err();
        insta::assert_snapshot!(error, @"the public key has 7 characters; it must be 32 bytes as 64 hexadecimal digits or as base64 (`openssl rand -hex 32` makes a signing key)");
    }
}
