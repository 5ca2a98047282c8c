//! The stand-in for GitHub, running until the test drops it, with a repository that real git has made.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use cogni_gateway::base::drain::Drain;
use cogni_gateway::base::secret::Secret;
use cogni_gateway::forge::credential::Credential;
use cogni_gateway::forge::github::{Api, Config, Patience};
use cogni_gateway::relay::repository::{Hosted, Repository};
use cogni_gateway::stand_in::{Forge, Hub};
use tempfile::TempDir;
use tokio_util::sync::{CancellationToken, DropGuard};

/// What the stand-in calls its one repository.
pub(crate) const NAME: &str = "acme/site";

/// The token it accepts. No other text in the suite looks like it.
pub(crate) const TOKEN: &str = "ghp_0nlyTheStandInKnowsIt";

/// A stand-in on a port of its own: `main` has a commit, `sandbox/task-1` has one more.
pub(crate) struct Running {
    pub(crate) hub: Hub,
    pub(crate) place: TempDir,
    _stop: DropGuard,
}

impl Running {
    pub(crate) async fn start() -> Self {
        let place = tempfile::tempdir().unwrap();
        let bare = place.path().join("site.git");
        git(place.path(), &["init", "--quiet", "--bare", "--initial-branch=main", "site.git"]);
        git(place.path(), &["init", "--quiet", "--initial-branch=main", "work"]);
        let work = place.path().join("work");
        commit(&work, "README", "hello\n");
        git(&work, &["push", "--quiet", bare.to_str().unwrap(), "main"]);
        git(&work, &["checkout", "--quiet", "-b", "sandbox/task-1"]);
        commit(&work, "work", "done\n");
        git(&work, &["push", "--quiet", bare.to_str().unwrap(), "sandbox/task-1"]);
        let forge = Forge::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
        let hub = forge.hub();
        hub.add(NAME, &bare);
        hub.accept(TOKEN);
        let stop = CancellationToken::new();
        Drain::default().spawn(forge.serve(stop.clone()));
        Self { hub, place, _stop: stop.drop_guard() }
    }

    pub(crate) fn bare(&self) -> PathBuf {
        self.place.path().join("site.git")
    }

    /// What people clone.
    pub(crate) fn clone_url(&self) -> String {
        format!("{}/{NAME}.git", self.hub.url())
    }

    pub(crate) fn hosted(&self) -> Hosted {
        let repository: Repository = self.clone_url().parse().unwrap();
        repository.hosted().unwrap().clone()
    }

    /// A client that is not made to wait.
    pub(crate) fn api(&self) -> Api {
        self.api_with(Patience {
            attempts: 3,
            first: Duration::from_millis(1),
            longest: Duration::from_secs(5),
        })
    }

    pub(crate) fn api_with(&self, patience: Patience) -> Api {
        let url = self.hub.url().parse().unwrap();
        Api::new(Config { url, patience, ..Config::default() }).unwrap()
    }
}

pub(crate) fn credential() -> Credential {
    Credential::Token(Secret::new(TOKEN))
}

/// Writes a file and commits it.
pub(crate) fn commit(work: &Path, file: &str, content: &str) {
    fs::write(work.join(file), content).unwrap();
    git(work, &["add", file]);
    git(work, &["commit", "--quiet", "--message", &format!("change {file}")]);
}

/// Runs git, which has to succeed; what it prints.
pub(crate) fn git(directory: &Path, arguments: &[&str]) -> String {
    let output = try_git(directory, arguments, &[]);
    assert!(output.status.success(), "git {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

/// Runs git, away from whatever this machine's is configured to.
pub(crate) fn try_git(directory: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    Command::new("git")
        .current_dir(directory)
        .args(arguments)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_TERMINAL_PROMPT", "0")
        .envs(["AUTHOR", "COMMITTER"].map(|who| (format!("GIT_{who}_NAME"), "someone")))
        .envs(["AUTHOR", "COMMITTER"].map(|who| (format!("GIT_{who}_EMAIL"), "someone@example")))
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}
