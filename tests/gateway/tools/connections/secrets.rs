//! T6: Tests that a credential goes to its server and nowhere else: not back to the agent, not into a log or a record.

use std::fmt::Write;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use base64::prelude::*;
use cogni_gateway::telemetry::access_log::AccessLogDestination;
use http::Method;
use serde_json::json;

use super::server::{Answer, SecureServer};
use super::{SECRET, SecretFile, app_with, code_of, start_app, start_open};
use crate::support::client::post_request;

/// The spellings of a credential in which a server may repeat it.
fn spellings() -> Vec<String> {
    let url = |text: &str| {
        percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
    };
    let every = SECRET.bytes().fold(String::new(), |text, byte| format!("{text}%{byte:02x}"));
    let mut all = vec![SECRET.to_owned(), url(SECRET), every, SECRET.replace('/', "\\/")];
    for before in ["", "u", "us", "user:"] {
        let text = format!("{before}{SECRET}:");
        all.extend([BASE64_STANDARD.encode(&text), BASE64_URL_SAFE_NO_PAD.encode(&text)]);
    }
    all
}

/// T6: a body that repeats the credential is cut before it, whatever its spelling, and wherever frames begin and end.
#[tokio::test]
async fn an_echo_is_cut_at_every_split_of_its_frames() {
    // The path says which spelling is repeated, and at which byte its body is split.
    let server = SecureServer::answering(|seen| {
        let mut numbers = seen.target[1..].split('/').map(|text| text.parse::<usize>().unwrap());
        let (spelling, split) = (numbers.next().unwrap(), numbers.next().unwrap());
        let body = format!("before {} after", spellings()[spelling]);
        let (one, two) = body.as_bytes().split_at(split);
        Answer { frames: vec![one.to_vec(), two.to_vec()], ..Answer::text("") }
    })
    .await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "budget = { per_minute = 10000 }").await;
    let (mut echoes, mut cut) = (0, 0);
    for (number, spelling) in spellings().into_iter().enumerate() {
        // Every split of the plain spelling and of one base64; some of each other one.
        let step = if number == 0 || number == 6 { 1 } else { 7 };
        for split in (0..=spelling.len() + 13).step_by(step) {
            let path = format!("/connect/api/{number}/{split}");
            let stream = app.client().open(&path, &json!({})).await;
            let status = stream.status.as_u16();
            let (text, is_whole) = stream.rest().await;
            // If the credential comes with the head, the client receives an error; else the body is cut before it.
            if status == 502 {
                assert!(is_whole && text.contains("credential_echoed"), "{text}");
            } else {
                // In base64, the digits of the text before the credential may pass.
                let is_before = text.len() <= "before ".len() + 8;
                let is_begun = format!("before {spelling}").starts_with(&text);
                assert!(!is_whole && is_before && is_begun, "{split}: {text}");
            }
            cut += usize::from(status == 200);
            echoes += 1;
        }
    }
    assert!(cut > 0, "some bodies are cut in the middle");
    let settled = app.recorded("connect.settled", 1).await;
    assert_eq!(settled[0]["outcome"], "credential_echoed");
    let records = app.stop().await;
    let found = records.iter().filter(|record| record["outcome"] == "credential_echoed").count();
    assert_eq!(found, echoes);
}

/// T6: a credential whose words are short, or have the characters of headers, is found as a whole.
#[tokio::test]
async fn a_credential_of_short_words_does_not_come_back() {
    for value in ["aB3;xY9,kL2=pQ7", "correct horse battery staple", "longsecretpart123=abc"] {
        let server = SecureServer::answering(move |_| Answer::text(value)).await;
        let secret = SecretFile::new(value, "");
        let app = start_open(&server, &secret, "").await;
        let answer = app.client().get("/connect/api/x").await;
        assert_eq!(code_of(&answer), "502 credential_echoed");
        app.stop().await;
    }
}

/// T6: a header that repeats the credential gives an error of the gateway, in each spelling and in a header's name.
#[tokio::test]
async fn an_echo_in_a_header_is_withheld() {
    let server = SecureServer::answering(|seen| {
        let number: usize = seen.target[1..].parse().unwrap();
        match spellings().get(number) {
            Some(spelling) => Answer::text("ok").with("location", &format!("/x?y={spelling}")),
            None => Answer::text("ok").with("plain-secret-name", "1"),
        }
    })
    .await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "").await;
    for number in 0..spellings().len() {
        let response = app.client().get(&format!("/connect/api/{number}")).await;
        assert_eq!(code_of(&response), "502 credential_echoed", "{number}");
        assert_eq!(response.header("location"), None);
    }
    secret.replace("Plain-Secret-Name");
    let response = app.client().get("/connect/api/9999").await;
    assert_eq!(code_of(&response), "502 credential_echoed");
    app.stop().await;
}

