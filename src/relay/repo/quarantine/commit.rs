//! A strict parser for commit objects, and the relay's rewriting of commits.
//!
//! Git reads the first `tree` and the `parent` lines right behind it, and skips whatever it does not know. A reader
//! that takes any line for a header would see another commit than git does, and the review would check another commit.
//! So there is one accepted form, which git itself writes, and every other form is refused.

use std::collections::{HashMap, HashSet};

use memchr::memmem;

use crate::relay::repo::ObjectId;

/// The content of a commit that was read and is not parsed yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnparsedCommit {
    pub name: ObjectId,
    pub content: Vec<u8>,
}

/// A commit in the form that git writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsedCommit {
    pub name: ObjectId,
    pub tree: ObjectId,
    pub parents: Vec<ObjectId>,
    /// The author line, `Name <email> seconds zone`, in the commit's encoding.
    pub author: Vec<u8>,
    /// The encoding, or `None` if the commit names no encoding or UTF-8.
    pub encoding: Option<Vec<u8>>,
    pub message: Vec<u8>,
}

/// The reason why a commit is not in the form that git writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CommitFormatError(&'static str);

impl ParsedCommit {
    /// Parses the content of a commit object, header by header, in git's order.
    pub fn parse(name: ObjectId, content: &[u8]) -> Result<Self, CommitFormatError> {
        if memchr::memchr(0, content).is_some() {
            return Err(CommitFormatError("it has a NUL in it"));
        }
        // The first empty line ends the headers. Everything behind it is the message.
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
        let committer =
            headers.next_with_key(b"committer ").filter(|committer| is_author_line(committer));
        committer.ok_or(CommitFormatError("its committer is missing, or stands elsewhere"))?;
        let encoding = headers.parse_encoding()?.filter(|encoding| !is_utf8(encoding));
        let message = content[end + 2..].to_vec();
        Ok(Self { name, tree, parents, author, encoding: encoding.map(<[u8]>::to_vec), message })
    }

    /// Returns the author, `Name <email>`, and the author's date, `seconds zone`.
    pub fn author_and_date(&self) -> (&[u8], &[u8]) {
        let after = self.author.iter().rposition(|byte| *byte == b'>').map_or(0, |at| at + 1);
        (self.author[..after].trim_ascii(), self.author[after..].trim_ascii())
    }

    /// Returns a new commit with the same tree, author, date and message. The committer is `committer`, and `trailers`
    /// are below the message. A parent in `new_ids` is replaced by its rewritten commit; other parents stay.
    ///
    /// No other header is copied, and no `encoding`: every reader of the new commit reads UTF-8, as the review did.
    /// Equal input always gives equal bytes.
    pub fn rewritten(
        &self,
        new_ids: &HashMap<ObjectId, ObjectId>,
        committer: &str,
        trailers: &str,
    ) -> Vec<u8> {
        let mut anew = format!("tree {}\n", self.tree).into_bytes();
        // Two of the agent's commits may be rewritten to the same commit, which is then one parent.
        let mut parents = HashSet::new();
        for parent in self.parents.iter().map(|parent| new_ids.get(parent).unwrap_or(parent)) {
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
        // The committer's date is the author's date: the present time would make every attempt another commit.
        header(b"committer", &[committer.as_bytes(), self.author_and_date().1]);
        // No encoding: with `UTF-16` git would show neither an author nor these trailers, and with `IBM037` other ones
        // than the review has seen.
        anew.push(b'\n');
        let message = self.message.trim_ascii_end();
        anew.extend_from_slice(message);
        // Trailers must be a paragraph of their own, unless the message's last paragraph is trailers already.
        anew.extend_from_slice(match (message, ends_in_trailers(message)) {
            ([], _) => b"",
            (_, true) => b"\n",
            (_, false) => b"\n\n",
        });
        anew.extend_from_slice(trailers.as_bytes());
        anew
    }
}

/// The header lines of a commit, taken one by one.
struct CommitHeaders<'a> {
    rest: Option<&'a [u8]>,
}

impl<'a> CommitHeaders<'a> {
    /// Takes the next line.
    fn next(&mut self) -> Option<&'a [u8]> {
        let rest = self.rest?;
        let end = memchr::memchr(b'\n', rest);
        self.rest = end.map(|end| &rest[end + 1..]);
        Some(end.map_or(rest, |end| &rest[..end]))
    }

    /// Takes the next line if it begins with `key`, and returns the rest of that line.
    fn next_with_key(&mut self, key: &[u8]) -> Option<&'a [u8]> {
        self.rest.filter(|rest| rest.starts_with(key))?;
        self.next().map(|line| &line[key.len()..])
    }

    /// Parses the optional headers below the committer, and returns the encoding.
    fn parse_encoding(mut self) -> Result<Option<&'a [u8]>, CommitFormatError> {
        let mut encoding = None;
        let (mut is_signed, mut may_go_on) = ([false; 2], false);
        while let Some(line) = self.next() {
            let (key, value) = line.split_at(memchr::memchr(b' ', line).unwrap_or(line.len()));
            let is_first = match key {
                // A line that begins with a space continues the header before it.
                b"" if may_go_on && !value.is_empty() => continue,
                b"encoding" => encoding.replace(value.get(1..).unwrap_or_default()).is_none(),
                b"gpgsig" => !std::mem::replace(&mut is_signed[0], true),
                b"gpgsig-sha256" => !std::mem::replace(&mut is_signed[1], true),
                // One for each merged tag.
                b"mergetag" => true,
                _ => {
                    return Err(CommitFormatError("it has a header that git does not write there"));
                }
            };
            if !is_first || value.is_empty() {
                return Err(CommitFormatError("it has a header twice, or an empty one"));
            }
            // Signatures and tags go over several lines; an encoding does not.
            may_go_on = key != b"encoding";
        }
        Ok(encoding)
    }
}

/// Returns true if a line is `Name <email> seconds zone`, as git checks it.
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

/// Returns true if a text is `seconds zone`.
fn is_date(date: &[u8]) -> bool {
    let parts = str::from_utf8(date).ok().and_then(|date| date.split_once(' '));
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    parts.is_some_and(|(seconds, zone)| {
        let is_padded = seconds.starts_with('0') && seconds.len() > 1;
        let is_time = is_number(seconds) && !is_padded && seconds.parse::<i64>().is_ok();
        is_time && zone.len() == 5 && zone.starts_with(['+', '-']) && is_number(&zone[1..])
    })
}

/// Returns true if git reads text of this encoding as UTF-8.
fn is_utf8(encoding: &[u8]) -> bool {
    encoding.eq_ignore_ascii_case(b"utf-8") || encoding.eq_ignore_ascii_case(b"utf8")
}

/// Returns true if the last of several paragraphs has only `Name: value` lines.
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

/// The most parents of a commit: more than any merge that people have made.
pub const MAX_PARENTS: usize = 100;
