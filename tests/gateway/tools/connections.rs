//! T6: Tests of a run's connections: what is sent, to which address, with whose credential, and what comes back.

pub(crate) mod aws;
mod budgets;
pub(crate) mod clients;
mod config;
mod explained_tunnels;
mod guard;
mod heads;
mod lookups;
mod paths;
mod programs;
mod raw_server;
mod secrets;
pub(crate) mod server;
mod taint;
mod tunnel;
mod tunnel_clients;
mod tunnel_config;
mod tunnel_ends;
mod uploads;

use std::fs;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cogni_gateway::base::host_lookups::HostLookup;
use cogni_gateway::base::host_reach::resolve_addresses;
use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::runner::tool_opener::RunToolOpener;
use cogni_gateway::telemetry::access_log::AccessLogDestination;
use http::Method;
use http_body_util::Full;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{agent_listing, app_with, start_app};
use crate::support::app::TestApp;
use crate::support::client::TestResponse;
use server::{Answer, SecureServer};

/// The credential of the tests. No answer, log or record may contain it.
const SECRET: &str = "ghs_Wx3/9+vQ~secret.77";

/// A file with a credential, and the text for a connection's table.
struct SecretFile {
    directory: TempDir,
    line: String,
}

impl SecretFile {
    fn new(secret: &str, form: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        fs::write(&path, format!("{secret}\n")).unwrap();
        let line = format!("credential = {{ file = '{}'{form} }}\n", path.display());
        Self { directory, line }
    }

    fn replace(&self, secret: &str) {
        fs::write(self.directory.path().join("token"), secret).unwrap();
    }
}

/// Starts a run with a connection `api` to a server, with the credential and rules that allow everything.
async fn start_open(server: &SecureServer, secret: &SecretFile, more: &str) -> TestApp {
    let rules = "allow = ['* /**']\n";
    start_app(&server.table("api", &format!("{}{rules}{more}", secret.line))).await
}

fn code_of(response: &TestResponse) -> String {
    let body: Value = serde_json::from_slice(&response.body).unwrap_or_default();
    let code = body["error"]["code"].as_str().unwrap_or("-");
    format!("{} {code}", response.status.as_u16())
}

