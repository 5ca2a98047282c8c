//! The header of a bundle, parsed before git gets any byte of the bundle.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::extract_commands::AnnouncedBranch;
use super::{BranchState, ObjectId, RepoError};

/// A bundle whose header names one branch and the commits that it builds on. Its content has not been inspected.
#[derive(Debug)]
pub struct GitBundle {
    pub(super) path: PathBuf,
    pub(super) state: BranchState,
    pub(super) announced: AnnouncedBranch,
    pub(super) header: BundleHeader,
}

/// The header of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleHeader {
    /// The commits that a repository must have before it can unpack the bundle.
    pub prerequisites: Vec<ObjectId>,
    pub tip: ObjectId,
    /// The offset of the pack in the file.
    pub pack_at: u64,
}

/// The reason why a file is not the requested bundle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    #[error("it does not begin as a bundle does")]
    NotABundle,
    #[error("it is of a kind that was not asked for: `{0}`")]
    UnexpectedCapability(String),
    #[error("line {0} of its head cannot be read")]
    InvalidLine(usize),
    #[error("its refs are not exactly `{0}`")]
    UnexpectedRefs(String),
    #[error("its head is longer than {MAX_HEADER_BYTES} bytes")]
    HeaderTooLong,
}

impl GitBundle {
    /// Opens the bundle at `path`, and parses its header.
    ///
    /// # Errors
    /// Returns [`RepoError::Bundle`] if the file is not a bundle of exactly the requested branch. Returns
    /// [`RepoError::AnnouncementMismatch`] if its tip is not the announced one.
    pub fn open(
        path: &Path,
        state: BranchState,
        announced: AnnouncedBranch,
    ) -> Result<Self, RepoError> {
        let disk = |source| RepoError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(disk)?;
        let mut head = vec![];
        BufReader::new(file).take(MAX_HEADER_BYTES).read_to_end(&mut head).map_err(disk)?;
        let header = BundleHeader::parse(&head, &state.branch.to_ref())?;
        if header.tip != announced.tip {
            return Err(RepoError::AnnouncementMismatch { what: "the commit at its tip" });
        }
        Ok(Self { path: path.to_owned(), state, announced, header })
    }

    /// Opens the file at the beginning of the pack.
    pub(super) fn open_pack(&self) -> std::io::Result<File> {
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.header.pack_at))?;
        Ok(file)
    }
}

impl BundleHeader {
    /// Parses the beginning of a bundle that must have the ref `ref_name` and no other ref.
    pub fn parse(mut bytes: &[u8], ref_name: &str) -> Result<Self, BundleError> {
        let total_bytes = bytes.len();
        let mut line = vec![];
        let mut number = 0;
        // Reads the next line without its newline. Returns its number and the offset behind it. A line without a
        // newline means that the header was cut, by the limit or by the file's end.
        let mut next = |line: &mut Vec<u8>| {
            line.clear();
            number += 1;
            bytes.read_until(b'\n', line).expect("memory can be read");
            match line.pop() {
                Some(b'\n') => Ok((number, total_bytes - bytes.len())),
                _ if total_bytes as u64 >= MAX_HEADER_BYTES => Err(BundleError::HeaderTooLong),
                _ if number == 1 => Err(BundleError::NotABundle),
                _ => Err(BundleError::InvalidLine(number)),
            }
        };
        // The header's form: a version line, capabilities (`@`, version 3 only), prerequisites (`-`), refs, an empty
        // line.
        next(&mut line)?;
        let may_have_capabilities = match line.as_slice() {
            b"# v2 git bundle" => false,
            b"# v3 git bundle" => true,
            _ => return Err(BundleError::NotABundle),
        };
        let (mut prerequisites, mut tip) = (vec![], None);
        loop {
            let (number, pack_at) = next(&mut line)?;
            match line.as_slice() {
                [] => {
                    let tip =
                        tip.ok_or_else(|| BundleError::UnexpectedRefs(ref_name.to_owned()))?;
                    return Ok(Self { prerequisites, tip, pack_at: pack_at as u64 });
                }
                // SHA-1 is the format without this line, too. Any other capability is refused: a filter would leave
                // objects out.
                b"@object-format=sha1" if may_have_capabilities => (),
                [b'@', name @ ..] if may_have_capabilities => {
                    return Err(BundleError::UnexpectedCapability(escape_for_message(name)));
                }
                // Behind the ID comes the first line of the commit's message, which is ignored.
                [b'-', rest @ ..] if tip.is_none() => {
                    prerequisites
                        .push(parse_object_id(rest).ok_or(BundleError::InvalidLine(number))?);
                }
                rest => {
                    let name = parse_object_id(rest).ok_or(BundleError::InvalidLine(number))?;
                    if tip.is_some()
                        || rest.get(OBJECT_ID_DIGITS + 1..) != Some(ref_name.as_bytes())
                    {
                        return Err(BundleError::UnexpectedRefs(ref_name.to_owned()));
                    }
                    tip = Some(name);
                }
            }
        }
    }
}

/// Parses an object ID at the beginning of a line, followed by a space or the line's end.
fn parse_object_id(line: &[u8]) -> Option<ObjectId> {
    let (name, rest) = line.split_at_checked(OBJECT_ID_DIGITS)?;
    ObjectId::parse(name).filter(|_| rest.first().is_none_or(|byte| *byte == b' '))
}

/// Escapes and cuts bytes of the bundle for a message.
fn escape_for_message(bytes: &[u8]) -> String {
    bytes[..bytes.len().min(MAX_EXCERPT_BYTES)].escape_ascii().to_string()
}

/// The length of a SHA-1 object ID in hex digits.
const OBJECT_ID_DIGITS: usize = 40;
/// The most bytes of the bundle that a message repeats. Our choice.
const MAX_EXCERPT_BYTES: usize = 60;

/// The longest header in bytes. It fits some hundred prerequisites with their messages; git writes a few. Our choice.
pub const MAX_HEADER_BYTES: u64 = 1 << 20;
