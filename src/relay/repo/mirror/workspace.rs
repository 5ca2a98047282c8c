//! The agent's copy of the repository, created before the agent can see it.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

use super::super::{BranchLease, RepoError};
use super::{BranchState, RepoMirror, mirror_ref};
use crate::base::dir_tree;
use crate::relay::git::{self, GitLimits};

/// The owner of the workspace's files: the user of the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOwner {
    pub uid: u32,
    pub gid: u32,
}

/// The author of the agent's commits, unless the agent sets another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitAuthor {
    pub name: String,
    pub email: String,
}

impl RepoMirror {
    /// Measures a checkout of the run's branch before any file is written. The repository's owner decides how large a
    /// checkout is, so this check protects the disk. The measure is the one that workspaces are measured by.
    ///
    /// # Errors
    /// Returns [`RepoError::CheckoutTooLarge`] if the checkout has more than `most_bytes` or more than
    /// [`MAX_CHECKOUT_NAMES`] names.
    pub fn measure_checkout(&self, state: &BranchState, most_bytes: u64) -> Result<(), RepoError> {
        let large =
            |size| Err(RepoError::CheckoutTooLarge { branch: state.branch.clone(), what: size });
        // The names are counted first, because git must open each object to report a size.
        let is_long = match self.measure_listing(state, "%(objecttype)") {
            // Git was stopped at the output limit: there are more names than that.
            Err(error) if error.is_resource_limit() => true,
            tally => tally?.names > MAX_CHECKOUT_NAMES,
        };
        if is_long {
            return large(format!("more than {MAX_CHECKOUT_NAMES} names"));
        }
        match self.measure_listing(state, "%(objecttype) %(objectsize)")?.bytes {
            bytes if bytes > most_bytes => large(format!("{bytes} bytes, of {most_bytes}")),
            _ => Ok(()),
        }
    }

    /// Lists all names of a checkout, and adds them up. Git is stopped at the output that the maximum of names would
    /// take.
    fn measure_listing(
        &self,
        state: &BranchState,
        format: &str,
    ) -> Result<CheckoutTotals, git::GitError> {
        let mut tally = CheckoutTotals::default();
        let output_bytes = MAX_CHECKOUT_NAMES.saturating_mul(NAME_LINE_BYTES);
        let words = ["-r", "-t", "--full-tree", &format!("--format={format}")];
        let call = self.git_command("ls-tree").args(words).arg(state.start.to_string());
        call.limits(GitLimits { output_bytes, ..GitLimits::default() })
            .stream_output(|piece| tally.count_piece(piece))?;
        Ok(tally)
    }

    /// Creates a repository in `workspace` with the run's branch checked out, and the base as `origin/<base>`.
    ///
    /// The directory must be new, or empty and owned by this process's user. On return it belongs to the agent, and git
    /// on this machine must never run in it again.
    pub fn checkout_workspace(
        &self,
        lease: &BranchLease,
        state: &BranchState,
        workspace: &Path,
        (owner, author): (FileOwner, &CommitAuthor),
    ) -> Result<(), RepoError> {
        let disk = |source| RepoError::Io { path: workspace.to_owned(), source };
        let is_new = create_private_dir(workspace).map_err(disk)?;
        if !is_new {
            let why = "it is not empty, not ours or no directory, so an agent may have been here";
            return Err(RepoError::StateUnusable { path: workspace.to_owned(), why });
        }
        let bundle = lease.create_scratch_dir("feed")?.join("bundle");
        // 1. The commits go into a bundle, so that the workspace shares no file with the mirror.
        self.write_checkout_bundle(state, &bundle)?;
        // 2. The bundle is unpacked as this process's user. The agent has no access yet.
        self.unpack_bundle(state, &bundle, workspace, author)?;
        fs::remove_file(&bundle).map_err(disk)?;
        // 3. Only then do the files go to the sandbox's user. Without root, they stay with this process's user.
        if rustix::process::geteuid().is_root() {
            dir_tree::chown_tree(workspace, owner.uid, owner.gid).map_err(disk)?;
        }
        Ok(())
    }

    /// Writes a bundle with all commits of the base and the branch.
    fn write_checkout_bundle(&self, state: &BranchState, bundle: &Path) -> Result<(), RepoError> {
        let mut refs = vec![mirror_ref(&state.branch, "base")];
        if state.exists {
            refs.push(mirror_ref(&state.branch, "branch"));
        }
        let call = self.git_command("bundle").args(["create", "--quiet"]).arg(bundle).args(refs);
        Ok(call.limits(self.limits.of_git()).execute()?)
    }

