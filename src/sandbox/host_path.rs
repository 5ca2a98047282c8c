//! The checks of paths of this machine that a sandbox gets: they must exist, and lie below a directory that the
//! operator allows.

mod access_list;

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf, absolute};

use rustix::process::{getegid, geteuid};

use super::spec::{MountAccess, RootSource, SANDBOX_UID, SandboxSpec, WorkspaceMount};
use super::{SandboxError, UserRange};
use access_list::{AccessIds, AccessList};

/// The paths of this program that sandboxes must keep from.
#[derive(Clone, Debug, Default)]
pub struct OwnPaths {
    /// The paths that no sandbox may see: secrets, records, directories of runs.
    pub private: Vec<PathBuf>,
    /// The paths that no sandbox may change, because they decide about later runs.
    pub decisive: Vec<PathBuf>,
}

/// Checks every path of `spec` that the operator or a client named, for a sandbox with a user of `users`.
///
/// The result stays valid until the mount: below the allowed root, no sandbox may write to a directory on the way,
/// and so none can replace a part of the path.
///
/// # Errors
/// Returns [`SandboxError::HostPath`] for the first path that is not absolute, does not exist, leads through a
/// symlink, is not below one of `roots`, shows a forbidden path, shows a private path or could change a decisive one of
/// this program, or does not let the sandbox's user in.
pub fn check_host_paths(
    spec: &SandboxSpec,
    users: UserRange,
    roots: &[PathBuf],
    own: &OwnPaths,
) -> Result<(), SandboxError> {
    let judge = |path: &Path, user| {
        check_path(path, roots, user)?;
        check_not_private(path, &own.private)
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
        let judged = judge(path, user)
            .and_then(|()| check_not_decisive(path, access, &own.decisive))
            .and_then(|()| user.check_access(path, access));
        judged.map_err(|why| wrong(path, why))?;
    }
    Ok(())
}

fn check_path(path: &Path, roots: &[PathBuf], user: SandboxUser) -> Result<(), String> {
    if !path.is_absolute() {
        return Err("it is not absolute".to_owned());
    }
    let real = fs::canonicalize(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            "it does not exist; make it first, or correct the path".to_owned()
        }
        _ => error.to_string(),
    })?;
    // A symlink in a parent directory counts too: a user who may write there could redirect the path after this check.
    if real != path {
        return Err(format!("it leads through a symlink; give `{}`", real.display()));
    }
    let kind = fs::symlink_metadata(path).map_err(|error| error.to_string())?.file_type();
    if !(kind.is_dir() || kind.is_file()) || kind.is_socket() {
        return Err("it is neither a directory nor a file".to_owned());
    }
    // Both directions count: a directory above a forbidden path shows the forbidden path too.
    let forbidden = FORBIDDEN_PATHS.iter().map(Path::new);
    if let Some(sight) = forbidden.clone().find(|of| path.starts_with(of) || of.starts_with(path)) {
        return Err(format!("it would show `{}`, which no sandbox may see", sight.display()));
    }
    let mut real_roots = roots.iter().filter_map(|root| fs::canonicalize(root).ok());
    let Some(root) = real_roots.find(|root| path.starts_with(root)) else {
        let roots: Vec<_> = roots.iter().map(|root| format!("`{}`", root.display())).collect();
        return Err(format!("it is not below {}; allow it with `--root`", roots.join(" or ")));
    };
    // Every directory from the path up to the allowed root must keep its entries safe from the sandbox's user.
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

/// Checks that the path shows none of the gateway's own paths: secrets, records, directories of runs. The own paths
/// may not exist yet.
fn check_not_private(path: &Path, private_paths: &[PathBuf]) -> Result<(), String> {
    match find_shown(path, private_paths) {
        Some(of) => Err(format!(
            "it would show `{}`, which is the gateway's own; keep that elsewhere",
            of.display()
        )),
        None => Ok(()),
    }
}

/// Checks that a sandbox with this access could not change a file that decides about later runs: prices, definitions of
/// tools, agents.
fn check_not_decisive(
    path: &Path,
    access: MountAccess,
    decisive_paths: &[PathBuf],
) -> Result<(), String> {
    if access != MountAccess::ReadWrite {
        return Ok(());
    }
    match find_shown(path, decisive_paths) {
        Some(of) => Err(format!(
            "the sandbox could change `{}`, which decides about later runs; keep that elsewhere, or mount this path read-only",
            of.display()
        )),
        None => Ok(()),
    }
}

