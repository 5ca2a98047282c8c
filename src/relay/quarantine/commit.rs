//! A commit as git stores it, taken apart and put together again without losing a byte.

use crate::relay::Sha;

/// A commit that git has found to be well-formed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    pub name: Sha,
    pub tree: Sha,
    pub parents: Vec<Sha>,
    /// `Name <email> seconds zone`, in whatever encoding.
    pub author: Vec<u8>,
    pub encoding: Option<Vec<u8>>,
    /// Other headers than those: signatures, and what merges of tags leave.
    pub has_extra: bool,
    pub message: Vec<u8>,
}

impl Commit {
    /// Reads what `cat-file` prints; `None` where that is no commit.
    pub fn parse(name: Sha, content: &[u8]) -> Option<Self> {
        let end = content.windows(2).position(|two| two == b"\n\n")?;
        let mut commit = Self {
            name,
            tree: Sha::NONE,
            parents: vec![],
            author: vec![],
            encoding: None,
            has_extra: false,
            message: content[end + 2..].to_vec(),
        };
        for line in content[..end].split(|byte| *byte == b'\n') {
            let space = memchr::memchr(b' ', line)?;
            match (&line[..space], &line[space + 1..]) {
                (b"tree", name) => commit.tree = Sha::parse(name)?,
                (b"parent", name) => commit.parents.push(Sha::parse(name)?),
                (b"author", author) => commit.author = author.to_vec(),
                (b"committer", _) => (),
                (b"encoding", encoding) => commit.encoding = Some(encoding.to_vec()),
                _ => commit.has_extra = true,
            }
        }
        (commit.tree != Sha::NONE && !commit.author.is_empty()).then_some(commit)
    }

    /// `seconds zone` of the author.
    fn date(&self) -> &[u8] {
        let after = self.author.iter().rposition(|byte| *byte == b'>').map_or(0, |at| at + 1);
        self.author[after..].trim_ascii()
    }

    /// The same work by the same author at the same time, on another parent, committed by `committer` and with
    /// `trailers` below its message. The same again whenever it is made.
    pub fn onto(&self, parent: Sha, committer: &str, trailers: &str) -> Vec<u8> {
        let mut made = format!("tree {}\nparent {parent}\n", self.tree).into_bytes();
        let date = self.date().to_vec();
        let mut header = |name: &[u8], parts: &[&[u8]]| {
            made.extend_from_slice(name);
            for part in parts {
                made.push(b' ');
                made.extend_from_slice(part);
            }
            made.push(b'\n');
        };
        header(b"author", &[&self.author]);
        header(b"committer", &[committer.as_bytes(), &date]);
        if let Some(encoding) = &self.encoding {
            header(b"encoding", &[encoding]);
        }
        made.push(b'\n');
        let message = self.message.trim_ascii_end();
        made.extend_from_slice(message);
        made.extend_from_slice(match (message, ends_in_trailers(message)) {
            ([], _) => b"",
            (_, true) => b"\n",
            (_, false) => b"\n\n",
        });
        made.extend_from_slice(trailers.as_bytes());
        made
    }

    /// Whether the message has a line that says what only the relay may say.
    pub fn claims_provenance(&self) -> bool {
        let is_ours = |line: &[u8]| {
            let name = line.split(|byte| *byte == b':').next().unwrap_or_default().trim_ascii();
            TRAILERS.iter().any(|ours| name.eq_ignore_ascii_case(ours.as_bytes()))
        };
        self.message.split(|byte| *byte == b'\n').any(is_ours)
    }
}

/// Whether the last of several paragraphs is one `Name: value` below the other.
fn ends_in_trailers(message: &[u8]) -> bool {
    let Some(at) = message.windows(2).rposition(|two| two == b"\n\n") else { return false };
    message[at + 2..].split(|byte| *byte == b'\n').all(|line| {
        let name = memchr::memchr(b':', line).map(|colon| &line[..colon]);
        name.is_some_and(|name| {
            !name.is_empty()
                && name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
        })
    })
}

/// Below each message that the relay writes: whose work it is.
pub(super) const TRAILERS: [&str; 2] = ["Sandbox-Run", "Sandbox-Agent"];
