//! The paths of this machine that a sandbox is given: below what the operator allows, and really there.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::Error;
use super::spec::{Root, RunSpec, Workspace};

/// Checks every path of `spec` that is somebody else's than ours.
///
/// # Errors
/// The first that is not absolute, not there, leads through a symlink, is not below one of `roots`, or is what no
/// sandbox may see.
pub fn check(spec: &RunSpec, roots: &[PathBuf]) -> Result<(), Error> {
    let workspace = match &spec.workspace {
        Workspace::None => None,
        Workspace::Directory { path, .. } => Some(path),
    };
    let root = match &spec.root {
        Root::Directory(path) => Some(path),
        Root::Image(_) | Root::Host => None,
    };
    let mounts = spec.mounts.iter().map(|mount| &mount.source);
    for path in root.into_iter().chain(workspace).chain(mounts) {
        judge(path, roots).map_err(|why| Error::HostPath { path: path.clone(), why })?;
    }
    Ok(())
}

fn judge(path: &Path, roots: &[PathBuf]) -> Result<(), String> {
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
    let real_root = |root: &PathBuf| fs::canonicalize(root).ok();
    if !roots.iter().filter_map(real_root).any(|root| path.starts_with(root)) {
        let roots: Vec<_> = roots.iter().map(|root| format!("`{}`", root.display())).collect();
        return Err(format!("it is not below {}; allow it with `--root`", roots.join(" or ")));
    }
    Ok(())
}

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
