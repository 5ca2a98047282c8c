//! The head of a bundle, read before git is given any of it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::extract_commands::AnnouncedBranch;
use super::{BranchState, ObjectId, RepoError};

/// A bundle that says that it holds one branch, and what that builds on. Nothing in it has been looked at yet.
#[derive(Debug)]
pub struct GitBundle {
    pub(super) path: PathBuf,
    pub(super) state: BranchState,
    pub(super) announced: AnnouncedBranch,
    pub(super) header: BundleHeader,
}

/// What a bundle says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleHeader {
    /// What whoever takes it must have.
    pub prerequisites: Vec<ObjectId>,
    pub tip: ObjectId,
    /// Where the pack begins.
    pub pack_at: u64,
}

/// Why a bundle is none that we asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    #[error("it does not begin as a bundle does")]
    NoBundle,
    #[error("it is of a kind that was not asked for: `{0}`")]
    Capability(String),
    #[error("line {0} of its head cannot be read")]
    Line(usize),
    #[error("it has another ref than `{0}`, or none")]
    Refs(String),
    #[error("its head is longer than {MAX_HEADER_BYTES} bytes")]
    Long,
}

impl GitBundle {
    /// Reads the head of the bundle in `path`.
    ///
    /// # Errors
    /// [`RepoError::Bundle`] where it is not the bundle of exactly the branch that was announced.
    pub fn open(
        path: &Path,
        state: BranchState,
        announced: AnnouncedBranch,
    ) -> Result<Self, RepoError> {
        let disk = |source| RepoError::Disk { path: path.to_owned(), source };
        let file = File::open(path).map_err(disk)?;
        let mut head = vec![];
        BufReader::new(file).take(MAX_HEADER_BYTES).read_to_end(&mut head).map_err(disk)?;
        let header = BundleHeader::parse(&head, &state.branch.to_ref())?;
        if header.tip != announced.tip {
            return Err(RepoError::Unlike { what: "the commit at its tip" });
        }
        Ok(Self { path: path.to_owned(), state, announced, header })
    }

    /// The pack, to be read from here on.
    pub(super) fn open_pack(&self) -> std::io::Result<File> {
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.header.pack_at))?;
        Ok(file)
    }
}

impl BundleHeader {
    /// Reads the beginning of a bundle which must have the ref `wanted` and no other.
    pub fn parse(mut bytes: &[u8], wanted: &str) -> Result<Self, BundleError> {
        let whole = bytes.len();
        let mut line = vec![];
        let mut number = 0;
        let mut next = |line: &mut Vec<u8>| {
            line.clear();
            number += 1;
            bytes.read_until(b'\n', line).expect("memory can be read");
            match line.pop() {
                Some(b'\n') => Ok((number, whole - bytes.len())),
                _ if whole as u64 >= MAX_HEADER_BYTES => Err(BundleError::Long),
                _ if number == 1 => Err(BundleError::NoBundle),
                _ => Err(BundleError::Line(number)),
            }
        };
        next(&mut line)?;
        let may_have_capabilities = match line.as_slice() {
            b"# v2 git bundle" => false,
            b"# v3 git bundle" => true,
            _ => return Err(BundleError::NoBundle),
        };
        let (mut prerequisites, mut tip) = (vec![], None);
        loop {
            let (number, pack_at) = next(&mut line)?;
            match line.as_slice() {
                [] => {
                    let tip = tip.ok_or_else(|| BundleError::Refs(wanted.to_owned()))?;
                    return Ok(Self { prerequisites, tip, pack_at: pack_at as u64 });
                }
                // It is what there is without saying so; a filter would leave objects out.
                b"@object-format=sha1" if may_have_capabilities => (),
                [b'@', name @ ..] if may_have_capabilities => {
                    return Err(BundleError::Capability(escape_for_message(name)));
                }
                // After the name comes the first line of the commit's message.
                [b'-', rest @ ..] if tip.is_none() => {
                    prerequisites.push(parse_object_id(rest).ok_or(BundleError::Line(number))?);
                }
                rest => {
                    let name = parse_object_id(rest).ok_or(BundleError::Line(number))?;
                    if tip.is_some() || rest.get(OBJECT_ID_DIGITS + 1..) != Some(wanted.as_bytes())
                    {
                        return Err(BundleError::Refs(wanted.to_owned()));
                    }
                    tip = Some(name);
                }
            }
        }
    }
}

/// A name, and nothing or a space after it.
fn parse_object_id(line: &[u8]) -> Option<ObjectId> {
    let (name, rest) = line.split_at_checked(OBJECT_ID_DIGITS)?;
    ObjectId::parse(name).filter(|_| rest.first().is_none_or(|byte| *byte == b' '))
}

fn escape_for_message(bytes: &[u8]) -> String {
    bytes[..bytes.len().min(MAX_EXCERPT_BYTES)].escape_ascii().to_string()
}

const OBJECT_ID_DIGITS: usize = 40;
const MAX_EXCERPT_BYTES: usize = 60;

/// Some hundred prerequisites with their messages; git makes them of a few.
pub const MAX_HEADER_BYTES: u64 = 1 << 20;
