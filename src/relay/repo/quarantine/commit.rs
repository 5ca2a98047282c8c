//! A commit as git stores it, taken apart, and made anew by the relay.
//!
//! Git reads the first `tree`, the `parent` lines right behind it, and skips whatever it does not know. A reader that
//! takes any line for a header sees another commit than git, and so another one than the judge. So there is one form,
//! which git itself writes, and anything else is refused.

use std::collections::{HashMap, HashSet};

use memchr::memmem;

use crate::relay::repo::ObjectId;

/// A commit that has been listed, and not been read yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnparsedCommit {
    pub name: ObjectId,
    pub content: Vec<u8>,
}

/// A commit in the form in which git writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsedCommit {
    pub name: ObjectId,
    pub tree: ObjectId,
    pub parents: Vec<ObjectId>,
    /// `Name <email> seconds zone`, in whatever encoding.
    pub author: Vec<u8>,
    /// `None` where the commit does not say it, or says UTF-8.
    pub encoding: Option<Vec<u8>>,
    pub message: Vec<u8>,
}

/// Why a commit is not in the form in which git writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CommitFormatError(&'static str);

impl ParsedCommit {
    /// Reads the content of a commit object, header by header, in git's order.
    pub fn parse(name: ObjectId, content: &[u8]) -> Result<Self, CommitFormatError> {
        if memchr::memchr(0, content).is_some() {
            return Err(CommitFormatError("it has a NUL in it"));
        }
        let end =
            memmem::find(content, b"\n\n").ok_or(CommitFormatError("its headers have no end"))?;
        let mut headers = CommitHeaders { rest: Some(&content[..end]) };
        let tree = headers.next_with_key(b"tree ").and_then(ObjectId::parse);
        let tree = tree.ok_or(CommitFormatError("it does not begin with a tree"))?;
        let mut parents = vec![];
        while let Some(parent) = headers.next_with_key(b"parent ") {
            let parent =
                ObjectId::parse(parent).ok_or(CommitFormatError("a parent of it has no name"))?;
            if parents.len() == MAX_PARENTS || parents.contains(&parent) {
                return Err(CommitFormatError("it has a parent twice, or too many parents"));
            }
            parents.push(parent);
        }
        let author = headers.next_with_key(b"author ").filter(|author| is_author_line(author));
        let author =
            author.ok_or(CommitFormatError("its author is missing, or stands elsewhere"))?.to_vec();
        let committer = headers.next_with_key(b"committer ").filter(|it| is_author_line(it));
        committer.ok_or(CommitFormatError("its committer is missing, or stands elsewhere"))?;
        let encoding = headers.parse_encoding()?.filter(|encoding| !is_utf8(encoding));
        let message = content[end + 2..].to_vec();
        Ok(Self { name, tree, parents, author, encoding: encoding.map(<[u8]>::to_vec), message })
    }

    /// Who the author is, `Name <email>`, and when that was, `seconds zone`.
    pub fn author_and_date(&self) -> (&[u8], &[u8]) {
        let after = self.author.iter().rposition(|byte| *byte == b'>').map_or(0, |at| at + 1);
        (self.author[..after].trim_ascii(), self.author[after..].trim_ascii())
    }

    /// The same work by the same author at the same time, committed by `committer` and with `trailers` below its message.
    /// Its parents have the names that they have been `made` with; those that have not are nobody's new work. Nothing else
    /// is taken over, and no `encoding`: whoever reads the commit reads UTF-8, as the judge did. The same again whenever it is made.
    pub fn rewritten(
        &self,
        made: &HashMap<ObjectId, ObjectId>,
        committer: &str,
        trailers: &str,
    ) -> Vec<u8> {
        let mut anew = format!("tree {}\n", self.tree).into_bytes();
        // Two of the agent's may come to one: then it is one parent.
        let mut parents = HashSet::new();
        for parent in self.parents.iter().map(|parent| made.get(parent).unwrap_or(parent)) {
            if parents.insert(parent) {
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
        header(b"committer", &[committer.as_bytes(), self.author_and_date().1]);
        // No encoding: with `UTF-16` git would show neither an author nor these trailers, with `IBM037` others than were judged.
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

/// The lines above the message, taken one by one.
struct CommitHeaders<'a> {
    rest: Option<&'a [u8]>,
}

impl<'a> CommitHeaders<'a> {
    fn next(&mut self) -> Option<&'a [u8]> {
        let rest = self.rest?;
        let end = memchr::memchr(b'\n', rest);
        self.rest = end.map(|end| &rest[end + 1..]);
        Some(end.map_or(rest, |end| &rest[..end]))
    }

    /// Takes the next line where it begins with `key`, and returns what follows that.
    fn next_with_key(&mut self, key: &[u8]) -> Option<&'a [u8]> {
        self.rest.filter(|rest| rest.starts_with(key))?;
        self.next().map(|line| &line[key.len()..])
    }

    /// Reads what may stand below the committer, and returns the encoding.
    fn parse_encoding(mut self) -> Result<Option<&'a [u8]>, CommitFormatError> {
        let mut encoding = None;
        let (mut is_signed, mut may_go_on) = ([false; 2], false);
        while let Some(line) = self.next() {
            let (key, value) = line.split_at(memchr::memchr(b' ', line).unwrap_or(line.len()));
            let is_first = match key {
                b"" if may_go_on && !value.is_empty() => continue,
                b"encoding" => encoding.replace(value.get(1..).unwrap_or_default()).is_none(),
                b"gpgsig" => !std::mem::replace(&mut is_signed[0], true),
                b"gpgsig-sha256" => !std::mem::replace(&mut is_signed[1], true),
                // One for each tag that was merged.
                b"mergetag" => true,
                _ => {
                    return Err(CommitFormatError("it has a header that git does not write there"));
                }
            };
            if !is_first || value.is_empty() {
                return Err(CommitFormatError("it has a header twice, or an empty one"));
            }
            may_go_on = key != b"encoding";
        }
        Ok(encoding)
    }
}

/// `Name <email> seconds zone`, as git checks it.
fn is_author_line(line: &[u8]) -> bool {
    let parts = || {
        let (name, rest) = line.split_at(memchr::memchr(b'<', line)?);
        let (email, date) = rest[1..].split_at(memchr::memchr(b'>', rest)?.checked_sub(1)?);
        Some((name, email, date.strip_prefix(b"> ")?))
    };
    parts().is_some_and(|(name, email, date)| {
        name.ends_with(b" ") && !name.contains(&b'>') && !email.contains(&b'<') && is_date(date)
    })
}

/// `seconds zone`.
fn is_date(date: &[u8]) -> bool {
    let parts = str::from_utf8(date).ok().and_then(|date| date.split_once(' '));
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    parts.is_some_and(|(seconds, zone)| {
        let is_padded = seconds.starts_with('0') && seconds.len() > 1;
        let is_time = is_number(seconds) && !is_padded && seconds.parse::<i64>().is_ok();
        is_time && zone.len() == 5 && zone.starts_with(['+', '-']) && is_number(&zone[1..])
    })
}

/// Whether git takes text in an encoding of this name for what it is.
fn is_utf8(encoding: &[u8]) -> bool {
    encoding.eq_ignore_ascii_case(b"utf-8") || encoding.eq_ignore_ascii_case(b"utf8")
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

/// More than any merge that people have made.
pub const MAX_PARENTS: usize = 100;
