//! The stand-in: git needs a token there, too.

use crate::support::forge::{Running, TOKEN, git, try_git};

/// L6: a push over HTTP is real git on both ends, and needs the token.
#[tokio::test(flavor = "multi_thread")]
async fn git_pushes_with_the_token_and_not_without() {
    let forge = Running::start().await;
    let (work, url) = (forge.place.path().join("work"), forge.clone_url());
    let push = ["push", "--porcelain", &url, "HEAD:refs/heads/sandbox/other"];
    let refused = try_git(&work, &push, &[]);
    assert!(!refused.status.success());

    let header = format!("Authorization: Basic {}", basic(TOKEN));
    let config = [
        ("GIT_CONFIG_COUNT", "1"),
        ("GIT_CONFIG_KEY_0", "http.extraHeader"),
        ("GIT_CONFIG_VALUE_0", header.as_str()),
    ];
    let pushed = try_git(&work, &push, &config);
    assert!(pushed.status.success(), "{pushed:?}");
    let tip = git(&forge.bare(), &["rev-parse", "sandbox/other"]);
    assert_eq!(tip, git(&work, &["rev-parse", "HEAD"]));
}

fn basic(token: &str) -> String {
    let mut text = String::new();
    cogni_gateway::base::b64::encode(format!("x-access-token:{token}").as_bytes(), &mut text);
    let padding = "=".repeat((4 - text.len() % 4) % 4);
    text.replace('-', "+").replace('_', "/") + &padding
}
