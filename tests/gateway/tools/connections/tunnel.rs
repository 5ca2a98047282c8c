//! T6: Tests of tunnels: a client that uses the server's own address sends what the rules allow, with the host's
//! credential, and reaches nothing else.

use std::net::IpAddr;
use std::sync::Arc;

use cogni_gateway::base::host_lookups::HostLookup;
use http::Method;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::server::{Answer, SecureServer};
use super::{SECRET, SecretFile, code_of, start_app, start_with_lookup};
use crate::support::app::TestApp;
use crate::tools::agent_listing;

/// The name of the servers in these tests, which no resolver knows.
pub(super) const HOST: &str = "api.example.test";

/// Returns the look-up that leads every name to this machine.
pub(super) fn local_lookup() -> HostLookup {
    Arc::new(|_, _| Ok(vec!["127.0.0.1".parse::<IpAddr>().unwrap()]))
}

/// Starts a run with a tunnel to a server.
pub(super) async fn start_tunnelled(table: &str) -> TestApp {
    start_with_lookup(table, local_lookup()).await
}

/// Returns the table of a connection with a tunnel, the credential, and these rules.
fn tunnel_table(server: &SecureServer, secret: &SecretFile, more: &str) -> String {
    server.table("api", &format!("{}tunnel = true\n{more}", secret.line))
}

/// Sends a request for a tunnel, and returns the stream and the head of the answer.
pub(super) async fn connect(app: &TestApp, request: &str) -> (UnixStream, String) {
    let mut stream = app.client().connect().await;
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = vec![];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    (stream, String::from_utf8(head).unwrap())
}

/// Returns the settings of a client that trusts the run's authority.
pub(super) async fn trusting_client(app: &TestApp) -> ClientConfig {
    let pem = app.client().get("/connect/ca.pem").await;
    assert_eq!(
        (pem.status.as_u16(), pem.header("content-type")),
        (200, Some("application/x-pem-file"))
    );
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&pem.body).unwrap()).unwrap();
    ClientConfig::builder().with_root_certificates(roots).with_no_client_auth()
}

/// Opens a tunnel, and makes the handshake in it.
pub(super) async fn open_tunnel(app: &TestApp, authority: &str) -> TlsStream<UnixStream> {
    let request = format!("CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n\r\n");
    let (stream, head) = connect(app, &request).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let name = authority.split(':').next().unwrap().to_owned();
    let tls = TlsConnector::from(Arc::new(trusting_client(app).await));
    tls.connect(ServerName::try_from(name).unwrap(), stream).await.unwrap()
}

