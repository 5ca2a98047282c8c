//! Tests of single API calls on the wire, and of invalid answers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::relay::git::{HttpProxy, OutboundConfig};
use cogni_gateway::relay::github::client::{
    GithubClient, GithubConfig, GithubError, RepositoryInfo, RetryPolicy,
};
use cogni_gateway::relay::github::credential::ForgeCredential;
use cogni_gateway::relay::github::pull_request::convert_to_draft;
use cogni_gateway::relay::repo::repository::{HostedRepository, RepositoryUrl};
use tokio_rustls::TlsAcceptor;

use super::pull_request::pull_request_spec;
use crate::support::github_server::TOKEN;
use crate::support::process::NO_LISTENER;
use crate::support::test_ca::TestCa;

/// L6: A call has the headers that GitHub requires, the token once, and a path below the API's base. GitHub Enterprise
/// has its GraphQL endpoint beside its REST API.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_is_one_plain_request() {
    let pull = r#"[{"number": 1, "node_id": "PR_1", "html_url": "http://forge/pull/1", "body": null,
        "head": {"ref": "sandbox/task-1", "repo": {"full_name": "acme/site"}},
        "base": {"ref": "main", "repo": null}}]"#;
    let server = ReplyServer::start([format_answer("200 OK", pull), format_answer("200 OK", "{}")]);
    let (api, repository) = (server.api("/api/v3/"), server.repository());
    let credential = ForgeCredential::Token(SecretString::new(TOKEN));
    convert_to_draft(&api, &credential, &repository, &pull_request_spec().head).await.unwrap();
    let shown = server.seen().join("\n").replace(&server.address.to_string(), "HOST");
    let shown = shown.replace(env!("CARGO_PKG_VERSION"), "VERSION");
    insta::assert_snapshot!(shown, @r#"
    GET /api/v3/repos/acme/site/pulls?state=open&head=acme%3Asandbox%2Ftask-1&per_page=20&page=1 HTTP/1.1
    user-agent: cogni-gateway/VERSION
    accept: application/vnd.github+json
    x-github-api-version: 2022-11-28
    authorization: Bearer ghp_0nlyTheStandInKnowsIt
    host: HOST


    POST /api/graphql HTTP/1.1
    user-agent: cogni-gateway/VERSION
    accept: application/vnd.github+json
    x-github-api-version: 2022-11-28
    authorization: Bearer ghp_0nlyTheStandInKnowsIt
    content-type: application/json
    host: HOST
    content-length: 143

    {"query":"mutation($id: ID!) { convertPullRequestToDraft(input: {pullRequestId: $id}) { pullRequest { isDraft } } }","variables":{"id":"PR_1"}}
    "#);
}

/// L6: The token is sent to no other address, wherever an answer redirects.
#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_is_not_followed() {
    let other = ReplyServer::start([format_answer("200 OK", ABOUT)]);
    for status in ["301 Moved Permanently", "302 Found", "307 Temporary Redirect"] {
        let location = format!("http://{}/repos/acme/site", other.address);
        let reply =
            format!("HTTP/1.1 {status}\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n");
        let error = ReplyServer::start([reply]).about().await.unwrap_err();
        assert!(matches!(&error, GithubError::RepositoryMoved(to) if *to == location), "{error}");
    }
    assert!(other.seen().is_empty());
}

/// L6: An answer that is too long, malformed or late is an error that may be retried, and the error says which it is.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_cannot_be_used_says_why() {
    let long = format!("{{\"default_branch\": \"main\", \"x\": \"{}\"}}", "x".repeat(4 << 20));
    let mut messages = vec![];
    for reply in [
        format_answer("200 OK", &long),
        format_answer("200 OK", r#"{"default_branch": 1}"#),
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{".to_owned(),
        "SSH-2.0-OpenSSH\r\n".to_owned(),
        String::new(),
        HANG.to_owned(),
    ] {
        let error = ReplyServer::start([reply]).about().await.unwrap_err();
        assert_eq!(error.retry_after(), Some(Duration::ZERO), "{error}");
        messages.push(error.to_string());
    }
    insta::assert_snapshot!(messages.join("\n"), @r#"
    GitHub did not answer: its answer is longer than 4 MiB
    GitHub did not answer: its answer is not what its API describes (invalid type: integer `1`, expected a string at line 1 column 20)
    GitHub did not answer: its answer broke off (end of file before message length reached)
    GitHub did not answer: what answers does not speak HTTP (invalid HTTP version parsed); check `GITHUB_API_URL`
    GitHub did not answer: connection closed before message completed
    GitHub did not answer: nothing within 2s
    "#);
}

/// L6: An answer in which the page of a pull request is no web address is not used: people would open the address.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_is_no_web_address_is_refused() {
    let long = format!("https://forge/{}", "x".repeat(2048));
    for page in ["javascript:alert(1)", "https://forge/\\u202e1", "https://forge/ 1", &long] {
        let pull = format!(
            r#"[{{"number": 1, "html_url": "{page}", "body": null, "head": {{"ref": "b", "repo": null}}, "base": {{"ref": "main", "repo": null}}}}]"#
        );
        let server = ReplyServer::start([format_answer("200 OK", &pull)]);
        let (api, repository) = (server.api("/api/v3/"), server.repository());
        let credential = ForgeCredential::Token(SecretString::new(TOKEN));
        let head = &pull_request_spec().head;
        let error = convert_to_draft(&api, &credential, &repository, head).await.unwrap_err();
        assert!(error.to_string().contains("`html_url` is no web address"), "{error}");
    }
}

/// L6: A token that cannot be a header value is refused before anything is sent, and not printed.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_is_no_header_is_not_sent() {
    let server = ReplyServer::start([format_answer("200 OK", ABOUT)]);
    let token = SecretString::new(format!("{TOKEN}\nx: y"));
    let error = server.api("").repository_info(&token, &server.repository()).await.unwrap_err();
    assert!(server.seen().is_empty() && !format!("{error:?}").contains(TOKEN));
    insta::assert_snapshot!(error, @"GitHub does not accept the token: no header may have its characters; give a valid one in `GITHUB_TOKEN`, or check `GITHUB_APP_ID` and `GITHUB_APP_KEY_FILE`");
}

