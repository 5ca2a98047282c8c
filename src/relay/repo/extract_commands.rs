//! The commands that are executed in a sandbox after the agent's processes have ended, and the parsing of their output.
//!
//! The agent wrote the repository and its configuration, hooks and attributes. None of the programs that these name may
//! start, and they must not change what the output means. If they change it in spite of that, quarantine finds that the
//! parts of the output do not fit together.
//!
//! Only `status` reads files of the workspace, and git starts filters for such reads. So `status` does not read the
//! repository's settings. It uses settings of its own, which name no filter, whatever the attributes say.
//!
//! This module only builds argument lists. They are for a container that sees the workspace read-only and nothing else,
//! and that has no access to the run's gateway.

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
    /// The number of bytes of standard output after which the program is killed.
    pub output_bytes: u64,
}

/// The commands that look at a workspace. All that read its repository run in one sandbox, whatever the others of them
/// find. The commands that read its files run in a second sandbox, which shows the checked-out commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtractCommandSet {
    /// Lists the commits in a few lines; see [`AnnouncedBranch::parse`].
    pub facts: ExtractCommand,
    /// Prints the checked-out commit; see [`AnnouncedBranch::with_head`].
    pub head: ExtractCommand,
    /// Prints one commit that is only on other branches, if there is one. Such commits are not relayed.
    pub elsewhere: ExtractCommand,
    /// Lists the files that are not committed and not ignored. The command reads a [repository of the relay's
    /// own](create_stub_repository): the workspace's settings and attributes name programs to read files with, and none
    /// of these programs may start.
    pub uncommitted: ExtractCommand,
    /// Lists the ignored files, each path with a NUL behind it, through the same repository of the relay's own.
    pub ignored: ExtractCommand,
    /// Prints the patches, for people and for a comparison with the commits.
    pub patches: ExtractCommand,
    /// Prints the bundle of the commits.
    pub bundle: ExtractCommand,
}

/// Limits on the output of the commands. The defaults are our choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExtractLimits {
    pub commits: u32,
    pub patches_bytes: u64,
    pub bundle_bytes: u64,
    /// The time limit of the commands, all together.
    #[serde(with = "humantime_serde")]
    pub time: Duration,
}

/// The branch as the sandbox's git announces it. The content is untrusted, and nothing depends on its truth.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AnnouncedBranch {
    pub tip: ObjectId,
    pub tree: ObjectId,
    pub commits: u32,
    pub merges: u32,
    /// The checked-out commit, if it is not the branch's tip. There may be work on another branch then, which is not
    /// relayed.
    pub head: Option<ObjectId>,
}

/// An error: the output is not in git's form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "git's output in the sandbox is not in the expected form; look for the commits in the workspace"
)]
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
    /// Builds the commands. `workspace` is the workspace's path in the sandbox, and `own` the path of the relay's
    /// [repository](create_stub_repository) there.
    pub fn new(state: &BranchState, workspace: &str, own: &str, limits: &ExtractLimits) -> Self {
        let range = || [state.branch.to_ref()].into_iter().chain(state.base_revisions());
        // Commands that read no file of the workspace may use its repository, under the settings below.
        let git = |words: &[&str], range: &mut dyn Iterator<Item = String>, output_bytes| {
            let mut argv = base_argv(&format!("{workspace}/.git"));
            argv.extend(words.iter().copied().map(str::to_owned).chain(range));
            ExtractCommand { argv, env: git_environment(), output_bytes }
        };
        // One more than the limit, so that quarantine sees that there are too many.
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
    /// Parses the output of [`ExtractCommandSet::facts`], which ended with `exit_code`. Returns `None` if there is no
    /// commit.
    pub fn parse(output: &[u8], exit_code: i64) -> Result<Option<Self>, ExtractOutputError> {
        match (exit_code, output) {
            (0, []) => return Ok(None),
            (0, _) => (),
            // The branch or the repository is gone. There may be work in the workspace in spite of that, so this is an
            // error.
            _ => return Err(ExtractOutputError),
        }
        // The last line must be complete. A cut output would announce fewer commits than there are.
        let lines =
            output.strip_suffix(b"\n").ok_or(ExtractOutputError)?.split(|byte| *byte == b'\n');
        let mut announced: Option<Self> = None;
        for line in lines {
            let [tip, tree, parents @ ..] = &parse_object_ids(line)?[..] else {
                return Err(ExtractOutputError);
            };
            // `rev-list` prints the newest commit first, so the first line is the branch's tip.
            let first = Self { tip: *tip, tree: *tree, commits: 0, merges: 0, head: None };
            let announced = announced.get_or_insert(first);
            announced.commits += 1;
            announced.merges += u32::from(parents.len() > 1);
        }
        Ok(announced)
    }

    /// Adds the output of [`ExtractCommandSet::head`]. An output that is not a commit ID counts as no `HEAD`.
    #[must_use]
    pub fn with_head(self, output: &[u8]) -> Self {
        let head = ObjectId::parse(output.trim_ascii_end()).filter(|head| *head != self.tip);
        Self { head, ..self }
    }
}

