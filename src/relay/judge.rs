//! Whether the agent's work is pushed, by what the host's own git says has changed.
//!
//! Looked at is what each commit changes, and what all of them come to: a file that is added and taken away again is
//! in the history all the same, and so is a credential.

mod claim;
pub mod diff;
mod evidence;
mod pattern;
mod policy;
mod secret;
mod seen;
mod standing;

use std::collections::BTreeSet;
use std::fmt;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::{BranchState, Error, Quarantined, Sha};
use crate::base::secret::Secret;
use diff::Change;
use evidence::Evidence;

pub use pattern::Pattern;
pub use policy::{Config, Invalid, Paths, Policy, Ruling};
pub use secret::{Found, Kind, SHORTEST as SHORTEST_KNOWN, Scanner, Text};

/// Work that was looked at.
#[derive(Debug)]
pub struct Judged {
    quarantined: Quarantined,
    verdict: Verdict,
    files: usize,
}

/// Work that may be pushed; there is no other way to one of these.
#[derive(Debug)]
pub struct Cleared {
    pub(super) quarantined: Quarantined,
    pub(super) verdict: Verdict,
}

/// Work that is not pushed. What came out of the sandbox is in its [`Artifacts`](super::Artifacts) still.
#[derive(Debug)]
pub struct Held {
    pub state: BranchState,
    pub tip: Sha,
    pub reasons: Vec<Reason>,
}

/// What becomes of the work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Push,
    /// Pushed; a person has to look at it.
    Review(Vec<Reason>),
    /// Not pushed.
    Hold(Vec<Reason>),
}

/// Why it is not simply pushed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Reason {
    pub ruling: Ruling,
    /// Escaped: the agent chose it.
    pub path: Option<String>,
    pub why: String,
}

impl Quarantined {
    /// Judges by `policy`. `known` are credentials of this host, which must not be found in anything.
    pub fn judge(self, policy: &Policy, known: &[Secret]) -> Result<Judged, Error> {
        let evidence = Evidence::gather(&self, policy, known)?;
        let mut bench = Bench { policy, reasons: BTreeSet::new() };
        bench.hear(&self, &evidence);
        let (verdict, files) = (bench.verdict(), evidence.files);
        Ok(Judged { quarantined: self, verdict, files })
    }
}

impl Judged {
    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    pub fn work(&self) -> &Quarantined {
        &self.quarantined
    }

    /// How many paths are not what they were.
    pub fn files(&self) -> usize {
        self.files
    }

    /// The work, to be pushed; or why it is not.
    #[expect(clippy::result_large_err, reason = "both are the outcome, and there is one of them")]
    pub fn cleared(self) -> Result<Cleared, Held> {
        let Self { quarantined, verdict, .. } = self;
        match verdict {
            Verdict::Hold(reasons) => {
                Err(Held { state: quarantined.state, tip: quarantined.tip, reasons })
            }
            verdict => Ok(Cleared { quarantined, verdict }),
        }
    }
}

impl Verdict {
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Review(_) => "review",
            Self::Hold(_) => "hold",
        }
    }

    pub fn reasons(&self) -> &[Reason] {
        match self {
            Self::Push => &[],
            Self::Review(reasons) | Self::Hold(reasons) => reasons,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "`{path}`: {}", self.why),
            None => f.write_str(&self.why),
        }
    }
}

/// Hears every rule, and remembers what speaks against.
struct Bench<'a> {
    policy: &'a Policy,
    reasons: BTreeSet<Reason>,
}