/// Returns the first of the paths that a mount of `path` would show, or that lies around `path`.
fn find_shown<'a>(path: &Path, own_paths: &'a [PathBuf]) -> Option<&'a PathBuf> {
    // Both the named path and the real path count: a sandbox that may write at either of them has the directory.
    let shown = |of: &Path| path.starts_with(of) || of.starts_with(path);
    own_paths
        .iter()
        .find(|of| absolute(of).is_ok_and(|of| shown(&of) || shown(&canonical_prefix(&of))))
}

/// Resolves the symlinks of a path, as far as the path exists.
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
    /// The group, if its number differs from the user's.
    gid: Option<u32>,
}

impl SandboxUser {
    /// Returns the users for a root. If a user other than root makes an embedded container, the sandbox's user is that
    /// user.
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

    /// Returns true if a sandbox with write access to the directory could replace the entry. Other sandboxes with this
    /// directory count too.
    fn could_replace_entry(self, entry: &Path, directory: &Path) -> io::Result<bool> {
        // The runner's own user makes all of these sandboxes, so there is no other user to protect the path from.
        if self.range.only_user() == Some(geteuid().as_raw()) {
            return Ok(false);
        }
        let by_list = AccessList::read(directory)?
            .is_some_and(|list| list.names(MODE_WRITE, |id| self.is_sandbox_id(id)));
        let (directory, entry) = (fs::symlink_metadata(directory)?, fs::symlink_metadata(entry)?);
        // In a sticky directory, only the owner of the entry or of the directory may move the entry (chmod(2)).
        let is_sticky = directory.mode() & MODE_STICKY != 0;
        let is_kept = is_sticky && !self.is_sandbox_id(entry.uid());
        let by_group =
            self.is_sandbox_id(directory.gid()) && directory.mode() >> 3 & MODE_WRITE != 0;
        let by_all = directory.mode() & MODE_WRITE != 0;
        Ok(self.is_sandbox_id(directory.uid()) || ((by_group || by_all || by_list) && !is_kept))
    }

    /// Returns true if a sandbox may have this user, or this group.
    fn is_sandbox_id(self, id: u32) -> bool {
        self.range.contains(id) || self.gid.map_or(id == SANDBOX_UID, |gid| gid == id)
    }

    /// Checks that the sandbox's user has the requested access to the path, by the mode or by an access control list.
    fn check_access(self, path: &Path, access: MountAccess) -> Result<(), String> {
        let found = fs::symlink_metadata(path).map_err(|error| error.to_string())?;
        let search = if found.is_dir() { MODE_SEARCH } else { 0 };
        let (requested, to) = match access {
            MountAccess::ReadOnly => (MODE_READ | search, "read"),
            MountAccess::ReadWrite => (MODE_READ | MODE_WRITE | search, "write"),
        };
        let list = AccessList::read(path).map_err(|error| error.to_string())?;
        if self.has_permissions(&found, list.as_ref(), requested) {
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

    /// Returns true if the access list, or the mode of a path without a list, grants all of these permissions.
    fn has_permissions(self, found: &Metadata, list: Option<&AccessList>, requested: u32) -> bool {
        // In a range of several users, the sandbox's own user is not known yet, so only the bits for all users count.
        let own = self.range.only_user();
        let ids = AccessIds { user: own, group: self.gid.or(own) };
        let owner = AccessIds { user: Some(found.uid()), group: Some(found.gid()) };
        if let Some(list) = list {
            return list.grants(requested, ids, owner);
        }
        let shift = match (ids.user == owner.user, ids.group == owner.group) {
            (true, _) => 6,
            (false, true) => 3,
            (false, false) => 0,
        };
        found.mode() >> shift & requested == requested
    }
}

const MODE_READ: u32 = 4;
const MODE_WRITE: u32 = 2;
const MODE_SEARCH: u32 = 1;

/// The sticky bit of a directory: only the owners of the directory and of an entry may move the entry.
const MODE_STICKY: u32 = 0o1000;

/// The paths that no sandbox may see: engines' sockets and states, devices, the kernel's own trees, and secrets.
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
