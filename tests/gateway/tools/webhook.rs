//! T4: Tests of the webhook of questions: what it sends, how it is signed, what is sent again, and which replies count.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use cogni_gateway::tools::approval::store::ApprovalStore;
use cogni_gateway::tools::approval::webhook::{ReplyError, Webhook, WebhookConfig};
use cogni_gateway::tools::approval::{ApprovalState, to_unix_millis};
use http::{HeaderMap, HeaderName, HeaderValue};
use ring::hmac;
use rusqlite::Connection;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::approvals::{decision, open_store, question};
use crate::support::raw_upstream;

/// The key of replies.
const KEY: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// Returns the webhook of a receiver, with its keys in files of the directory.
fn open_webhook(directory: &Path, url: &str) -> Arc<Webhook> {
    let file = |name: &str, key: &str| {
        let path = directory.join(name);
        fs::write(&path, key).unwrap();
        path
    };
    let other = format!("whsec_{}", STANDARD.encode([7; 32]));
    let table = format!(
        "url = '{url}'\nsecret = {{ file = '{}' }}\nreply_secret = {{ file = '{}' }}\napprovers = {{ U1 = 'grant-1' }}",
        file("key", &other).display(),
        file("reply-key", KEY).display(),
    );
    let config: WebhookConfig = toml::from_str(&table).unwrap();
    let webhook = Webhook::new(&config).unwrap();
    webhook.check_keys().unwrap();
    Arc::new(webhook)
}

fn tomorrow() -> i64 {
    to_unix_millis(SystemTime::now() + Duration::from_hours(24))
}

/// A message as the receiver has it.
struct Received {
    id: String,
    body: Value,
}

/// Receives one message, checks its signature, and answers with a status.
async fn receive(listener: &TcpListener, status: &str) -> Received {
    let (mut stream, _) = listener.accept().await.unwrap();
    let request = raw_upstream::read_request(&mut stream).await;
    let (head, body) = request.split_once("\r\n\r\n").unwrap();
    let field = |name: &str| {
        let lines = head.lines().filter_map(|line| line.split_once(": "));
        let mut values = lines.filter(|(found, _)| found.eq_ignore_ascii_case(name));
        values.next().unwrap().1.to_owned()
    };
    let (id, timestamp) = (field("webhook-id"), field("webhook-timestamp"));
    let key = hmac::Key::new(hmac::HMAC_SHA256, &[7; 32]);
    let signature = hmac::sign(&key, format!("{id}.{timestamp}.{body}").as_bytes());
    assert_eq!(field("webhook-signature"), format!("v1,{}", STANDARD.encode(signature)));
    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    raw_upstream::send_text(&mut stream, &answer).await;
    Received { id, body: serde_json::from_str(body).unwrap() }
}

