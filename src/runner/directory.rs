//! A run's directory on this machine: nobody else can enter it, and it goes with the run.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{self, Path, PathBuf};

use anyhow::Context;

use crate::base::tree;
use crate::sandbox::spec::{GID, HOSTS, HOSTS_TEXT, UID};
use crate::sandbox::{Owner, name_of};

/// Where an installation's runs have their directories, without symlinks, whether it is there or not: what was made
/// before a reboot is known by it.
pub(super) fn real(run_dir: &Path) -> io::Result<PathBuf> {
    let run_dir = path::absolute(run_dir)?;
    match (fs::canonicalize(&run_dir), run_dir.parent(), run_dir.file_name()) {
        (Err(error), Some(parent), Some(name)) if error.kind() == io::ErrorKind::NotFound => {
            Ok(real(parent)?.join(name))
        }
        (found, ..) => found,
    }
}

/// Removed when it is dropped. Its name says whose it is, so there is no moment at which nobody knows.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    is_roots: bool,
    user: (u32, u32),
}

impl Directory {
    pub(super) fn create(parent: &Path, run: &str, owner: &Owner) -> anyhow::Result<Self> {
        let cannot =
            |path: &Path| format!("the run's directory `{}` cannot be made", path.display());
        // Others may pass through, and see nothing.
        DirBuilder::new()
            .recursive(true)
            .mode(0o711)
            .create(parent)
            .with_context(|| cannot(parent))?;
        let parent = real(parent).with_context(|| cannot(parent))?;
        let path = parent.join(format!("{}-{}", name_of(run), owner.to_file_name()));
        DirBuilder::new().mode(0o700).create(&path).with_context(|| cannot(&path))?;
        let mut directory = Self { path, is_roots: false, user: (UID, GID) };
        let socket_dir = directory.socket_dir();
        // The sandbox sees this one, and its user must be able to go through.
        fs::create_dir(&socket_dir).with_context(|| cannot(&socket_dir))?;
        fs::set_permissions(&socket_dir, Permissions::from_mode(0o755))?;
        let hosts = socket_dir.join(HOSTS);
        fs::write(&hosts, HOSTS_TEXT).with_context(|| cannot(&hosts))?;
        fs::set_permissions(&hosts, Permissions::from_mode(0o644))?;
        let made = fs::metadata(&socket_dir)?;
        directory.is_roots = made.uid() == 0;
        if !directory.is_roots {
            directory.user = (made.uid(), made.gid());
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
    pub(super) fn workspace(&self) -> PathBuf {
        self.path.join("workspace")
    }

    /// Makes it, writable for the sandbox's user, and for others only where we may not give
    /// it away.
    pub(super) fn make_workspace(&self) -> anyhow::Result<PathBuf> {
        let path = self.workspace();
        let cannot = || format!("the workspace `{}` cannot be made", path.display());
        DirBuilder::new().mode(0o700).create(&path).with_context(cannot)?;
        if self.is_roots {
            chown(&path, Some(UID), Some(UID)).with_context(cannot)?;
        } else {
            fs::set_permissions(&path, Permissions::from_mode(0o777)).with_context(cannot)?;
        }
        Ok(path)
    }

    /// Who a gateway's container runs as. One that may not give files away keeps them, and runs it as itself.
    pub(super) fn proxy_user(&self) -> (u32, u32) {
        self.user
    }

    /// Whether this process makes files as root.
    pub(super) fn is_roots(&self) -> bool {
        self.is_roots
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.path) {
            tracing::error!(%error, path = %self.path.display(), "the run's directory is left behind");
        }
    }
}

/// Removes a run's directory; one that is not there is as good as removed. Where something is mounted in it, it is kept:
/// what would be removed is somebody else's.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mut targets = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    if let Some(target) = targets.find(|target| Path::new(target).starts_with(path)) {
        return Err(io::Error::other(format!("something is mounted at `{target}`")));
    }
    tree::remove(path)
}

/// Who made a directory of this name.
pub(super) fn owner_of(file_name: &str) -> Option<Owner> {
    let (_, owner) = file_name.strip_prefix("cogni-")?.split_once('-')?;
    Owner::parse(owner)
}
