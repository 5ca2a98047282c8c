//! The search for credentials in work that is to be pushed.

use std::collections::BTreeMap;

use regex::bytes::{Regex, RegexSet};
use serde::{Deserialize, Serialize};

use crate::base::digest::sha256_hex;
use crate::base::secret::SecretString;

/// A kind of credential to search for.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CredentialKind {
    pub name: String,
    /// A regular expression that matches at most some hundred bytes.
    pub pattern: String,
}

/// A scanner for credentials of all kinds.
#[derive(Debug)]
pub struct SecretScanner {
    any: RegexSet,
    each: Vec<Regex>,
    names: Vec<String>,
    /// Credentials of this host, which no agent was given.
    known: Vec<SecretString>,
    /// The number of bytes of a piece that are kept for the next one: the length of the longest credential.
    kept: usize,
}

/// The state of scanning one text, piece by piece.
#[derive(Debug, Default)]
pub struct ScanWindow {
    /// The end of the text so far, in which a credential may have begun.
    window: Vec<u8>,
    /// A copy of the window without NULs, made at the first NUL. Latin letters in UTF-16 have one NUL each.
    narrow: Option<Vec<u8>>,
}

/// The found credentials: the kind of each, by the credential's hash.
pub type FoundSecrets = BTreeMap<String, String>;

impl SecretScanner {
    /// Compiles the patterns. Registered credentials that are shorter than [`MIN_SECRET_BYTES`] are ignored.
    ///
    /// # Errors
    /// Returns the error of the first pattern that is not a regular expression, or that is too large.
    pub fn new(kinds: &[CredentialKind], known: &[SecretString]) -> Result<Self, regex::Error> {
        let patterns = || kinds.iter().map(|kind| kind.pattern.as_str());
        let known: Vec<_> = known
            .iter()
            .filter(|known| known.expose_secret().len() >= MIN_SECRET_BYTES)
            .cloned()
            .collect();
        // A registered private key may be longer than any credential that a pattern finds.
        let longest =
            known.iter().map(|known| known.expose_secret().len()).max().unwrap_or_default();
        Ok(Self {
            any: RegexSet::new(patterns())?,
            each: patterns().map(Regex::new).collect::<Result<_, _>>()?,
            names: kinds.iter().map(|kind| kind.name.clone()).collect(),
            known,
            kept: longest.max(MAX_CREDENTIAL_BYTES),
        })
    }

    /// Scans the next piece of a text.
    pub fn scan(&self, text: &mut ScanWindow, piece: &[u8], found: &mut FoundSecrets) {
        // The first NUL: from here on, a second window is scanned that has no NULs.
        if text.narrow.is_none() && memchr::memchr(0, piece).is_some() {
            text.narrow = Some(text.window.clone());
        }
        if let Some(narrow) = &mut text.narrow {
            narrow.extend(piece.iter().filter(|byte| **byte != 0));
            self.scan_window(narrow, found);
        }
        text.window.extend_from_slice(piece);
        self.scan_window(&mut text.window, found);
    }

    /// Scans a window, and keeps only its end.
    fn scan_window(&self, window: &mut Vec<u8>, found: &mut FoundSecrets) {
        // One pass finds out which patterns match at all. Only those are then searched one by one.
        for at in &self.any.matches(window) {
            let matches = self.each[at].find_iter(window).map(|found| found.as_bytes());
            for credential in matches.filter(|credential| !is_example(credential)) {
                found.insert(sha256_hex(credential), self.names[at].clone());
            }
        }
        for known in &self.known {
            if memchr::memmem::find(window, known.expose_secret().as_bytes()).is_some() {
                found.insert(
                    sha256_hex(known.expose_secret().as_bytes()),
                    HOST_SECRET_KIND.to_owned(),
                );
            }
        }
        // A credential that ends in the next piece is still in the window as a whole.
        let done = window.len().saturating_sub(self.kept);
        window.drain(..done);
    }
}

/// Returns true if a match is an example. Documentation has many: well-known ones, and texts like `xxxx`. Text before
/// or behind a real credential cannot hide it, because the number of different characters only grows.
fn is_example(credential: &[u8]) -> bool {
    let mut letters = credential.to_vec();
    letters.sort_unstable();
    letters.dedup();
    // Fewer different characters than random text of this length would have. A private key's frame is no example.
    let dull = if credential.len() < 32 { 8 } else { 12 };
    let is_dull = letters.len() <= dull && !credential.starts_with(b"-----");
    is_dull || EXAMPLE_CREDENTIALS.iter().any(|example| credential == example.as_bytes())
}

/// Examples in the documentation of the issuer of real credentials.
const EXAMPLE_CREDENTIALS: [&str; 3] =
    ["AKIAIOSFODNN7EXAMPLE", "AKIAI44QH8DHBEXAMPLE", "ASIAIOSFODNN7EXAMPLE"];

/// The kind of this host's own credentials.
const HOST_SECRET_KIND: &str = "this host's own";

/// The least bytes of a registered credential. A shorter one would be found in ordinary text.
pub const MIN_SECRET_BYTES: usize = 12;

/// The longest credential in bytes that its pattern finds across two pieces.
const MAX_CREDENTIAL_BYTES: usize = 512;
