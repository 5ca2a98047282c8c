//! The digest of the program of a tool that is a file, so that an approval is for the program that a person could see.
//!
//! - An image is digested by its id, and the approved call runs by this id: a name may refer to another image later.
//! - Without an image, each path and each name of a program in `argv` and `env` stands for a file of this machine, and so
//!   does each in the first line of a script. The digest has the resolved path, the device, the inode and the content of
//!   each such file. A part that names no program costs nothing: it is in the digest as a name without a file.
//! - A program that cannot be digested is refused when the rule that asks is loaded.
//!
//! The files that a program opens by itself are not digested: libraries, modules, configuration. They belong to this
//! machine, and the run cannot change them.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::task::spawn_blocking;

use super::definition::{ToolDefinition, ToolProgramKind};
use super::interpreter::may_interpret;
use super::job::{JobRunner, JobWorkspace, ToolJob};
use crate::base::canonical;
use crate::base::file_digest::{FileDigest, FileDigestCache};
use crate::sandbox::embedded::shows_host_path;
use crate::sandbox::spec::oci::DEFAULT_PATH;

/// The program of a tool, as an approval covers it.
#[derive(Debug, Default)]
pub(super) struct DigestedProgram {
    /// The digest of the program; `None` for a tool of the gateway or of a server.
    pub(super) digest: Option<String>,
    /// The id of the program's image.
    pub(super) image: Option<String>,
    /// True if no answer may count for all runs: the program is, or may be, an [interpreter](super::interpreter).
    pub(super) is_interpreter: bool,
}

/// Digests the program of a tool.
///
/// # Errors
/// Returns an error if a file cannot be read, the image cannot be found, or the program cannot be digested.
pub(super) async fn digest_program(
    tool: &ToolDefinition,
    jobs: Option<&Arc<dyn JobRunner>>,
    files: &Arc<FileDigestCache>,
) -> io::Result<DigestedProgram> {
    let Some(job) = tool.program.sandbox_job() else { return Ok(DigestedProgram::default()) };
    check_approvable(tool).map_err(io::Error::other)?;
    if let Some(name) = &job.image {
        let jobs = jobs.ok_or_else(|| io::Error::other("there is no sandbox for the tool"))?;
        let image = jobs.resolve_image(name).await?;
        let digest = canonical::digest("tool image 1", &image).map_err(io::Error::other)?;
        // The files of an image cannot be seen from here, and a name in it may lead to any program.
        return Ok(DigestedProgram {
            digest: Some(digest),
            image: Some(image),
            is_interpreter: true,
        });
    }
    let (job, files) = (Arc::clone(job), Arc::clone(files));
    let digest = spawn_blocking(move || digest_files(&job, &files)).await;
    digest.map_err(io::Error::other)?
}

/// Checks that an approval can cover the program of a tool.
///
/// # Errors
/// Returns the part that no digest covers, and the remedy.
pub(super) fn check_approvable(tool: &ToolDefinition) -> Result<(), String> {
    let Some(job) = tool.program.sandbox_job() else { return Ok(()) };
    check_digestible(job)?;
    // The server may have started with the image that the name had before.
    if matches!(tool.program, ToolProgramKind::Mcp(_)) && job.image.is_some() {
        let problem =
            "the server runs in an image; use this machine's programs, or a tool that is a file";
        return Err(problem.to_owned());
    }
    Ok(())
}

/// Checks that a digest can cover the program of a sandbox.
///
/// # Errors
/// Returns the part that no digest covers, and the remedy.
pub(super) fn check_digestible(job: &ToolJob) -> Result<(), String> {
    // A digest of the workspace would not help: the run can change a file between the check and its use.
    if job.workspace != JobWorkspace::None {
        return Err("the tool has the run's workspace, which the run can change after a person's answer; set `workspace = \"none\"` in the tool's file".to_owned());
    }
    if job.image.is_some() {
        return Ok(());
    }
    let texts = named_texts(job);
    if texts.len() > MAX_NAMED_TEXTS {
        return Err(format!(
            "the tool's `argv` and `env` have more than {MAX_NAMED_TEXTS} names; put the program into a file"
        ));
    }
    match texts.iter().find(|text| names_directory(text)) {
        Some(text) => Err(format!(
            "the tool names the directory `{}`, whose files a digest does not cover; name the files, or put them into an image",
            text.escape_debug()
        )),
        None => Ok(()),
    }
}