/// T6: an answer that the guard could not read is withheld; with no credential there is nothing to guard.
#[tokio::test]
async fn an_encoded_answer_is_withheld() {
    let server = SecureServer::answering(|seen| {
        Answer::text("\u{1f}\u{8b}").with("content-encoding", &seen.target[1..])
    })
    .await;
    let secret = SecretFile::new(SECRET, "");
    let rules = "allow = ['GET /**']\n";
    let app = start_app(
        &(server.table("api", &format!("{}{rules}", secret.line)) + &server.table("bare", rules)),
    )
    .await;
    for encoding in ["gzip", "br", "zstd", "x-own"] {
        let response = app.client().get(&format!("/connect/api/{encoding}")).await;
        assert_eq!(code_of(&response), "502 encoded_response", "{encoding}");
        let response = app.client().get(&format!("/connect/bare/{encoding}")).await;
        assert_eq!(response.header("content-encoding"), Some(encoding));
    }
    assert_eq!(app.client().get("/connect/api/identity").await.status, 200);
    app.stop().await;
}

/// T6: an answer that only resembles the credential passes unchanged, to its last byte.
#[tokio::test]
async fn an_answer_that_resembles_the_credential_passes() {
    let near = format!("{}x {} % \\ {}", &SECRET[..SECRET.len() - 1], &SECRET[1..], &SECRET[..9]);
    let body = near.repeat(200);
    let sent = body.clone();
    let server = SecureServer::answering(move |_| {
        let frames = sent.as_bytes().chunks(37).map(<[u8]>::to_vec).collect();
        Answer { frames, ..Answer::text("") }
    })
    .await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "").await;
    assert_eq!(app.client().get("/connect/api/a").await.text(), body);
    app.stop().await;
}

/// T6: the credential is in no answer, log, record or error, also when the server and the credential's place misbehave.
#[tokio::test]
async fn the_value_is_nowhere() {
    let server = SecureServer::answering(|seen| match &*seen.target {
        "/echo" => Answer::text(format!("{:?}", seen.headers)),
        "/header" => Answer::text("").with("x", seen.headers["authorization"].to_str().unwrap()),
        "/encoded" => Answer::text("x").with("content-encoding", "gzip"),
        "/error" => Answer { status: 500, ..Answer::text("failed") },
        _ => Answer::text("ok"),
    })
    .await;
    for form in ["", ", basic = 'user'", ", header = 'private-token'"] {
        let secret = SecretFile::new(SECRET, form);
        let place = tempfile::tempdir().unwrap();
        let log = place.path().join("access.log");
        let table = server.table("api", &format!("{}allow = ['* /**']", secret.line));
        let app = app_with(&table, |config| {
            config.access_log = AccessLogDestination::File(log.clone());
        })
        .await;
        let client = app.client();
        let mut told = String::new();
        let paths = ["/ok", "/echo", "/header", "/encoded", "/error", "//bad", "/a?access_token=x"];
        for path in paths {
            let request = post_request(&format!("/connect/api{path}"), &json!({"a": 1}), &[]);
            let response = client.start(request).await.unwrap();
            write!(told, "{:?} {:?}", response.status, response.headers).unwrap();
            told += &response.rest().await.0;
        }
        // A value that no header can have.
        secret.replace(&format!("{SECRET}\r\nx-evil: 1"));
        let response = client.get("/connect/api/ok").await;
        assert_eq!(code_of(&response), "502 credential_unavailable");
        told += response.text();
        write!(told, "{:?}", app.stop().await).unwrap();
        let lines = fs::read_to_string(log).unwrap();
        assert_eq!(lines.lines().filter(|line| line.contains("/connect/NAME")).count(), 8);
        told += &lines;
        for spelling in spellings() {
            assert!(!told.contains(&spelling), "{spelling} in {told}");
        }
        assert!(!told.contains(&SECRET[4..16]), "{told}");
    }
    assert!(server.seen().iter().all(|seen| !seen.headers.contains_key("x-evil")));
}

