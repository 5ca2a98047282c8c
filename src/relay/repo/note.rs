//! The note beside a commit: a git note, on a ref that has only the relays' notes.
//!
//! **Invariant:** notes of other machines stay: the ref only moves forwards, from where this machine has found it.
//!
//! **Invariant:** the remote's notes are fetched under the lock and the limits of every other fetch: the remote decides
//! how many there are.

use super::git::{self, GitCommand, GitInput};
use super::mirror::note_ref;
use super::push::RefUpdateStatus;
use super::remote_error::{map_network_error, rejection_message};
use super::{ObjectId, RepoError, RepoMirror, SandboxBranch};
use crate::base::secret::SecretString;

/// A text to store beside a commit.
#[derive(Clone, Copy, Debug)]
pub struct CommitNote<'a> {
    pub branch: &'a SandboxBranch,
    pub head: ObjectId,
    pub text: &'a str,
    /// The note's author, as `Name <email>`.
    pub committer: &'a str,
}

impl RepoMirror {
    /// Writes a note beside a commit at the remote, unless the note is already there.
    ///
    /// # Errors
    /// Returns [`RepoError::RemoteRejected`] if the remote refuses notes, [`RepoError::NotesTooLarge`] if its notes
    /// exceed the limits of a fetch, [`RepoError::FetchLimitExceeded`] if the mirror is full, and otherwise the errors
    /// of a [push](super::ApprovedWork::push_branch).
    pub fn put_note(
        &self,
        note: CommitNote<'_>,
        token: Option<&SecretString>,
    ) -> Result<(), RepoError> {
        let own_ref = note_ref(note.branch);
        // One writer at a time on this machine. Writers on other machines are noticed by the push's lease.
        let _lock = self.lock_file("notes")?;
        let writer = NoteWriter { mirror: self, own_ref: &own_ref, note, token };
        for _ in 0..MAX_ATTEMPTS {
            // The whole attempt writes objects into the mirror, and the last of them is what the push reads.
            if self.run_locked_fetch(|| writer.try_write())?? {
                return Ok(());
            }
        }
        Err(RepoError::Unreachable {
            why: "other machines keep writing notes at the same time".to_owned(),
        })
    }
}

/// The writer of one note.
struct NoteWriter<'a> {
    mirror: &'a RepoMirror,
    /// The [ref](note_ref) of the notes in the mirror. Each branch has its own.
    own_ref: &'a str,
    note: CommitNote<'a>,
    token: Option<&'a SecretString>,
}

