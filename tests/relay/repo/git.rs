//! L4, L6: Tests of the one function that runs git.

use std::fs::{self, File};
use std::thread;
use std::time::Duration;

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::relay::git::{GitError, GitInput, GitLimits};
use cogni_gateway::relay::repo::GitProgram;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::support::process::{pause_for, wait_until};
use crate::support::repository::TestRepository;

fn git_program() -> (TempDir, GitProgram) {
    let directory = tempfile::tempdir().unwrap();
    let git = GitProgram::find(&directory.path().join("home")).unwrap();
    (directory, git)
}

/// L4: A git process that does not end, or prints too much, is killed.
#[test]
fn a_git_without_end_is_ended() {
    let (_directory, git) = git_program();
    // No process writes to this pipe or closes it while git reads.
    let (read, _write) = std::io::pipe().unwrap();
    let reads =
        || GitInput::File(File::from(std::os::fd::OwnedFd::from(read.try_clone().unwrap())));
    let limits = GitLimits { time: Duration::from_millis(300), ..GitLimits::default() };
    let late = git.subcommand("hash-object").arg("--stdin").input(reads()).limits(limits).execute();
    insta::assert_snapshot!(late.unwrap_err(), @"`git hash-object` has taken longer than 300ms");
    let limits = GitLimits { output_bytes: 10, ..GitLimits::default() };
    let loud = git.subcommand("help").arg("-a").limits(limits).execute();
    insta::assert_snapshot!(loud.unwrap_err(), @"`git help` has printed more than 10 bytes");
}

/// L4, L7: If git was killed from outside, its result is unknown. If git reached a limit, the limit is the result.
#[test]
fn a_killed_git_is_distinguished_from_a_limit() {
    let (_directory, git) = git_program();
    let (read, _write) = std::io::pipe().unwrap();
    let input = GitInput::File(File::from(std::os::fd::OwnedFd::from(read)));
    let ended = thread::scope(|scope| {
        let call = git.subcommand("hash-object").arg("--stdin").input(input);
        let caller = scope.spawn(|| call.execute().unwrap_err());
        wait_until(|| find_child("hash-object").is_some(), || "git has not begun".to_owned());
        kill_process(find_child("hash-object").unwrap(), Signal::KILL).unwrap();
        caller.join().unwrap()
    });
    insta::assert_snapshot!(ended, @"`git hash-object` has failed (signal: 9 (SIGKILL))");
    assert!(ended.is_transient() && !ended.is_resource_limit());

    let limits = GitLimits { file_bytes: 1 << 10, ..GitLimits::default() };
    let directory = tempfile::tempdir().unwrap();
    let bare = TestRepository::seeded(&directory.path().join("bare.git"));
    let call = git.subcommand("hash-object").repository(&bare.path).args(["-w", "--stdin"]);
    let noise: Vec<u8> =
        (0..200_000_u32).flat_map(|at| at.wrapping_mul(0x9e37_79b1).to_le_bytes()).collect();
    let spent = call.limits(limits).input(GitInput::Bytes(noise)).execute().unwrap_err();
    insta::assert_snapshot!(spent, @"`git hash-object` has failed (signal: 25 (SIGXFSZ))");
    assert!(spent.is_resource_limit() && !spent.is_transient());
}

/// L4, R5: A git whose caller is cancelled is killed at once, and none begins after that.
#[test]
fn a_cancelled_git_is_killed() {
    let (_directory, git) = git_program();
    let cancel = CancellationToken::new();
    let git = git.with_cancellation(cancel.clone());
    // No process writes to this pipe or closes it while git reads.
    let (read, _write) = std::io::pipe().unwrap();
    let input = GitInput::File(File::from(std::os::fd::OwnedFd::from(read)));
    let ended = thread::scope(|scope| {
        let call = git.subcommand("hash-object").args(["--stdin", "--no-filters"]).input(input);
        let caller = scope.spawn(|| call.execute().unwrap_err());
        wait_until(|| find_child("--no-filters").is_some(), || "git has not begun".to_owned());
        cancel.cancel();
        caller.join().unwrap()
    });
    insta::assert_snapshot!(ended, @"`git hash-object` was ended, because its caller was cancelled");
    assert!(find_child("--no-filters").is_none() && !ended.is_transient());
    assert!(git.subcommand("version").execute().is_err());
}

