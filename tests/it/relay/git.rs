//! L4, L6: the one way in which git is run.

use std::fs::{self, File};
use std::time::Duration;

use cogni_gateway::base::secret::Secret;
use cogni_gateway::git::{Error, Input, Limits};
use cogni_gateway::relay::Git;
use tempfile::TempDir;

use crate::support::process::pause_for;
use crate::support::repository::Repository;

fn git() -> (TempDir, Git) {
    let directory = tempfile::tempdir().unwrap();
    let git = Git::find(&directory.path().join("home")).unwrap();
    (directory, git)
}

/// L4: a git that does not end is ended, and one that says too much as well.
#[test]
fn a_git_without_end_is_ended() {
    let (_directory, git) = git();
    // Nobody ever writes into this pipe, and nobody closes it while git reads.
    let (read, _write) = std::io::pipe().unwrap();
    let reads = || Input::File(File::from(std::os::fd::OwnedFd::from(read.try_clone().unwrap())));
    let limits = Limits { time: Duration::from_millis(300), ..Limits::default() };
    let late = git.call("hash-object").word("--stdin").input(reads()).limits(limits).done();
    insta::assert_snapshot!(late.unwrap_err(), @"`git hash-object` has taken longer than 300ms");
    let limits = Limits { output_bytes: 10, ..Limits::default() };
    let loud = git.call("help").word("-a").limits(limits).done();
    insta::assert_snapshot!(loud.unwrap_err(), @"`git help` has said more than 10 bytes");
}

/// L4: what is made of an answer here is not git's time; and a time that no clock can count is none.
#[test]
fn only_gits_own_time_counts() {
    let (_directory, git) = git();
    let limits = Limits { time: Duration::from_secs(4), ..Limits::default() };
    let mut pieces = 0;
    let slow = git.call("help").word("-a").limits(limits).pieces(|_| {
        pieces += 1;
        if pieces == 1 {
            pause_for(Duration::from_secs(5));
        }
    });
    slow.unwrap();
    let limits = Limits { time: Duration::MAX, ..Limits::default() };
    assert!(git.call("version").limits(limits).text().is_ok());
}

/// L4: git is fed more than a pipe holds while it answers more than a pipe holds.
#[test]
fn a_long_question_has_a_long_answer() {
    let (directory, git) = git();
    let repository = Repository::with_files(&directory.path().join("repository"));
    let name = repository.object("blob", "x");
    let call = git.call("cat-file").repository(&repository.path.join(".git"));
    let question = format!("{name}\n").repeat(20_000).into_bytes();
    let answer = call.word("--batch-check").input(Input::Bytes(question)).text().unwrap();
    assert_eq!(answer.lines().count(), 20_000);
    assert!(answer.lines().all(|line| line == format!("{name} blob 1")));
}

/// L6: what git repeats of a secret is left out, in what it prints and in what it complains of.
#[test]
fn a_secret_is_in_nothing_that_comes_back() {
    let (_directory, git) = git();
    let secret = Secret::new("Authorization: Basic c2VjcmV0LXNlY3JldA==");
    let call = git.call("config").words(["get", "http.https://x/.extraHeader"]);
    let (said, ended) = call.header("https://x/", &secret).told().unwrap();
    assert!(ended.is_ok());
    insta::assert_snapshot!(said, @"*** Basic ***");
    let call = git.call("config").word("--c2VjcmV0LXNlY3JldA==").secret(&secret);
    let error = call.done().unwrap_err();
    assert!(matches!(error, Error::Failed { .. }));
    assert!(!format!("{error} {error:?}").contains("c2VjcmV0"), "{error}");
}

/// L4: git on this machine listens to nobody: not to its user, not to the system, not to the environment.
#[test]
fn the_relays_git_is_configured_by_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let home = directory.path().join("home");
    let git = Git::find(&home).unwrap();
    fs::write(home.join(".gitconfig"), "[user]\n\tname = Evil\n").unwrap();
    let said = git.call("config").words(["list", "--show-origin"]).text().unwrap();
    let others: Vec<_> = said.lines().filter(|line| !line.starts_with("command line:")).collect();
    assert_eq!(others, Vec::<&str>::new());
    // Nor does it look for a repository around it.
    Repository::with_files(&home);
    let found = git.call("rev-parse").word("--git-dir").text();
    assert!(found.is_err(), "{found:?}");
}