impl NoteWriter<'_> {
    /// Adds the note to the remote's notes. Returns false if another machine has changed them in the meantime.
    fn try_write(&self) -> Result<bool, RepoError> {
        let CommitNote { head, text, .. } = self.note;
        let before = self.fetch_notes()?;
        if before.is_some() && self.read_note(head)?.as_deref() == Some(text) {
            return Ok(true);
        }
        // `--reuse-message` takes a blob unchanged; `--file` would drop empty lines of the text in git before 2.42.
        let blob = self.mirror.git_command("hash-object").args(["-w", "--stdin"]);
        let blob = blob.input(GitInput::Bytes(text.as_bytes().to_vec())).output_text()?;
        let reuse = format!("--reuse-message={}", blob.trim_end());
        self.notes_command().args(["add", "--force", &reuse, &head.to_string()]).execute()?;
        // With an empty `before`, the lease demands that the remote has no notes ref yet.
        let before = before.map(|sha| sha.to_string()).unwrap_or_default();
        let lease = format!("--force-with-lease={NOTES_REF}:{before}");
        let words = ["--porcelain", "--no-verify", "--no-signed", "--no-progress", &lease, "--"];
        let call = self.mirror.git_command("push").args(words).arg(self.mirror.remote_url());
        let call = call.arg(format!("{}:{NOTES_REF}", self.own_ref));
        let call = call.limits(self.mirror.fetch_limits().of_note_push());
        let (output, ended) = self.mirror.authenticate(call, self.token)?.output_and_status()?;
        match ended {
            Ok(()) => Ok(true),
            Err(_) if CONCURRENT_UPDATE_MESSAGES.iter().any(|words| output.contains(words)) => {
                Ok(false)
            }
            Err(error) => Err(match RefUpdateStatus::parse_ref_line(&output, NOTES_REF) {
                Some(RefUpdateStatus::Rejected(why)) => {
                    RepoError::RemoteRejected { why: rejection_message(why, &Err(error)) }
                }
                _ => self.map_limit_error(error),
            }),
        }
    }

    /// Fetches the remote's notes into the local ref. Returns their commit, or `None` if the remote has none.
    fn fetch_notes(&self) -> Result<Option<ObjectId>, RepoError> {
        let names = [NOTES_REF.to_owned()];
        let list = self.mirror.ref_list_command(&[], &names, self.token)?;
        let listed = list.output_text().map_err(|error| self.map_limit_error(error))?;
        // Git also lists a ref whose name only ends with this one.
        let mut lines = listed.lines().filter_map(|line| line.split_once('\t'));
        let has_notes = lines.any(|(_, name)| name == NOTES_REF);
        // A leftover local ref would bring old notes back to a remote that has removed its notes.
        if !has_notes {
            self.mirror.git_command("update-ref").args(["-d", self.own_ref]).execute()?;
            return Ok(None);
        }
        self.mirror.check_not_full(self.note.branch)?;
        let refspecs = [format!("+{NOTES_REF}:{}", self.own_ref)];
        let fetch = self.mirror.fetch_command(&refspecs, self.token)?;
        fetch.execute().map_err(|error| self.map_limit_error(error))?;
        // The push builds on what was fetched, which may be newer than what `ls-remote` has listed.
        let tip =
            self.mirror.git_command("rev-parse").args(["--verify", self.own_ref]).output_text()?;
        Ok(ObjectId::parse(tip.trim_end().as_bytes()))
    }

    /// Maps an error of the git that lists, fetches or pushes the notes. A later attempt would reach the same limit, unless it is
    /// the limit of time.
    fn map_limit_error(&self, error: git::GitError) -> RepoError {
        if matches!(error, git::GitError::Timeout { .. }) || !error.is_resource_limit() {
            return map_network_error(error);
        }
        RepoError::NotesTooLarge { why: error.to_string(), limits: self.mirror.fetch_limits() }
    }

    /// Returns the present note of a commit, or `None` if there is none.
    fn read_note(&self, head: ObjectId) -> Result<Option<String>, git::GitError> {
        match self.notes_command().args(["show", &head.to_string()]).output_text() {
            Ok(note) => Ok(Some(note)),
            Err(error @ git::GitError::Failed { .. }) if !error.is_transient() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Builds a `git notes` command on the local ref, with the committer as its author.
    fn notes_command(&self) -> GitCommand<'_> {
        let CommitNote { committer, .. } = self.note;
        let (name, email) = committer.split_once(" <").unwrap_or((committer, ""));
        let email = email.trim_end_matches('>');
        self.mirror
            .git_command("notes")
            .env("GIT_NOTES_REF", self.own_ref)
            .env("GIT_AUTHOR_NAME", name)
            .env("GIT_AUTHOR_EMAIL", email)
            .env("GIT_COMMITTER_NAME", name)
            .env("GIT_COMMITTER_EMAIL", email)
    }
}

/// The ref of the notes at the remote.
const NOTES_REF: &str = "refs/notes/cogni";

/// Parts of git's messages, in the C locale, if another machine has moved the ref or is just moving it.
const CONCURRENT_UPDATE_MESSAGES: [&str; 5] =
    ["stale info", "fetch first", "cannot lock ref", "failed to update ref", "incorrect old value"];

/// The most attempts to write a note. An attempt fails if another machine's note was added, and few machines write to
/// one repository. Our choice.
const MAX_ATTEMPTS: u32 = 8;
