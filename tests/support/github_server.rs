//! The GitHub stand-in, which runs until the test drops it, with a repository that real git has made.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use base64::prelude::*;
use cogni_gateway::base::secret::SecretString;
use cogni_gateway::base::task_group::TaskGroup;
use cogni_gateway::fakes::github_server::{FakeGithub, FakeGithubHandle};
use cogni_gateway::relay::github::client::{GithubClient, GithubConfig, RetryPolicy};
use cogni_gateway::relay::github::credential::ForgeCredential;
use cogni_gateway::relay::repo::repository::{HostedRepository, RepositoryUrl};
use tempfile::TempDir;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::repository::{commit_file, run_git};

/// The stand-in's one repository.
pub(crate) const NAME: &str = "acme/site";

/// The accepted token. No other text in the suite resembles it.
pub(crate) const TOKEN: &str = "ghp_0nlyTheStandInKnowsIt";

/// A stand-in on its own port: `main` has one commit, and `sandbox/task-1` has one more.
pub(crate) struct RunningGithub {
    pub(crate) hub: FakeGithubHandle,
    pub(crate) place: TempDir,
    _stop: DropGuard,
}

impl RunningGithub {
    pub(crate) async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bare = dir.path().join("site.git");
        run_git(dir.path(), &["init", "--quiet", "--bare", "--initial-branch=main", "site.git"]);
        run_git(dir.path(), &["init", "--quiet", "--initial-branch=main", "work"]);
        let work = dir.path().join("work");
        commit_file(&work, "README", "hello\n");
        run_git(&work, &["push", "--quiet", bare.to_str().unwrap(), "main"]);
        run_git(&work, &["checkout", "--quiet", "-b", "sandbox/task-1"]);
        commit_file(&work, "work", "done\n");
        run_git(&work, &["push", "--quiet", bare.to_str().unwrap(), "sandbox/task-1"]);
        let github = FakeGithub::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
        let hub = github.github_handle();
        hub.add_repository(NAME, &bare);
        hub.accept_token(TOKEN);
        let stop = CancellationToken::new();
        TaskGroup::default().spawn_task(github.serve(stop.clone()));
        Self { hub, place: dir, _stop: stop.drop_guard() }
    }

    pub(crate) fn bare(&self) -> PathBuf {
        self.place.path().join("site.git")
    }

    /// Returns the URL that people clone.
    pub(crate) fn clone_url(&self) -> String {
        format!("{}/{NAME}.git", self.hub.url())
    }

    pub(crate) fn hosted(&self) -> HostedRepository {
        let repository: RepositoryUrl = self.clone_url().parse().unwrap();
        repository.as_hosted().unwrap().clone()
    }

    /// Returns a client without rate limiting.
    pub(crate) fn api(&self) -> GithubClient {
        self.api_with(RetryPolicy {
            attempts: 3,
            initial_delay: Duration::from_millis(1),
            max_delay: Duration::from_secs(5),
        })
    }

    pub(crate) fn api_with(&self, retry: RetryPolicy) -> GithubClient {
        let url = self.hub.url().parse().unwrap();
        GithubClient::new(GithubConfig { url, retry, ..GithubConfig::default() }).unwrap()
    }
}

pub(crate) fn forge_credential() -> ForgeCredential {
    ForgeCredential::Token(SecretString::new(TOKEN))
}

/// Returns the form in which git sends a token in a header.
pub(crate) fn basic_auth(token: &str) -> String {
    BASE64_STANDARD.encode(format!("x-access-token:{token}"))
}