/// Sends a request that is the last one in a tunnel, and returns the whole answer.
pub(super) async fn ask(app: &TestApp, authority: &str, request: &str) -> String {
    let mut stream = open_tunnel(app, authority).await;
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = vec![];
    // The server may end without the notice of TLS.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

fn status_and_code(answer: &str) -> String {
    let status = answer.split(' ').nth(1).unwrap_or("-").to_owned();
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    format!("{status} {}", body["error"]["code"].as_str().unwrap_or("-"))
}

/// T6: a request in a tunnel is judged, charged and recorded like one by the connection's path, and the server gets the
/// same request.
#[tokio::test]
async fn a_request_in_a_tunnel_takes_the_way_of_its_connection() {
    let server = SecureServer::named(HOST, |_| {
        Answer::text("<a href='https://api.example.test/b'>").with("content-type", "text/html")
    })
    .await;
    let secret = SecretFile::new(SECRET, "");
    let rules = "allow = ['POST /repos/*/issues']\nrewrite_links = true\nprice_usd = '0.001'";
    let app = start_tunnelled(&tunnel_table(&server, &secret, rules)).await;
    let authority = server.authority();
    let request = format!(
        "POST /repos/site/issues?page=2 HTTP/1.1\r\nhost: {authority}\r\nauthorization: own\r\norigin: https://{authority}\r\n\
         content-type: text/plain\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"
    );
    let answer = ask(&app, &authority, &request).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // Links stay: the client reaches the server by its own address.
    assert!(answer.contains("<a href='https://api.example.test/b'>"), "{answer}");
    let by_path = [("content-type", "text/plain")];
    let path = "/connect/api/repos/site/issues?page=2";
    assert_eq!(app.client().ask(Method::POST, path, "hello", &by_path).await.status, 200);
    let seen = server.seen();
    let parts = |number: usize| (&seen[number].target, &seen[number].headers, &seen[number].body);
    assert_eq!(parts(0), parts(1));
    assert_eq!(seen[0].headers["authorization"], format!("Bearer {SECRET}"));
    let denied = format!(
        "GET /repos/site/issues HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n\r\n"
    );
    assert_eq!(status_and_code(&ask(&app, &authority, &denied).await), "403 policy_denied");
    let records = app.stop().await;
    let of = |event: &str| -> Vec<_> {
        let found = records.iter().filter(|record| record["event"] == event);
        found.map(|own| [&own["connection"], &own["path"], &own["rule"], &own["outcome"]]).collect()
    };
    assert_eq!(of("connect.admitted").len(), 2);
    assert_eq!(of("connect.admitted")[0], of("connect.admitted")[1]);
    assert_eq!(of("connect.settled")[0], of("connect.settled")[1]);
    let refused = of("connect.refused");
    assert_eq!((refused.len(), refused[0][0], refused[0][2]), (1, &json!("api"), &json!("allow")));
}

/// T6: a tunnel carries several requests, and the path of the connection's address begins each of them.
#[tokio::test]
async fn a_tunnel_carries_several_requests_below_the_address() {
    let server = SecureServer::named(HOST, |seen| Answer::text(seen.target.clone())).await;
    let secret = SecretFile::new(SECRET, "");
    let table = tunnel_table(&server, &secret, "allow = ['GET /repos/**']\ndeny = ['* /repos/x']");
    let table = table.replace(&server.url(), &format!("{}/api/v3", server.url()));
    let app = start_tunnelled(&table).await;
    let authority = server.authority();
    let mut stream = open_tunnel(&app, &authority).await;
    let paths = [
        "/api/v3/repos/a",
        "/repos/a",
        "/api/v3/repos/x",
        "/api/v3x/repos/a",
        "/api/v3/../repos/a",
        "/api/v3",
    ];
    for (number, path) in paths.iter().enumerate() {
        let close = if number + 1 == paths.len() { "connection: close\r\n" } else { "" };
        let request = format!("GET {path} HTTP/1.1\r\nhost: {authority}\r\n{close}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
    }
    let mut answers = vec![];
    let _ = stream.read_to_end(&mut answers).await;
    let answers = String::from_utf8(answers).unwrap();
    let statuses: Vec<_> = answers.split("HTTP/1.1 ").skip(1).map(|answer| &answer[..3]).collect();
    assert_eq!(statuses, ["200", "403", "403", "403", "400", "403"]);
    assert!(answers.contains("/api/v3/repos/a"));
    assert_eq!(server.seen().len(), 1);
    app.stop().await;
}

/// T6: only the exact host and port of a connection with a tunnel are reached, and the request has one reading.
#[tokio::test]
async fn another_host_or_port_has_no_tunnel() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let plain = SecureServer::named("plain.example.test", |_| Answer::text("ok")).await;
    let secret = SecretFile::new(SECRET, "");
    let table = tunnel_table(&server, &secret, "allow = ['GET /**']")
        + &plain.table("plain", "allow = ['GET /**']");
    let app = start_tunnelled(&table).await;
    let (own, port) = (server.authority(), server.address.port());
    let upper = own.to_uppercase();
    let get = |target: &str, more: &str| format!("CONNECT {target} HTTP/1.1\r\n{more}\r\n");
    let cases = [
        (get(&own, ""), "200 -"),
        (get(&upper, ""), "200 -"),
        (format!("CONNECT {own} HTTP/1.0\r\n\r\n"), "200 -"),
        (get(&plain.authority(), ""), "403 policy_denied"),
        (get(&format!("other.example.test:{port}"), ""), "403 policy_denied"),
        (get(&format!("x{HOST}:{port}"), ""), "403 policy_denied"),
        (get(&format!("{HOST}.:{port}"), ""), "403 policy_denied"),
        (get(&format!("{HOST}:443"), ""), "403 policy_denied"),
        (get(&format!("127.0.0.1:{port}"), ""), "403 policy_denied"),
        (get(&format!("[::1]:{port}"), ""), "403 policy_denied"),
        (get(&format!("2130706433:{port}"), ""), "403 policy_denied"),
        (get(&format!("localhost:{port}"), ""), "403 policy_denied"),
        (get("169.254.169.254:80", ""), "403 policy_denied"),
        (get(&format!("user@{own}"), ""), "400 invalid_tunnel"),
        (get(HOST, ""), "400 invalid_tunnel"),
        (get("/connect/api/a", ""), "400 invalid_tunnel"),
        (get(&format!("https://{own}/"), ""), "400 invalid_tunnel"),
        (get(&own, "host: a\r\nhost: b\r\n"), "400 invalid_tunnel"),
        (get(&own, "content-length: 3\r\n"), "400 invalid_tunnel"),
        (get(&own, "transfer-encoding: chunked\r\n"), "400 invalid_tunnel"),
        (get(&own, "origin: https://evil.example\r\n"), "403 foreign_origin"),
        (get(&own, "connection: upgrade\r\nupgrade: websocket\r\n"), "403 upgrade_refused"),
    ];
    for (request, expected) in cases {
        let (mut stream, mut answer) = connect(&app, &request).await;
        if !answer.contains(" 200 ") {
            let length = answer.split("content-length: ").nth(1).unwrap();
            let mut body = vec![0; length.split("\r\n").next().unwrap().parse().unwrap()];
            stream.read_exact(&mut body).await.unwrap();
            answer += &String::from_utf8(body).unwrap();
        }
        assert_eq!(status_and_code(&answer), expected, "{request}");
    }
    assert!(server.seen().is_empty() && plain.seen().is_empty());
    let records = app.stop().await;
    let refused: Vec<_> =
        records.iter().filter(|record| record["event"] == "connect.refused").collect();
    assert!(refused.iter().all(|record| record["method"] == "CONNECT"), "{refused:?}");
    assert!(!refused.is_empty());
}

/// T6: the agent's file decides about tunnels, too, and a run without tunnels has no certificate.
#[tokio::test]
async fn a_tunnel_belongs_to_its_connection_and_agent() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let secret = SecretFile::new(SECRET, "");
    let table = tunnel_table(&server, &secret, "allow = ['GET /**']");
    let app =
        super::app_with(&table, |config| config.tools.agent = Some(agent_listing(&[]).into()))
            .await;
    let authority = server.authority();
    let request = format!("CONNECT {authority} HTTP/1.1\r\n\r\n");
    assert!(connect(&app, &request).await.1.starts_with("HTTP/1.1 403"));
    assert_eq!(code_of(&app.client().get("/connect/ca.pem").await), "404 not_found");
    app.stop().await;
    let app = start_app(&table.replace("tunnel = true", "")).await;
    assert!(connect(&app, &request).await.1.starts_with("HTTP/1.1 403"));
    assert_eq!(code_of(&app.client().get("/connect/ca.pem").await), "404 not_found");
    app.stop().await;
    let app = start_app(&table).await;
    let listed = app.client().get("/connect").await.json();
    assert_eq!(listed["connections"][0]["tunnel"], authority);
    app.stop().await;
}

