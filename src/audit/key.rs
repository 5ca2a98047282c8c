//! Ed25519 keys: who vouches for a log, and how that is checked.
//!
//! A checkpoint signs the hash of the record before it. That hash commits to the whole chain, so
//! one signature vouches for all that stands before it.

use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};

use super::{Error, chain::Hash};
use crate::base::{b64, hex, secret::Secret};

/// A key pair that signs checkpoints, and what else this machine vouches for.
pub struct SigningKey {
    pair: Ed25519KeyPair,
    public: PublicKey,
}

/// A public key; prints as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PublicKey([u8; 32]);

impl SigningKey {
    /// The configured key, else one that lives as long as this process.
    pub fn new(seed: Option<&Secret>) -> Result<Self, Error> {
        let seed = match seed {
            Some(seed) => decode("signing key", seed.expose())?,
            None => random()?,
        };
        let pair =
            Ed25519KeyPair::from_seed_unchecked(&seed).expect("any 32 bytes are an ed25519 seed");
        let public = pair.public_key().as_ref().try_into().expect("a public key has 32 bytes");
        Ok(Self { pair, public: PublicKey(public) })
    }

    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// The signature of a text that begins as no other kind of text does that this key signs.
    pub fn sign_text(&self, text: &[u8]) -> [u8; 64] {
        self.pair.sign(text).as_ref().try_into().expect("an ed25519 signature has 64 bytes")
    }

    /// The signature of everything up to the record with this hash, in hexadecimal.
    pub(super) fn sign(&self, head: &Hash) -> [u8; 128] {
        let mut text = [0; 128];
        hex::encode(self.pair.sign(&statement(head)).as_ref(), &mut text);
        text
    }
}

impl PublicKey {
    /// Reads 32 bytes written as 64 hexadecimal digits or as base64.
    pub fn parse(text: &str) -> Result<Self, Error> {
        decode("public key", text).map(Self)
    }

    /// Whether `signature` was made with this key's other half for `text`.
    pub fn verifies_text(&self, text: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ED25519, self.0).verify(text, signature).is_ok()
    }

    /// Whether `signature` (hexadecimal) was made with this key's other half for `head`.
    pub(super) fn verifies(&self, head: &Hash, signature: &str) -> bool {
        let key = UnparsedPublicKey::new(&ED25519, self.0);
        hex::decode::<64>(signature)
            .is_some_and(|signature| key.verify(&statement(head), &signature).is_ok())
    }
}

/// The seed in a file, which is made with one, for its owner alone, where there is none. Whoever is first has made it.
///
/// # Errors
/// The file cannot be made or read, or holds something else.
pub fn kept_seed(path: &Path) -> Result<Secret, Error> {
    let failed = |source| Error::KeyFile { path: path.to_owned(), source };
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make_seed(path, &random()?).map_err(failed)?;
            fs::read_to_string(path)
        }
        read => read,
    };
    let seed = Secret::new(text.map_err(failed)?.trim());
    SigningKey::new(Some(&seed)).map(|_| seed)
}

/// It gets its name when it is whole, and on the disk: what is signed with a key that a power cut takes is worth little.
fn make_seed(path: &Path, seed: &[u8; 32]) -> io::Result<()> {
    let mut text = [b'\n'; 65];
    hex::encode(seed, &mut text[..64]);
    let folder = path.parent().unwrap_or(Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let fresh = path.with_extension(uuid::Uuid::now_v7().simple().to_string());
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&fresh)?;
    let linked = file.write_all(&text).and_then(|()| file.sync_all());
    let linked = linked.and_then(|()| fs::hard_link(&fresh, path));
    fs::remove_file(&fresh)?;
    match linked {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => File::open(folder)?.sync_all(),
    }
}

/// Shows its public half.
impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SigningKey").field(&self.public).finish()
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = [0; 64];
        hex::encode(&self.0, &mut text);
        f.write_str(str::from_utf8(&text).expect("digits are ASCII"))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What is signed: `cogni-gateway audit checkpoint v1 ` and the hash as it stands in the file. The
/// words make the signature worthless for anything else this key may sign.
fn statement(head: &Hash) -> [u8; DOMAIN.len() + 64] {
    let mut statement = [0; DOMAIN.len() + 64];
    statement[..DOMAIN.len()].copy_from_slice(DOMAIN);
    statement[DOMAIN.len()..].copy_from_slice(head.as_bytes());
    statement
}

fn random() -> Result<[u8; 32], Error> {
    let mut seed = [0; 32];
    SystemRandom::new().fill(&mut seed).map_err(|_| Error::Random)?;
    Ok(seed)
}

fn decode(what: &'static str, text: &str) -> Result<[u8; 32], Error> {
    let text = text.trim();
    let bytes = hex::decode(text).or_else(|| b64::decode_any(text));
    bytes.ok_or(Error::Key { what, characters: text.chars().count() })
}

/// What the file is called in a state directory.
pub const KEY_FILE: &str = "audit.key";

const DOMAIN: &[u8] = b"cogni-gateway audit checkpoint v1 ";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_reads_the_same_from_hexadecimal_and_both_base64_alphabets() {
        let key = PublicKey([0xfb; 32]);
        for text in [
            "fbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfbfb",
            "+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/s=",
            "-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_s\n",
        ] {
            assert_eq!(PublicKey::parse(text).unwrap(), key, "{text}");
        }
    }

    #[test]
    fn a_wrong_key_is_described_and_not_repeated() {
        let error = PublicKey::parse("hunter2").unwrap_err();
        insta::assert_snapshot!(error, @"the public key has 7 characters; it must be 32 bytes as 64 hexadecimal digits or as base64 (`openssl rand -hex 32` makes a signing key)");
    }
}
