//! A parser for git's raw diff (`--raw -z`), with combined diffs of merges.

use crate::relay::repo::ObjectId;

/// A path that has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathChange {
    pub path: Vec<u8>,
    /// The path's entry in each parent.
    pub before: Vec<TreeEntry>,
    pub after: TreeEntry,
}

/// The entry of a tree at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeEntry {
    /// The mode, or 0 if there is no entry.
    pub mode: u32,
    pub name: ObjectId,
}

/// An error: the text is not in git's form.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is no raw diff")]
pub struct DiffFormatError;

/// The modes that git writes for a file, a program, a link and another repository's commit.
pub const MODE_FILE: u32 = 0o100_644;
pub const MODE_EXECUTABLE: u32 = 0o100_755;
pub const MODE_SYMLINK: u32 = 0o120_000;
pub const MODE_SUBMODULE: u32 = 0o160_000;

impl TreeEntry {
    pub fn is_absent(self) -> bool {
        self.mode == 0
    }

    /// Returns true if the entry has content to read.
    pub fn is_blob(self) -> bool {
        !self.is_absent() && self.mode != MODE_SUBMODULE
    }
}

impl PathChange {
    pub fn is_new(&self) -> bool {
        self.before.iter().all(|entry| entry.is_absent())
    }
}

/// Parses any number of changes.
///
/// A change consists of one colon for each parent, the modes and the IDs of the parents' entries and of the new entry,
/// a letter for each parent, a NUL, the path and a NUL.
pub fn parse_raw_diff(mut bytes: &[u8]) -> Result<Vec<PathChange>, DiffFormatError> {
    let mut changes = vec![];
    while !bytes.is_empty() {
        let (head, rest) = split_field(bytes)?;
        let (path, rest) = split_field(rest)?;
        changes.push(parse_change(head, path)?);
        bytes = rest;
    }
    Ok(changes)
}

fn parse_change(head: &[u8], path: &[u8]) -> Result<PathChange, DiffFormatError> {
    // The number of colons gives the number of modes, IDs and letters that must follow.
    let parents = head.iter().take_while(|byte| **byte == b':').count();
    let words: Vec<_> = head[parents..].split(|byte| *byte == b' ').collect();
    let entries = parents + 1;
    if parents == 0 || path.is_empty() || words.len() != 2 * entries + 1 {
        return Err(DiffFormatError);
    }
    let letters = words[2 * entries];
    if letters.len() != parents || !letters.iter().all(|letter| b"ADMT".contains(letter)) {
        return Err(DiffFormatError);
    }
    let entry = |at: usize| {
        Some(TreeEntry {
            mode: parse_mode(words[at])?,
            name: ObjectId::parse(words[entries + at])?,
        })
    };
    // The entries are the parents' ones, and then the new one.
    let mut before = (0..entries).map(entry).collect::<Option<Vec<_>>>().ok_or(DiffFormatError)?;
    let after = before.pop().ok_or(DiffFormatError)?;
    Ok(PathChange { path: path.to_vec(), before, after })
}

/// Parses a mode: six octal digits, and one of the few modes that git writes.
fn parse_mode(word: &[u8]) -> Option<u32> {
    let text = str::from_utf8(word).ok().filter(|text| text.len() == 6)?;
    let mode = u32::from_str_radix(text, 8).ok()?;
    [0, MODE_FILE, MODE_EXECUTABLE, MODE_SYMLINK, MODE_SUBMODULE].contains(&mode).then_some(mode)
}

/// Splits off the text before the next NUL.
fn split_field(bytes: &[u8]) -> Result<(&[u8], &[u8]), DiffFormatError> {
    let end = memchr::memchr(0, bytes).ok_or(DiffFormatError)?;
    Ok((&bytes[..end], &bytes[end + 1..]))
}