/// T6, T5: a request goes to the server with the host's credential, and is found in the audit log without it.
#[tokio::test]
async fn a_request_is_sent_with_the_credential_of_the_host() {
    let server = SecureServer::answering(|_| {
        let mut answer = Answer::text("one ").with("x-answer", "1").with("set-cookie", "a=b");
        answer.frames.push(b"two".to_vec());
        answer
    })
    .await;
    let secret = SecretFile::new(SECRET, "");
    let table =
        format!("{}allow = ['POST /repos/acme/*/issues']\nprice_usd = '0.001'", secret.line);
    let app = start_app(&server.table("api", &table)).await;
    let path = "/connect/api/repos/acme/site/issues?page=2&token_type=x";
    let response = app.client().post(path, &json!({"title": "hello"})).await;
    assert_eq!((response.status.as_u16(), response.text()), (200, "one two"));
    assert_eq!(response.header("x-answer"), Some("1"));
    assert_eq!(response.header("set-cookie"), None);
    let seen = server.seen().remove(0);
    assert_eq!(seen.target, "/repos/acme/site/issues?page=2&token_type=x");
    assert_eq!((seen.method, &*seen.body), (Method::POST, &br#"{"title":"hello"}"#[..]));
    let header = |name: &str| seen.headers.get(name).map(|value| value.to_str().unwrap());
    assert_eq!(header("authorization"), Some(&*format!("Bearer {SECRET}")));
    assert_eq!(header("host"), Some(&*format!("localhost:{}", server.address.port())));
    assert_eq!(header("accept-encoding"), Some("identity"));

    let refused = app.client().get("/connect/api/repos/evil/site/issues").await;
    assert_eq!(code_of(&refused), "403 policy_denied");
    insta::assert_json_snapshot!(refused.json(), @r#"
    {
      "error": {
        "code": "policy_denied",
        "layer": "connection",
        "message": "the connection's rules do not allow this request",
        "rule": "allow",
        "type": "connection_error"
      }
    }
    "#);
    let mut records = app.stop().await;
    records.retain(|record| record["event"].as_str().unwrap().starts_with("connect."));
    for record in &mut records {
        let own = record.as_object_mut().unwrap();
        for name in ["hash", "prev", "seq", "time", "run", "v", "duration_ms", "pid", "request"] {
            own.remove(name);
        }
        let digest = own.remove("path").map(|path| path.as_str().unwrap().len());
        assert!(matches!(digest, None | Some(64)), "{own:?}");
    }
    insta::assert_json_snapshot!(records);
}

/// T6: the list names the connections that the run may use, and what is left of their limits.
#[tokio::test]
async fn the_list_names_the_connections_of_the_run() {
    let server = SecureServer::start().await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "budget = { requests = 3, bytes_in = '1k' }").await;
    app.client().get("/connect/api/a").await;
    let listed = app.client().get("/connect").await;
    insta::assert_json_snapshot!(listed.json(), @r#"
    {
      "connections": [
        {
          "left": {
            "bytes_in": 1022,
            "bytes_out": null,
            "cost_usd": null,
            "requests": 2
          },
          "limits": {
            "bytes_in": 1024,
            "requests": 3
          },
          "name": "api",
          "path": "/connect/api/",
          "price_usd": "0"
        }
      ]
    }
    "#);
    app.stop().await;
}

/// T6, T1: a connection that does not exist and one that the agent's file does not list get one answer.
#[tokio::test]
async fn an_agent_uses_the_connections_that_its_file_lists() {
    let (one, two) = (SecureServer::start().await, SecureServer::start().await);
    let open = "allow = ['GET /**']";
    let table = one.table("one", open) + &two.table("two", open);
    let app = app_with(&table, |config| {
        config.tools.agent = Some(agent_listing(&["connect__one"]).into());
    })
    .await;
    let client = app.client();
    assert_eq!(client.get("/connect/one/a").await.status, 200);
    let unlisted = client.get("/connect/two/a").await;
    let unknown = client.get("/connect/three/a").await;
    assert_eq!((unlisted.status, &unlisted.body), (unknown.status, &unknown.body));
    assert_eq!(code_of(&unknown), "403 policy_denied");
    let names = client.get("/connect").await.json()["connections"].clone();
    assert_eq!(names.as_array().unwrap().len(), 1, "{names}");
    assert!(two.seen().is_empty());
    let records = app.stop().await;
    let layers: Vec<_> = records
        .iter()
        .filter(|record| record["event"] == "connect.refused")
        .map(|record| (record["connection"].clone(), record["layer"].clone()))
        .collect();
    assert_eq!(layers, [(json!("two"), json!("agent")), (Value::Null, json!("agent"))]);
}

/// T6: the agent's own credentials do not reach an allowed server, wherever they are.
#[tokio::test]
async fn the_clients_own_credentials_are_dropped() {
    let server = SecureServer::start().await;
    let secret = SecretFile::new(SECRET, ", header = 'private-token'");
    let app = start_open(&server, &secret, "headers = ['x-custom']").await;
    let own = [
        "authorization",
        "cookie",
        "proxy-authorization",
        "x-api-key",
        "api-key",
        "private-token",
        "x-auth-token",
        "x-amz-security-token",
        "x-litellm-api-key",
        "x-litellm-tags",
        "x-goog-api-key",
        "x-forwarded-for",
        "x-forwarded-host",
        "forwarded",
        "x-http-method-override",
        "x-original-url",
        "x-rewrite-url",
        "sec-websocket-key",
        "range",
        "if-range",
        "te",
        "referer",
    ];
    let mut headers: Vec<_> = own.iter().map(|name| (*name, "agents-own")).collect();
    headers.extend([("x-custom", "passes"), ("user-agent", "curl"), ("accept-encoding", "gzip")]);
    headers.extend([("connection", "close, x-hop"), ("x-hop", "agents-own")]);
    let response = app.client().ask(Method::GET, "/connect/api/a", "", &headers).await;
    assert_eq!(response.status, 200);
    let seen = server.seen().remove(0);
    let mut names: Vec<_> = seen.headers.keys().map(http::HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["accept-encoding", "host", "private-token", "user-agent", "x-custom"]);
    assert_eq!(seen.headers["private-token"], SECRET);
    assert!(!format!("{:?}", seen.headers).contains("agents-own"));
    // A parameter cannot be taken out without another meaning, so the request is refused.
    for query in ["access_token=x", "a=1&API_KEY=x", "%61ccess_token=x", "a;private_token=x"] {
        let refused = app.client().get(&format!("/connect/api/a?{query}")).await;
        assert_eq!(code_of(&refused), "403 client_credential", "{query}");
    }
    assert_eq!(server.seen().len(), 1);
    app.stop().await;
}

/// T6: no other protocol, and no page of another machine, uses a connection.
#[tokio::test]
async fn upgrades_and_foreign_pages_are_refused() {
    let server = SecureServer::start().await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "").await;
    let client = app.client();
    let ask = async |headers: &[(&str, &str)]| {
        code_of(&client.ask(Method::GET, "/connect/api/a", "", headers).await)
    };
    let websocket = [("connection", "upgrade"), ("upgrade", "websocket")];
    assert_eq!(ask(&websocket).await, "403 upgrade_refused");
    assert_eq!(ask(&[("origin", "http://evil.example")]).await, "403 foreign_origin");
    assert_eq!(ask(&[("origin", "http://localhost:3000")]).await, "200 -");
    for method in ["TRACE", "PROPFIND", "get"] {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let refused = client.ask(method, "/connect/api/a", "", &[]).await;
        assert_eq!(code_of(&refused), "403 policy_denied");
    }
    let two_hosts =
        "GET /connect/api/a HTTP/1.1\r\nhost: a\r\nhost: b\r\nconnection: close\r\n\r\n";
    assert!(client.raw(two_hosts.as_bytes()).await.starts_with("HTTP/1.1 400"));
    let absolute =
        "GET http://evil.example/connect/api/a HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    assert!(client.raw(absolute.as_bytes()).await.starts_with("HTTP/1.1 404"));
    let seen = server.seen();
    assert_eq!(seen.len(), 1);
    assert!(!seen[0].headers.contains_key("origin"));
    app.stop().await;
}

/// T6: each server sees its own credential, in its own form, and no other.
#[tokio::test]
async fn no_credential_goes_to_another_host() {
    let forms = ["", ", basic = 'x-access-token'", ", header = 'private-token'"];
    let (mut servers, mut secrets, mut table) = (vec![], vec![], String::new());
    for (number, form) in forms.iter().enumerate() {
        let server = SecureServer::start().await;
        let secret = SecretFile::new(&format!("secret-of-{number}-{number}"), form);
        let rules = format!("{}allow = ['GET /**']", secret.line);
        table += &server.table(&format!("c{number}"), &rules);
        servers.push(server);
        secrets.push(secret);
    }
    let bare = SecureServer::start().await;
    table += &bare.table("bare", "allow = ['GET /**']");
    let app = start_app(&table).await;
    for number in [0, 1, 2, 2, 1, 0] {
        let path = format!("/connect/c{number}/a");
        // The client claims the host of another connection.
        let other = servers[(number + 1) % 3].address.to_string();
        let response = app.client().ask(Method::GET, &path, "", &[("x-host", &other)]).await;
        assert_eq!(response.status, 200);
    }
    assert_eq!(app.client().get("/connect/bare/a").await.status, 200);
    let basic = "Basic eC1hY2Nlc3MtdG9rZW46c2VjcmV0LW9mLTEtMQ==";
    let expected = [
        ("authorization", "Bearer secret-of-0-0"),
        ("authorization", basic),
        ("private-token", "secret-of-2-2"),
    ];
    for (server, (name, value)) in servers.iter().zip(expected) {
        let seen = server.seen();
        assert_eq!(seen.len(), 2);
        for request in seen {
            let found: Vec<_> = request
                .headers
                .iter()
                .filter(|(_, value)| {
                    let text = value.to_str().unwrap();
                    text.contains("secret-of") || text.starts_with("Basic")
                })
                .map(|(name, value)| (name.as_str(), value.to_str().unwrap()))
                .collect();
            assert_eq!(found, [(name, value)]);
        }
    }
    assert!(!format!("{:?}", bare.seen()[0].headers).contains("secret"));
    app.stop().await;
}

/// T6: a redirect is an answer like any other: the gateway does not follow it, and its target sees nothing.
#[tokio::test]
async fn a_redirect_is_passed_on_and_never_followed() {
    let target = SecureServer::start().await;
    let url = format!("{}/stolen", target.url());
    let location = url.clone();
    let server = SecureServer::answering(move |seen| {
        let status = seen.target[1..].parse().unwrap();
        Answer { status, ..Answer::text("").with("location", &location) }
    })
    .await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "").await;
    for status in [301_u16, 302, 303, 307, 308] {
        let response = app.client().get(&format!("/connect/api/{status}")).await;
        assert_eq!(response.status.as_u16(), status);
        assert_eq!(response.header("location"), Some(&*url));
    }
    assert!(target.seen().is_empty());
    app.stop().await;
}

/// T6: where the operator says so, links to the run's connections lead through the connections.
#[tokio::test]
async fn links_to_connections_are_rewritten() {
    let files = SecureServer::start().await;
    let file = format!("{}/a", files.url());
    let link = file.clone();
    let server = SecureServer::answering(move |seen| {
        let kind = if seen.target == "/binary" { "image/png" } else { "text/html; charset=utf-8" };
        let body = format!("<a href='{link}'>");
        let length = body.len().to_string();
        Answer::text(body)
            .with("content-type", kind)
            .with("content-length", &length)
            .with("location", &link)
            .with("link", &format!("<{link}>; rel=\"next\""))
    })
    .await;
    let open = "allow = ['GET /**']\n";
    let table = server.table("index", &format!("{open}rewrite_links = true"))
        + &server.table("plain", open)
        + &files.table("files", open);
    let app = start_app(&table).await;
    let ask = async |path: &str| {
        let request = http::Request::get(path).header("host", "localhost:7777");
        app.client().send(request.body(Full::default()).unwrap()).await
    };
    let own = "http://localhost:7777/connect/files/a";
    let rewritten = ask("/connect/index/html").await;
    assert_eq!(rewritten.text(), format!("<a href='{own}'>"));
    assert_eq!(rewritten.header("location"), Some(own));
    assert_eq!(rewritten.header("link"), Some(&*format!("<{own}>; rel=\"next\"")));
    for path in ["/connect/index/binary", "/connect/plain/html"] {
        assert_eq!(ask(path).await.text(), format!("<a href='{file}'>"), "{path}");
    }
    // A client that names another host gets the usual address, and no other.
    let answer = app.client().get("/connect/index/html").await;
    assert_eq!(answer.text(), "<a href='http://localhost:8080/connect/files/a'>");
    app.stop().await;
}

/// Starts a run whose connections use this look-up.
async fn start_with_lookup(table: &str, lookup: HostLookup) -> TestApp {
    app_with(table, |config: &mut GatewayConfig| {
        let opener = RunToolOpener { lookup: Some(lookup), ..RunToolOpener::default() };
        config.tools.opener = Some(Arc::new(opener));
    })
    .await
}

/// T6: the address that was checked is the address that is dialled, also if the resolver changes its mind.
#[tokio::test]
async fn a_flipping_resolver_leads_nowhere_else() {
    let server = SecureServer::answering(|_| Answer::text("ok").with("connection", "close")).await;
    let secret = SecretFile::new(SECRET, "");
    let table = format!("{}allow = ['GET /**']", secret.line);
    let lookups = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&lookups);
    let metadata: IpAddr = "169.254.169.254".parse().unwrap();
    // Every second answer is the address of a metadata service.
    let lookup: HostLookup = Arc::new(move |host, port| {
        if count.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            resolve_addresses(host, port)
        } else {
            Ok(vec![metadata])
        }
    });
    let app = start_with_lookup(&server.table("api", &table), lookup).await;
    let mut codes = vec![];
    for _ in 0..6 {
        codes.push(code_of(&app.client().get("/connect/api/a").await));
    }
    // One look-up for each connection: there is no second one between the check and the connection.
    assert_eq!(codes, ["200 -", "502 address_refused"].repeat(3));
    assert_eq!((lookups.load(Ordering::Relaxed), server.seen().len()), (6, 3));
    let records = app.stop().await;
    let outcomes: Vec<_> = records
        .iter()
        .filter(|record| record["event"] == "connect.settled")
        .map(|record| record["outcome"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(outcomes, ["completed", "address_refused"].repeat(3));
}

/// T6: a public name that leads to this machine, a private network or a metadata service is not dialled, in any
/// spelling of the address. Metadata services stay closed although private addresses are allowed.
#[tokio::test]
async fn names_that_lead_inside_are_not_dialled() {
    let private = [
        "127.0.0.1",
        "::1",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "fd12::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::1",
        "0.0.0.0",
    ];
    let never = [
        "169.254.169.254",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "100.100.100.200",
        "168.63.129.16",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
        "fe80::1",
        "::",
        "::127.0.0.1",
        "255.255.255.255",
        "224.0.0.1",
    ];
    let answer = Arc::new(Mutex::new(vec![]));
    let current = Arc::clone(&answer);
    let lookup: HostLookup = Arc::new(move |_, _| Ok(current.lock().unwrap().clone()));
    let table = |name: &str, is_private: bool| {
        format!(
            "[connections.{name}]\nurl = 'https://api.example.com:9'\nallow = ['GET /**']\nallow_private_addresses = {is_private}\n"
        )
    };
    let app = start_with_lookup(&(table("public", false) + &table("named", true)), lookup).await;
    for address in private.iter().chain(&never) {
        *answer.lock().unwrap() = vec![address.parse().unwrap()];
        let response = app.client().get("/connect/public/a").await;
        assert_eq!(code_of(&response), "502 address_refused", "{address}");
    }
    for address in never {
        *answer.lock().unwrap() = vec![address.parse().unwrap()];
        let response = app.client().get("/connect/named/a").await;
        assert_eq!(code_of(&response), "502 address_refused", "{address}");
    }
    app.stop().await;
}

/// T6: a certificate of another name or authority gets no request, and so no credential.
#[tokio::test]
async fn a_server_that_does_not_prove_its_name_sees_nothing() {
    let (server, other) = (SecureServer::start().await, SecureServer::start().await);
    let secret = SecretFile::new(SECRET, "");
    let rules = format!("{}allow = ['GET /**']", secret.line);
    let foreign = server
        .table("foreign", &rules)
        .replace(&server.ca.file.display().to_string(), &other.ca.file.display().to_string());
    let address = server.table("address", &rules).replace("localhost", "127.0.0.1");
    let app = start_app(&(foreign + &address)).await;
    for name in ["foreign", "address"] {
        let response = app.client().get(&format!("/connect/{name}/a")).await;
        assert_eq!(code_of(&response), "502 upstream_failed", "{name}");
    }
    assert!(server.seen().is_empty());
    app.stop().await;
}

/// T6: HTTP/2 clients use connections, too, and a request without a body stays without one.
#[tokio::test]
async fn a_client_of_http2_uses_a_connection() {
    let server = SecureServer::start().await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "").await;
    let mut sender = app.client().http2().await;
    let request = http::Request::get("http://localhost/connect/api/a?b=c");
    let response = sender.send_request(request.body(Full::default()).unwrap()).await.unwrap();
    assert_eq!(response.status(), 200);
    let body = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
    assert_eq!(body, "ok");
    let seen = server.seen().remove(0);
    assert_eq!((&*seen.target, seen.headers.get("content-length")), ("/a?b=c", None));
    assert_eq!(seen.headers.get("transfer-encoding"), None);
    drop(sender);
    app.stop().await;
}