/// L6: If the API cannot be reached, the error names the setting to check.
#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_api_names_its_setting() {
    let (trusted_ca, another) = (TestCa::new(), TestCa::new());
    let mut messages = vec![];
    for (host, ca_file, proxy) in [
        ("localhost", None, None),
        ("localhost", Some(another.file.clone()), None),
        ("other.example", Some(trusted_ca.file.clone()), None),
        (
            "localhost",
            Some(trusted_ca.file.clone()),
            Some(HttpProxy::parse_proxy(&NO_LISTENER.to_string(), "").unwrap()),
        ),
    ] {
        let address = serve_tls(trusted_ca.server(host, &["http/1.1"])).await;
        let api = github_client(
            &format!("https://localhost:{}", address.port()),
            OutboundConfig { ca_file, proxy },
        );
        let site = hosted_repository(&format!("https://localhost:{}/acme/site", address.port()));
        messages.push(
            api.repository_info(&SecretString::new(TOKEN), &site).await.unwrap_err().to_string(),
        );
    }
    let no_listener = github_client(&format!("http://{NO_LISTENER}"), OutboundConfig::default());
    let site = hosted_repository(&format!("http://{NO_LISTENER}/acme/site"));
    messages.push(
        no_listener
            .repository_info(&SecretString::new(TOKEN), &site)
            .await
            .unwrap_err()
            .to_string(),
    );
    insta::assert_snapshot!(messages.join("\n"), @r#"
    GitHub did not answer: its certificate is not accepted (UnknownIssuer); name the PEM file of the authority that signed it in `GITHUB_CA_FILE`
    GitHub did not answer: its certificate is not accepted (BadSignature); name the PEM file of the authority that signed it in `GITHUB_CA_FILE`
    GitHub did not answer: its certificate is not accepted (certificate not valid for name "localhost"; certificate is only valid for DnsName("other.example")); check `GITHUB_API_URL`
    GitHub did not answer: there is no connection to it (Connection refused (os error 111)); check `HTTPS_PROXY` and the network
    GitHub did not answer: there is no connection to it (Connection refused (os error 111)); check `GITHUB_API_URL` and the network
    "#);
}

/// A server that answers connections one after the other with prepared replies, and accepts no more.
struct ReplyServer {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<String>>>,
}

impl ReplyServer {
    fn start(replies: impl IntoIterator<Item = String> + Send + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::<Mutex<Vec<String>>>::default();
        let seen_by_server = Arc::clone(&seen);
        let replies = replies.into_iter().collect::<Vec<_>>();
        thread::spawn(move || {
            for reply in replies {
                let mut socket = listener.accept().unwrap().0;
                seen_by_server.lock().unwrap().push(read_request(&socket));
                if reply == HANG {
                    // The client speaks first.
                    let _ = socket.read(&mut [0]);
                }
                // The client may disconnect before it has read everything.
                let _ = socket.write_all(reply.as_bytes());
            }
        });
        Self { address, seen }
    }

    fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }

    fn api(&self, base: &str) -> GithubClient {
        github_client(&format!("http://{}{base}", self.address), OutboundConfig::default())
    }

    fn repository(&self) -> HostedRepository {
        hosted_repository(&format!("http://{}/acme/site", self.address))
    }

    async fn about(&self) -> Result<RepositoryInfo, GithubError> {
        self.api("").repository_info(&SecretString::new(TOKEN), &self.repository()).await
    }
}

/// Reads one request including its body.
fn read_request(socket: &TcpStream) -> String {
    let mut from = BufReader::new(socket);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(from.read_line(&mut head).unwrap(), 0, "{head}");
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    from.read_exact(&mut body).unwrap();
    head.replace("\r\n", "\n") + std::str::from_utf8(&body).unwrap()
}

/// Completes the TLS handshake and sends nothing.
async fn serve_tls(tls: rustls::ServerConfig) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let _ = TlsAcceptor::from(Arc::new(tls.clone())).accept(socket).await;
        }
    });
    address
}

fn format_answer(status: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}")
}

fn github_client(url: &str, network: OutboundConfig) -> GithubClient {
    let patience = RetryPolicy { attempts: 1, ..RetryPolicy::default() };
    let timeout = Duration::from_secs(2);
    let config = GithubConfig {
        url: url.parse().unwrap(),
        network,
        retry: patience,
        timeout,
        ..GithubConfig::default()
    };
    GithubClient::new(config).unwrap()
}

fn hosted_repository(url: &str) -> HostedRepository {
    let repository: RepositoryUrl = url.parse().unwrap();
    repository.as_hosted().unwrap().clone()
}

const ABOUT: &str = r#"{"default_branch": "main"}"#;

/// A reply that never arrives.
const HANG: &str = "hang";
