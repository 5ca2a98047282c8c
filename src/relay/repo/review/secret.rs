//! Credentials in what is to be pushed.

use std::collections::BTreeMap;

use regex::bytes::{Regex, RegexSet};
use serde::{Deserialize, Serialize};

use crate::base::hex;
use crate::base::secret::SecretString;

/// One kind of credential.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CredentialKind {
    pub name: String,
    /// A regular expression that matches no more than some hundred bytes.
    pub pattern: String,
}

/// Finds credentials of all kinds.
#[derive(Debug)]
pub struct SecretScanner {
    any: RegexSet,
    each: Vec<Regex>,
    names: Vec<String>,
    /// Those that the host itself holds; the agent was never given one.
    known: Vec<SecretString>,
    /// What is kept of a piece until the next one: the longest that may be in both.
    kept: usize,
}

/// A text that is being looked at, piece by piece.
#[derive(Debug, Default)]
pub struct ScanWindow {
    /// The end of what was looked at, where a credential may have begun.
    window: Vec<u8>,
    /// The same without NULs, from the first of them on: Latin letters in UTF-16 have one each.
    narrow: Option<Vec<u8>>,
}

/// What was found: the kind of each, by a hash of what it was.
pub type FoundSecrets = BTreeMap<String, String>;

impl SecretScanner {
    /// # Errors
    /// The first pattern that is none.
    pub fn new(kinds: &[CredentialKind], known: &[SecretString]) -> Result<Self, regex::Error> {
        let patterns = || kinds.iter().map(|kind| kind.pattern.as_str());
        let known: Vec<_> = known
            .iter()
            .filter(|known| known.expose_secret().len() >= MIN_SECRET_BYTES)
            .cloned()
            .collect();
        // A private key is longer than what has a pattern.
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

    /// Looks at the next piece of a text.
    pub fn scan(&self, text: &mut ScanWindow, piece: &[u8], found: &mut FoundSecrets) {
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

    /// Looks at a window, and leaves its end.
    fn scan_window(&self, window: &mut Vec<u8>, found: &mut FoundSecrets) {
        for at in &self.any.matches(window) {
            let matches = self.each[at].find_iter(window).map(|found| found.as_bytes());
            for credential in matches.filter(|credential| !is_example(credential)) {
                found.insert(hex::sha256_hex(credential), self.names[at].clone());
            }
        }
        for known in &self.known {
            if memchr::memmem::find(window, known.expose_secret().as_bytes()).is_some() {
                found.insert(
                    hex::sha256_hex(known.expose_secret().as_bytes()),
                    HOST_SECRET_KIND.to_owned(),
                );
            }
        }
        let done = window.len().saturating_sub(self.kept);
        window.drain(..done);
    }
}

/// Documentation is full of these: well-known ones, and `xxxx`. How many letters there are does not grow less by what
/// is put before a real one, or behind it.
fn is_example(credential: &[u8]) -> bool {
    let mut letters = credential.to_vec();
    letters.sort_unstable();
    letters.dedup();
    let dull = if credential.len() < 32 { 8 } else { 12 };
    let is_dull = letters.len() <= dull && !credential.starts_with(b"-----");
    is_dull || EXAMPLE_CREDENTIALS.iter().any(|example| credential == example.as_bytes())
}

/// Those that stand in the documentation of whoever gives out real ones.
const EXAMPLE_CREDENTIALS: [&str; 3] =
    ["AKIAIOSFODNN7EXAMPLE", "AKIAI44QH8DHBEXAMPLE", "ASIAIOSFODNN7EXAMPLE"];

const HOST_SECRET_KIND: &str = "this host's own";

/// A shorter one would be found everywhere.
pub const MIN_SECRET_BYTES: usize = 12;

/// The longest credential that is found by its pattern where two pieces meet.
const MAX_CREDENTIAL_BYTES: usize = 512;
