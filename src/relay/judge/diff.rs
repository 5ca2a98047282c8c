//! What git prints of a diff, `--raw -z`, with merges combined.

use crate::relay::Sha;

/// One path that is not what it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub path: Vec<u8>,
    /// One for each parent.
    pub before: Vec<Entry>,
    pub after: Entry,
}

/// What stands at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// 0 where there is nothing.
    pub mode: u32,
    pub name: Sha,
}

/// It is not what git prints.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is no raw diff")]
pub struct Senseless;

/// What git writes of a file, of a program, of a link and of another repository's commit.
pub const FILE: u32 = 0o100_644;
pub const PROGRAM: u32 = 0o100_755;
pub const LINK: u32 = 0o120_000;
pub const SUBMODULE: u32 = 0o160_000;

impl Entry {
    pub fn is_nothing(self) -> bool {
        self.mode == 0
    }

    /// Whether there is content to read.
    pub fn is_blob(self) -> bool {
        !self.is_nothing() && self.mode != SUBMODULE
    }
}

impl Change {
    pub fn is_new(&self) -> bool {
        self.before.iter().all(|entry| entry.is_nothing())
    }
}

/// Reads any number of changes.
///
/// A change is one colon for each parent, the modes and the names of the parents' entries and the own one, a letter
/// for each parent, a NUL, the path and a NUL.
pub fn parse(mut bytes: &[u8]) -> Result<Vec<Change>, Senseless> {
    let mut changes = vec![];
    while !bytes.is_empty() {
        let (head, rest) = field(bytes)?;
        let (path, rest) = field(rest)?;
        changes.push(change(head, path)?);
        bytes = rest;
    }
    Ok(changes)
}

fn change(head: &[u8], path: &[u8]) -> Result<Change, Senseless> {
    let parents = head.iter().take_while(|byte| **byte == b':').count();
    let words: Vec<_> = head[parents..].split(|byte| *byte == b' ').collect();
    let entries = parents + 1;
    if parents == 0 || path.is_empty() || words.len() != 2 * entries + 1 {
        return Err(Senseless);
    }
    let letters = words[2 * entries];
    if letters.len() != parents || !letters.iter().all(|letter| b"ADMT".contains(letter)) {
        return Err(Senseless);
    }
    let entry =
        |at: usize| Some(Entry { mode: mode(words[at])?, name: Sha::parse(words[entries + at])? });
    let mut before = (0..entries).map(entry).collect::<Option<Vec<_>>>().ok_or(Senseless)?;
    let after = before.pop().ok_or(Senseless)?;
    Ok(Change { path: path.to_vec(), before, after })
}

/// Six octal digits, of the few modes there are.
fn mode(word: &[u8]) -> Option<u32> {
    let text = str::from_utf8(word).ok().filter(|text| text.len() == 6)?;
    let mode = u32::from_str_radix(text, 8).ok()?;
    [0, FILE, PROGRAM, LINK, SUBMODULE].contains(&mode).then_some(mode)
}

fn field(bytes: &[u8]) -> Result<(&[u8], &[u8]), Senseless> {
    let end = memchr::memchr(0, bytes).ok_or(Senseless)?;
    Ok((&bytes[..end], &bytes[end + 1..]))
}
