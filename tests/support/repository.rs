//! Real repositories, made by git as a person would make them.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A directory for git commands, independent of the configuration of the user who runs the tests.
#[derive(Clone, Debug)]
pub(crate) struct TestRepository {
    pub(crate) path: PathBuf,
}

impl TestRepository {
    /// Makes a bare repository with the default branch `main`, as GitHub has.
    pub(crate) fn bare(path: &Path) -> Self {
        std::fs::create_dir_all(path).unwrap();
        let repository = Self { path: path.to_owned() };
        repository.git(["init", "-q", "--bare", "-b", "main"]);
        repository
    }

    /// Makes a repository with files on the branch `main`.
    pub(crate) fn with_files(path: &Path) -> Self {
        std::fs::create_dir_all(path).unwrap();
        let repository = Self { path: path.to_owned() };
        repository.git(["init", "-q", "-b", "main"]);
        repository
    }

    /// Opens a repository that exists already.
    pub(crate) fn at(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Makes a bare repository with one commit on `main`: a README and two directories.
    pub(crate) fn seeded(path: &Path) -> Self {
        let bare = Self::bare(path);
        let work = Self::with_files(&path.with_extension("seed"));
        work.write("README.md", "# A project\n");
        work.write("src/main.c", "int main(void) { return 0; }\n");
        work.write("docs/guide.md", "one\ntwo\nthree\n");
        work.commit("Begin");
        work.git([OsStr::new("push"), OsStr::new("-q"), path.as_os_str(), OsStr::new("main")]);
        bare
    }

    /// Writes a file and its parent directories.
    pub(crate) fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    /// Commits everything, and returns the commit's id.
    pub(crate) fn commit(&self, message: &str) -> String {
        self.git(["add", "-A"]);
        self.git(["commit", "-q", "--allow-empty", "-m", message]);
        self.git(["rev-parse", "HEAD"])
    }

    /// Adds an object to the repository, however malformed, and returns its id.
    pub(crate) fn object(&self, kind: &str, content: impl AsRef<[u8]>) -> String {
        let words = ["hash-object", "-w", "--literally", "--stdin", "-t", kind];
        self.git_with(words, content.as_ref())
    }

    /// Adds a tree with these entries in their order: mode, name, object.
    pub(crate) fn tree(&self, entries: &[(&str, &[u8], &str)]) -> String {
        let mut tree = vec![];
        for (mode, name, object) in entries {
            tree.extend_from_slice(mode.as_bytes());
            tree.push(b' ');
            tree.extend_from_slice(name);
            tree.push(0);
            let byte = |at: usize| u8::from_str_radix(&object[at..at + 2], 16).unwrap();
            tree.extend((0..40).step_by(2).map(byte));
        }
        self.object("tree", tree)
    }

    /// Commits a tree on top of the current commit, and moves the branch there; the files stay unchanged.
    pub(crate) fn commit_tree(&self, tree: &str, message: &str) -> String {
        let commit = self.git(["commit-tree", tree, "-p", "HEAD", "-m", message]);
        self.git(["update-ref", "HEAD", &commit]);
        commit
    }

    /// Runs git, which must succeed, and returns its output without the last newline.
    #[track_caller]
    pub(crate) fn git<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> String {
        self.git_with(arguments, b"")
    }

    /// Runs git with an input.
    #[track_caller]
    pub(crate) fn git_with<A: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = A>,
        input: &[u8],
    ) -> String {
        let arguments: Vec<_> =
            arguments.into_iter().map(|word| word.as_ref().to_owned()).collect();
        let output = self.try_git(&arguments, input);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "git {arguments:?} in {}: {stderr}", self.path.display());
        String::from_utf8_lossy(&output.stdout).trim_end_matches('\n').to_owned()
    }

    /// Runs git, which may fail.
    pub(crate) fn try_git<A: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = A>,
        input: &[u8],
    ) -> Output {
        let mut child = command_in("git", &self.path)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("git is installed");
        let mut stdin = child.stdin.take().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || drop(stdin.write_all(input)));
            child.wait_with_output().unwrap()
        })
    }
}

/// Runs git in a directory, which must succeed; returns its output.
#[track_caller]
pub(crate) fn run_git(directory: &Path, arguments: &[&str]) -> String {
    TestRepository::at(directory).git(arguments)
}

/// Writes a file and commits it.
pub(crate) fn commit_file(work: &Path, file: &str, content: &str) {
    let work = TestRepository::at(work);
    work.write(file, content);
    work.git(["add", file]);
    work.git(["commit", "--quiet", "--message", &format!("change {file}")]);
}

/// A program in a directory, with a fixed identity and time, and only the repository's configuration.
pub(crate) fn command_in(program: &str, directory: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .current_dir(directory)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_TERMINAL_PROMPT", "0")
        .env("GIT_AUTHOR_NAME", "An Agent")
        .env("GIT_AUTHOR_EMAIL", "agent@example.com")
        .env("GIT_AUTHOR_DATE", "2026-01-02T03:04:05Z")
        .env("GIT_COMMITTER_NAME", "An Agent")
        .env("GIT_COMMITTER_EMAIL", "agent@example.com")
        .env("GIT_COMMITTER_DATE", "2026-01-02T03:04:05Z");
    command
}