/// T6: answers without a body end in order: HEAD, 204 and 304.
#[tokio::test]
async fn answers_without_a_body_end_in_order() {
    let server = SecureServer::answering(|seen| match &*seen.target {
        "/204" => Answer { status: 204, frames: vec![], ..Answer::text("") },
        "/304" => Answer { status: 304, frames: vec![], ..Answer::text("") },
        _ => Answer { frames: vec![], ..Answer::text("").with("content-length", "5") },
    })
    .await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "").await;
    for (method, path, status) in
        [(Method::HEAD, "/head", 200), (Method::GET, "/204", 204), (Method::GET, "/304", 304)]
    {
        let response = app.client().ask(method, &format!("/connect/api{path}"), "", &[]).await;
        assert_eq!((response.status.as_u16(), response.body.len()), (status, 0), "{path}");
    }
    let records = app.stop().await;
    let settled: Vec<_> =
        records.iter().filter(|record| record["event"] == "connect.settled").collect();
    assert_eq!(settled.len(), 3);
    assert!(settled.iter().all(|record| record["outcome"] == "completed"), "{settled:?}");
}

/// T6: bytes pass as they come, in both directions: the first bytes of an answer arrive before its end.
#[tokio::test]
async fn an_answer_streams_and_a_client_that_leaves_is_settled_once() {
    let server =
        SecureServer::answering(|_| Answer { is_open: true, ..Answer::text("first\n") }).await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "").await;
    let mut stream = app.client().open("/connect/api/a", &json!({})).await;
    assert_eq!(stream.frame().await.unwrap().unwrap(), "first\n");
    drop(stream);
    let settled = app.recorded("connect.settled", 1).await;
    assert_eq!(
        (&settled[0]["outcome"], &settled[0]["bytes_in"], &settled[0]["bytes_out"]),
        (&json!("client_gone"), &json!(6), &json!(2))
    );
    // The end of the run ends an open request.
    let mut stream = app.client().open("/connect/api/a", &json!({})).await;
    assert_eq!(stream.frame().await.unwrap().unwrap(), "first\n");
    app.run.control.abort_calls();
    assert!(!stream.rest().await.1, "the body ends without its terminator");
    let settled = app.recorded("connect.settled", 2).await;
    assert_eq!(settled[1]["outcome"], "shut_down");
    app.stop().await;
}

