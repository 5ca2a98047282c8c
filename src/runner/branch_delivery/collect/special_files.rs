//! What git would wait for in a workspace: a pipe that nobody writes to, in the place of a file that git opens by itself.
//!
//! The agent's processes are gone, so what is looked at does not change. Nothing of it is opened but directories, and the
//! repository's configuration, which may name further files for git to open.

use std::ffi::CStr;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, bail};
use rustix::fs::{FileType, OFlags};

use crate::base::dir_tree;

/// Looks before git does. Git opens each file below `.git` as it comes by it, and of the workspace those that say what it
/// ignores and how it reads the others. Blocks.
///
/// # Errors
/// One of them is a pipe or a device, or below `.git` a symlink, which may lead to one; the configuration includes files, or
/// objects are to be found elsewhere; or they cannot be looked at.
pub(super) fn check_special_files(workspace: &Path) -> anyhow::Result<()> {
    let own = workspace.join(".git");
    match fs::symlink_metadata(&own) {
        // Git says so itself.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Ok(found) if !found.is_dir() => bail!("`.git` is not a directory, and git is not asked"),
        found => found.map(drop).context(INSPECT_ERROR_MESSAGE)?,
    }
    for name in LEADING {
        if own.join(name).symlink_metadata().is_ok() {
            bail!("`.git/{name}` leads git elsewhere, and git is not asked");
        }
    }
    reject_special(find_in_repository(&own), ".git")?;
    for name in CONFIGURATIONS {
        check_configuration(&own.join(name)).with_context(|| format!("`.git/{name}`"))?;
    }
    let is_read =
        |name: &CStr, kind| kind != FileType::Symlink && GIT_READ_FILES.contains(&name.to_bytes());
    reject_special(
        dir_tree::find_special_entry(workspace, is_read)
            .map(|name| name.map(|name| display_name(&name))),
        "the workspace",
    )
}

/// Refuses a configuration that includes files: git opens those wherever they are and whatever they are. Git takes the name of
/// a section in any case, and nothing but the name right behind the bracket; brackets in values are refused as well.
fn check_configuration(path: &Path) -> anyhow::Result<()> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path);
    let file = match opened {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        opened => opened.context(INSPECT_ERROR_MESSAGE)?,
    };
    let mut text = vec![];
    file.take(MAX_CONFIGURATION_BYTES + 1).read_to_end(&mut text).context(INSPECT_ERROR_MESSAGE)?;
    if text.len() as u64 > MAX_CONFIGURATION_BYTES {
        bail!("it is longer than {MAX_CONFIGURATION_BYTES} bytes, and git is not asked");
    }
    if text.windows(INCLUDE.len()).any(|part| part.eq_ignore_ascii_case(INCLUDE)) {
        bail!("it includes other files, which git would open wherever they are: git is not asked");
    }
    Ok(())
}

/// All but hooks, which are not started: people link them.
fn find_in_repository(own: &Path) -> io::Result<Option<String>> {
    for entry in fs::read_dir(own)? {
        let entry = entry?;
        let (name, kind) = (entry.file_name(), entry.file_type()?);
        if name == "hooks" || kind.is_file() {
            continue;
        }
        if !kind.is_dir() {
            return Ok(Some(name.to_string_lossy().into_owned()));
        }
        if let Some(special) = dir_tree::find_special_entry(&entry.path(), |_, _| true)? {
            return Ok(Some(display_name(&special)));
        }
    }
    Ok(None)
}

fn reject_special(special: io::Result<Option<String>>, place: &str) -> anyhow::Result<()> {
    match special.context(INSPECT_ERROR_MESSAGE)? {
        Some(name) => bail!(
            "`{}` in {place} is a pipe, a device or a symlink, which git would wait for: git is not asked",
            name.escape_debug()
        ),
        None => Ok(()),
    }
}

fn display_name(name: &CStr) -> String {
    name.to_string_lossy().into_owned()
}

/// Git opens these in each directory, and follows no symlink there.
const GIT_READ_FILES: &[&[u8]] = &[b".gitignore", b".gitattributes", b".gitmodules"];

/// Files below `.git` that name another place to look for what is there, or for objects.
const LEADING: &[&str] = &["commondir", "objects/info/alternates", "objects/info/http-alternates"];

const CONFIGURATIONS: &[&str] = &["config", "config.worktree"];

/// The beginning of a section that includes files, with a condition or without.
const INCLUDE: &[u8] = b"[include";

/// The longest configuration that is looked at. Ours: one of a thousand branches has 100 KiB.
const MAX_CONFIGURATION_BYTES: u64 = 1 << 20;

const INSPECT_ERROR_MESSAGE: &str = "the workspace cannot be looked at";

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
            ".gitmodules",
        ];
        for name in places {
            let (_place, path) = workspace();
            check_special_files(&path).expect("it is well");
            make(&path.join(name), |path| {
                mknodat(CWD, path, FileType::Fifo, Mode::RUSR, 0).expect("made");
            });
            let why = check_special_files(&path).expect_err(name).to_string();
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
            (".git/objects/info/alternates", true),
            (".git/config.worktree", true),
            (".git/hooks/pre-commit", false),
            ("link", false),
            (".gitignore", false),
        ] {
            let (_place, path) = workspace();
            make(&path.join(name), |path| symlink("/proc/self/fd/1", path).expect("made"));
            mknodat(CWD, path.join("fifo"), FileType::Fifo, Mode::RUSR, 0).expect("made");
            assert_eq!(check_special_files(&path).is_err(), is_refused, "{name}");
        }
    }

    /// L3: git opens no file because the repository's configuration says so.
    #[test]
    fn a_configuration_that_includes_files_is_refused() {
        for (text, is_refused) in [
            ("[core]\n\tbare = false\n# include\n[branch \"include\"]\n", false),
            ("[include]\n\tpath = /tmp/pipe\n", true),
            ("[core]bare=false\n  [INCLUDE]path=../pipe", true),
            ("[includeIf \"gitdir:/\"]\n\tpath = /proc/self/fd/0\n", true),
            ("\u{feff}[Include]\r\n\tpath = pipe\r\n", true),
        ] {
            for name in [".git/config", ".git/config.worktree"] {
                let (_place, path) = workspace();
                make(&path.join(name), |path| fs::write(path, text).expect("written"));
                assert_eq!(check_special_files(&path).is_err(), is_refused, "{name}: {text:?}");
            }
        }
        let (_place, path) = workspace();
        let long = "#".repeat(1 + (1 << 20));
        make(&path.join(".git/config"), |path| fs::write(path, long).expect("written"));
        assert!(check_special_files(&path).expect_err("long").to_string().contains("config"));
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
