//! T6: Tests of connections that sign for AWS: what the service verifies, what is refused, and that no key comes back.

mod vectors;
pub(crate) mod verifying_server;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex};

use base64::prelude::*;
use cogni_gateway::cli::explain;
use http::Method;
use serde_json::{Value, json};
use tempfile::TempDir;

use self::verifying_server::{AwsKey, start_aws_server};
use super::server::{Answer, SecureServer};
use super::{app_with, code_of, start_app};
use crate::support::app::TestApp;
use crate::support::client::TestResponse;
use crate::tools::tool_settings;

pub(crate) const KEY: AwsKey =
    AwsKey { id: "AKIDEXAMPLE", secret: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", token: None };

/// A key for some hours.
pub(crate) const SESSION_KEY: AwsKey =
    AwsKey { token: Some("FwoGZXIvYXdzEXAMPLE//token+0123=="), ..KEY };

/// The headers that an SDK adds when it signs with keys that are none.
const CLIENTS_OWN: [(&str, &str); 5] = [
    (
        "authorization",
        "AWS4-HMAC-SHA256 Credential=unused/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=00",
    ),
    ("x-amz-date", "20260101T000000Z"),
    ("x-amz-content-sha256", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    ("x-amz-security-token", "agents-own"),
    ("x-amz-user-agent", "aws-sdk-js/3"),
];

/// A file with a key, whose value a test can replace.
pub(crate) struct KeyFile {
    directory: TempDir,
}

impl KeyFile {
    pub(crate) fn new(key: &AwsKey) -> Self {
        let own = Self { directory: tempfile::tempdir().unwrap() };
        own.write(&key.to_json().to_string());
        own
    }

    fn write(&self, text: &str) {
        fs::write(self.path(), text).unwrap();
    }

    fn path(&self) -> String {
        self.directory.path().join("key.json").display().to_string()
    }

    /// Returns the tables of a connection that signs nothing, of one that signs for S3, and of one that signs for another
    /// service. They are called `api`, `s3` and `other`, and allow everything.
    pub(crate) fn tables_of_each_kind(&self, server: &SecureServer) -> String {
        server.table("api", "allow = ['* /**']\n")
            + &server.table("s3", &self.lines("s3", ""))
            + &server.table("other", &self.lines("execute-api", ""))
    }

    /// Returns the lines of a connection that signs for a service with this key, and allows everything.
    pub(crate) fn lines(&self, service: &str, more: &str) -> String {
        let aws = format!("{{ region = 'eu-central-1', service = '{service}'{more} }}");
        format!("credential = {{ file = '{}', aws = {aws} }}\nallow = ['* /**']\n", self.path())
    }
}

async fn start_signing(server: &SecureServer, key: &KeyFile, service: &str, more: &str) -> TestApp {
    start_app(&server.table("aws", &key.lines(service, more))).await
}

/// T6: S3 verifies each request, whatever the client has signed itself: paths and queries with escapes, and bodies that
/// stream.
#[tokio::test]
async fn requests_to_s3_are_signed_anew() {
    let (server, key) = (start_aws_server(KEY).await, KeyFile::new(&KEY));
    let more = "headers = ['x-amz-acl', 'x-amz-meta-note', 'content-md5']\n";
    let app = start_app(&server.table("aws", &(key.lines("s3", "") + more))).await;
    let ask = async |method: Method, path: &str, body: &str, headers: &[(&str, &str)]| {
        let headers = [&CLIENTS_OWN[..], headers].concat();
        let path = format!("/connect/aws{path}");
        app.client().ask(method, &path, body, &headers).await.text().to_owned()
    };
    let paths = [
        "/",
        "/bucket",
        "/bucket?list-type=2&prefix=a%2Fb%20c&delimiter=%2F&acl",
        "/bucket/a%20b/%C3%A4%40%281%29.txt",
        "/bucket/?uploads&b=2&b=1&a=",
    ];
    for path in paths {
        assert_eq!(ask(Method::GET, path, "", &[]).await, "ok", "{path}");
    }
    let long = "x".repeat(3 << 20);
    let listed = [
        ("x-amz-acl", "private"),
        ("x-amz-meta-note", "note"),
        ("content-md5", "rL0Y20zC+Fzt72VPzMSk2A=="),
        ("x-amz-checksum-crc32", "AAAAAA=="),
        ("x-amz-checksum-mode", "ENABLED"),
        ("x-amz-sdk-checksum-algorithm", "CRC32"),
    ];
    assert_eq!(ask(Method::PUT, "/bucket/long", &long, &listed).await, "ok");
    let seen = server.seen().pop().unwrap();
    assert_eq!(seen.body.len(), long.len());
    assert_eq!(seen.headers["x-amz-content-sha256"], "UNSIGNED-PAYLOAD");
    let mut names: Vec<_> = seen.headers.keys().map(http::HeaderName::as_str).collect();
    names.retain(|name| name.starts_with("x-amz-"));
    names.sort_unstable();
    assert_eq!(names, ["x-amz-acl", "x-amz-content-sha256", "x-amz-date", "x-amz-meta-note"]);
    assert!(server.seen().iter().all(|seen| !format!("{:?}", seen.headers).contains("agents-own")));
    app.stop().await;
}

/// T6: a header of AWS that no list lets pass may not get lost in silence: the request would mean something else.
#[tokio::test]
async fn a_request_that_would_lose_a_header_is_refused() {
    let (server, key) = (start_aws_server(KEY).await, KeyFile::new(&KEY));
    let plain = SecureServer::start().await;
    let table = server.table("aws", &(key.lines("s3", "") + "headers = ['x-amz-acl']\n"))
        + &plain.table("plain", "allow = ['* /**']\n");
    let app = start_app(&table).await;
    let ask = async |name: &str, headers: &[(&str, &str)]| {
        let headers = [&CLIENTS_OWN[..], headers].concat();
        app.client().ask(Method::PUT, &format!("/connect/{name}/b/a"), "body", &headers).await
    };
    let lost: [&[(&str, &str)]; 11] = [
        &[("x-amz-copy-source", "/other/secret")],
        &[("x-amz-rename-source", "/other/secret")],
        &[("x-amz-write-offset-bytes", "1000")],
        &[("x-amz-server-side-encryption", "aws:kms")],
        &[("x-amz-object-lock-mode", "COMPLIANCE")],
        &[("x-amz-tagging", "a=b")],
        &[("x-amz-checksum-algorithm", "CRC32")],
        &[("x-amz-expected-bucket-owner", "1")],
        &[("x-amz-mfa", "1")],
        &[("x-amz-acl", "private"), ("x-amz-invented", "1")],
        &[("x-amz-acl", "private"), ("connection", "X-Amz-Acl")],
    ];
    for headers in lost {
        assert_eq!(code_of(&ask("aws", headers).await), "400 unsignable_request", "{headers:?}");
    }
    let message = |answer: &TestResponse| answer.json()["error"]["message"].clone();
    insta::assert_snapshot!(message(&ask("aws", lost[0]).await), @r#""the request cannot be signed for AWS: its header `x-amz-copy-source` would not be sent, and the request means something else without it; leave it out, because no list can let it pass""#);
    insta::assert_snapshot!(message(&ask("aws", lost[5]).await), @r#""the request cannot be signed for AWS: its header `x-amz-tagging` would not be sent, and the request means something else without it; leave it out, or let the operator list it in the connection's `headers`""#);
    assert!(server.seen().is_empty() && app.run.ledger.connection_spending().is_empty());
    assert_eq!(ask("aws", &[("x-amz-acl", "private")]).await.status, 200);
    // Another connection passes none of them, and they mean nothing to its server.
    assert_eq!(ask("plain", lost[0]).await.status, 200);
    app.stop().await;
}

/// T6: a program prints a key with a token, which is sent and signed. A service other than S3 signs the body's digest, and
/// its bytes are counted once.
#[tokio::test]
async fn a_session_signs_the_digest_of_a_body() {
    let (server, key) = (start_aws_server(SESSION_KEY).await, KeyFile::new(&SESSION_KEY));
    let aws = "aws = { region = 'eu-central-1', service = 'lambda' }";
    let lines = format!("credential = {{ command = ['/bin/cat', '{}'], {aws} }}\n", key.path());
    let more = "allow = ['* /**']\nbudget = { bytes_out = '40' }\n";
    let app = start_app(&server.table("aws", &(lines + more))).await;
    let path = "/connect/aws/functions/arn%3Aaws%3Alambda/invocations?Qualifier=1";
    let ask = async |body: &str| app.client().ask(Method::POST, path, body, &CLIENTS_OWN).await;
    assert_eq!(ask("{\"a\":1}").await.text(), "ok");
    assert_eq!(ask("").await.text(), "ok");
    let [first, second] = &server.seen()[..] else { panic!("two requests") };
    assert_eq!((&*first.body, &*second.body), (&b"{\"a\":1}"[..], &b""[..]));
    assert_eq!(code_of(&ask(&"x".repeat(34)).await), "402 connection_byte_budget_exhausted");
    assert_eq!(ask(&"x".repeat(33)).await.text(), "ok");
    let records = app.stop().await;
    let sent: Vec<_> = records.iter().filter_map(|record| record["bytes_out"].as_u64()).collect();
    assert_eq!(sent, [7, 0, 33]);
}

/// T6: where operations are in `x-amz-target`, a client names one that the operator lists, and no second one beside it.
#[tokio::test]
async fn a_client_names_the_operations_that_are_listed() {
    let (server, key) = (start_aws_server(KEY).await, KeyFile::new(&KEY));
    let targets = ", targets = ['DynamoDB_20120810.GetItem', 'DynamoDB_20120810.Query']";
    let table = server.table("aws", &key.lines("dynamodb", targets))
        + &server.table("other", &key.lines("sqs", ""));
    let app = start_app(&table).await;
    let json = ("content-type", "application/x-amz-json-1.0");
    let get = ("x-amz-target", "DynamoDB_20120810.GetItem");
    let ask = async |path: &str, headers: &[(&str, &str)]| {
        let path = format!("/connect/{path}");
        code_of(&app.client().ask(Method::POST, &path, "{}", headers).await)
    };
    assert_eq!(ask("aws/", &[json, get]).await, "200 -");
    assert_eq!(ask("aws/", &[json, ("x-amz-target", "DynamoDB_20120810.Query")]).await, "200 -");
    assert_eq!(server.seen()[0].headers["x-amz-target"], "DynamoDB_20120810.GetItem");
    let form = ("content-type", "application/x-www-form-urlencoded");
    let delete = ("x-amz-target", "DynamoDB_20120810.DeleteTable");
    let two_types =
        ("content-type", "application/x-amz-json-1.0, application/x-www-form-urlencoded");
    let parameter =
        ("content-type", "application/x-amz-json-1.0; a, application/x-www-form-urlencoded");
    let denied: [(&str, &[(&str, &str)]); 14] = [
        ("aws/", &[json, delete]),
        ("aws/", &[json, ("x-amz-target", "dynamodb_20120810.getitem")]),
        ("aws/", &[json, get, delete]),
        ("aws/", &[json]),
        ("aws/", &[form, get]),
        ("aws/", &[json, form, get]),
        ("aws/", &[two_types, get]),
        ("aws/", &[parameter, get]),
        // What `connection` names is not sent, so it names no operation.
        ("aws/", &[json, get, ("connection", "x-amz-target")]),
        ("aws/", &[json, get, ("connection", "close, Content-Type")]),
        ("aws/", &[json, get, ("connection", "x-amz-target, content-type")]),
        ("other/", &[get, ("connection", "x-amz-target")]),
        ("aws/?Action=DeleteTable", &[json, get]),
        ("other/", &[json, ("x-amz-target", "AmazonSQS.SendMessage")]),
    ];
    for (path, headers) in denied {
        assert_eq!(ask(path, headers).await, "403 policy_denied", "{path} {headers:?}");
    }
    assert_eq!(ask("other/", &[form]).await, "200 -");
    let charset = ("content-type", "application/x-amz-json-1.1; charset=UTF-8");
    assert_eq!(ask("aws/", &[charset, get]).await, "200 -");
    assert_eq!(server.seen().len(), 4);
    let records = app.stop().await;
    let rules: Vec<_> =
        records.iter().filter(|record| record["event"] == "connect.refused").collect();
    assert!(rules.len() == 14 && rules.iter().all(|record| record["rule"] == "targets"));
}

/// T6: what cannot be signed anew is refused before anything is reserved: presigned addresses, bodies whose pieces the
/// client has signed, paths that S3 reads in another way, and bodies that are too long or have no announced length.
#[tokio::test]
async fn what_cannot_be_signed_is_refused() {
    let (server, key) = (start_aws_server(KEY).await, KeyFile::new(&KEY));
    let table = server.table("s3", &key.lines("s3", ""))
        + &server.table("other", &key.lines("execute-api", ""));
    let app = start_app(&table).await;
    let client = app.client();
    let cases: [(&str, &str, &str, &str); 13] = [
        ("/s3/b/a?X-Amz-Signature=00&X-Amz-Credential=a", "", "", "403 client_credential"),
        ("/s3/b/a?AWSAccessKeyId=a&Signature=b", "", "", "403 client_credential"),
        ("/s3/b/a?X-Amz-Date=1", "", "", "400 unsignable_request"),
        ("/s3/b/a?a=b&%78-amz-copy-source=c", "", "", "400 unsignable_request"),
        ("/other/a?x-AMZ-anything", "", "", "400 unsignable_request"),
        ("/s3/b/a", "content-encoding", "gzip, AWS-chunked", "400 unsignable_request"),
        (
            "/s3/b/a",
            "x-amz-content-sha256",
            "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
            "400 unsignable_request",
        ),
        (
            "/s3/b/a",
            "x-amz-content-sha256",
            "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
            "400 unsignable_request",
        ),
        ("/s3/b/a", "x-amz-trailer", "x-amz-checksum-crc32", "400 unsignable_request"),
        ("/s3/b/a", "x-amz-decoded-content-length", "1", "400 unsignable_request"),
        ("/other/a", "content-encoding", "aws-chunked", "400 unsignable_request"),
        ("/s3/b/a+b", "", "", "400 ambiguous_path"),
        ("/other/a%2Bb", "", "", "200 -"),
    ];
    for (path, name, value, expected) in cases {
        let headers: &[_] = if name.is_empty() { &[] } else { &[(name, value)] };
        let path = format!("/connect{path}");
        let answer = client.ask(Method::PUT, &path, "body", headers).await;
        assert_eq!(code_of(&answer), expected, "{path} {headers:?}");
    }
    let refused = client
        .ask(Method::PUT, "/connect/s3/b/a", "x", &[("content-encoding", "aws-chunked")])
        .await;
    insta::assert_snapshot!(refused.json()["error"]["message"].as_str().unwrap(), @"the request cannot be signed for AWS: the client has signed the pieces of its body or sends a trailer (`aws-chunked`); set `AWS_REQUEST_CHECKSUM_CALCULATION=when_required`, and let the client sign no payloads");
    for (length, expected) in [(1 << 20, "200 -"), ((1 << 20) + 1, "413 request_too_large")] {
        let answer = client.ask(Method::POST, "/connect/other/a", &"x".repeat(length), &[]).await;
        assert_eq!(code_of(&answer), expected);
    }
    let chunked = |name: &str| {
        format!(
            "PUT /connect/{name}/b/a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n1\r\nx\r\n0\r\n\r\n"
        )
    };
    let answer = client.raw(chunked("other").as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 411") && answer.contains("length_required"), "{answer}");
    assert!(client.raw(chunked("s3").as_bytes()).await.starts_with("HTTP/1.1 200"));
    let spent = app.run.ledger.connection_spending();
    assert_eq!((spent["other"].requests, spent["s3"].requests), (2, 1));
    app.stop().await;
}

/// T6, G15: a body that is kept until it is signed counts among the bytes in flight; one that streams does not.
#[tokio::test]
async fn a_body_that_is_signed_counts_among_the_bytes_in_flight() {
    let (server, key) = (start_aws_server(KEY).await, KeyFile::new(&KEY));
    let table = server.table("s3", &key.lines("s3", ""))
        + &server.table("other", &key.lines("execute-api", ""));
    let app = app_with(&table, |config| {
        config.server.max_run_body_bytes = 512 << 10;
        config.policy.max_body_bytes = 512 << 10;
    })
    .await;
    let body = "x".repeat(600 << 10);
    for (name, expected) in [("s3", "200 -"), ("other", "429 overloaded")] {
        let path = format!("/connect/{name}/b/a");
        let answer = app.client().ask(Method::PUT, &path, &body, &[]).await;
        assert_eq!(code_of(&answer), expected);
    }
    assert_eq!(server.seen().len(), 1);
    app.stop().await;
}

/// T6: neither the secret key nor the token comes back, over any connection of the run. The key's id is no secret.
#[tokio::test]
async fn no_part_of_the_key_comes_back() {
    let text = Arc::<Mutex<String>>::default();
    let told = Arc::clone(&text);
    let server = SecureServer::answering(move |seen| {
        let text = told.lock().unwrap().clone();
        match &*seen.target {
            "/header" => Answer::text("ok").with("x-told", &text),
            _ => Answer::text(format!("before {text} behind")),
        }
    })
    .await;
    let key = KeyFile::new(&SESSION_KEY);
    let table =
        server.table("aws", &key.lines("s3", "")) + &server.table("bare", "allow = ['GET /**']\n");
    let app = start_app(&table).await;
    let token = SESSION_KEY.token.unwrap();
    let secrets = [
        KEY.secret.to_owned(),
        token.to_owned(),
        BASE64_STANDARD.encode(KEY.secret),
        token.replace('/', "%2F"),
    ];
    // The other connection is asked first: the run has not used the key by then.
    for name in ["bare", "aws"] {
        for (told, expected) in secrets
            .iter()
            .map(|secret| (&**secret, "502 credential_echoed"))
            .chain([(KEY.id, "200 -")])
        {
            told.clone_into(&mut text.lock().unwrap());
            for path in ["body", "header"] {
                let answer = app.client().get(&format!("/connect/{name}/{path}")).await;
                assert_eq!(code_of(&answer), expected, "{name} {path} {told}");
            }
        }
    }
    let records = format!("{:?}", app.stop().await);
    assert!(secrets.iter().all(|secret| !records.contains(secret)));
}

/// T6: a value that is no key sends nothing and costs nothing. The log names the place and the mistake, and neither it nor
/// the answer has a part of the value.
#[tokio::test]
async fn a_value_that_is_no_key_is_not_told() {
    let (server, key) = (start_aws_server(KEY).await, KeyFile::new(&KEY));
    let app = start_signing(&server, &key, "s3", "").await;
    let log = tempfile::NamedTempFile::new().unwrap();
    let lines = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(Mutex::new(log.reopen().unwrap()))
        .finish();
    let guard = tracing::subscriber::set_default(lines);
    let with = |name: &str, value: Value| {
        let mut changed = KEY.to_json();
        changed[name] = value;
        changed.to_string()
    };
    let values = [
        KEY.secret.to_owned(),
        with("SecretAccessKey", json!({ "is": KEY.secret })),
        with("Version", json!(KEY.secret)),
        with("AccessKeyId", Value::Null),
        with("SecretAccessKey", json!(&KEY.secret[..7])),
        with("Expiration", json!("2020-01-01T00:00:00Z")),
        with("Expiration", json!(KEY.secret)),
    ];
    for value in &values {
        key.write(value);
        let answer = app.client().get("/connect/aws/b/a").await;
        assert_eq!(code_of(&answer), "502 credential_unavailable", "{value}");
        assert!(!answer.text().contains(&KEY.secret[..7]));
    }
    drop(guard);
    key.write(&KEY.to_json().to_string());
    assert_eq!(app.client().get("/connect/aws/b/a").await.text(), "ok");
    assert_eq!((server.seen().len(), app.run.ledger.connection_spending()["aws"].requests), (1, 1));
    let records = format!("{:?}", app.stop().await);
    let log = fs::read_to_string(log.path()).unwrap();
    assert!(!(records + &log).contains(&KEY.secret[..7]), "{log}");
    let problem = |line: &str| -> Option<String> {
        let problem = line.split_once("problem=")?.1.replace(&key.path(), "KEY");
        Some(problem.split(", line").next()?.trim_matches('"').to_owned())
    };
    let problems: Vec<_> = log.lines().filter_map(problem).collect();
    insta::assert_snapshot!(problems.join("\n"), @r"
    `KEY`: it is not what a `credential_process` prints: it is not JSON
    `KEY`: it is not what a `credential_process` prints: a member has a wrong type
    `KEY`: it is not what a `credential_process` prints: a member has a wrong type
    `KEY`: its JSON has no `AccessKeyId`
    `KEY`: its `SecretAccessKey` is shorter than 8 bytes
    `KEY`: it has expired at 2020-01-01T00:00:00Z
    `KEY`: its `Expiration` is not a time of ISO 8601
    ");
}

/// T7: `explain` gives the answer of a real request, also about its signature.
#[test]
fn explain_knows_what_is_signed() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gateway.toml");
    let aws = "{ region = 'eu-central-1', service = 'dynamodb', targets = ['DynamoDB_20120810.GetItem'] }";
    let table = format!(
        "[tools.connections.aws]\nurl = 'https://dynamodb.eu-central-1.amazonaws.com'\nallow = ['POST /']\ncredential = {{ env = 'A', aws = {aws} }}\n"
    );
    fs::write(&file, table).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let explain = |headers: &str| {
        let arguments = ["explain", "-", "--config", file.to_str().unwrap()];
        let matches = explain::command().try_get_matches_from(arguments).unwrap();
        let request = format!(
            "POST /connect/aws/ HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-amz-json-1.0\r\n{headers}\r\n"
        );
        let mut output = vec![];
        explain::run(&matches, request.as_bytes(), &mut output).unwrap();
        String::from_utf8(output).unwrap()
    };
    insta::assert_snapshot!(explain("x-amz-target: DynamoDB_20120810.GetItem\r\n"), @r"
    connection aws
    allowed    by every layer; rule: allow[0]
    reserves   1 request, $0
    ");
    insta::assert_snapshot!(explain("x-amz-target: DynamoDB_20120810.PutItem\r\n"), @r"
    connection aws
    refused    policy_denied: layer connection, rule targets
               the connection's rules do not allow this request
    ");
    insta::assert_snapshot!(explain("x-amz-target: DynamoDB_20120810.GetItem\r\nconnection: x-amz-target\r\n"), @r"
    connection aws
    refused    policy_denied: layer connection, rule targets
               the connection's rules do not allow this request
    ");
    insta::assert_snapshot!(explain("x-amz-target: DynamoDB_20120810.GetItem\r\ncontent-length: 2000000\r\n"), @r"
    connection aws
    refused    request_too_large
               the body is longer than 1 MiB, the most that is signed for a service other than S3
    ");
}

/// T7: a table that cannot sign, or lets the client set what is signed, is refused with its key and a remedy.
#[test]
fn a_wrong_signature_names_its_key_and_a_remedy() {
    let with = |credential: &str, more: &str| {
        format!(
            "[connections.aws]\nurl = 'https://s3.example.com'\ncredential = {{ env = 'A', {credential} }}\n{more}"
        )
    };
    let aws = |table: &str| with(&format!("aws = {{ {table} }}"), "");
    let listing = |header: &str| {
        with("aws = { region = 'a', service = 's3' }", &format!("headers = ['{header}']"))
    };
    let tables = [
        aws(""),
        aws("region = 'eu-central-1'"),
        aws("region = 'eu central', service = 's3'"),
        aws("region = 'a', service = 'S3'"),
        aws("region = 'a', service = 's3', profile = 'x'"),
        aws("region = 'a', service = 's3', targets = ['A.B', 'DynamoDB_*']"),
        with("header = 'x-api-key', aws = { region = 'a', service = 's3' }", ""),
        listing("x-amz-date"),
        listing("x-amz-security-token"),
        listing("x-amz-content-sha256"),
        listing("x-amz-copy-source-if-match"),
        listing("x-amz-target"),
        with("header = 'x-api-key'", "headers = ['x-amz-acl']"),
    ];
    let errors: Vec<_> = tables
        .iter()
        .map(|table| match tool_settings(table).check() {
            Ok(()) => panic!("{table}"),
            Err(error) => error.to_string(),
        })
        .collect();
    insta::assert_snapshot!(errors.join("\n"));
    tool_settings(&listing("x-amz-acl")).check().unwrap();
}
