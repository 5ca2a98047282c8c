//! A tree as git stores it, checked to the byte.
//!
//! Git's own check counts a mode in 16 bits, and so takes `300644` for a file's; other programs do not, and cannot read
//! such a tree. And it says nothing of an empty directory, which no diff of files shows.

/// Why a tree is not in the form in which git writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(&'static str);

/// Checks the content of a tree object. Names and their order are git's to check.
pub fn check(mut content: &[u8]) -> Result<(), Invalid> {
    const CUT: Invalid = Invalid("an entry of it is cut");
    while !content.is_empty() {
        let space = memchr::memchr(b' ', content).ok_or(CUT)?;
        let (mode, rest) = (&content[..space], &content[space + 1..]);
        let end = memchr::memchr(0, rest).ok_or(CUT)?;
        let (name, after) = rest[1 + end..].split_at_checked(NAME_BYTES).ok_or(CUT)?;
        if !MODES.contains(&mode) {
            return Err(Invalid("an entry of it has a mode that git does not write"));
        }
        if mode == DIRECTORY && name == EMPTY {
            return Err(Invalid("it has an empty directory, which no diff shows"));
        }
        content = after;
    }
    Ok(())
}

/// A file, a program, a link, another repository's commit and a directory.
const MODES: [&[u8]; 5] = [b"100644", b"100755", b"120000", b"160000", DIRECTORY];
const DIRECTORY: &[u8] = b"40000";

/// The name of the tree without entries.
const EMPTY: [u8; NAME_BYTES] = [
    0x4b, 0x82, 0x5d, 0xc6, 0x42, 0xcb, 0x6e, 0xb9, 0xa0, 0x60, 0xe5, 0x4b, 0xf8, 0xd6, 0x92, 0x88,
    0xfb, 0xee, 0x49, 0x04,
];
const NAME_BYTES: usize = 20;