/// Delivers messages until the receiver is done and the outbox has noted it: the highest number of attempts of a message
/// that is left, or `None` for an empty outbox.
async fn deliver_until<T>(
    (store, directory): (&ApprovalStore, &Path),
    left: Option<u32>,
    receiver: impl Future<Output = T>,
) -> T {
    let stop = CancellationToken::new();
    let outbox = Connection::open(directory.join("state.db")).unwrap();
    let receive_and_stop = async {
        let message = receiver.await;
        let attempts = "SELECT max(attempts) FROM approval_message";
        while outbox.query_row(attempts, [], |row| row.get::<_, Option<u32>>(0)).unwrap() != left {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        stop.cancel();
        message
    };
    tokio::join!(store.deliver_messages(&stop), receive_and_stop).1
}

/// A question and its end are two signed messages, with the listed fields and without the arguments. A message that is
/// not received is sent again with its id, also by the next process; a received one is not.
#[tokio::test]
async fn messages_are_signed_and_sent_until_they_are_received() {
    let directory = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let webhook = open_webhook(directory.path(), &url);
    let store = open_store(directory.path());
    store.set_webhook(Some(Arc::clone(&webhook)));
    let mut row = question("apr-1");
    row.arguments = Some(r#"{"text": "the secret plan"}"#.to_owned());
    row.evidence = [("owner".to_owned(), "acme".to_owned())].into();
    row.not_after_ms = tomorrow();
    let watch = store.ask(row.clone()).await.unwrap().unwrap();
    // 1. The receiver fails, and this process ends.
    let place = (&store, directory.path());
    let first = deliver_until(place, Some(1), receive(&listener, "500 Failed")).await;
    assert_eq!(
        [&first.body["type"], &first.body["data"]["id"], &first.body["data"]["evidence"]],
        [&json!("approval.requested"), &json!("apr-1"), &json!({"owner": "acme"})]
    );
    assert_eq!(first.body["data"]["digest"], row.digest);
    assert!(!first.body.to_string().contains("secret plan"));
    drop((watch, store));
    // 2. The next process sends the same message again, and then the answer.
    let store = open_store(directory.path());
    store.set_webhook(Some(webhook));
    let again =
        deliver_until((&store, directory.path()), None, receive(&listener, "204 No Content")).await;
    assert_eq!((&again.id, &again.body), (&first.id, &first.body));
    store.decide("apr-1", decision(true, &row.digest), SystemTime::now()).await.unwrap();
    let last = deliver_until((&store, directory.path()), None, receive(&listener, "200 OK")).await;
    assert_eq!(
        [&last.body["type"], &last.body["data"]["state"], &last.body["data"]["by"]],
        [&json!("approval.resolved"), &json!(ApprovalState::Approved), &json!("grant-2")]
    );
}

/// A redirect is not followed: the receiver is the one that the operator has named.
#[tokio::test]
async fn a_redirect_is_no_receipt() {
    let directory = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let elsewhere = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let store = open_store(directory.path());
    store.set_webhook(Some(open_webhook(directory.path(), &url)));
    let mut row = question("apr-1");
    row.not_after_ms = tomorrow();
    let _watch = store.ask(row).await.unwrap().unwrap();
    let moved = format!("307 Moved\r\nlocation: http://{}/", elsewhere.local_addr().unwrap());
    let both = async {
        let first = receive(&listener, &moved).await;
        let second = receive(&listener, "200 OK").await;
        assert_eq!(first.id, second.id);
    };
    tokio::select! {
        () = deliver_until((&store, directory.path()), None, both) => (),
        _ = elsewhere.accept() => panic!("a redirect was followed"),
    }
}

/// A reply that another program has signed (Python's `hmac`) is accepted; anything else about it is not.
#[test]
fn a_reply_counts_by_its_signature_and_time() {
    const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
    const TIME: &str = "1614265330";
    const BODY: &[u8] = br#"{"test": 2432232314}"#;
    const SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
    let directory = tempfile::tempdir().unwrap();
    let webhook = open_webhook(directory.path(), "http://127.0.0.1:1/");
    let at = |seconds: u64| UNIX_EPOCH + Duration::from_secs(seconds);
    let headers = |fields: &[(&'static str, &str)]| {
        fields
            .iter()
            .map(|(name, value)| {
                (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
            })
            .collect::<Vec<_>>()
    };
    let check = |fields: &[(&'static str, &str)], body: &[u8], now| {
        let mut map = HeaderMap::new();
        for (name, value) in headers(fields) {
            map.append(name, value);
        }
        webhook.check_reply(&map, body, at(now))
    };
    let signed =
        [("webhook-id", ID), ("webhook-timestamp", TIME), ("webhook-signature", SIGNATURE)];
    let now = 1_614_265_330;
    assert_eq!(check(&signed, BODY, now), Ok(ID.to_owned()));
    assert_eq!(check(&signed, BODY, now + 300), Ok(ID.to_owned()));
    assert_eq!(check(&signed, BODY, now - 300), Ok(ID.to_owned()));
    assert_eq!(check(&signed, BODY, now + 301), Err(ReplyError::Timestamp));
    assert_eq!(check(&signed, BODY, now - 301), Err(ReplyError::Timestamp));
    assert_eq!(check(&signed, br#"{"test": 2432232315}"#, now), Err(ReplyError::Signature));
    let two = format!("v1,AAAA v1a,zzz {SIGNATURE}");
    let changed = |name: &str, value| {
        signed.map(|(found, old)| if found == name { (found, value) } else { (found, old) })
    };
    assert_eq!(check(&changed("webhook-signature", &two), BODY, now), Ok(ID.to_owned()));
    for (name, value, error) in [
        ("webhook-id", "msg_2", ReplyError::Signature),
        ("webhook-id", "msg.2", ReplyError::Headers),
        ("webhook-id", "", ReplyError::Headers),
        ("webhook-timestamp", "1614265331", ReplyError::Signature),
        ("webhook-signature", &SIGNATURE[3..], ReplyError::Signature),
        ("webhook-signature", "v1,", ReplyError::Signature),
    ] {
        assert_eq!(check(&changed(name, value), BODY, now), Err(error), "{name}: {value}");
    }
    for (name, value) in signed {
        let without: Vec<_> = signed.into_iter().filter(|(found, _)| *found != name).collect();
        assert_eq!(check(&without, BODY, now), Err(ReplyError::Headers), "{name}");
        let twice = [&signed[..], &[(name, value)]].concat();
        assert_eq!(check(&twice, BODY, now), Err(ReplyError::Headers), "{name} twice");
    }
    // The key of our own messages signs no reply.
    let key = hmac::Key::new(hmac::HMAC_SHA256, &[7; 32]);
    let text = [format!("{ID}.{TIME}.").as_bytes(), BODY].concat();
    let own = format!("v1,{}", STANDARD.encode(hmac::sign(&key, &text)));
    assert_eq!(check(&changed("webhook-signature", &own), BODY, now), Err(ReplyError::Signature));
}

/// A table that contradicts itself is refused, with its key and a remedy.
#[test]
fn a_wrong_webhook_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let short = directory.path().join("short");
    fs::write(&short, "whsec_AAAA").unwrap();
    let told: Vec<_> = [
        "url = 'ftp://host/'\nsecret = { env = 'KEY' }".to_owned(),
        "url = 'https://user@host/'\nsecret = { env = 'KEY' }".to_owned(),
        "url = 'http://host/'\nsecret = { }".to_owned(),
        "url = 'http://host/'\nsecret = { env = 'A' }\nreply_secret = { env = 'A' }".to_owned(),
        "url = 'http://host/'\nsecret = { env = 'A' }\nreply_secret = { env = 'B' }".to_owned(),
        "url = 'http://host/'\nsecret = { env = 'A' }\napprovers = { U1 = 'grant-1' }".to_owned(),
        "url = 'http://host/'\nsecret = { env = 'A' }\nreply_secret = { env = 'B' }\napprovers = { U1 = 'me' }".to_owned(),
        format!("url = 'http://host/'\nsecret = {{ file = '{}' }}", short.display()),
        "url = 'http://host/'\nsecret = { file = '/nowhere' }".to_owned(),
    ]
    .iter()
    .map(|table| {
        let config: WebhookConfig = toml::from_str(table).unwrap();
        let webhook = Webhook::new(&config);
        webhook.and_then(|webhook| webhook.check_keys()).unwrap_err().to_string()
    })
    .collect();
    insta::assert_snapshot!(told.join("\n"), @r#"
    `tools.approvals.webhook.url`: must begin with `http://` or `https://` and have no user, password or query
    `tools.approvals.webhook.url`: must begin with `http://` or `https://` and have no user, password or query
    `tools.approvals.webhook.secret`: needs one of `env` and `file`
    `tools.approvals.webhook.reply_secret`: is `secret`; give the replies a key of their own
    `tools.approvals.webhook.approvers`: and `reply_secret` need each other; give both, or none
    `tools.approvals.webhook.approvers`: and `reply_secret` need each other; give both, or none
    `tools.approvals.webhook.approvers`: has the ids of grants by users: `U024BE7LH = "grant-…"`
    `tools.approvals.webhook.secret`: it is not `whsec_` and the Base64 of 24 to 64 bytes
    `tools.approvals.webhook.secret`: `/nowhere`: No such file or directory (os error 2)
    "#);
}
