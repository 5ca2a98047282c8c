//! A run's directory on this machine. Only the directory's owner can enter it, and the directory is removed with the
//! run.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::mem;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{self, Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::base::unix::MAX_PATH_BYTES;
use crate::base::{dir_tree, private_dir};
use crate::sandbox::spec::{HOSTS_FILE, HOSTS_TEXT, SANDBOX_UID};
use crate::sandbox::{OwnerProcess, UserLease, UserRange, leftovers, sandbox_name};

/// Returns the absolute path of an installation's run directory, without symlinks. The directory does not have to
/// exist. The path identifies the installation's containers and cgroups, also those made before a reboot.
pub(super) fn canonical_run_dir(run_dir: &Path) -> io::Result<PathBuf> {
    let run_dir = path::absolute(run_dir)?;
    match (fs::canonicalize(&run_dir), run_dir.parent(), run_dir.file_name()) {
        // A missing directory has no canonical path. So the names below the nearest existing ancestor are appended to
        // the ancestor's canonical path.
        (Err(error), Some(parent), Some(name)) if error.kind() == io::ErrorKind::NotFound => {
            Ok(canonical_run_dir(parent)?.join(name))
        }
        (found, ..) => found,
    }
}

/// The directory of one run, which is removed with the run. [`RunDirectory::remove`] waits for the removal; dropping
/// the value does not. The agent chose how many files the directory holds, so a blocking thread removes the directory.
/// The directory's name contains the owner process, so the owner is known from the directory's first moment.
#[derive(Debug)]
pub(super) struct RunDirectory {
    path: PathBuf,
    is_roots: bool,
    proxy_user: (u32, u32),
    /// The lease of the sandbox's user. The lease is returned after the directory is removed.
    user: UserLease,
}

impl RunDirectory {
    /// Makes a directory for a run whose files belong to the shared user.
    pub(super) fn create(parent: &Path, run: &str, owner: &OwnerProcess) -> anyhow::Result<Self> {
        Self::create_for_users(UserRange::SHARED_USER, parent, run, owner)
    }

    /// Checks that the path of a run's socket below `parent` is no longer than the kernel allows.
    ///
    /// # Errors
    /// Returns an error if the path is longer.
    pub(super) fn check_length(parent: &Path, owner: &OwnerProcess) -> anyhow::Result<()> {
        let parent = path::absolute(parent)?;
        let name = format!("{}-{}", sandbox_name(""), owner.to_file_name());
        let length = parent.join(name).join("sock/llm.sock").as_os_str().len();
        if let Some(excess) = length.checked_sub(MAX_PATH_BYTES).filter(|excess| *excess > 0) {
            bail!(
                "run directory `{}` is {excess} bytes too long: the sockets below it would have paths of {length} bytes, \
                 and the kernel allows {MAX_PATH_BYTES}; choose a shorter one with `--run-dir`",
                parent.display()
            );
        }
        Ok(())
    }

