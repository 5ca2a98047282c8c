//! Compares the relay's handling of a run's work with git alone, in one session: extracting commits from a workspace,
//! checking, rewriting, reviewing and pushing them, against `git fetch` and `git push` of the same commits.
//!
//! `-- --test` only shows that the benchmark runs. The memory is the peak of any git process so far.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a bench is not production code")]

#[expect(dead_code, reason = "the tests of the relay need more of it")]
#[path = "../tests/relay/repo/setup.rs"]
mod place;
#[expect(dead_code, reason = "the tests of the relay need more of it")]
#[path = "../tests/support/repository.rs"]
mod repository;
/// The tests have this module at the same path.
mod support {
    pub(crate) use super::repository;
}

use std::env;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use place::RelaySetup;

fn main() {
    let once = env::args().any(|argument| argument == "--test");
    let (rounds, works) = if once {
        (
            1,
            [
                ("1 commit", 1, 10),
                ("2 commits", 2, 10),
                ("3 commits", 3, 10),
                ("100 kB", 1, 100_000),
            ],
        )
    } else {
        let large = ("50 MB in one commit", 1, 50_000_000);
        (5, [("1 commit", 1, 100), ("100 commits", 100, 100), ("1,000 commits", 1000, 100), large])
    };
    println!("{:<22}{:>12}{:>12}{:>8}{:>16}", "work", "relay", "git", "ratio", "peak of a git");
    for (name, commits, bytes) in works {
        let (mut ours, mut theirs) = (vec![], vec![]);
        for round in 0..rounds {
            let place = RelaySetup::new();
            let run = place.begin(&format!("bench-{round}"), "workspace");
            let branch = run.state.branch.to_ref();
            import_commits(
                &run.workspace.path,
                &branch,
                &run.state.start.to_string(),
                commits,
                bytes,
            );
            let begun = Instant::now();
            place.deliver(&run).unwrap();
            ours.push(begun.elapsed());
            theirs.push(push_with_git(&place, &run.workspace.path, &branch));
        }
        let (ours, theirs) = (median_time(ours), median_time(theirs));
        let ratio = ours.as_secs_f64() / theirs.as_secs_f64();
        let peak = peak_of_children() >> 20;
        println!("{name:<22}{ours:>12.1?}{theirs:>12.1?}{ratio:>8.2}{peak:>12} MiB");
    }
}

/// Imports commits on top of `start`, each with its own file.
fn import_commits(repository: &Path, branch: &str, start: &str, commits: usize, bytes: usize) {
    let mut child = Command::new("git")
        .arg("--git-dir")
        .arg(repository.join(".git"))
        .args(["fast-import", "--quiet", "--force"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stream = Vec::new();
    for number in 0..commits {
        let content = make_noise(number as u64 + 1, bytes);
        let mut head =
            format!("commit {branch}\ncommitter A <a@b> {} +0000\n", 1_700_000_000 + number);
        write!(head, "data 4\nwork\n").unwrap();
        if number == 0 {
            writeln!(head, "from {start}").unwrap();
        }
        write!(head, "M 100644 inline file-{number}\ndata {}\n", content.len()).unwrap();
        stream.extend_from_slice(head.as_bytes());
        stream.extend_from_slice(&content);
        stream.push(b'\n');
    }
    child.stdin.take().unwrap().write_all(&stream).unwrap();
    assert!(child.wait().unwrap().success());
}

/// Incompressible bytes that are the same each time.
fn make_noise(mut seed: u64, bytes: usize) -> Vec<u8> {
    let step = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed.to_le_bytes()[0]
    };
    std::iter::repeat_with(step).take(bytes).collect()
}

/// Does the same with git alone and without any checks: into a mirror, and on to a remote.
fn push_with_git(place: &RelaySetup, workspace: &Path, branch: &str) -> Duration {
    let git = |words: &[&str]| {
        let done = Command::new("git").current_dir(place.path("")).args(words).status().unwrap();
        assert!(done.success(), "{words:?}");
    };
    git(&["clone", "--quiet", "--mirror", "remote.git", "plain-mirror.git"]);
    git(&["clone", "--quiet", "--bare", "remote.git", "plain-remote.git"]);
    git(&["--git-dir=plain-remote.git", "update-ref", "-d", branch]);
    let workspace = workspace.display().to_string();
    let refspec = format!("+{branch}:refs/heads/plain");
    let begun = Instant::now();
    git(&[
        "--git-dir=plain-mirror.git",
        "-c",
        "safe.directory=*",
        "fetch",
        "--quiet",
        &workspace,
        &refspec,
    ]);
    git(&["--git-dir=plain-mirror.git", "push", "--quiet", "plain-remote.git", "refs/heads/plain"]);
    begun.elapsed()
}

fn median_time(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Returns the peak memory of child processes in bytes.
fn peak_of_children() -> u64 {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_CHILDREN);
    u64::try_from(usage.unwrap().max_rss()).unwrap() << 10
}
