//! What is said beside a commit: a git note, on a ref that is only for those.
//!
//! **Invariant:** what other machines have noted stays: the ref moves forwards only, from where it was found.

use super::git::{self, GitCommand, GitInput};
use super::push::{RefUpdateStatus, map_network_error, rejection_message};
use super::{ObjectId, RepoError, RepoMirror, SandboxBranch};
use crate::base::secret::SecretString;

/// What is to stand beside a commit.
#[derive(Clone, Copy, Debug)]
pub struct CommitNote<'a> {
    pub branch: &'a SandboxBranch,
    pub head: ObjectId,
    pub text: &'a str,
    /// `Name <email>`.
    pub committer: &'a str,
}

impl RepoMirror {
    /// Puts a note beside a commit of the remote's, where it is not yet.
    ///
    /// # Errors
    /// [`RepoError::Declined`] where the remote takes none; otherwise as of a [push](super::ApprovedWork::push_branch).
    pub fn put_note(
        &self,
        note: CommitNote<'_>,
        token: Option<&SecretString>,
    ) -> Result<(), RepoError> {
        let own = format!("refs/notes/relay/{}", note.branch.key());
        // One at a time on this machine; others are told by the remote.
        let _lock = self.lock_file("notes")?;
        let desk = NoteWriter { mirror: self, own: &own, committer: note.committer, token };
        for _ in 0..MAX_ATTEMPTS {
            if desk.try_write(note.head, note.text)? {
                return Ok(());
            }
        }
        Err(RepoError::Unreachable { why: "others keep writing notes".to_owned() })
    }
}

/// Where one note is written.
struct NoteWriter<'a> {
    mirror: &'a RepoMirror,
    /// Where the notes are while one is added; each branch has a place of its own.
    own: &'a str,
    committer: &'a str,
    token: Option<&'a SecretString>,
}

impl NoteWriter<'_> {
    /// Adds the note to those of the remote. Whether it is there now; otherwise somebody else was faster.
    fn try_write(&self, head: ObjectId, note: &str) -> Result<bool, RepoError> {
        let before = self.fetch_notes()?;
        if before.is_some() && self.read_note(head)?.as_deref() == Some(note) {
            return Ok(true);
        }
        // A blob is taken as it is; a text given by `--file` would lose its empty lines in git before 2.42.
        let blob = self.mirror.git_command("hash-object").args(["-w", "--stdin"]);
        let blob = blob.input(GitInput::Bytes(note.as_bytes().to_vec())).output_text()?;
        let reuse = format!("--reuse-message={}", blob.trim_end());
        self.notes_command().args(["add", "--force", &reuse, &head.to_string()]).execute()?;
        let before = before.map(|sha| sha.to_string()).unwrap_or_default();
        let lease = format!("--force-with-lease={NOTES_REF}:{before}");
        let words = ["--porcelain", "--no-verify", "--no-signed", "--no-progress", &lease, "--"];
        let call = self.mirror.git_command("push").args(words).arg(self.mirror.remote_url());
        let call = call.arg(format!("{}:{NOTES_REF}", self.own));
        let (said, ended) = self.mirror.authenticate(call, self.token)?.output_and_status()?;
        match ended {
            Ok(()) => Ok(true),
            Err(_) if CONCURRENT_UPDATE_MESSAGES.iter().any(|words| said.contains(words)) => {
                Ok(false)
            }
            Err(error) => Err(match RefUpdateStatus::parse_ref_line(&said, NOTES_REF) {
                Some(RefUpdateStatus::Rejected(why)) => {
                    RepoError::Declined { why: rejection_message(why, &Err(error)) }
                }
                _ => map_network_error(error),
            }),
        }
    }

    /// Brings the remote's notes to our place; `None` where it has none.
    fn fetch_notes(&self) -> Result<Option<ObjectId>, RepoError> {
        let url = self.mirror.remote_url();
        let list = self.mirror.git_command("ls-remote").arg("--").arg(&url).arg(NOTES_REF);
        let listed =
            self.mirror.authenticate(list, self.token)?.output_text().map_err(map_network_error)?;
        let tip = listed.split('\t').next().and_then(|name| ObjectId::parse(name.as_bytes()));
        if tip.is_none() {
            self.mirror.git_command("update-ref").args(["-d", self.own]).execute()?;
            return Ok(None);
        }
        let words = ["--quiet", "--no-tags", "--no-write-fetch-head", "--refmap=", "--"];
        let call = self
            .mirror
            .git_command("fetch")
            .args(words)
            .arg(url)
            .arg(format!("+{NOTES_REF}:{}", self.own));
        self.mirror.authenticate(call, self.token)?.execute().map_err(map_network_error)?;
        // What is pushed builds on what was fetched, which may be newer than what was listed.
        let tip =
            self.mirror.git_command("rev-parse").args(["--verify", self.own]).output_text()?;
        Ok(ObjectId::parse(tip.trim_end().as_bytes()))
    }

    fn read_note(&self, head: ObjectId) -> Result<Option<String>, git::GitError> {
        match self.notes_command().args(["show", &head.to_string()]).output_text() {
            Ok(note) => Ok(Some(note)),
            Err(error @ git::GitError::Failed { .. }) if !error.is_transient() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn notes_command(&self) -> GitCommand<'_> {
        let (name, email) = self.committer.split_once(" <").unwrap_or((self.committer, ""));
        let email = email.trim_end_matches('>');
        self.mirror
            .git_command("notes")
            .env("GIT_NOTES_REF", self.own)
            .env("GIT_AUTHOR_NAME", name)
            .env("GIT_AUTHOR_EMAIL", email)
            .env("GIT_COMMITTER_NAME", name)
            .env("GIT_COMMITTER_EMAIL", email)
    }
}

const NOTES_REF: &str = "refs/notes/cogni";

/// What git says, in this language, where somebody else has moved the ref, or is about to.
const CONCURRENT_UPDATE_MESSAGES: [&str; 5] =
    ["stale info", "fetch first", "cannot lock ref", "failed to update ref", "incorrect old value"];

/// Each time somebody else's was added; few machines write to one repository.
const MAX_ATTEMPTS: u32 = 8;
