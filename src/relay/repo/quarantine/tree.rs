//! A strict check of tree objects, byte by byte.
//!
//! Git's own check reads a mode as 16 bits, and so accepts `300644` as a file's mode. Other programs do not, and cannot
//! read such a tree. Git also accepts an empty directory, which no diff of files shows.

/// The reason why a tree is not in the form that git writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TreeFormatError(&'static str);

/// Checks the content of a tree object. Git has already checked the names and their order.
pub fn check_tree(mut content: &[u8]) -> Result<(), TreeFormatError> {
    const TRUNCATED_ENTRY: TreeFormatError = TreeFormatError("an entry of it is cut");
    // An entry is a mode in octal digits, a space, a name, a NUL and 20 bytes of an object ID.
    while !content.is_empty() {
        let space = memchr::memchr(b' ', content).ok_or(TRUNCATED_ENTRY)?;
        let (mode, rest) = (&content[..space], &content[space + 1..]);
        let end = memchr::memchr(0, rest).ok_or(TRUNCATED_ENTRY)?;
        let (name, after) =
            rest[1 + end..].split_at_checked(OBJECT_ID_BYTES).ok_or(TRUNCATED_ENTRY)?;
        if !VALID_MODES.contains(&mode) {
            return Err(TreeFormatError("an entry of it has a mode that git does not write"));
        }
        if mode == MODE_DIRECTORY && name == EMPTY_TREE_ID {
            return Err(TreeFormatError("it has an empty directory, which no diff shows"));
        }
        content = after;
    }
    Ok(())
}

/// The valid modes: a file, a program, a link, another repository's commit and a directory.
const VALID_MODES: [&[u8]; 5] = [b"100644", b"100755", b"120000", b"160000", MODE_DIRECTORY];
const MODE_DIRECTORY: &[u8] = b"40000";

/// The ID of the tree without entries.
const EMPTY_TREE_ID: [u8; OBJECT_ID_BYTES] = [
    0x4b, 0x82, 0x5d, 0xc6, 0x42, 0xcb, 0x6e, 0xb9, 0xa0, 0x60, 0xe5, 0x4b, 0xf8, 0xd6, 0x92, 0x88,
    0xfb, 0xee, 0x49, 0x04,
];
/// The length of a SHA-1 object ID in bytes.
const OBJECT_ID_BYTES: usize = 20;
