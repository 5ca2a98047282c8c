//! The paths of this machine that a sandbox is given: below what the operator allows, and really there.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf, absolute};

use rustix::process::{getegid, geteuid};

use super::spec::{Access, Root, RunSpec, UID, Workspace};
use super::{Error, UserRange};

/// Checks every path of `spec` that is somebody else's than ours, for a sandbox with one of these users.
///
/// What is found stays so until it is mounted: from its root down, no sandbox may write where it could be turned
/// elsewhere.
///
/// # Errors
/// The first that is not absolute, not there, leads through a symlink, is not below one of `roots`, is what no sandbox
/// may see, shows one of `ours`, or does not let the sandbox's user in.
pub fn check(
    spec: &RunSpec,
    users: UserRange,
    roots: &[PathBuf],
    ours: &[PathBuf],
) -> Result<(), Error> {
    let judge = |path: &Path, user| {
        judge(path, roots, user)?;
        shows_none(path, ours)
    };
    let wrong = |path: &Path, why| Error::HostPath { path: path.to_owned(), why };
    let user = User::of(&spec.root, users);
    if let Root::Directory(path) = &spec.root {
        judge(path, user).map_err(|why| wrong(path, why))?;
    }
    let workspace = match &spec.workspace {
        Workspace::None | Workspace::Fresh => None,
        Workspace::Directory { path, access } => Some((path, *access)),
    };
    let mounts = spec.mounts.iter().map(|mount| (&mount.source, mount.access));
    for (path, access) in workspace.into_iter().chain(mounts) {
        let judged = judge(path, user).and_then(|()| user.let_in(path, access));
        judged.map_err(|why| wrong(path, why))?;
    }
    Ok(())
}

fn judge(path: &Path, roots: &[PathBuf], user: User) -> Result<(), String> {
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
    let forbidden = FORBIDDEN.iter().map(Path::new);
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
        if user.may_turn(entry, directory).map_err(|error| error.to_string())? {
            return Err(format!(
                "a sandbox may write to `{}`, and turn it elsewhere; keep it where no sandbox's user ({}, {UID}) may write",
                directory.display(),
                user.range
            ));
        }
    }
    Ok(())
}

/// Whether nothing of ours is there: our secrets, our records, what we make for others. It may not be there yet.
fn shows_none(path: &Path, ours: &[PathBuf]) -> Result<(), String> {
    // Where it is named, and where it really is: whoever may write at either place has it.
    let shown = |of: &Path| path.starts_with(of) || of.starts_with(path);
    let is_shown = |of: &&PathBuf| absolute(of).is_ok_and(|of| shown(&of) || shown(&real(&of)));
    match ours.iter().find(is_shown) {
        Some(of) => Err(format!(
            "it would show `{}`, which is the gateway's own; keep that elsewhere",
            of.display()
        )),
        None => Ok(()),
    }
}

/// Where a path leads, as far as it is there.
fn real(path: &Path) -> PathBuf {
    let found = path.ancestors().find_map(|above| Some((above, fs::canonicalize(above).ok()?)));
    let Some((above, real)) = found else { return path.to_owned() };
    match path.strip_prefix(above) {
        Ok(rest) if !rest.as_os_str().is_empty() => real.join(rest),
        _ => real,
    }
}

/// The users that the sandbox may have, as this machine sees them.
#[derive(Clone, Copy)]
struct User {
    range: UserRange,
    /// The group, where it is another than the user's.
    gid: Option<u32>,
}

impl User {
    /// A container that somebody else than root has made of this machine's programs is that user's here.
    fn of(root: &Root, users: UserRange) -> Self {
        let (uid, gid) = (geteuid(), getegid());
        let is_own = matches!(root, Root::Host | Root::Directory(_));
        match uid.is_root() {
            true => Self { range: users, gid: None },
            false if is_own => {
                Self { range: UserRange::one(uid.as_raw()), gid: Some(gid.as_raw()) }
            }
            false => Self { range: UserRange::SHARED, gid: None },
        }
    }

    /// Whether a sandbox that is given the directory could put something else in the place of its entry: this sandbox, or
    /// another one that has the directory, too.
    fn may_turn(self, entry: &Path, directory: &Path) -> io::Result<bool> {
        // Where all of this is the runner's own user's, there is nobody to keep out.
        if self.range.single() == Some(geteuid().as_raw()) {
            return Ok(false);
        }
        let (directory, entry) = (fs::symlink_metadata(directory)?, fs::symlink_metadata(entry)?);
        let is_sticky = directory.mode() & STICKY != 0;
        let is_kept = is_sticky && !self.is_sandboxes(entry.uid());
        let by_group = self.is_sandboxes(directory.gid()) && directory.mode() >> 3 & WRITE != 0;
        let by_all = directory.mode() & WRITE != 0;
        Ok(self.is_sandboxes(directory.uid()) || ((by_group || by_all) && !is_kept))
    }

    /// Whether a sandbox may have this user, or group.
    fn is_sandboxes(self, id: u32) -> bool {
        self.range.contains(id) || self.gid.map_or(id == UID, |gid| gid == id)
    }

    /// Whether it may do with the path what it is given for. An access list may say more than a mode.
    fn let_in(self, path: &Path, access: Access) -> Result<(), String> {
        let found = fs::symlink_metadata(path).map_err(|error| error.to_string())?;
        let search = if found.is_dir() { SEARCH } else { 0 };
        let (wanted, to) = match access {
            Access::ReadOnly => (READ | search, "read"),
            Access::ReadWrite => (READ | WRITE | search, "write"),
        };
        let has_list = || rustix::fs::getxattr(path, ACCESS_LIST, &mut [0; 0]).is_ok();
        if self.may(&found, wanted) || has_list() {
            return Ok(());
        }
        Err(match self.range.single() {
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
    fn may(self, found: &Metadata, wanted: u32) -> bool {
        // Of several users, the sandbox's own is not known yet.
        let own = self.range.single();
        let shift = match (own == Some(found.uid()), self.gid.or(own) == Some(found.gid())) {
            (true, _) => 6,
            (false, true) => 3,
            (false, false) => 0,
        };
        found.mode() >> shift & wanted == wanted
    }
}

const READ: u32 = 4;
const WRITE: u32 = 2;
const SEARCH: u32 = 1;

/// Of a directory: only its owner, and that of an entry, may move the entry.
const STICKY: u32 = 0o1000;

const ACCESS_LIST: &str = "system.posix_acl_access";

/// Engines' sockets and states, devices, the kernel's own trees, and where secrets are kept.
const FORBIDDEN: &[&str] = &[
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
