//! A commit as git stores it, taken apart, and made anew by the relay.

use std::collections::HashMap;

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
    /// All that stands above the message, those lines among it that are not made anew: signatures, and whatever else.
    pub head: Vec<u8>,
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
            head: content[..end].to_vec(),
            message: content[end + 2..].to_vec(),
        };
        for line in content[..end].split(|byte| *byte == b'\n') {
            let space = memchr::memchr(b' ', line)?;
            match (&line[..space], &line[space + 1..]) {
                (b"tree", name) => commit.tree = Sha::parse(name)?,
                (b"parent", name) => commit.parents.push(Sha::parse(name)?),
                (b"author", author) => commit.author = author.to_vec(),
                (b"encoding", encoding) => commit.encoding = Some(encoding.to_vec()),
                _ => (),
            }
        }
        (commit.tree != Sha::NONE && !commit.author.is_empty()).then_some(commit)
    }

    /// Who the author is, `Name <email>`, and when that was, `seconds zone`.
    pub fn signature(&self) -> (&[u8], &[u8]) {
        let after = self.author.iter().rposition(|byte| *byte == b'>').map_or(0, |at| at + 1);
        (self.author[..after].trim_ascii(), self.author[after..].trim_ascii())
    }

    /// The same work by the same author at the same time, committed by `committer` and with `trailers` below its message.
    /// Its parents have the names that they have been `made` with; those that have not are nobody's new work. Nothing else
    /// is taken over. The same again whenever it is made.
    pub fn anew(&self, made: &HashMap<Sha, Sha>, committer: &str, trailers: &str) -> Vec<u8> {
        let mut anew = format!("tree {}\n", self.tree).into_bytes();
        // Two of the agent's may come to one: then it is one parent.
        let mut parents: Vec<&Sha> = vec![];
        for parent in self.parents.iter().map(|parent| made.get(parent).unwrap_or(parent)) {
            if !parents.contains(&parent) {
                parents.push(parent);
                anew.extend_from_slice(format!("parent {parent}\n").as_bytes());
            }
        }
        let mut header = |name: &[u8], parts: &[&[u8]]| {
            anew.extend_from_slice(name);
            for part in parts {
                anew.push(b' ');
                anew.extend_from_slice(part);
            }
            anew.push(b'\n');
        };
        header(b"author", &[&self.author]);
        header(b"committer", &[committer.as_bytes(), self.signature().1]);
        if let Some(encoding) = &self.encoding {
            header(b"encoding", &[encoding]);
        }
        anew.push(b'\n');
        let message = self.message.trim_ascii_end();
        anew.extend_from_slice(message);
        anew.extend_from_slice(match (message, ends_in_trailers(message)) {
            ([], _) => b"",
            (_, true) => b"\n",
            (_, false) => b"\n\n",
        });
        anew.extend_from_slice(trailers.as_bytes());
        anew
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