/// T6: a server that is silent for too long, or not there, ends typed.
#[tokio::test]
async fn a_silent_server_ends_the_request() {
    let server =
        SecureServer::answering(|_| Answer { is_open: true, ..Answer::text("first\n") }).await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "timeout = '100ms'").await;
    let (text, is_whole) = app.client().open("/connect/api/a", &json!({})).await.rest().await;
    assert_eq!((&*text, is_whole), ("first\n", false));
    let settled = app.recorded("connect.settled", 1).await;
    assert_eq!(settled[0]["outcome"], "timed_out");
    app.stop().await;
}

/// T6, T1: an operator who pauses or ends the run pauses or ends its connections.
#[tokio::test]
async fn a_paused_run_sends_nothing() {
    use cogni_gateway::gateway::run::control::RunControlState;
    let server = SecureServer::start().await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "").await;
    app.run.control.set_state(RunControlState::Paused);
    assert_eq!(code_of(&app.client().get("/connect/api/a").await), "429 run_paused");
    app.run.control.set_state(RunControlState::Draining);
    assert_eq!(code_of(&app.client().get("/connect/api/a").await), "403 run_ended");
    assert!(server.seen().is_empty());
    app.stop().await;
}

/// G2: the access log names the route without the parts that a client chooses.
#[tokio::test]
async fn the_access_log_names_the_routes_of_connections() {
    let server = SecureServer::start().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("access.log");
    let app = app_with(&server.table("api", "allow = ['POST /**']"), |config| {
        config.access_log = AccessLogDestination::File(file.clone());
    })
    .await;
    app.client().post("/connect/api/chosen", &json!("abc")).await;
    app.client().get("/connect/chosen/chosen").await;
    app.client().get("/connect").await;
    app.stop().await;
    let log = fs::read_to_string(&file).unwrap();
    assert!(!log.contains("chosen"), "{log}");
    let words = |key: &str| -> Vec<String> {
        let word = |line: &str| {
            line.split(&format!(" {key}=")).nth(1).unwrap().split(' ').next().unwrap().to_owned()
        };
        log.lines().filter(|line| line.contains("/connect")).map(word).collect()
    };
    assert_eq!(words("uri"), ["/connect/NAME/PATH", "/connect/NAME/PATH", "/connect"]);
    assert_eq!(words("outcome"), ["connect", "policy_denied", "connect"]);
    assert_eq!(words("request_bytes"), ["5", "0", "0"]);
    assert_eq!(words("bytes")[0], "2");
}
