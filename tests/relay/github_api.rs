//! Every call that the relay makes to GitHub is checked against GitHub's own API description. `tests/github/install`
//! downloads the description.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::relay::github::client::{GithubClient, GithubConfig, RetryPolicy};
use cogni_gateway::relay::github::credential::{ForgeCredential, GithubApp};
use cogni_gateway::relay::github::pull_request::change_summary::ChangeSummary;
use cogni_gateway::relay::github::pull_request::{PullRequestSpec, publish_pull_request};
use cogni_gateway::relay::repo::repository::{HostedRepository, RepositoryUrl};
use cogni_gateway::relay::repo::{BranchKey, ObjectId, SandboxBranch};

use crate::support::process::{ChildProcess, free_port, wait_until};

/// L6: The calls for repositories, branches, and listing and creating pull requests agree with GitHub's description.
#[tokio::test]
async fn creating_a_pull_request_agrees_with_githubs_description() {
    let github = DescribedServer::start("none.json");
    let (api, repository) = (github.api(), github.repository());
    let token = SecretString::new("ghp_described");
    assert_eq!(api.repository_info(&token, &repository).await.unwrap().default_branch, "master");
    assert!(api.branch_info(&token, &repository, "sandbox/task-1").await.unwrap().is_some());
    let credential = ForgeCredential::Token(token);
    for needs_review in [false, true] {
        let spec = PullRequestSpec { needs_review, ..pull_request_spec() };
        assert!(publish_pull_request(&api, &credential, &repository, &spec).await.unwrap().is_new);
    }
}

/// L6: The calls that change a pull request agree with GitHub's description.
#[tokio::test]
async fn changing_a_pull_request_agrees_with_githubs_description() {
    let github = DescribedServer::start("one.json");
    let credential = ForgeCredential::Token(SecretString::new("ghp_described"));
    let published = publish_pull_request(
        &github.api(),
        &credential,
        &github.repository(),
        &pull_request_spec(),
    )
    .await;
    assert!(!published.unwrap().is_new);
}

/// L6: The call for an app's token agrees with GitHub's description.
#[tokio::test]
async fn requesting_an_apps_token_agrees_with_githubs_description() {
    let github = DescribedServer::start("none.json");
    let key = Command::new("openssl").args(["genrsa", "2048"]).output().unwrap().stdout;
    let key = SecretString::new(String::from_utf8(key).unwrap());
    let app = ForgeCredential::App(Box::new(GithubApp::new("Iv1.cogni", &key).unwrap()));
    let token = app.token(&github.api(), &github.repository()).await.unwrap();
    assert!(token.expose_secret().starts_with("ghs_"));
}

/// A call that disagrees with the description is refused, so the tests above can fail.
#[test]
fn a_call_that_github_does_not_describe_is_refused() {
    let github = DescribedServer::start("none.json");
    for (body, status) in [
        (r#"{"title":"t","head":"sandbox/x","base":"main"}"#, "201"),
        (r#"{"title":"t","head":"sandbox/x"}"#, "422"),
        (r#"{"title":"t","head":"sandbox/x","base":"main","draft":"yes"}"#, "422"),
    ] {
        assert_eq!(github.status("POST", "/repos/acme/site/pulls", body), status, "{body}");
    }
    assert_eq!(github.status("PATCH", "/repos/acme/site/pulls/7", r#"{"state":"merged"}"#), "422");
}

/// Prism, a mock server that answers described calls with examples and refuses all others.
struct DescribedServer {
    port: u16,
    _process: ChildProcess,
}

impl DescribedServer {
    fn start(description: &str) -> Self {
        let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/github");
        let port = free_port();
        let mut command = Command::new(kept.join("node"));
        command
            .arg(kept.join("npm/node_modules/@stoplight/prism-cli/dist/index.js"))
            .args(["mock", "--host", "127.0.0.1", "--port", &port.to_string()])
            .arg(kept.join(description));
        let mut process = ChildProcess::start(&mut command, "run tests/github/install");
        process.until(|output| output.contains("Prism is listening"));
        wait_until(|| TcpStream::connect(("127.0.0.1", port)).is_ok(), || process.output());
        Self { port, _process: process }
    }

    fn api(&self) -> GithubClient {
        let url = format!("http://127.0.0.1:{}", self.port).parse().unwrap();
        let patience = RetryPolicy { attempts: 1, ..RetryPolicy::default() };
        let timeout = Duration::from_mins(2);
        GithubClient::new(GithubConfig { url, retry: patience, timeout, ..GithubConfig::default() })
            .unwrap()
    }

    fn repository(&self) -> HostedRepository {
        let url = format!("http://127.0.0.1:{}/acme/site", self.port);
        let repository: RepositoryUrl = url.parse().unwrap();
        repository.as_hosted().unwrap().clone()
    }

    /// Returns the status of the answer to a call that the relay would not make.
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

fn pull_request_spec() -> PullRequestSpec {
    PullRequestSpec {
        head: SandboxBranch::from_key(BranchKey::parse("task-1").unwrap()),
        base: Some("main".to_owned()),
        run: "run-1".to_owned(),
        agent: "coder".to_owned(),
        title: "Do the work".to_owned(),
        body: "It is done.".to_owned(),
        commit_range: (ObjectId::NONE, ObjectId::hash_object("blob", b"")),
        summary: ChangeSummary::default(),
        needs_review: false,
        reasons: vec![],
        earlier_reasons: vec![],
    }
}
