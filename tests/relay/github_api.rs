//! GitHub's own description of its API, held against every call that the relay makes. `tests/github/install` gets it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::relay::github::client::{GithubClient, GithubConfig, RetryPolicy};
use cogni_gateway::relay::github::credential::{ForgeCredential, GithubApp};
use cogni_gateway::relay::github::pull_request::{PullRequestSpec, publish_pull_request};
use cogni_gateway::relay::repo::repository::{HostedRepository, RepositoryUrl};
use cogni_gateway::relay::repo::{BranchKey, ObjectId, SandboxBranch};

use crate::support::process::{Process, free_port, patience};

/// L6: what is asked of GitHub is what GitHub describes: repositories, branches, pull requests that are listed and made.
#[tokio::test]
async fn a_new_pull_request_is_asked_for_as_github_describes_it() {
    let github = Described::start("none.json");
    let (api, repository) = (github.api(), github.repository());
    let token = SecretString::new("ghp_described");
    assert_eq!(api.repository_info(&token, &repository).await.unwrap().default_branch, "master");
    assert!(api.branch_info(&token, &repository, "sandbox/task-1").await.unwrap().is_some());
    let credential = ForgeCredential::Token(token);
    for needs_review in [false, true] {
        let order = PullRequestSpec { needs_review, ..order() };
        assert!(publish_pull_request(&api, &credential, &repository, &order).await.unwrap().is_new);
    }
}

/// L6: so is a change of one.
#[tokio::test]
async fn a_pull_request_is_changed_as_github_describes_it() {
    let github = Described::start("one.json");
    let credential = ForgeCredential::Token(SecretString::new("ghp_described"));
    let published =
        publish_pull_request(&github.api(), &credential, &github.repository(), &order()).await;
    assert!(!published.unwrap().is_new);
}

/// L6: so is an app's token.
#[tokio::test]
async fn an_apps_token_is_asked_for_as_github_describes_it() {
    let github = Described::start("none.json");
    let key = Command::new("openssl").args(["genrsa", "2048"]).output().unwrap().stdout;
    let key = SecretString::new(String::from_utf8(key).unwrap());
    let app = ForgeCredential::App(Box::new(GithubApp::new("Iv1.cogni", &key).unwrap()));
    let token = app.token(&github.api(), &github.repository()).await.unwrap();
    assert!(token.expose_secret().starts_with("ghs_"));
}

/// What is not as it is described is refused, so that the tests above can fail.
#[test]
fn a_call_that_github_does_not_describe_is_refused() {
    let github = Described::start("none.json");
    for (body, status) in [
        (r#"{"title":"t","head":"sandbox/x","base":"main"}"#, "201"),
        (r#"{"title":"t","head":"sandbox/x"}"#, "422"),
        (r#"{"title":"t","head":"sandbox/x","base":"main","draft":"yes"}"#, "422"),
    ] {
        assert_eq!(github.status("POST", "/repos/acme/site/pulls", body), status, "{body}");
    }
    assert_eq!(github.status("PATCH", "/repos/acme/site/pulls/7", r#"{"state":"merged"}"#), "422");
}

/// Prism, which answers by examples what is asked by the description, and refuses the rest.
struct Described {
    port: u16,
    _process: Process,
}

impl Described {
    fn start(description: &str) -> Self {
        let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/github");
        let port = free_port();
        let mut command = Command::new(kept.join("node"));
        command
            .arg(kept.join("npm/node_modules/@stoplight/prism-cli/dist/index.js"))
            .args(["mock", "--host", "127.0.0.1", "--port", &port.to_string()])
            .arg(kept.join(description));
        let mut process = Process::start(&mut command, "run tests/github/install");
        process.until(|said| said.contains("Prism is listening"));
        patience(|| TcpStream::connect(("127.0.0.1", port)).is_ok(), || process.said());
        Self { port, _process: process }
    }

    fn api(&self) -> GithubClient {
        let url = format!("http://127.0.0.1:{}", self.port).parse().unwrap();
        let patience = RetryPolicy { attempts: 1, ..RetryPolicy::default() };
        let timeout = Duration::from_mins(2);
        GithubClient::new(GithubConfig { url, patience, timeout, ..GithubConfig::default() })
            .unwrap()
    }

    fn repository(&self) -> HostedRepository {
        let url = format!("http://127.0.0.1:{}/acme/site", self.port);
        let repository: RepositoryUrl = url.parse().unwrap();
        repository.as_hosted().unwrap().clone()
    }

    /// The status of the answer to a call that the relay would not make.
    fn status(&self, method: &str, path: &str, body: &str) -> String {
        let mut socket = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let head = "host: x\r\ncontent-type: application/json\r\nconnection: close\r\nauthorization: Bearer t";
        let length = body.len();
        write!(
            socket,
            "{method} {path} HTTP/1.1\r\n{head}\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    }
}

fn order() -> PullRequestSpec {
    PullRequestSpec {
        head: SandboxBranch::from_key(BranchKey::parse("task-1").unwrap()),
        base: Some("main".to_owned()),
        run: "run-1".to_owned(),
        agent: "coder".to_owned(),
        title: "Do the work".to_owned(),
        body: "It is done.".to_owned(),
        moved: (ObjectId::NONE, ObjectId::hash_object("blob", b"")),
        needs_review: false,
        reasons: vec![],
        before: vec![],
    }
}
