//! The check for special files in a workspace. An agent may put a pipe without a writer in the place of a file that git
//! opens by itself, and git would wait for the pipe forever.
//!
//! The agent's processes are gone, so the workspace does not change during the check. The check opens only directories
//! and the repository's configuration, which may name further files for git to open.

use std::ffi::CStr;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, bail};
use rustix::fs::{FileType, OFlags};

use crate::base::dir_tree;

/// Checks every file that git may open: each file below `.git`, and the files of the workspace that tell git what to
/// ignore and how to read other files. Blocks.
///
/// # Errors
/// Returns an error if such a file is a pipe or a device, or a symlink below `.git`, which may lead to a pipe. Returns
/// an error if the configuration includes files, if the repository refers to objects elsewhere, or if the workspace
/// cannot be read.
pub(super) fn check_special_files(workspace: &Path) -> anyhow::Result<()> {
    let own = workspace.join(".git");
    match fs::symlink_metadata(&own) {
        // Without `.git` there is nothing to check. Git itself reports the missing repository.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Ok(found) if !found.is_dir() => bail!("`.git` is not a directory, and git is not asked"),
        found => found.map(drop).context(INSPECT_ERROR_MESSAGE)?,
    }
    // 1. Files that lead git to another directory, which this check does not see.
    for name in LEADING {
        if own.join(name).symlink_metadata().is_ok() {
            bail!("`.git/{name}` leads git elsewhere, and git is not asked");
        }
    }
    // 2. Special files in the repository; then its configuration, which is safe to open after that check.
    reject_special(find_in_repository(&own), ".git")?;
    for name in CONFIGURATIONS {
        check_configuration(&own.join(name)).with_context(|| format!("`.git/{name}`"))?;
    }
    // 3. The files of the workspace that git reads by itself. Git follows no symlink at these names.
    let is_read =
        |name: &CStr, kind| kind != FileType::Symlink && GIT_READ_FILES.contains(&name.to_bytes());
    reject_special(
        dir_tree::find_special_entry(workspace, is_read)
            .map(|name| name.map(|name| display_name(&name))),
        "the workspace",
    )
}

/// Refuses a configuration that includes files, because git opens an included file at any path and of any type. Git
/// accepts a section's name in upper or lower case, but only directly behind the bracket. A value that contains the
/// same text is refused as well.
fn check_configuration(path: &Path) -> anyhow::Result<()> {
    // `NONBLOCK`, because opening a pipe without a writer would block. `NOFOLLOW`, because a symlink may lead to any
    // file.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path);
    let file = match opened {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        opened => opened.context(INSPECT_ERROR_MESSAGE)?,
    };
    let mut text = vec![];
    // One byte more than the maximum tells a file that is too long from a file of the maximum size.
    file.take(MAX_CONFIGURATION_BYTES + 1).read_to_end(&mut text).context(INSPECT_ERROR_MESSAGE)?;
    if text.len() as u64 > MAX_CONFIGURATION_BYTES {
        bail!("it is longer than {MAX_CONFIGURATION_BYTES} bytes, and git is not asked");
    }
    if text.windows(INCLUDE.len()).any(|part| part.eq_ignore_ascii_case(INCLUDE)) {
        bail!("it includes other files, which git would open wherever they are: git is not asked");
    }
    Ok(())
}

/// Returns the first special file or symlink below `.git`. Skips the hooks: git starts no hook here, and people link
/// hooks to other places.
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

fn reject_special(special: io::Result<Option<String>>, location: &str) -> anyhow::Result<()> {
    match special.context(INSPECT_ERROR_MESSAGE)? {
        Some(name) => bail!(
            "`{}` in {location} is a pipe, a device or a symlink, which git would wait for: git is not asked",
            name.escape_debug()
        ),
        None => Ok(()),
    }
}

fn display_name(name: &CStr) -> String {
    name.to_string_lossy().into_owned()
}

/// The names that git opens in each directory of a workspace. Git follows no symlink at these names.
const GIT_READ_FILES: &[&[u8]] = &[b".gitignore", b".gitattributes", b".gitmodules"];

/// The files below `.git` that name another directory for the repository's content or objects.
const LEADING: &[&str] = &["commondir", "objects/info/alternates", "objects/info/http-alternates"];

/// The configuration files below `.git`.
const CONFIGURATIONS: &[&str] = &["config", "config.worktree"];

/// The beginning of a section that includes files, with a condition or without.
const INCLUDE: &[u8] = b"[include";

/// The maximum size of a configuration in bytes (our choice). The configuration of a thousand branches has 100 KiB.
const MAX_CONFIGURATION_BYTES: u64 = 1 << 20;

/// The context of every error of reading the workspace.
const INSPECT_ERROR_MESSAGE: &str = "the workspace cannot be read";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use rustix::fs::{CWD, Mode, mknodat};

    use super::*;

    /// L3: the check finds a pipe at every path that git opens, before git waits for the pipe.
    #[test]
    fn a_pipe_that_git_would_open_is_refused() {
        let paths = [
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
        for name in paths {
            let (_temp_dir, path) = workspace();
            check_special_files(&path).expect("it is well");
            make(&path.join(name), |path| {
                mknodat(CWD, path, FileType::Fifo, Mode::RUSR, 0).expect("made");
            });
            let why = check_special_files(&path).expect_err(name).to_string();
            assert!(why.contains("is a pipe"), "{name}: {why}");
        }
    }

    /// L3: no file leads git to another directory. A file that git does not open may have any type.
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

    /// L3: the repository's configuration cannot make git open a file.
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
        let temp_dir = tempfile::tempdir().expect("there is a place for it");
        let path = temp_dir.path().join("workspace");
        for file in [".git/HEAD", ".git/config", ".git/refs/heads/main", ".git/hooks/sample", "one"]
        {
            make(&path.join(file), |path| fs::write(path, "").expect("written"));
        }
        (temp_dir, path)
    }

    fn make(path: &Path, put: impl FnOnce(&Path)) {
        fs::create_dir_all(path.parent().expect("it has one")).expect("made");
        let _ = fs::remove_file(path);
        put(path);
    }
}
