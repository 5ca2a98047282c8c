//! What is executed in a sandbox once the agent's processes are gone, and what its answers mean.
//!
//! The agent wrote the repository and its configuration, hooks and attributes. Nothing that they name is started, and they
//! must not change what the bytes mean. Where they do all the same, quarantine finds that they do not fit together.
//!
//! Only `status` looks at files, which is where git starts filters. It does not read the repository's settings: it has
//! some of its own, which name no filter, whatever the attributes say.
//!
//! These are words only, for a container that has nothing but the workspace, which is read-only to it, and no way to the
//! run's gateway.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use super::{BranchState, Sha};

/// One program to execute in the sandbox, as the agent's user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    pub argv: Vec<String>,
    pub env: Vec<(&'static str, String)>,
    /// After this it is killed.
    pub time: Duration,
    /// After so much of standard output, too.
    pub output_bytes: u64,
}

/// What is asked, in this order. Where [`facts`](Self::facts) says that there is nothing, the other two need not be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commands {
    /// Answered in a few lines; see [`Announced::parse`].
    pub facts: Command,
    /// Where the agent has its work checked out; see [`Announced::with_head`].
    pub head: Command,
    /// A commit that is on no branch but others, if there is one. Those are not relayed.
    pub elsewhere: Command,
    /// What is committed nowhere, and not ignored. It is asked of a [repository of the relay's own](make_repository): the
    /// workspace's settings and attributes name programs to read its files with, and none of them is started.
    pub uncommitted: Command,
    /// What is ignored, each path with a NUL behind it, asked in the same way.
    pub ignored: Command,
    /// For people, and to be compared with the commits.
    pub patches: Command,
    /// The commits.
    pub bundle: Command,
}

/// What may come out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    pub commits: u32,
    pub patches_bytes: u64,
    pub bundle_bytes: u64,
    /// For all that is asked, together.
    #[serde(with = "humantime_serde")]
    pub time: Duration,
}

/// What the sandbox's git says about the branch. Nothing depends on its being true.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Announced {
    pub tip: Sha,
    pub tree: Sha,
    pub commits: u32,
    pub merges: u32,
    /// The checked-out commit, where it is not the branch's: there may be work that is on another branch, and is not
    /// relayed.
    pub head: Option<Sha>,
}

/// The answer is not what git answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the sandbox's git cannot say what is on the branch; look for it in the workspace")]
pub struct Unclear;

impl Default for Limits {
    fn default() -> Self {
        Self {
            commits: 1000,
            patches_bytes: 64 << 20,
            bundle_bytes: 64 << 20,
            time: Duration::from_mins(2),
        }
    }
}

impl Commands {
    /// `workspace` is where the sandbox sees it, and `own` is where it sees the relay's [repository](make_repository).
    pub fn new(state: &BranchState, workspace: &str, own: &str, limits: &Limits) -> Self {
        let range = || [state.branch.to_ref()].into_iter().chain(state.known());
        let git = |words: &[&str], range: &mut dyn Iterator<Item = String>, output_bytes| {
            let mut argv = start(&format!("{workspace}/.git"));
            argv.extend(words.iter().copied().map(str::to_owned).chain(range));
            Command { argv, env: environment(), time: limits.time, output_bytes }
        };
        // One more than there may be, to see that there are too many.
        let count = format!("--max-count={}", u64::from(limits.commits) + 1);
        let facts = ["rev-list", "--no-commit-header", "--format=tformat:%H %T %P", &count];
        let facts_bytes = (u64::from(limits.commits) + 1) * FACT_BYTES;
        let head = ["rev-parse", "--verify", "--end-of-options"];
        Self {
            facts: git(&facts, &mut range(), facts_bytes),
            head: git(&head, &mut ["HEAD^{commit}".to_owned()].into_iter(), FACT_BYTES),
            elsewhere: git(
                &["rev-list", "--max-count=1", "--all", "--not"],
                &mut [state.branch.to_ref(), state.start.to_string(), state.base_tip.to_string()]
                    .into_iter(),
                FACT_BYTES,
            ),
            uncommitted: of_files(STATUS, (workspace, own), limits),
            ignored: of_files(IGNORED, (workspace, own), limits),
            patches: git(FORMAT_PATCH, &mut range(), limits.patches_bytes),
            bundle: git(&["bundle", "create", "--quiet", "-"], &mut range(), limits.bundle_bytes),
        }
    }
}

impl Announced {
    /// Reads the answer to [`Commands::facts`], which ended with `exit_code`; `None` where nothing was committed.
    pub fn parse(output: &[u8], exit_code: i64) -> Result<Option<Self>, Unclear> {
        match (exit_code, output) {
            (0, []) => return Ok(None),
            (0, _) => (),
            // The branch is gone, or the repository: there may be work all the same.
            _ => return Err(Unclear),
        }
        let lines = output.strip_suffix(b"\n").ok_or(Unclear)?.split(|byte| *byte == b'\n');
        let mut announced: Option<Self> = None;
        for line in lines {
            let [tip, tree, parents @ ..] = &names(line)?[..] else { return Err(Unclear) };
            // The newest comes first: there is but one that nothing else leads to.
            let first = Self { tip: *tip, tree: *tree, commits: 0, merges: 0, head: None };
            let announced = announced.get_or_insert(first);
            announced.commits += 1;
            announced.merges += u32::from(parents.len() > 1);
        }
        Ok(announced)
    }

    /// Adds the answer to [`Commands::head`]. A `HEAD` that names nothing is none.
    #[must_use]
    pub fn with_head(self, output: &[u8]) -> Self {
        let head = Sha::parse(output.trim_ascii_end()).filter(|head| *head != self.tip);
        Self { head, ..self }
    }
}