/// T6: a request in a tunnel names the tunnel's host, once, and nothing else.
#[tokio::test]
async fn a_request_for_another_host_is_misdirected() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_tunnelled(&tunnel_table(&server, &secret, "allow = ['* /**']")).await;
    let own = server.authority();
    let get = |target: &str, hosts: &str| {
        format!("GET {target} HTTP/1.1\r\n{hosts}connection: close\r\n\r\n")
    };
    let cases = [
        (get("/a", &format!("host: {}\r\n", own.to_uppercase())), "200 -"),
        (get("/a", "host: other.example.test\r\n"), "421 tunnel_mismatch"),
        (get("/a", &format!("host: {HOST}\r\n")), "421 tunnel_mismatch"),
        (get("/a", &format!("host: {HOST}:443\r\n")), "421 tunnel_mismatch"),
        (get("/a", &format!("host: user@{own}\r\n")), "421 tunnel_mismatch"),
        (get("/a", &format!("host: {HOST}.:{}\r\n", server.address.port())), "421 tunnel_mismatch"),
        (get("/a", "host: \r\n"), "421 tunnel_mismatch"),
        (get("/a", ""), "421 tunnel_mismatch"),
        (get("/a", &format!("host: {own}\r\nhost: {own}\r\n")), "421 tunnel_mismatch"),
        (get(&format!("https://{own}/a"), &format!("host: {own}\r\n")), "421 tunnel_mismatch"),
        (get("http://localhost/a", &format!("host: {own}\r\n")), "421 tunnel_mismatch"),
        (
            get("/a", &format!("host: {own}\r\norigin: https://evil.example\r\n")),
            "403 foreign_origin",
        ),
        (get("/a", &format!("host: {own}\r\nupgrade: websocket\r\n")), "403 upgrade_refused"),
        (get("/a?access_token=x", &format!("host: {own}\r\n")), "403 client_credential"),
        (get(&own, &format!("host: {own}\r\n")).replace("GET", "CONNECT"), "421 tunnel_mismatch"),
        (get("/connect/ca.pem", &format!("host: {own}\r\n")), "200 -"),
    ];
    let mut refused = vec![];
    for (request, expected) in cases {
        assert_eq!(status_and_code(&ask(&app, &own, &request).await), expected, "{request}");
        refused.extend(expected.split(' ').nth(1).filter(|code| *code != "-"));
    }
    // The paths of the gateway are not served in a tunnel: they are paths of the server there.
    let targets: Vec<_> = server.seen().into_iter().map(|seen| seen.target).collect();
    assert_eq!(targets, ["/a", "/connect/ca.pem"]);
    // Each refusal is recorded, with its connection.
    let records = app.stop().await;
    let recorded: Vec<_> = records
        .iter()
        .filter(|record| record["event"] == "connect.refused" && record["connection"] == "api")
        .map(|record| record["code"].as_str().unwrap())
        .collect();
    assert_eq!(recorded, refused);
}