fn digest_files(job: &ToolJob, cache: &FileDigestCache) -> io::Result<DigestedProgram> {
    check_digestible(job).map_err(io::Error::other)?;
    let search_path = job.env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    let mut names = named_texts(job);
    let mut files: BTreeMap<String, Vec<FileDigest>> = BTreeMap::new();
    // 1. Each script adds the names in its first line, so that its interpreter is covered, too.
    while let Some(name) = names.pop() {
        if files.contains_key(&name) {
            continue;
        }
        let found = read_files(&name, search_path, cache)?;
        let lines = found.iter().filter_map(|file| file.interpreter.as_deref());
        names.extend(lines.flat_map(split_text).map(str::to_owned));
        files.insert(name, found);
        // 2. A chain of scripts has an end; a program with more names was refused before.
        if files.len() > 2 * MAX_NAMED_TEXTS {
            return Err(io::Error::other("the program's scripts name too many others"));
        }
    }
    let digest = canonical::digest("tool program 2", &files).map_err(io::Error::other)?;
    let is_interpreter = may_interpret(job, &files, cache);
    Ok(DigestedProgram { digest: Some(digest), image: None, is_interpreter })
}

/// Reads the files that a name may stand for. Shells differ in the file that they take if several directories of `PATH`
/// have one, so each counts.
fn read_files(
    name: &str,
    search_path: &str,
    cache: &FileDigestCache,
) -> io::Result<Vec<FileDigest>> {
    let paths = if name.starts_with('/') {
        vec![Path::new(name).to_owned()]
    } else {
        search_path.split(':').map(|directory| Path::new(directory).join(name)).collect()
    };
    let mut found = vec![];
    for path in paths {
        match cache.read_digest(&path) {
            Ok(file) => found.extend(file),
            // A path that exists in the sandbox only, or a text that is no name.
            Err(error) if is_missing(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

fn is_missing(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidFilename, InvalidInput, NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory | InvalidFilename | InvalidInput)
}

/// Returns the texts in the words of a program that may name a file.
fn named_texts(job: &ToolJob) -> Vec<String> {
    // The directories of `PATH` are searched for each name, and are no argument.
    let env = job.env.iter().filter(|(name, _)| *name != "PATH").map(|(_, value)| value);
    let mut texts: Vec<String> =
        job.argv.iter().chain(env).flat_map(|word| split_text(word)).map(str::to_owned).collect();
    texts.sort_unstable();
    texts.dedup();
    texts
}

/// Splits a word into the texts that may name a file: the word itself, the value of an option, and each part between
/// blanks and signs, for a program in the language of a shell. A text that names no file is no harm.
fn split_text(word: &str) -> impl Iterator<Item = &str> {
    let value = word.split_once('=').map(|(_, value)| value);
    let parts = word.split(|letter: char| letter.is_whitespace() || SEPARATORS.contains(letter));
    // An option may have its value without a sign between: `-I/usr/lib/x`.
    let joined = parts.clone().filter(|part| part.starts_with('-'));
    let joined = joined.filter_map(|part| part.find('/').map(|slash| &part[slash..]));
    let texts = [Some(word), value].into_iter().flatten().chain(parts).chain(joined);
    // The sandbox's own directory is empty, so a path that begins there leads to a file only if it leaves it.
    let texts = texts.map(|text| match text.rfind("../") {
        Some(last) => &text[last + 2..],
        None => text,
    });
    texts.filter(|text| {
        let is_name = !text.contains('/') && !matches!(*text, "" | "." | "..");
        is_name || text.starts_with('/')
    })
}

/// Returns true if a text names a directory of this machine that a sandbox shows.
fn names_directory(text: &str) -> bool {
    let path = Path::new(text);
    let is_shown = |path: PathBuf| path.is_dir() && shows_host_path(&path);
    path.is_absolute() && path.canonicalize().is_ok_and(is_shown)
}

/// The characters that end a name in the languages of shells and of programs in one argument.
const SEPARATORS: &str = "=:;,|&<>()[]{}'\"`$\\!*?@#%";

/// The most names in a program. Our choice: each is looked for in each directory of `PATH`.
const MAX_NAMED_TEXTS: usize = 1024;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    use super::*;
    use crate::sandbox::spec::SandboxLimits;
    use crate::tools::argument_schema::ArgumentSchema;

    fn judge(argv: &[&str], path: Option<&str>) -> bool {
        let job = ToolJob {
            argv: argv.iter().map(|word| (*word).to_owned()).collect(),
            image: None,
            workspace: JobWorkspace::None,
            env: path.map(|path| ("PATH".to_owned(), path.to_owned())).into_iter().collect(),
            limits: SandboxLimits::default(),
        };
        digest_files(&job, &FileDigestCache::default()).unwrap().is_interpreter
    }

    /// The program that runs is judged, whatever its path is called and whichever program starts it.
    #[test]
    fn an_interpreter_is_known_behind_every_name() {
        let directory = tempfile::tempdir().unwrap();
        let own = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        let (link, second, copy) = (own("count"), own("wide"), own("tally"));
        symlink("/bin/bash", &link).unwrap();
        symlink(&link, &second).unwrap();
        fs::copy("/bin/bash", &copy).unwrap();
        let (script, text, missing) = (own("report"), own("data"), own("none"));
        fs::write(&script, "#!/bin/cat\n").unwrap();
        fs::write(&text, "count").unwrap();
        let loader = ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"];
        let loader = loader.into_iter().find(|path| Path::new(path).exists()).unwrap();
        for argv in [
            &[&*link][..],
            &[&second],
            &[&copy],
            &[&script],
            &[&text],
            &[&missing],
            &["/bin/sh", "-c", "wc"],
            &["wc", "/bin/sh"],
            &["/usr/bin/timeout", "5", "/bin/cat"],
            &["/usr/bin/nice", "/bin/cat"],
            &["stdbuf", "-o0", "cat"],
            &["/usr/bin/find", "/etc/hostname", "-exec", "cat"],
            &[loader, "/bin/cat"],
            &["/bin/cat", "--shell=/bin/dash"],
            &["../bin/cat"],
            &[],
        ] {
            assert!(judge(argv, None), "{argv:?}");
        }
        assert!(judge(&["count"], Some(directory.path().to_str().unwrap())));
        let plain = own("plain");
        fs::copy("/bin/cat", &plain).unwrap();
        for argv in [
            &["/usr/bin/wc", "-w"][..],
            &["cat"],
            &["/usr/bin/seq"],
            &[&plain],
            &["wc", "no-such-sh"],
        ] {
            assert!(!judge(argv, None), "{argv:?}");
        }
    }

    /// No person is asked about a program with the run's workspace, in an image or without one.
    #[tokio::test]
    async fn no_question_is_about_a_program_with_the_workspace() {
        for image in [None, Some("tools:1".to_owned())] {
            let job = ToolJob {
                argv: vec!["/usr/bin/true".to_owned()],
                image: image.clone(),
                workspace: JobWorkspace::Ro,
                env: BTreeMap::new(),
                limits: SandboxLimits::default(),
            };
            let tool = ToolDefinition {
                name: "text__count".into(),
                digest: String::new(),
                description: String::new(),
                parameters: ArgumentSchema::default(),
                program: ToolProgramKind::Job(Arc::new(job)),
                timeout: Duration::from_secs(1),
                max_result_bytes: 1024,
            };
            // The image is not looked for, so no sandbox is needed.
            let digested = digest_program(&tool, None, &Arc::default()).await;
            let error = digested.unwrap_err().to_string();
            assert!(error.starts_with("the tool has the run's workspace"), "{image:?}: {error}");
        }
    }
}
