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

use super::{BranchState, ObjectId};

/// One program to execute in the sandbox, as the agent's user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtractCommand {
    pub argv: Vec<String>,
    pub env: Vec<(&'static str, String)>,
    /// After this it is killed.
    pub time: Duration,
    /// After so much of standard output, too.
    pub output_bytes: u64,
}

/// What is asked, in this order. Where [`facts`](Self::facts) says that there is nothing, the other two need not be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtractCommandSet {
    /// Answered in a few lines; see [`AnnouncedBranch::parse`].
    pub facts: ExtractCommand,
    /// Where the agent has its work checked out; see [`AnnouncedBranch::with_head`].
    pub head: ExtractCommand,
    /// A commit that is on no branch but others, if there is one. Those are not relayed.
    pub elsewhere: ExtractCommand,
    /// What is committed nowhere, and not ignored. It is asked of a [repository of the relay's own](create_stub_repository): the
    /// workspace's settings and attributes name programs to read its files with, and none of them is started.
    pub uncommitted: ExtractCommand,
    /// What is ignored, each path with a NUL behind it, asked in the same way.
    pub ignored: ExtractCommand,
    /// For people, and to be compared with the commits.
    pub patches: ExtractCommand,
    /// The commits.
    pub bundle: ExtractCommand,
}

/// What may come out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExtractLimits {
    pub commits: u32,
    pub patches_bytes: u64,
    pub bundle_bytes: u64,
    /// For all that is asked, together.
    #[serde(with = "humantime_serde")]
    pub time: Duration,
}

/// What the sandbox's git says about the branch. Nothing depends on its being true.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AnnouncedBranch {
    pub tip: ObjectId,
    pub tree: ObjectId,
    pub commits: u32,
    pub merges: u32,
    /// The checked-out commit, where it is not the branch's: there may be work that is on another branch, and is not
    /// relayed.
    pub head: Option<ObjectId>,
}

/// The answer is not what git answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the sandbox's git cannot say what is on the branch; look for it in the workspace")]
pub struct ExtractOutputError;

impl Default for ExtractLimits {
    fn default() -> Self {
        Self {
            commits: 1000,
            patches_bytes: 64 << 20,
            bundle_bytes: 64 << 20,
            time: Duration::from_mins(2),
        }
    }
}

impl ExtractCommandSet {
    /// `workspace` is where the sandbox sees it, and `own` is where it sees the relay's [repository](create_stub_repository).
    pub fn new(state: &BranchState, workspace: &str, own: &str, limits: &ExtractLimits) -> Self {
        let range = || [state.branch.to_ref()].into_iter().chain(state.base_revisions());
        let git = |words: &[&str], range: &mut dyn Iterator<Item = String>, output_bytes| {
            let mut argv = base_argv(&format!("{workspace}/.git"));
            argv.extend(words.iter().copied().map(str::to_owned).chain(range));
            ExtractCommand { argv, env: git_environment(), time: limits.time, output_bytes }
        };
        // One more than there may be, to see that there are too many.
        let count = format!("--max-count={}", u64::from(limits.commits) + 1);
        let facts = ["rev-list", "--no-commit-header", "--format=tformat:%H %T %P", &count];
        let facts_bytes = (u64::from(limits.commits) + 1) * MAX_HEAD_OUTPUT_BYTES;
        let head = ["rev-parse", "--verify", "--end-of-options"];
        Self {
            facts: git(&facts, &mut range(), facts_bytes),
            head: git(&head, &mut ["HEAD^{commit}".to_owned()].into_iter(), MAX_HEAD_OUTPUT_BYTES),
            elsewhere: git(
                &["rev-list", "--max-count=1", "--all", "--not"],
                &mut [state.branch.to_ref(), state.start.to_string(), state.base_tip.to_string()]
                    .into_iter(),
                MAX_HEAD_OUTPUT_BYTES,
            ),
            uncommitted: file_command(STATUS_ARGS, (workspace, own), limits),
            ignored: file_command(IGNORED_ARGS, (workspace, own), limits),
            patches: git(FORMAT_PATCH_ARGS, &mut range(), limits.patches_bytes),
            bundle: git(&["bundle", "create", "--quiet", "-"], &mut range(), limits.bundle_bytes),
        }
    }
}

