//! The paths of this machine that a sandbox is given: below what the operator allows, and really there.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf, absolute};

use rustix::process::{getegid, geteuid};

use super::spec::{MountAccess, RootSource, SANDBOX_UID, SandboxSpec, WorkspaceMount};
use super::{SandboxError, UserRange};

/// Checks every path of `spec` that is somebody else's than ours, for a sandbox with one of these users.
///
/// What is found stays so until it is mounted: from its root down, no sandbox may write where it could be turned
/// elsewhere.
///
/// # Errors
/// The first that is not absolute, not there, leads through a symlink, is not below one of `roots`, is what no sandbox
/// may see, shows one of `ours`, or does not let the sandbox's user in.
pub fn check_host_paths(
    spec: &SandboxSpec,
    users: UserRange,
    roots: &[PathBuf],
    ours: &[PathBuf],
) -> Result<(), SandboxError> {
    let judge = |path: &Path, user| {
        check_path(path, roots, user)?;
        check_not_private(path, ours)
    };
    let wrong = |path: &Path, why| SandboxError::HostPath { path: path.to_owned(), why };
    let user = SandboxUser::from_root(&spec.root, users);
    if let RootSource::Directory(path) = &spec.root {
        judge(path, user).map_err(|why| wrong(path, why))?;
    }
    let workspace = match &spec.workspace {
        WorkspaceMount::None | WorkspaceMount::Fresh => None,
        WorkspaceMount::Directory { path, access } => Some((path, *access)),
    };
    let mounts = spec.mounts.iter().map(|mount| (&mount.source, mount.access));
    for (path, access) in workspace.into_iter().chain(mounts) {
        let judged = judge(path, user).and_then(|()| user.check_access(path, access));
        judged.map_err(|why| wrong(path, why))?;
    }
    Ok(())
}

fn check_path(path: &Path, roots: &[PathBuf], user: SandboxUser) -> Result<(), String> {
    if !path.is_absolute() {
        return Err("it is not absolute".to_owned());
    }
    let real = fs::canonicalize(path).map_err(|error| error.to_string())?;
    // Also of a directory on the way: whoever may write there could turn it elsewhere after this check.
    if real != path {
        return Err(format!("it leads through a symlink; give `{}`", real.display()));
    }
    let kind = fs::symlink_metadata(path).map_err(|error| error.to_string())?.file_type();
    if !(kind.is_dir() || kind.is_file()) || kind.is_socket() {
        return Err("it is neither a directory nor a file".to_owned());
    }
    // Both ways: a directory above one of these shows it too.
    let forbidden = FORBIDDEN_PATHS.iter().map(Path::new);
    if let Some(sight) = forbidden.clone().find(|of| path.starts_with(of) || of.starts_with(path)) {
        return Err(format!("it would show `{}`, which no sandbox may see", sight.display()));
    }
    let mut real_roots = roots.iter().filter_map(|root| fs::canonicalize(root).ok());
    let Some(root) = real_roots.find(|root| path.starts_with(root)) else {
        let roots: Vec<_> = roots.iter().map(|root| format!("`{}`", root.display())).collect();
        return Err(format!("it is not below {}; allow it with `--root`", roots.join(" or ")));
    };
    let steps = path.ancestors().zip(path.ancestors().skip(1));
    for (entry, directory) in steps.take_while(|(_, directory)| directory.starts_with(&root)) {
        if user.could_replace_entry(entry, directory).map_err(|error| error.to_string())? {
            return Err(format!(
                "a sandbox may write to `{}`, and turn it elsewhere; keep it where no sandbox's user ({}, {SANDBOX_UID}) may write",
                directory.display(),
                user.range
            ));
        }
    }
    Ok(())
}

/// Whether nothing of ours is there: our secrets, our records, what we make for others. It may not be there yet.
fn check_not_private(path: &Path, ours: &[PathBuf]) -> Result<(), String> {
    // Where it is named, and where it really is: whoever may write at either place has it.
    let shown = |of: &Path| path.starts_with(of) || of.starts_with(path);
    let is_shown =
        |of: &&PathBuf| absolute(of).is_ok_and(|of| shown(&of) || shown(&canonical_prefix(&of)));
    match ours.iter().find(is_shown) {
        Some(of) => Err(format!(
            "it would show `{}`, which is the gateway's own; keep that elsewhere",
            of.display()
        )),
        None => Ok(()),
    }
}

