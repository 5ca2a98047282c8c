//! Credentials in what is to be pushed.

use std::collections::BTreeMap;

use regex::bytes::{Regex, RegexSet};
use serde::{Deserialize, Serialize};

use crate::base::hex;
use crate::base::secret::Secret;

/// One kind of credential.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Kind {
    pub name: String,
    /// A regular expression that matches no more than some hundred bytes.
    pub pattern: String,
}

/// Finds credentials of all kinds.
#[derive(Debug)]
pub struct Scanner {
    any: RegexSet,
    each: Vec<Regex>,
    names: Vec<String>,
    /// Those that the host itself holds; the agent was never given one.
    known: Vec<Secret>,
}

/// A text that is being looked at, piece by piece.
#[derive(Debug, Default)]
pub struct Text {
    /// The end of what was looked at, where a credential may have begun.
    window: Vec<u8>,
}

/// What was found: the kind of each, by a hash of what it was.
pub type Found = BTreeMap<String, String>;

impl Scanner {
    /// # Errors
    /// The first pattern that is none.
    pub fn new(kinds: &[Kind], known: &[Secret]) -> Result<Self, regex::Error> {
        let patterns = || kinds.iter().map(|kind| kind.pattern.as_str());
        Ok(Self {
            any: RegexSet::new(patterns())?,
            each: patterns().map(Regex::new).collect::<Result<_, _>>()?,
            names: kinds.iter().map(|kind| kind.name.clone()).collect(),
            known: known.iter().filter(|known| known.expose().len() >= SHORTEST).cloned().collect(),
        })
    }

    /// Looks at the next piece of a text.
    pub fn scan(&self, text: &mut Text, piece: &[u8], found: &mut Found) {
        text.window.extend_from_slice(piece);
        for at in &self.any.matches(&text.window) {
            let matches = self.each[at].find_iter(&text.window).map(|found| found.as_bytes());
            for credential in matches.filter(|credential| !is_example(credential)) {
                found.insert(hex::sha256(credential), self.names[at].clone());
            }
        }
        for known in &self.known {
            if memchr::memmem::find(&text.window, known.expose().as_bytes()).is_some() {
                found.insert(hex::sha256(known.expose().as_bytes()), KNOWN.to_owned());
            }
        }
        let done = text.window.len().saturating_sub(LONGEST);
        text.window.drain(..done);
    }
}

/// Documentation is full of these.
fn is_example(credential: &[u8]) -> bool {
    let upper = credential.to_ascii_uppercase();
    let end = &upper[upper.len().saturating_sub(16)..];
    let mut letters = end.to_vec();
    letters.sort_unstable();
    letters.dedup();
    let is_dull = letters.len() <= 4 && !credential.starts_with(b"-----");
    is_dull || memchr::memmem::find(&upper, b"EXAMPLE").is_some()
}

const KNOWN: &str = "this host's own";

/// A shorter one would be found everywhere.
const SHORTEST: usize = 12;

/// The longest credential that is found where two pieces meet.
const LONGEST: usize = 512;