/// T6: a credential is read for each request, so that it can be replaced while the run goes on.
#[tokio::test]
async fn a_credential_can_be_replaced() {
    let server = SecureServer::start().await;
    let secret = SecretFile::new("first-secret", "");
    let app = start_open(&server, &secret, "").await;
    assert_eq!(app.client().get("/connect/api/a").await.status, 200);
    secret.replace("second-secret\n");
    assert_eq!(app.client().get("/connect/api/a").await.status, 200);
    for unusable in ["", "short", "two\nlines-of-secret"] {
        secret.replace(unusable);
        let response = app.client().get("/connect/api/a").await;
        assert_eq!(code_of(&response), "502 credential_unavailable", "{unusable}");
    }
    drop(secret);
    let response = app.client().get("/connect/api/a").await;
    assert_eq!(code_of(&response), "502 credential_unavailable");
    let seen: Vec<_> = server
        .seen()
        .iter()
        .map(|seen| seen.headers["authorization"].to_str().unwrap().to_owned())
        .collect();
    assert_eq!(seen, ["Bearer first-secret", "Bearer second-secret"]);
    // A request that was not sent costs nothing.
    let spent = app.run.ledger.connection_spending();
    assert_eq!(spent["api"].requests, 2);
    let records = app.stop().await;
    let refused = records.iter().filter(|record| record["event"] == "connect.refused").count();
    assert_eq!(refused, 4);
}

/// T6: a program of the host prints the credential; it sees nothing of the host's environment, and its failures end
/// typed.
#[tokio::test]
async fn a_program_prints_the_credential() {
    let server = SecureServer::start().await;
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("token");
    let write = |text: &str| {
        fs::write(&program, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
    };
    write("echo token-of-$1-$#$CARGO_PKG_NAME");
    let command = format!("credential = {{ command = ['{}', 'a b'] }}", program.display());
    let app = start_app(&server.table("api", &format!("{command}\nallow = ['GET /**']"))).await;
    assert_eq!(app.client().get("/connect/api/a").await.status, 200);
    assert_eq!(server.seen()[0].headers["authorization"], "Bearer token-of-a b-1");
    for failing in
        ["exit 1", "true", "echo secret-value; exit 3", "head -c 100000 /dev/zero", "kill $$"]
    {
        write(failing);
        let response = app.client().get("/connect/api/a").await;
        assert_eq!(code_of(&response), "502 credential_unavailable", "{failing}");
    }
    assert_eq!(server.seen().len(), 1);
    app.stop().await;
}

/// T6: a range of an answer is not asked for where a credential could come back in pieces.
#[tokio::test]
async fn ranges_pass_only_without_a_credential() {
    let server = SecureServer::start().await;
    let secret = SecretFile::new(SECRET, "");
    let rules = "allow = ['GET /**']\n";
    let table =
        server.table("api", &format!("{}{rules}", secret.line)) + &server.table("bare", rules);
    let app = start_app(&table).await;
    for name in ["api", "bare"] {
        let headers = [("range", "bytes=0-5")];
        app.client().ask(Method::GET, &format!("/connect/{name}/a"), "", &headers).await;
    }
    let ranges: Vec<_> =
        server.seen().iter().map(|seen| seen.headers.contains_key("range")).collect();
    assert_eq!(ranges, [false, true]);
    app.stop().await;
}

/// T6: `audit verify` names an answer that repeated a credential.
#[tokio::test]
async fn the_audit_names_the_finding() {
    let server = SecureServer::answering(|seen| {
        Answer::text(seen.headers["authorization"].to_str().unwrap())
    })
    .await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "price_usd = '0.5'").await;
    let told = app.client().open("/connect/api/a", &json!({})).await.rest().await.0;
    assert!(!told.contains(SECRET));
    app.client().get("/connect/unknown/a").await;
    app.recorded("connect.settled", 1).await;
    let log = app.audit_log();
    app.run.audit.flush_buffered();
    let mut printed = vec![];
    let command = cogni_gateway::cli::audit::AuditCommand::Verify { file: log, public_key: None };
    cogni_gateway::cli::audit::run(&command, &mut printed).unwrap();
    let printed = String::from_utf8(printed).unwrap();
    let own: Vec<_> = printed
        .lines()
        .filter(|line| line.contains("connections") || line.contains("credential"))
        .collect();
    insta::assert_snapshot!(own.join("\n"), @r"
    connections api: 1 requests, 2 bytes out, 29 bytes in, $0.5
                1 requests over connections refused
                1 answers repeated a credential and were cut
    ");
    app.stop().await;
}
