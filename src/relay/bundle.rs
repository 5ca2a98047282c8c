//! The head of a bundle, read before git is given any of it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::extract::Announced;
use super::{BranchState, Error, Sha};

/// A bundle that says that it holds one branch, and what that builds on. Nothing in it has been looked at yet.
#[derive(Debug)]
pub struct Bundle {
    pub(super) path: PathBuf,
    pub(super) state: BranchState,
    pub(super) announced: Announced,
    pub(super) header: Header,
}

/// What a bundle says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// What whoever takes it must have.
    pub prerequisites: Vec<Sha>,
    pub tip: Sha,
    /// Where the pack begins.
    pub pack_at: u64,
}

/// Why a bundle is none that we asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
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

impl Bundle {
    /// Reads the head of the bundle in `path`.
    ///
    /// # Errors
    /// [`Error::Bundle`] where it is not the bundle of exactly the branch that was announced.
    pub fn open(path: &Path, state: BranchState, announced: Announced) -> Result<Self, Error> {
        let disk = |source| Error::Disk { path: path.to_owned(), source };
        let file = File::open(path).map_err(disk)?;
        let mut head = vec![];
        BufReader::new(file).take(MAX_HEADER_BYTES).read_to_end(&mut head).map_err(disk)?;
        let header = Header::parse(&head, &state.branch.to_ref())?;
        if header.tip != announced.tip {
            return Err(Error::Unlike { what: "the commit at its tip" });
        }
        Ok(Self { path: path.to_owned(), state, announced, header })
    }

    /// The pack, to be read from here on.
    pub(super) fn pack(&self) -> std::io::Result<File> {
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.header.pack_at))?;
        Ok(file)
    }
}

impl Header {
    /// Reads the beginning of a bundle which must have the ref `wanted` and no other.
    pub fn parse(mut bytes: &[u8], wanted: &str) -> Result<Self, Invalid> {
        let whole = bytes.len();
        let mut line = vec![];
        let mut number = 0;
        let mut next = |line: &mut Vec<u8>| {
            line.clear();
            number += 1;
            bytes.read_until(b'\n', line).expect("memory can be read");
            match line.pop() {
                Some(b'\n') => Ok((number, whole - bytes.len())),
                _ if whole as u64 >= MAX_HEADER_BYTES => Err(Invalid::Long),
                _ if number == 1 => Err(Invalid::NoBundle),
                _ => Err(Invalid::Line(number)),
            }
        };
        next(&mut line)?;
        let may_have_capabilities = match line.as_slice() {
            b"# v2 git bundle" => false,
            b"# v3 git bundle" => true,
            _ => return Err(Invalid::NoBundle),
        };
        let (mut prerequisites, mut tip) = (vec![], None);
        loop {
            let (number, pack_at) = next(&mut line)?;
            match line.as_slice() {
                [] => {
                    let tip = tip.ok_or_else(|| Invalid::Refs(wanted.to_owned()))?;
                    return Ok(Self { prerequisites, tip, pack_at: pack_at as u64 });
                }
                // It is what there is without saying so; a filter would leave objects out.
                b"@object-format=sha1" if may_have_capabilities => (),
                [b'@', name @ ..] if may_have_capabilities => {
                    return Err(Invalid::Capability(printable(name)));
                }
                // After the name comes the first line of the commit's message.
                [b'-', rest @ ..] if tip.is_none() => {
                    prerequisites.push(first_name(rest).ok_or(Invalid::Line(number))?);
                }
                rest => {
                    let name = first_name(rest).ok_or(Invalid::Line(number))?;
                    if tip.is_some() || rest.get(NAME_DIGITS + 1..) != Some(wanted.as_bytes()) {
                        return Err(Invalid::Refs(wanted.to_owned()));
                    }
                    tip = Some(name);
                }
            }
        }
    }
}

/// A name, and nothing or a space after it.
fn first_name(line: &[u8]) -> Option<Sha> {
    let (name, rest) = line.split_at_checked(NAME_DIGITS)?;
    Sha::parse(name).filter(|_| rest.first().is_none_or(|byte| *byte == b' '))
}

fn printable(bytes: &[u8]) -> String {
    bytes[..bytes.len().min(MAX_SHOWN)].escape_ascii().to_string()
}

const NAME_DIGITS: usize = 40;
const MAX_SHOWN: usize = 60;

/// Some hundred prerequisites with their messages; git makes them of a few.
pub const MAX_HEADER_BYTES: u64 = 1 << 20;