/// T6: an answer in a tunnel is searched for the credential, and the certificate and the list contain none.
#[tokio::test]
async fn no_credential_comes_back_through_a_tunnel() {
    let server = SecureServer::named(HOST, |seen| match &*seen.target {
        "/header" => Answer::text("ok").with("x-echo", SECRET),
        _ => Answer::text(format!("before {SECRET} after")),
    })
    .await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_tunnelled(&tunnel_table(&server, &secret, "allow = ['* /**']")).await;
    let own = server.authority();
    let mut shown = String::new();
    for path in ["/header", "/body"] {
        let request = format!("GET {path} HTTP/1.1\r\nhost: {own}\r\nconnection: close\r\n\r\n");
        let answer = ask(&app, &own, &request).await;
        assert_eq!(status_and_code(&answer), "502 credential_echoed", "{path}");
        shown += &answer;
    }
    shown += app.client().get("/connect/ca.pem").await.text();
    shown += app.client().get("/connect").await.text();
    let access = app.access_log();
    let log = app.audit_log();
    shown += &std::fs::read_to_string(&log).unwrap();
    shown += &std::fs::read_to_string(&access).unwrap_or_default();
    assert!(!shown.contains(SECRET) && !shown.contains("PRIVATE KEY"));
    app.stop().await;
}

/// T6: HTTP/2 carries no tunnel, and no run without connections has one.
#[tokio::test]
async fn http2_and_runs_without_connections_have_no_tunnel() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_tunnelled(&tunnel_table(&server, &secret, "allow = ['* /**']")).await;
    let mut sender = app.client().http2().await;
    let request = http::Request::connect(server.authority());
    let request = request.body(http_body_util::Full::default()).unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.status(), 404);
    drop(sender);
    app.stop().await;
    let app = TestApp::start().await;
    let request = format!("CONNECT {} HTTP/1.1\r\n\r\n", server.authority());
    assert!(connect(&app, &request).await.1.starts_with("HTTP/1.1 404"));
    app.stop().await;
}