    /// Makes a directory for a run whose sandbox gets one of `users`.
    pub(super) fn create_for_users(
        users: UserRange,
        parent: &Path,
        run: &str,
        owner: &OwnerProcess,
    ) -> anyhow::Result<Self> {
        let cannot =
            |path: &Path| format!("the run's directory `{}` cannot be made", path.display());
        // Mode 0711: other users may pass through the parent directory, but cannot list it.
        private_dir::make(parent, 0o711)?;
        let parent = canonical_run_dir(parent).with_context(|| cannot(parent))?;
        let path = parent.join(format!("{}-{}", sandbox_name(run), owner.to_file_name()));
        // The user is leased before the directory exists, so that no file can belong to a user of another sandbox.
        let user = users.lease_user(None, &path)?;
        DirBuilder::new().mode(0o700).create(&path).with_context(|| cannot(&path))?;
        let mut directory =
            Self { path, is_roots: false, proxy_user: (SANDBOX_UID, SANDBOX_UID), user };
        let socket_dir = directory.socket_dir();
        create_socket_dir(&socket_dir).with_context(|| cannot(&socket_dir))?;
        // The owner of the new directory shows whether this process makes files as root.
        let made = fs::metadata(&socket_dir)?;
        directory.is_roots = made.uid() == 0;
        if !directory.is_roots {
            directory.proxy_user = (made.uid(), made.gid());
        }
        Ok(directory)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the parent of all runs' directories, without symlinks.
    pub(super) fn parent(&self) -> PathBuf {
        self.path.parent().map(Path::to_owned).unwrap_or_default()
    }

    /// Returns the path of the socket's directory. The name is short because a socket's path may have 107 bytes.
    pub(super) fn socket_dir(&self) -> PathBuf {
        self.path.join("sock")
    }

    /// Returns the path of a workspace that is removed with the run.
    pub(super) fn workspace_path(&self) -> PathBuf {
        self.path.join("workspace")
    }

    /// Makes the workspace. Gives it to the sandbox's user, or lets every user write if this process cannot change
    /// owners.
    pub(super) fn create_workspace(&self) -> anyhow::Result<PathBuf> {
        // Mode 0777 is safe below: only this process's user can enter the run's directory above the workspace.
        let path = self.workspace_path();
        let cannot = || format!("the workspace `{}` cannot be made", path.display());
        DirBuilder::new().mode(0o700).create(&path).with_context(cannot)?;
        if self.is_roots {
            chown(&path, Some(self.uid()), Some(self.uid())).with_context(cannot)?;
        } else {
            fs::set_permissions(&path, Permissions::from_mode(0o777)).with_context(cannot)?;
        }
        Ok(path)
    }

    /// Returns the user and group of a gateway's container. A process that is not root cannot change a file's owner, so
    /// the container runs as that process's user.
    pub(super) fn gateway_user(&self) -> (u32, u32) {
        self.proxy_user
    }

    /// Returns the sandbox's user.
    pub(super) fn uid(&self) -> u32 {
        self.user.uid()
    }

    /// Returns true if this process makes files as root.
    pub(super) fn runs_as_root(&self) -> bool {
        self.is_roots
    }

    /// Takes the path and the lease, and leaves an empty path, which `drop` ignores.
    fn take_parts(&mut self) -> (PathBuf, UserLease) {
        (mem::take(&mut self.path), mem::replace(&mut self.user, UserLease::shared_user()))
    }

    /// Removes the directory, and waits up to `REMOVE_TIMEOUT`. A longer removal continues in the background; if this
    /// process ends before, the next sweep removes the rest.
    pub(super) async fn remove(mut self) {
        let (path, user) = self.take_parts();
        let removal = spawn_blocking(move || remove_best_effort(&path, user));
        if timeout(REMOVE_TIMEOUT, removal).await.is_err() {
            tracing::warn!(
                "the removal of a run's directory takes long and continues in the background"
            );
        }
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        // `remove` has taken the parts already if it was called.
        let (path, user) = self.take_parts();
        if path.as_os_str().is_empty() {
            return;
        }
        match Handle::try_current() {
            // The task runs on without its handle.
            Ok(runtime) => drop(runtime.spawn_blocking(move || remove_best_effort(&path, user))),
            Err(_) => remove_best_effort(&path, user),
        }
    }
}

/// Removes a run's directory. If the removal fails, registers the directory for this process's sweeper.
fn remove_best_effort(path: &Path, user: UserLease) {
    if let Err(error) = remove_run_dir(path) {
        // Files of the user remain, so no other sandbox may get the user.
        user.keep_locked();
        tracing::error!(%error, path = %path.display(), "cannot remove the run's directory");
        if let Some(name) = path.file_name() {
            leftovers::register(name.to_string_lossy());
        }
    }
}

/// Makes the directory that a sandbox sees as its socket's directory. The directory has a hosts file, but no socket.
pub(super) fn create_socket_dir(path: &Path) -> io::Result<()> {
    fs::create_dir(path)?;
    // The sandbox mounts this directory, and the sandbox's user must be able to enter it.
    fs::set_permissions(path, Permissions::from_mode(0o755))?;
    let hosts = path.join(HOSTS_FILE);
    fs::write(&hosts, HOSTS_TEXT)?;
    fs::set_permissions(&hosts, Permissions::from_mode(0o644))
}

/// Removes a run's directory. A missing directory counts as removed.
///
/// # Errors
/// Returns an error if a file system is mounted below the directory, because the mounted files do not belong to the
/// run. Returns an error if a file cannot be removed.
pub(super) fn remove_run_dir(path: &Path) -> io::Result<()> {
    // The second field of a line is the mount point. A crashed sandbox may have left a mount in the directory.
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mut targets = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    if let Some(target) = targets.find(|target| Path::new(target).starts_with(path)) {
        return Err(io::Error::other(format!("something is mounted at `{target}`")));
    }
    dir_tree::remove_tree(path)
}

/// Returns the process that made a directory of this name.
pub(super) fn owner_from_name(file_name: &str) -> Option<OwnerProcess> {
    let (_, owner) = file_name.strip_prefix("cogni-")?.split_once('-')?;
    OwnerProcess::parse(owner)
}

/// The maximum time that a run's end waits for the removal (our choice): enough for some hundred thousand names.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    /// R5: the agent chooses how many names its directory holds, but not how long other runs wait for the removal.
    #[test]
    fn a_directory_is_removed_beside_the_runtime() {
        let temp_dir = tempfile::tempdir().expect("there is a place for it");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("there is a thread").block_on(async {
            let awaited = filled(temp_dir.path(), "waited");
            let path = awaited.path().to_owned();
            let mut removal = std::pin::pin!(awaited.remove());
            tokio::select! {
                biased;
                () = removal.as_mut() => panic!("no other task had a turn during the removal"),
                () = tokio::task::yield_now() => (),
            }
            removal.await;
            assert!(!path.exists());

            let dropped = filled(temp_dir.path(), "dropped");
            let path = dropped.path().to_owned();
            drop(dropped);
            assert!(path.exists(), "it was waited for");
        });
    }

    fn filled(parent: &Path, run: &str) -> RunDirectory {
        let owner = OwnerProcess::this_process().expect("it is there");
        let directory = RunDirectory::create(parent, run, &owner).expect("made");
        for number in 0..20_000 {
            fs::write(directory.path().join(number.to_string()), "").expect("written");
        }
        directory
    }
}