    /// Creates the repository from the bundle, checks the branch out, and sets the author.
    fn unpack_bundle(
        &self,
        state: &BranchState,
        bundle: &Path,
        workspace: &Path,
        author: &CommitAuthor,
    ) -> Result<(), RepoError> {
        let git_dir = workspace.join(".git");
        let branch = state.branch.to_string();
        let inside = |subcommand| {
            let call =
                self.git.subcommand(subcommand).repository(&git_dir).limits(self.limits.of_git());
            call.env("GIT_WORK_TREE", workspace)
        };
        let words = ["--quiet", "--template=", "--object-format=sha1", "--initial-branch", &branch];
        inside("init").args(words).execute()?;
        let origin = format!("refs/remotes/origin/{}", state.base);
        let (base, branch_ref) =
            (mirror_ref(&state.branch, "base"), mirror_ref(&state.branch, "branch"));
        let mut refspecs = vec![format!("{base}:{origin}")];
        refspecs.extend(state.exists.then(|| format!("{branch_ref}:{}", state.branch.to_ref())));
        let words = ["--quiet", "--no-tags", "--no-write-fetch-head", "--update-head-ok", "--"];
        inside("fetch").args(words).arg(bundle).args(refspecs).execute()?;
        // A new branch begins at the base.
        if !state.exists {
            inside("update-ref")
                .arg(state.branch.to_ref())
                .arg(state.start.to_string())
                .execute()?;
        }
        // Links of the repository are created as links. That is safe here: no agent is in the directory yet, and git
        // itself never writes through a link.
        let reset = inside("reset").config("core.symlinks=true").args(["--hard", "--quiet"]);
        reset.execute().map_err(|error| map_checkout_error(error, state))?;
        for (key, value) in [("user.name", &author.name), ("user.email", &author.email)] {
            inside("config").args(["--local", key, value]).execute()?;
        }
        Ok(())
    }
}

/// Maps an error of git as it writes the files of a branch. Without a fault of this machine, it is the branch's content
/// that cannot be written.
fn map_checkout_error(error: git::GitError, state: &BranchState) -> RepoError {
    match error.stderr_text().map(git::summarize_stderr) {
        Some(why) if !error.is_transient() && !error.is_resource_limit() => {
            RepoError::CheckoutFailed { branch: state.branch.clone(), why }
        }
        _ => error.into(),
    }
}

/// The sums of the `ls-tree` output so far. Each line has a kind and a size.
#[derive(Default)]
struct CheckoutTotals {
    names: u64,
    bytes: u64,
    /// The value of the size that is being parsed.
    size: u64,
}

impl CheckoutTotals {
    /// Counts one piece of output, which may end within a line. Kinds have no digits, so every digit belongs to a size.
    /// An entry without a size has no content of its own.
    fn count_piece(&mut self, piece: &[u8]) {
        for byte in piece {
            match byte {
                b'0'..=b'9' => {
                    let digit = u64::from(byte - b'0');
                    self.size = self.size.saturating_mul(10).saturating_add(digit);
                }
                b'\n' => {
                    self.names += 1;
                    let blocks = std::mem::take(&mut self.size).div_ceil(MIN_NAME_BYTES).max(1);
                    self.bytes = self.bytes.saturating_add(blocks.saturating_mul(MIN_NAME_BYTES));
                }
                _ => (),
            }
        }
    }
}

/// Creates a directory, and returns true if it is empty and only this process's user can use it.
fn create_private_dir(path: &Path) -> io::Result<bool> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => (),
    }
    // `symlink_metadata`: a link that another user has put there is not a directory, and so is refused.
    let found = fs::symlink_metadata(path)?;
    let is_ours = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
    if !is_ours || fs::read_dir(path)?.next().is_some() {
        return Ok(false);
    }
    fs::set_permissions(path, Permissions::from_mode(0o700))?;
    Ok(true)
}

/// The most names of one checkout, directories included. The largest repositories that people work in have fewer.
pub const MAX_CHECKOUT_NAMES: u64 = 500_000;

/// The longest output line of one name in bytes: a kind and a size of 20 digits.
const NAME_LINE_BYTES: u64 = 32;

/// The least disk space of one name in bytes, as in the measure of a workspace.
const MIN_NAME_BYTES: u64 = 4096;
