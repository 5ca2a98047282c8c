//! Tests of git access to the stand-in, which requires a token.

use crate::support::github_server::{RunningGithub, TOKEN, basic_auth};
use crate::support::repository::{command_in, run_git};

/// L6: A push over HTTP uses real git on both ends, and requires the token.
#[tokio::test(flavor = "multi_thread")]
async fn git_pushes_with_the_token_and_not_without() {
    let github = RunningGithub::start().await;
    let (work, url) = (github.place.path().join("work"), github.clone_url());
    let push = ["push", "--porcelain", &url, "HEAD:refs/heads/sandbox/other"];
    let refused = command_in("git", &work).args(push).output().unwrap();
    assert!(!refused.status.success());

    let header = format!("Authorization: Basic {}", basic_auth(TOKEN));
    let config = [
        ("GIT_CONFIG_COUNT", "1"),
        ("GIT_CONFIG_KEY_0", "http.extraHeader"),
        ("GIT_CONFIG_VALUE_0", header.as_str()),
    ];
    let pushed = command_in("git", &work).args(push).envs(config).output().unwrap();
    assert!(pushed.status.success(), "{pushed:?}");
    let tip = run_git(&github.bare(), &["rev-parse", "sandbox/other"]);
    assert_eq!(tip, run_git(&work, &["rev-parse", "HEAD"]));
}
