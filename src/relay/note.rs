//! What is said beside a commit: a git note, on a ref that is only for those.
//!
//! **Invariant:** what other machines have noted stays: the ref moves forwards only, from where it was found.

use super::git::{self, Call, Input};
use super::push::{Answer, unreached, whole};
use super::{Branch, Error, Mirror, Sha};
use crate::base::secret::Secret;

/// What is to stand beside a commit.
#[derive(Clone, Copy, Debug)]
pub struct Note<'a> {
    pub branch: &'a Branch,
    pub head: Sha,
    pub text: &'a str,
    /// `Name <email>`.
    pub committer: &'a str,
}

impl Mirror {
    /// Puts a note beside a commit of the remote's, where it is not yet.
    ///
    /// # Errors
    /// [`Error::Declined`] where the remote takes none; otherwise as of a [push](super::Cleared::push).
    pub fn note(&self, note: Note<'_>, token: Option<&Secret>) -> Result<(), Error> {
        let own = format!("refs/notes/relay/{}", note.branch.key());
        // One at a time on this machine; others are told by the remote.
        let _lock = self.lock("notes")?;
        let desk = Desk { mirror: self, own: &own, committer: note.committer, token };
        for _ in 0..ATTEMPTS {
            if desk.put(note.head, note.text)? {
                return Ok(());
            }
        }
        Err(Error::Unreachable { why: "others keep writing notes".to_owned() })
    }
}

/// Where one note is written.
struct Desk<'a> {
    mirror: &'a Mirror,
    /// Where the notes are while one is added; each branch has a place of its own.
    own: &'a str,
    committer: &'a str,
    token: Option<&'a Secret>,
}

impl Desk<'_> {
    /// Adds the note to those of the remote. Whether it is there now; otherwise somebody else was faster.
    fn put(&self, head: Sha, note: &str) -> Result<bool, Error> {
        let before = self.fetch()?;
        if before.is_some() && self.read(head)?.as_deref() == Some(note) {
            return Ok(true);
        }
        // A blob is taken as it is; a text given by `--file` would lose its empty lines in git before 2.42.
        let blob = self.mirror.call("hash-object").words(["-w", "--stdin"]);
        let blob = blob.input(Input::Bytes(note.as_bytes().to_vec())).text()?;
        let reuse = format!("--reuse-message={}", blob.trim_end());
        self.notes().words(["add", "--force", &reuse, &head.to_string()]).done()?;
        let before = before.map(|sha| sha.to_string()).unwrap_or_default();
        let lease = format!("--force-with-lease={NOTES}:{before}");
        let words = ["--porcelain", "--no-verify", "--no-signed", "--no-progress", &lease, "--"];
        let call = self.mirror.call("push").words(words).word(self.mirror.url());
        let call = call.word(format!("{}:{NOTES}", self.own));
        let (said, ended) = self.mirror.admit(call, self.token)?.told()?;
        match ended {
            Ok(()) => Ok(true),
            Err(_) if OVERTAKEN.iter().any(|words| said.contains(words)) => Ok(false),
            Err(error) => Err(match Answer::read(&said, NOTES) {
                Some(Answer::Rejected(why)) => Error::Declined { why: whole(why, &Err(error)) },
                _ => unreached(error),
            }),
        }
    }

    /// Brings the remote's notes to our place; `None` where it has none.
    fn fetch(&self) -> Result<Option<Sha>, Error> {
        let url = self.mirror.url();
        let list = self.mirror.call("ls-remote").word("--").word(&url).word(NOTES);
        let listed = self.mirror.admit(list, self.token)?.text().map_err(unreached)?;
        let tip = listed.split('\t').next().and_then(|name| Sha::parse(name.as_bytes()));
        if tip.is_none() {
            self.mirror.call("update-ref").words(["-d", self.own]).done()?;
            return Ok(None);
        }
        let words = ["--quiet", "--no-tags", "--no-write-fetch-head", "--refmap=", "--"];
        let call =
            self.mirror.call("fetch").words(words).word(url).word(format!("+{NOTES}:{}", self.own));
        self.mirror.admit(call, self.token)?.done().map_err(unreached)?;
        // What is pushed builds on what was fetched, which may be newer than what was listed.
        let tip = self.mirror.call("rev-parse").words(["--verify", self.own]).text()?;
        Ok(Sha::parse(tip.trim_end().as_bytes()))
    }

    fn read(&self, head: Sha) -> Result<Option<String>, git::Error> {
        match self.notes().words(["show", &head.to_string()]).text() {
            Ok(note) => Ok(Some(note)),
            Err(error @ git::Error::Failed { .. }) if !error.is_passing() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn notes(&self) -> Call<'_> {
        let (name, email) = self.committer.split_once(" <").unwrap_or((self.committer, ""));
        let email = email.trim_end_matches('>');
        self.mirror
            .call("notes")
            .variable("GIT_NOTES_REF", self.own)
            .variable("GIT_AUTHOR_NAME", name)
            .variable("GIT_AUTHOR_EMAIL", email)
            .variable("GIT_COMMITTER_NAME", name)
            .variable("GIT_COMMITTER_EMAIL", email)
    }
}

const NOTES: &str = "refs/notes/cogni";

/// What git says, in this language, where somebody else has moved the ref, or is about to.
const OVERTAKEN: [&str; 5] =
    ["stale info", "fetch first", "cannot lock ref", "failed to update ref", "incorrect old value"];

/// Each time somebody else's was added; few machines write to one repository.
const ATTEMPTS: u32 = 8;