/// Returns this process's one child with this argument.
fn find_child(word: &str) -> Option<Pid> {
    let own = format!("PPid:\t{}\n", std::process::id());
    fs::read_dir("/proc").unwrap().map(Result::unwrap).find_map(|entry| {
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        let words = fs::read_to_string(entry.path().join("cmdline")).ok()?;
        let is_it = status.contains(&own) && words.split('\0').any(|one| one == word);
        Pid::from_raw(entry.file_name().to_str()?.parse().ok().filter(|_| is_it)?)
    })
}

/// L4: The limits hold from git's first instruction on, also on a machine that is too busy to set them in time.
#[test]
fn no_git_is_ever_without_limits() {
    let (_directory, git) = git_program();
    let limits = GitLimits { memory_bytes: 1 << 29, file_bytes: 1 << 29, ..GitLimits::default() };
    let ask = || {
        let call = git.subcommand("limits").config("alias.limits=!ulimit -v; ulimit -f; ulimit -c");
        call.limits(limits).output_text().unwrap()
    };
    thread::scope(|scope| {
        let askers: Vec<_> =
            (0..24).map(|_| scope.spawn(|| [ask(), ask(), ask(), ask()])).collect();
        for message in askers.into_iter().flat_map(|asker| asker.join().unwrap()) {
            let [memory, file, core] = message.lines().collect::<Vec<_>>()[..] else {
                panic!("{message}")
            };
            assert_eq!((memory, core), ("524288", "0"));
            // Shells count in blocks of 512 or of 1,024 bytes.
            assert!(["1048576", "524288"].contains(&file), "{file}");
        }
    });
}

/// L4: Time that this process spends on an answer is not git's time. A duration beyond what a clock can represent means
/// no limit.
#[test]
fn only_gits_own_time_counts() {
    let (_directory, git) = git_program();
    let limits = GitLimits { time: Duration::from_secs(4), ..GitLimits::default() };
    let mut pieces = 0;
    let slow = git.subcommand("help").arg("-a").limits(limits).stream_output(|_| {
        pieces += 1;
        if pieces == 1 {
            pause_for(Duration::from_secs(5));
        }
    });
    slow.unwrap();
    let limits = GitLimits { time: Duration::MAX, ..GitLimits::default() };
    assert!(git.subcommand("version").limits(limits).output_text().is_ok());
}

/// L4: Git can be fed more than a pipe holds while it answers with more than a pipe holds.
#[test]
fn a_long_question_has_a_long_answer() {
    let (directory, git) = git_program();
    let repository = TestRepository::with_files(&directory.path().join("repository"));
    let name = repository.object("blob", "x");
    let call = git.subcommand("cat-file").repository(&repository.path.join(".git"));
    let question = format!("{name}\n").repeat(20_000).into_bytes();
    let answer = call.arg("--batch-check").input(GitInput::Bytes(question)).output_text().unwrap();
    assert_eq!(answer.lines().count(), 20_000);
    assert!(answer.lines().all(|line| line == format!("{name} blob 1")));
}

/// L6: A secret that git repeats is removed from its output and from its errors.
#[test]
fn a_secret_is_in_nothing_that_comes_back() {
    let (_directory, git) = git_program();
    let secret = SecretString::new("Authorization: Basic c2VjcmV0LXNlY3JldA==");
    let call = git.subcommand("config").args(["--get", "http.https://x/.extraHeader"]);
    let (output, ended) = call.http_header("https://x/", &secret).output_and_status().unwrap();
    assert!(ended.is_ok());
    insta::assert_snapshot!(output, @"*** Basic ***");
    let call = git.subcommand("config").arg("--c2VjcmV0LXNlY3JldA==").redact_secret(&secret);
    let error = call.execute().unwrap_err();
    assert!(matches!(error, GitError::Failed { .. }));
    assert!(!format!("{error} {error:?}").contains("c2VjcmV0"), "{error}");
}

/// L4: The relay's git reads no configuration: neither the user's nor the system's nor the environment's.
#[test]
fn the_relays_git_reads_no_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let home = directory.path().join("home");
    let git = GitProgram::find(&home).unwrap();
    fs::write(home.join(".gitconfig"), "[user]\n\tname = Evil\n").unwrap();
    let output = git.subcommand("config").args(["--list", "--show-origin"]).output_text().unwrap();
    let others: Vec<_> = output.lines().filter(|line| !line.starts_with("command line:")).collect();
    assert_eq!(others, Vec::<&str>::new());
    // Git does not look for a repository in the parent directories either.
    TestRepository::with_files(&home);
    let found = git.subcommand("rev-parse").arg("--git-dir").output_text();
    assert!(found.is_err(), "{found:?}");
}