/// Creates a repository at `path` that has only a checked-out commit. The commands for uncommitted and ignored files
/// use it with the workspace's objects and index, and with no settings of the workspace.
///
/// # Errors
/// Returns an error if the disk cannot be written.
pub fn create_stub_repository(path: &Path, head: ObjectId) -> io::Result<()> {
    for directory in [path, &path.join("refs"), &path.join("objects")] {
        fs::create_dir(directory)?;
        fs::set_permissions(directory, Permissions::from_mode(0o755))?;
    }
    let config = "[core]\n\trepositoryFormatVersion = 0\n".to_owned();
    for (name, text) in [("HEAD", format!("{head}\n")), ("config", config)] {
        let file = path.join(name);
        fs::write(&file, text)?;
        fs::set_permissions(&file, Permissions::from_mode(0o644))?;
    }
    Ok(())
}

/// Builds a command that reads a workspace's files through the relay's own repository.
fn file_command(
    words: &[&str],
    (workspace, own): (&str, &str),
    limits: &ExtractLimits,
) -> ExtractCommand {
    let mut argv = base_argv(own);
    argv.push(format!("--work-tree={workspace}"));
    argv.extend(["-c".to_owned(), format!("core.excludesFile={workspace}/.git/info/exclude")]);
    argv.extend(words.iter().copied().map(str::to_owned));
    // The objects and the index are the agent's, as data. The settings and attributes beside them are not read.
    let mut env = git_environment();
    env.push(("GIT_INDEX_FILE", format!("{workspace}/.git/index")));
    env.push(("GIT_OBJECT_DIRECTORY", format!("{workspace}/.git/objects")));
    ExtractCommand { argv, env, output_bytes: limits.patches_bytes }
}

/// Returns the arguments that every command begins with.
fn base_argv(git_dir: &str) -> Vec<String> {
    let mut argv =
        vec![GIT_PATH.to_owned(), format!("--git-dir={git_dir}"), "--literal-pathspecs".to_owned()];
    argv.extend(GIT_SETTINGS.iter().flat_map(|setting| ["-c", setting]).map(str::to_owned));
    argv
}

/// Returns the environment of every command.
fn git_environment() -> Vec<(&'static str, String)> {
    GIT_ENVIRONMENT.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
}

/// Parses the object IDs of one output line.
fn parse_object_ids(line: &[u8]) -> Result<Vec<ObjectId>, ExtractOutputError> {
    let words = line.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
    words.map(|word| ObjectId::parse(word).ok_or(ExtractOutputError)).collect()
}

/// The path of the relay's own repository in the sandbox.
pub const RELAY_REPOSITORY_TARGET: &str = "/relay-git";

/// The path of git in the sandbox. The agent's `PATH` is not used.
const GIT_PATH: &str = "/usr/bin/git";

/// Settings that override the repository's. Without each of them, a test has seen git print other bytes or start a
/// program.
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
    // A bitmap beside a pack says which objects belong to a commit, and git believes that file of the agent's.
    "pack.useBitmaps=false",
    "pack.useBitmapBoundaryTraversal=false",
    "pack.readReverseIndex=false",
    "pack.allowPackReuse=false",
    // The sparse algorithm may add objects that are not new. Only new objects may come out.
    "pack.useSparse=false",
    "bundle.version=2",
];

/// The environment of git in the sandbox: no settings outside the repository, no network, no prompts.
const GIT_ENVIRONMENT: &[(&str, &str)] = &[
    ("HOME", "/tmp"),
    ("XDG_CONFIG_HOME", "/tmp"),
    ("GIT_CONFIG_NOSYSTEM", "1"),
    ("GIT_CONFIG_GLOBAL", "/dev/null"),
    ("GIT_CONFIG_COUNT", "0"),
    ("GIT_ATTR_NOSYSTEM", "1"),
    ("GIT_NO_REPLACE_OBJECTS", "1"),
    // A path that cannot exist. If the file exists, each git and each of its helpers prints a long hint about it.
    ("GIT_GRAFT_FILE", "/dev/null/none"),
    ("GIT_TERMINAL_PROMPT", "0"),
    ("GIT_OPTIONAL_LOCKS", "0"),
    ("GIT_NO_LAZY_FETCH", "1"),
    ("GIT_ALLOW_PROTOCOL", ""),
    ("GIT_PAGER", "cat"),
    ("LC_ALL", "C"),
    ("TZ", "UTC"),
];

/// The arguments that list uncommitted files.
const STATUS_ARGS: &[&str] = &[
    "status",
    "--porcelain=v1",
    "-z",
    "--untracked-files=normal",
    "--ignore-submodules=all",
    "--no-renames",
];

/// The arguments that list ignored files.
const IGNORED_ARGS: &[&str] =
    &["ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory"];

/// The arguments that print the patches. With them the output was the same under every configuration that was tried.
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

/// The longest output line of one commit in bytes, with more parents than any commit has.
const MAX_HEAD_OUTPUT_BYTES: u64 = 4 << 10;