/// Where a path leads, as far as it is there.
fn canonical_prefix(path: &Path) -> PathBuf {
    let found = path.ancestors().find_map(|above| Some((above, fs::canonicalize(above).ok()?)));
    let Some((above, real)) = found else { return path.to_owned() };
    match path.strip_prefix(above) {
        Ok(rest) if !rest.as_os_str().is_empty() => real.join(rest),
        _ => real,
    }
}

/// The users that the sandbox may have, as this machine sees them.
#[derive(Clone, Copy)]
struct SandboxUser {
    range: UserRange,
    /// The group, where it is another than the user's.
    gid: Option<u32>,
}

impl SandboxUser {
    /// A container that somebody else than root has made of this machine's programs is that user's here.
    fn from_root(root: &RootSource, users: UserRange) -> Self {
        let (uid, gid) = (geteuid(), getegid());
        let is_own = matches!(root, RootSource::Host | RootSource::Directory(_));
        match uid.is_root() {
            true => Self { range: users, gid: None },
            false if is_own => {
                Self { range: UserRange::single_user(uid.as_raw()), gid: Some(gid.as_raw()) }
            }
            false => Self { range: UserRange::SHARED_USER, gid: None },
        }
    }

    /// Whether a sandbox that is given the directory could put something else in the place of its entry: this sandbox, or
    /// another one that has the directory, too.
    fn could_replace_entry(self, entry: &Path, directory: &Path) -> io::Result<bool> {
        // Where all of this is the runner's own user's, there is nobody to keep out.
        if self.range.only_user() == Some(geteuid().as_raw()) {
            return Ok(false);
        }
        let (directory, entry) = (fs::symlink_metadata(directory)?, fs::symlink_metadata(entry)?);
        let is_sticky = directory.mode() & MODE_STICKY != 0;
        let is_kept = is_sticky && !self.is_sandbox_id(entry.uid());
        let by_group =
            self.is_sandbox_id(directory.gid()) && directory.mode() >> 3 & MODE_WRITE != 0;
        let by_all = directory.mode() & MODE_WRITE != 0;
        Ok(self.is_sandbox_id(directory.uid()) || ((by_group || by_all) && !is_kept))
    }

    /// Whether a sandbox may have this user, or group.
    fn is_sandbox_id(self, id: u32) -> bool {
        self.range.contains(id) || self.gid.map_or(id == SANDBOX_UID, |gid| gid == id)
    }

    /// Whether it may do with the path what it is given for. An access list may say more than a mode.
    fn check_access(self, path: &Path, access: MountAccess) -> Result<(), String> {
        let found = fs::symlink_metadata(path).map_err(|error| error.to_string())?;
        let search = if found.is_dir() { MODE_SEARCH } else { 0 };
        let (wanted, to) = match access {
            MountAccess::ReadOnly => (MODE_READ | search, "read"),
            MountAccess::ReadWrite => (MODE_READ | MODE_WRITE | search, "write"),
        };
        let has_list = || rustix::fs::getxattr(path, ACL_XATTR, &mut [0; 0]).is_ok();
        if self.has_permissions(&found, wanted) || has_list() {
            return Ok(());
        }
        Err(match self.range.only_user() {
            Some(uid) => format!(
                "user {uid}, which the sandbox runs as, may not {to} there; `chown {uid}` it, change its mode, or name another user with `--uid`"
            ),
            None => format!(
                "the sandbox's user, one of {}, may not {to} there; let all users {to} there by its mode",
                self.range
            ),
        })
    }

    /// Whether it has all of these permissions, by the mode alone.
    fn has_permissions(self, found: &Metadata, wanted: u32) -> bool {
        // Of several users, the sandbox's own is not known yet.
        let own = self.range.only_user();
        let shift = match (own == Some(found.uid()), self.gid.or(own) == Some(found.gid())) {
            (true, _) => 6,
            (false, true) => 3,
            (false, false) => 0,
        };
        found.mode() >> shift & wanted == wanted
    }
}

const MODE_READ: u32 = 4;
const MODE_WRITE: u32 = 2;
const MODE_SEARCH: u32 = 1;

/// Of a directory: only its owner, and that of an entry, may move the entry.
const MODE_STICKY: u32 = 0o1000;

const ACL_XATTR: &str = "system.posix_acl_access";

/// Engines' sockets and states, devices, the kernel's own trees, and where secrets are kept.
const FORBIDDEN_PATHS: &[&str] = &[
    "/boot",
    "/dev",
    "/etc",
    "/proc",
    "/run",
    "/sys",
    "/var/lib/containerd",
    "/var/lib/containers",
    "/var/lib/docker",
    "/var/run",
];
