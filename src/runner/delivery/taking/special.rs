//! What git would wait for in a workspace: a pipe that nobody writes to, in the place of a file that git opens by itself.
//!
//! The agent's processes are gone, so what is looked at does not change. Nothing of it is opened but directories.

use std::ffi::CStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use anyhow::{Context, bail};
use rustix::fs::FileType;

use crate::base::tree;

/// Looks before git does. Git opens each file below `.git` as it comes by it, and of the workspace those that say what it
/// ignores and how it reads the others. Blocks.
///
/// # Errors
/// One of them is a pipe or a device, or below `.git` a symlink, which may lead to one; or they cannot be looked at.
pub(super) fn check(workspace: &Path) -> anyhow::Result<()> {
    let own = workspace.join(".git");
    match fs::symlink_metadata(&own) {
        // Git says so itself.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Ok(found) if !found.is_dir() => bail!("`.git` is not a directory, and git is not asked"),
        found => found.map(drop).context(UNSEEN)?,
    }
    if own.join("commondir").symlink_metadata().is_ok() {
        bail!("`.git/commondir` leads git elsewhere, and git is not asked");
    }
    refuse(in_repository(&own), ".git")?;
    let is_read = |name: &CStr, kind| kind != FileType::Symlink && READ.contains(&name.to_bytes());
    refuse(
        tree::special(workspace, is_read).map(|name| name.map(|name| shown(&name))),
        "the workspace",
    )
}

/// All but hooks, which are not started: people link them.
fn in_repository(own: &Path) -> io::Result<Option<String>> {
    for entry in fs::read_dir(own)? {
        let entry = entry?;
        let (name, kind) = (entry.file_name(), entry.file_type()?);
        if name == "hooks" || kind.is_file() {
            continue;
        }
        if !kind.is_dir() {
            return Ok(Some(name.to_string_lossy().into_owned()));
        }
        if let Some(special) = tree::special(&entry.path(), |_, _| true)? {
            return Ok(Some(shown(&special)));
        }
    }
    Ok(None)
}

fn refuse(special: io::Result<Option<String>>, place: &str) -> anyhow::Result<()> {
    match special.context(UNSEEN)? {
        Some(name) => bail!(
            "`{}` in {place} is a pipe, a device or a symlink, which git would wait for: git is not asked",
            name.escape_debug()
        ),
        None => Ok(()),
    }
}

fn shown(name: &CStr) -> String {
    name.to_string_lossy().into_owned()
}

/// Git opens these in each directory, and follows no symlink there.
const READ: &[&[u8]] = &[b".gitignore", b".gitattributes"];

const UNSEEN: &str = "the workspace cannot be looked at";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use rustix::fs::{CWD, Mode, mknodat};

    use super::*;

    /// L3: a pipe in the place of what git opens is found before git waits for it, wherever it lies.
    #[test]
    fn a_pipe_that_git_would_open_is_refused() {
        let places = [
            ".git/HEAD",
            ".git/config",
            ".git/index",
            ".git/packed-refs",
            ".git/refs/heads/main",
            ".git/refs/heads/a/b",
            ".git/objects/ab/cdef",
            ".git/info/exclude",
            ".gitignore",
            "src/deep/.gitattributes",
        ];
        for name in places {
            let (_place, path) = workspace();
            check(&path).expect("it is well");
            make(&path.join(name), |path| {
                mknodat(CWD, path, FileType::Fifo, Mode::RUSR, 0).expect("made");
            });
            let why = check(&path).expect_err(name).to_string();
            assert!(why.contains("is a pipe"), "{name}: {why}");
        }
    }

    /// L3: nothing leads git elsewhere; what it does not open may be anything.
    #[test]
    fn what_leads_elsewhere_is_refused_where_git_follows() {
        for (name, is_refused) in [
            (".git/config", true),
            (".git/refs/heads/main", true),
            (".git/commondir", true),
            (".git/hooks/pre-commit", false),
            ("link", false),
            (".gitignore", false),
        ] {
            let (_place, path) = workspace();
            make(&path.join(name), |path| symlink("/proc/self/fd/1", path).expect("made"));
            mknodat(CWD, path.join("fifo"), FileType::Fifo, Mode::RUSR, 0).expect("made");
            assert_eq!(check(&path).is_err(), is_refused, "{name}");
        }
    }

    fn workspace() -> (tempfile::TempDir, PathBuf) {
        let place = tempfile::tempdir().expect("there is a place for it");
        let path = place.path().join("workspace");
        for file in [".git/HEAD", ".git/config", ".git/refs/heads/main", ".git/hooks/sample", "one"]
        {
            make(&path.join(file), |path| fs::write(path, "").expect("written"));
        }
        (place, path)
    }

    fn make(path: &Path, put: impl FnOnce(&Path)) {
        fs::create_dir_all(path.parent().expect("it has one")).expect("made");
        let _ = fs::remove_file(path);
        put(path);
    }
}