impl AnnouncedBranch {
    /// Reads the answer to [`ExtractCommandSet::facts`], which ended with `exit_code`; `None` where nothing was committed.
    pub fn parse(output: &[u8], exit_code: i64) -> Result<Option<Self>, ExtractOutputError> {
        match (exit_code, output) {
            (0, []) => return Ok(None),
            (0, _) => (),
            // The branch is gone, or the repository: there may be work all the same.
            _ => return Err(ExtractOutputError),
        }
        let lines =
            output.strip_suffix(b"\n").ok_or(ExtractOutputError)?.split(|byte| *byte == b'\n');
        let mut announced: Option<Self> = None;
        for line in lines {
            let [tip, tree, parents @ ..] = &parse_object_ids(line)?[..] else {
                return Err(ExtractOutputError);
            };
            // The newest comes first: there is but one that nothing else leads to.
            let first = Self { tip: *tip, tree: *tree, commits: 0, merges: 0, head: None };
            let announced = announced.get_or_insert(first);
            announced.commits += 1;
            announced.merges += u32::from(parents.len() > 1);
        }
        Ok(announced)
    }

    /// Adds the answer to [`ExtractCommandSet::head`]. A `HEAD` that names nothing is none.
    #[must_use]
    pub fn with_head(self, output: &[u8]) -> Self {
        let head = ObjectId::parse(output.trim_ascii_end()).filter(|head| *head != self.tip);
        Self { head, ..self }
    }
}

/// Makes a repository that has nothing but a checked-out commit, at `path`, for whoever asks what of a workspace is
/// committed: its objects and its index are the workspace's, and its settings are nobody's.
///
/// # Errors
/// The disk does not take it.
pub fn create_stub_repository(path: &Path, head: ObjectId) -> io::Result<()> {
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
fn file_command(
    words: &[&str],
    (workspace, own): (&str, &str),
    limits: &ExtractLimits,
) -> ExtractCommand {
    let mut argv = base_argv(own);
    argv.push(format!("--work-tree={workspace}"));
    argv.extend(["-c".to_owned(), format!("core.excludesFile={workspace}/.git/info/exclude")]);
    argv.extend(words.iter().copied().map(str::to_owned));
    let mut env = git_environment();
    env.push(("GIT_INDEX_FILE", format!("{workspace}/.git/index")));
    env.push(("GIT_OBJECT_DIRECTORY", format!("{workspace}/.git/objects")));
    ExtractCommand { argv, env, time: limits.time, output_bytes: limits.patches_bytes }
}

/// The words that every call begins with.
fn base_argv(git_dir: &str) -> Vec<String> {
    let mut argv =
        vec![GIT_PATH.to_owned(), format!("--git-dir={git_dir}"), "--literal-pathspecs".to_owned()];
    argv.extend(GIT_SETTINGS.iter().flat_map(|setting| ["-c", setting]).map(str::to_owned));
    argv
}

fn git_environment() -> Vec<(&'static str, String)> {
    GIT_ENVIRONMENT.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
}

fn parse_object_ids(line: &[u8]) -> Result<Vec<ObjectId>, ExtractOutputError> {
    let words = line.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
    words.map(|word| ObjectId::parse(word).ok_or(ExtractOutputError)).collect()
}

/// Where a sandbox finds the relay's own repository.
pub const RELAY_REPOSITORY_TARGET: &str = "/relay-git";

/// Not what the agent's `PATH` finds.
const GIT_PATH: &str = "/usr/bin/git";

/// Each of these has been seen to change the bytes where it was not there, or to start a program.
const GIT_SETTINGS: &[&str] = &[
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

const GIT_ENVIRONMENT: &[(&str, &str)] = &[
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

const STATUS_ARGS: &[&str] = &[
    "status",
    "--porcelain=v1",
    "-z",
    "--untracked-files=normal",
    "--ignore-submodules=all",
    "--no-renames",
];

const IGNORED_ARGS: &[&str] =
    &["ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory"];

/// With these the output is the same with any configuration that was tried against it.
const FORMAT_PATCH_ARGS: &[&str] = &[
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
const MAX_HEAD_OUTPUT_BYTES: u64 = 4 << 10;