impl Bench<'_> {
    /// What the work is, and what is said of it.
    fn hear(&mut self, work: &Quarantined, evidence: &Evidence) {
        self.look(evidence);
        self.claims(work);
        if work.has_work_elsewhere {
            let why = "the agent's checkout is at another commit than its branch";
            self.say(self.policy.work_elsewhere, None, why);
        }
    }

    fn look(&mut self, evidence: &Evidence) {
        let Policy { review_files, hold_files, .. } = *self.policy;
        for change in &evidence.changes {
            self.path(change);
            self.mode(change);
        }
        for (path, size) in &evidence.large {
            self.size(path, *size);
        }
        for path in &evidence.links_outside {
            self.say(self.policy.link_outside, Some(path), "it is a link out of the repository");
        }
        for path in &evidence.lfs_pointers {
            self.say(
                self.policy.lfs_pointer,
                Some(path),
                "it points to a large file that is not here",
            );
        }
        for (path, kind) in &evidence.secrets {
            self.say(self.policy.secret, path.as_deref(), &format!("it holds {kind}"));
        }
        let counted = format!("{} paths are changed", evidence.files);
        match evidence.files {
            files if files > hold_files => self.say(Ruling::Hold, None, &counted),
            files if files > review_files => self.say(Ruling::Review, None, &counted),
            _ => (),
        }
    }

    /// What commits say of themselves.
    fn claims(&mut self, work: &Quarantined) {
        let Policy { claims_provenance, strange_date, foreign_encoding, .. } = *self.policy;
        let now = SystemTime::now();
        for commit in &work.commits {
            if claim::claims_run(commit) {
                let why = "a message says which run it is of, which is for the relay";
                self.say(claims_provenance, None, why);
            }
            if work.committer.as_ref().is_some_and(|ours| claim::claims_relay(commit, ours)) {
                self.say(claims_provenance, None, "an author has the relay's name or address");
            }
            if claim::hides_author(commit) {
                self.say(claims_provenance, None, "an author's name is not what it looks like");
            }
            if claim::is_untimely(commit, now) {
                self.say(strange_date, None, "a commit is of a time at which nobody works");
            }
            if claim::is_in_foreign_encoding(commit) {
                let why = "a commit is not in UTF-8: it reads otherwise than it was looked at";
                self.say(foreign_encoding, None, why);
            }
        }
    }

    fn path(&mut self, change: &Change) {
        let path = Some(change.path.as_slice());
        for rule in self.policy.on_path(&change.path) {
            self.say(rule.verdict, path, &rule.why);
        }
        if is_strange(&change.path) {
            self.say(self.policy.strange_path, path, "its name is not what it looks like");
        }
    }

    fn mode(&mut self, change: &Change) {
        let was = |mode| change.before.iter().any(|entry| entry.mode == mode);
        let path = Some(change.path.as_slice());
        match change.after.mode {
            diff::SUBMODULE => self.say(self.policy.submodule, path, "it is another repository"),
            diff::PROGRAM if !was(diff::PROGRAM) => {
                self.say(self.policy.new_program, path, "it can be run now");
            }
            _ => (),
        }
    }

    fn size(&mut self, path: &[u8], size: u64) {
        let Policy { review_file_bytes, hold_file_bytes, .. } = *self.policy;
        let why = format!("it has {size} bytes");
        match size {
            size if size > hold_file_bytes => self.say(Ruling::Hold, Some(path), &why),
            size if size > review_file_bytes => self.say(Ruling::Review, Some(path), &why),
            _ => (),
        }
    }

    fn say(&mut self, ruling: Ruling, path: Option<&[u8]>, why: &str) {
        if ruling > Ruling::Push {
            let path = path.map(shown);
            self.reasons.insert(Reason { ruling, path, why: why.to_owned() });
        }
    }

    fn verdict(self) -> Verdict {
        let strictest = self.reasons.last().map(|reason| reason.ruling);
        // The strictest first, and no more than a person reads.
        let reasons = || {
            let mut reasons: Vec<_> = self.reasons.iter().cloned().collect();
            reasons.sort_by_key(|reason| std::cmp::Reverse(reason.ruling));
            reasons.truncate(MAX_REASONS);
            reasons
        };
        match strictest {
            None | Some(Ruling::Push) => Verdict::Push,
            Some(Ruling::Review) => Verdict::Review(reasons()),
            Some(Ruling::Hold) => Verdict::Hold(reasons()),
        }
    }
}

/// Not text, or with characters that show nothing, or turn around what stands beside them.
fn is_strange(path: &[u8]) -> bool {
    str::from_utf8(path)
        .map_or(true, |path| path.chars().any(seen::is_hidden) || path.contains('\\'))
}

fn shown(path: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(path).chars().flat_map(char::escape_debug).collect();
    text.chars().take(MAX_SHOWN).collect()
}

const MAX_REASONS: usize = 50;
const MAX_SHOWN: usize = 200;
