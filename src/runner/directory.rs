//! A run's directory on this machine: nobody else can enter it, and it goes with the run.

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

/// Where an installation's runs have their directories, without symlinks, whether it is there or not: what was made
/// before a reboot is known by it.
pub(super) fn canonical_run_dir(run_dir: &Path) -> io::Result<PathBuf> {
    let run_dir = path::absolute(run_dir)?;
    match (fs::canonicalize(&run_dir), run_dir.parent(), run_dir.file_name()) {
        (Err(error), Some(parent), Some(name)) if error.kind() == io::ErrorKind::NotFound => {
            Ok(canonical_run_dir(parent)?.join(name))
        }
        (found, ..) => found,
    }
}

/// Goes with its run: [`RunDirectory::remove`] waits for that, and who drops it does not. How much is in it was for an agent to
/// choose, so it is removed on a thread of its own. Its name says whose it is, so there is no moment at which nobody knows.
#[derive(Debug)]
pub(super) struct RunDirectory {
    path: PathBuf,
    is_roots: bool,
    proxy_user: (u32, u32),
    /// The sandbox's. It is given back when nothing is left of the directory.
    user: UserLease,
}

impl RunDirectory {
    /// For what has no sandbox.
    pub(super) fn create(parent: &Path, run: &str, owner: &OwnerProcess) -> anyhow::Result<Self> {
        Self::create_for_users(UserRange::SHARED_USER, parent, run, owner)
    }

    /// Checks that the path of a run's socket below `parent` is no longer than the kernel allows.
    ///
    /// # Errors
    /// The path is longer.
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

    /// For a sandbox, which is given one of these users.
    pub(super) fn create_for_users(
        users: UserRange,
        parent: &Path,
        run: &str,
        owner: &OwnerProcess,
    ) -> anyhow::Result<Self> {
        let cannot =
            |path: &Path| format!("the run's directory `{}` cannot be made", path.display());
        // Others may pass through, and see nothing.
        private_dir::make(parent, 0o711).with_context(|| cannot(parent))?;
        let parent = canonical_run_dir(parent).with_context(|| cannot(parent))?;
        let path = parent.join(format!("{}-{}", sandbox_name(run), owner.to_file_name()));
        let user = users.lease_user(None, &path)?;
        DirBuilder::new().mode(0o700).create(&path).with_context(|| cannot(&path))?;
        let mut directory =
            Self { path, is_roots: false, proxy_user: (SANDBOX_UID, SANDBOX_UID), user };
        let socket_dir = directory.socket_dir();
        create_socket_dir(&socket_dir).with_context(|| cannot(&socket_dir))?;
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

    /// Of all runs, without symlinks.
    pub(super) fn parent(&self) -> PathBuf {
        self.path.parent().map(Path::to_owned).unwrap_or_default()
    }

    /// Short: a socket's path has 107 bytes.
    pub(super) fn socket_dir(&self) -> PathBuf {
        self.path.join("sock")
    }

    /// Where a workspace is that goes with the run.
    pub(super) fn workspace_path(&self) -> PathBuf {
        self.path.join("workspace")
    }

    /// Makes it, writable for the sandbox's user, and for others only where we may not give
    /// it away.
    pub(super) fn create_workspace(&self) -> anyhow::Result<PathBuf> {
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

    /// Who a gateway's container runs as. One that may not give files away keeps them, and runs it as itself.
    pub(super) fn gateway_user(&self) -> (u32, u32) {
        self.proxy_user
    }

    /// The sandbox's user.
    pub(super) fn uid(&self) -> u32 {
        self.user.uid()
    }

    /// Whether this process makes files as root.
    pub(super) fn runs_as_root(&self) -> bool {
        self.is_roots
    }

    fn take_parts(&mut self) -> (PathBuf, UserLease) {
        (mem::take(&mut self.path), mem::replace(&mut self.user, UserLease::shared_user()))
    }

    /// Removes it. What takes longer than there is time goes on behind whoever waits; where this process ends before, the
    /// next sweep does the rest.
    pub(super) async fn remove(mut self) {
        let (path, user) = self.take_parts();
        let removal = spawn_blocking(move || remove_best_effort(&path, user));
        if timeout(REMOVE_TIMEOUT, removal).await.is_err() {
            tracing::warn!("a run's directory holds so much that nobody waits for its end");
        }
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        let (path, user) = self.take_parts();
        if path.as_os_str().is_empty() {
            return;
        }
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || remove_best_effort(&path, user))),
            Err(_) => remove_best_effort(&path, user),
        }
    }
}

fn remove_best_effort(path: &Path, user: UserLease) {
    if let Err(error) = remove_run_dir(path) {
        user.keep_locked();
        tracing::error!(%error, path = %path.display(), "the run's directory is left behind");
        if let Some(name) = path.file_name() {
            leftovers::register(name.to_string_lossy());
        }
    }
}

/// Makes what a sandbox sees as its socket's directory, without a socket.
pub(super) fn create_socket_dir(path: &Path) -> io::Result<()> {
    fs::create_dir(path)?;
    // The sandbox sees this one, and its user must be able to go through.
    fs::set_permissions(path, Permissions::from_mode(0o755))?;
    let hosts = path.join(HOSTS_FILE);
    fs::write(&hosts, HOSTS_TEXT)?;
    fs::set_permissions(&hosts, Permissions::from_mode(0o644))
}

/// Removes a run's directory; one that is not there is as good as removed. Where something is mounted in it, it is kept:
/// what would be removed is somebody else's.
pub(super) fn remove_run_dir(path: &Path) -> io::Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mut targets = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    if let Some(target) = targets.find(|target| Path::new(target).starts_with(path)) {
        return Err(io::Error::other(format!("something is mounted at `{target}`")));
    }
    dir_tree::remove_tree(path)
}

/// Who made a directory of this name.
pub(super) fn owner_from_name(file_name: &str) -> Option<OwnerProcess> {
    let (_, owner) = file_name.strip_prefix("cogni-")?.split_once('-')?;
    OwnerProcess::parse(owner)
}

/// How long a run's end waits for it: some hundred thousand names.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    /// R5: how many names there are is for the agent to choose, and how long others wait is not.
    #[test]
    fn a_directory_is_removed_beside_the_runtime() {
        let place = tempfile::tempdir().expect("there is a place for it");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("there is a thread").block_on(async {
            let waited = filled(place.path(), "waited");
            let path = waited.path().to_owned();
            let mut removal = std::pin::pin!(waited.remove());
            tokio::select! {
                biased;
                () = removal.as_mut() => panic!("nobody else had a turn meanwhile"),
                () = tokio::task::yield_now() => (),
            }
            removal.await;
            assert!(!path.exists());

            let dropped = filled(place.path(), "dropped");
            let path = dropped.path().to_owned();
            drop(dropped);
            assert!(path.exists(), "it was waited for");
        });
    }

    fn filled(place: &Path, run: &str) -> RunDirectory {
        let owner = OwnerProcess::this_process().expect("it is there");
        let directory = RunDirectory::create(place, run, &owner).expect("made");
        for number in 0..20_000 {
            fs::write(directory.path().join(number.to_string()), "").expect("written");
        }
        directory
    }
}