/// Makes a repository that has nothing but a checked-out commit, at `path`, for whoever asks what of a workspace is
/// committed: its objects and its index are the workspace's, and its settings are nobody's.
///
/// # Errors
/// The disk does not take it.
pub fn make_repository(path: &Path, head: Sha) -> io::Result<()> {
    for folder in [path, &path.join("refs"), &path.join("objects")] {
        fs::create_dir(folder)?;
        fs::set_permissions(folder, Permissions::from_mode(0o755))?;
    }
    let config = "[core]\n\trepositoryFormatVersion = 0\n".to_owned();
    for (name, text) in [("HEAD", format!("{head}\n")), ("config", config)] {
        let file = path.join(name);
        fs::write(&file, text)?;
        fs::set_permissions(&file, Permissions::from_mode(0o644))?;
    }
    Ok(())
}

/// Asks the relay's own repository about a workspace's files.
fn of_files(words: &[&str], (workspace, own): (&str, &str), limits: &Limits) -> Command {
    let mut argv = start(own);
    argv.push(format!("--work-tree={workspace}"));
    argv.extend(["-c".to_owned(), format!("core.excludesFile={workspace}/.git/info/exclude")]);
    argv.extend(words.iter().copied().map(str::to_owned));
    let mut env = environment();
    env.push(("GIT_INDEX_FILE", format!("{workspace}/.git/index")));
    env.push(("GIT_OBJECT_DIRECTORY", format!("{workspace}/.git/objects")));
    Command { argv, env, time: limits.time, output_bytes: limits.patches_bytes }
}

/// The words that every call begins with.
fn start(git_dir: &str) -> Vec<String> {
    let mut argv =
        vec![GIT.to_owned(), format!("--git-dir={git_dir}"), "--literal-pathspecs".to_owned()];
    argv.extend(SETTINGS.iter().flat_map(|setting| ["-c", setting]).map(str::to_owned));
    argv
}

fn environment() -> Vec<(&'static str, String)> {
    ENVIRONMENT.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
}

fn names(line: &[u8]) -> Result<Vec<Sha>, Unclear> {
    let words = line.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
    words.map(|word| Sha::parse(word).ok_or(Unclear)).collect()
}

/// Where a sandbox finds the relay's own repository.
pub const OWN_REPOSITORY: &str = "/relay-git";

/// Not what the agent's `PATH` finds.
const GIT: &str = "/usr/bin/git";

/// Each of these has been seen to change the bytes where it was not there, or to start a program.
const SETTINGS: &[&str] = &[
    "safe.directory=*",
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.pager=cat",
    "core.commitGraph=false",
    "core.multiPackIndex=false",
    "core.attributesFile=/dev/null",
    "core.quotePath=true",
    "core.abbrev=40",
    "diff.external=",
    "diff.suppressBlankEmpty=false",
    "diff.orderFile=/dev/null",
    "diff.ignoreSubmodules=none",
    "diff.noPrefix=false",
    "diff.mnemonicPrefix=false",
    "format.mboxrd=false",
    "format.signOff=false",
    "format.subjectPrefix=PATCH",
    "i18n.logOutputEncoding=UTF-8",
    "log.showSignature=false",
    "gpg.program=/bin/false",
    "submodule.recurse=false",
    "pack.threads=1",
    // A file beside a pack would say what is to come out with a commit, and git would believe it.
    "pack.useBitmaps=false",
    "pack.useBitmapBoundaryTraversal=false",
    "pack.readReverseIndex=false",
    "pack.allowPackReuse=false",
    // Only what is new comes out.
    "pack.useSparse=false",
    "bundle.version=2",
];

const ENVIRONMENT: &[(&str, &str)] = &[
    ("HOME", "/tmp"),
    ("XDG_CONFIG_HOME", "/tmp"),
    ("GIT_CONFIG_NOSYSTEM", "1"),
    ("GIT_CONFIG_GLOBAL", "/dev/null"),
    ("GIT_CONFIG_COUNT", "0"),
    ("GIT_ATTR_NOSYSTEM", "1"),
    ("GIT_NO_REPLACE_OBJECTS", "1"),
    ("GIT_GRAFT_FILE", "/dev/null"),
    ("GIT_TERMINAL_PROMPT", "0"),
    ("GIT_OPTIONAL_LOCKS", "0"),
    ("GIT_NO_LAZY_FETCH", "1"),
    ("GIT_ALLOW_PROTOCOL", ""),
    ("GIT_PAGER", "cat"),
    ("LC_ALL", "C"),
    ("TZ", "UTC"),
];

const STATUS: &[&str] = &[
    "status",
    "--porcelain=v1",
    "-z",
    "--untracked-files=normal",
    "--ignore-submodules=all",
    "--no-renames",
];

const IGNORED: &[&str] =
    &["ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory"];

/// With these the output is the same with any configuration that was tried against it.
const FORMAT_PATCH: &[&str] = &[
    "format-patch",
    "--stdout",
    "--keep-subject",
    "--no-numbered",
    "--binary",
    "--full-index",
    "--no-renames",
    "--stat=72",
    "--summary",
    "-U3",
    "--inter-hunk-context=0",
    "--diff-algorithm=myers",
    "--indent-heuristic",
    "--submodule=short",
    "--no-signature",
    "--no-attach",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--no-thread",
    "--no-cover-letter",
    "--no-add-header",
    "--no-to",
    "--no-cc",
    "--no-from",
    "--no-notes",
    "--no-base",
    "--no-signoff",
    "--always",
];

/// A commit's line, with more parents than any has.
const FACT_BYTES: u64 = 4 << 10;
