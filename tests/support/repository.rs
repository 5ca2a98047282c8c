//! Real repositories, made by git as a person would use it.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A directory that git is run in, undisturbed by the configuration of whoever runs the tests.
#[derive(Clone, Debug)]
pub(crate) struct Repository {
    pub(crate) path: PathBuf,
}

impl Repository {
    /// A bare one, as a forge keeps it, whose default branch is `main`.
    pub(crate) fn bare(path: &Path) -> Self {
        std::fs::create_dir_all(path).unwrap();
        let repository = Self { path: path.to_owned() };
        repository.git(["init", "-q", "--bare", "-b", "main"]);
        repository
    }

    /// One with files, on the branch `main`.
    pub(crate) fn with_files(path: &Path) -> Self {
        std::fs::create_dir_all(path).unwrap();
        let repository = Self { path: path.to_owned() };
        repository.git(["init", "-q", "-b", "main"]);
        repository
    }

    /// One that is there already.
    pub(crate) fn at(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// A bare one with one commit on `main`: a README and two directories.
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

    /// Writes a file, and the directories above it.
    pub(crate) fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    /// Commits everything there is, and returns the commit's name.
    pub(crate) fn commit(&self, message: &str) -> String {
        self.git(["add", "-A"]);
        self.git(["commit", "-q", "--allow-empty", "-m", message]);
        self.git(["rev-parse", "HEAD"])
    }

    /// Puts an object into the repository, however bad it is, and returns its name.
    pub(crate) fn object(&self, kind: &str, content: impl AsRef<[u8]>) -> String {
        let words = ["hash-object", "-w", "--literally", "--stdin", "-t", kind];
        self.git_with(words, content.as_ref())
    }

    /// Puts a tree of these entries into the repository, in their order: mode, name, object.
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

    /// Commits a tree on top of what is checked out, and moves the branch there; the files stay as they are.
    pub(crate) fn commit_tree(&self, tree: &str, message: &str) -> String {
        let commit = self.git(["commit-tree", tree, "-p", "HEAD", "-m", message]);
        self.git(["update-ref", "HEAD", &commit]);
        commit
    }

    /// Runs git, which must be content, and returns what it prints, without the last line's end.
    #[track_caller]
    pub(crate) fn git<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> String {
        self.git_with(arguments, b"")
    }

    /// Runs git with something to read.
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

    /// Runs git, whatever becomes of it.
    pub(crate) fn try_git<A: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = A>,
        input: &[u8],
    ) -> Output {
        let mut child = command("git", &self.path)
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

/// Runs git in a directory, which has to succeed; what it prints.
#[track_caller]
pub(crate) fn git(directory: &Path, arguments: &[&str]) -> String {
    Repository::at(directory).git(arguments)
}

/// Writes a file and commits it.
pub(crate) fn commit(work: &Path, file: &str, content: &str) {
    let work = Repository::at(work);
    work.write(file, content);
    work.git(["add", file]);
    work.git(["commit", "--quiet", "--message", &format!("change {file}")]);
}

/// A program in a directory, with an identity and a time of its own, and no configuration but the repository's.
pub(crate) fn command(program: &str, directory: &Path) -> Command {
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
