//! T4: Tests of the webhook of a real service: a message to a receiver, and the signed reply of one of its users.

use std::fs;
use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::Method;
use ring::hmac;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::approvals::{caller_body, configure_caller, text, wait_for_questions};
use super::{ServiceSetup, conversation_body};
use crate::support::raw_upstream;
use crate::support::service::MintedGrant;

const REPLIES: &str = "/api/v1/approvals/replies";

/// The keys of messages and of replies.
const KEYS: [[u8; 32]; 2] = [[1; 32], [2; 32]];

struct SignedReply<'a> {
    id: &'a str,
    key: [u8; 32],
    body: String,
}

impl SignedReply<'_> {
    async fn send(&self, setup: &ServiceSetup) -> (u16, Value) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().to_string();
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.key);
        let signature = hmac::sign(&key, format!("{}.{now}.{}", self.id, self.body).as_bytes());
        let signature = format!("v1,{}", STANDARD.encode(signature));
        let headers = [
            ("content-type", "application/json"),
            ("webhook-id", self.id),
            ("webhook-timestamp", &now),
            ("webhook-signature", &signature),
        ];
        let answered = setup.client().ask(Method::POST, REPLIES, &self.body, &headers).await;
        let json = answered.json();
        let told = if json["error"].is_object() { &json["error"]["code"] } else { &json["state"] };
        (answered.status.as_u16(), told.clone())
    }
}

fn reply_body(data: &Value, user: &str) -> String {
    let (approval, digest) = (&data["id"], &data["digest"]);
    let data = json!({"approval": approval, "digest": digest, "user": user, "decision": "approve"});
    json!({"type": "approval.decision", "data": data}).to_string()
}

/// Receives a message about a question.
async fn receive(listener: &TcpListener) -> Value {
    let (mut stream, _) = listener.accept().await.unwrap();
    let request = raw_upstream::read_request(&mut stream).await;
    let answer = "HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n";
    raw_upstream::send_text(&mut stream, answer).await;
    serde_json::from_str(request.split_once("\r\n\r\n").unwrap().1).unwrap()
}

/// A service that tells a receiver about questions, with the grants of three of its users: one who may approve, one whose
/// grant starts the runs, and one who may only read.
struct ReplyingSetup {
    setup: ServiceSetup,
    approver: MintedGrant,
    starter: MintedGrant,
}

async fn replying_setup(receiver: SocketAddr) -> ReplyingSetup {
    let setup = ServiceSetup::new("").await;
    let approver = setup.mint(&["--access", "approve"]);
    let reader = setup.mint(&["--access", "read"]);
    let starter = setup.mint(&[
        "--access",
        "read,runs,approve",
        "--allow-sandbox",
        "--agent",
        "*",
        "--account",
        "acct-1",
    ]);
    let key_file = |name: &str, key: [u8; 32]| {
        let path = setup.path().join(name);
        fs::write(&path, format!("whsec_{}\n", STANDARD.encode(key))).unwrap();
        path
    };
    let webhook = format!(
        "[tools.approvals.webhook]\nurl = 'http://{receiver}/questions'\nsecret = {{ file = '{}' }}\n\
         reply_secret = {{ file = '{}' }}\n[tools.approvals.webhook.approvers]\nU1 = '{}'\nU2 = '{}'\nU3 = '{}'\n",
        key_file("key", KEYS[0]).display(),
        key_file("reply-key", KEYS[1]).display(),
        approver.id,
        starter.id,
        reader.id,
    );
    let script = "/run/cogni-tool exec core__get_current_time {} --wait 5m >&2";
    configure_caller(
        &setup,
        script,
        &format!("approve = 'ask'\nevidence = []\n[tools.approvals]\nhold = '5m'\n{webhook}"),
    );
    ReplyingSetup { setup, approver, starter }
}

/// The receiver learns of a question, and a signed reply of a user with a grant answers it, once. Nothing else does.
#[tokio::test(flavor = "multi_thread")]
async fn a_signed_reply_answers_a_question() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let ReplyingSetup { setup, approver, starter } = replying_setup(address).await;
    let service = setup.start();
    let run = starter.run(&caller_body()).await;
    // 1. The message has everything but the arguments.
    let message = receive(&listener).await;
    let data = &message["data"];
    assert_eq!(
        [&message["type"], &data["run"], &data["tool"], &data["state"]],
        [
            &json!("approval.requested"),
            &json!(run),
            &json!("core__get_current_time"),
            &json!("pending")
        ]
    );
    assert!(data["arguments"].is_null() && !data["digest"].is_null());
    // 2. No reply counts without the key, the grant and the POST.
    let reply = |id, key, user| SignedReply { id, key, body: reply_body(data, user) };
    for (case, expected) in [
        (reply("r-1", KEYS[0], "U1"), (401, "invalid_signature")),
        (reply("r-2", [3; 32], "U1"), (401, "invalid_signature")),
        (reply("r-3", KEYS[1], "U9"), (403, "unknown_approver")),
        (reply("r-4", KEYS[1], "U2"), (403, "forbidden_own_run")),
        (reply("r-5", KEYS[1], "U3"), (403, "forbidden")),
        (
            SignedReply { id: "r-6", key: KEYS[1], body: message.to_string() },
            (422, "invalid_request"),
        ),
    ] {
        assert_eq!(case.send(&setup).await, (expected.0, json!(expected.1)), "{}", case.id);
    }
    let unsigned = setup.client().post(REPLIES, &json!({})).await;
    assert_eq!(unsigned.status, 401);
    assert_eq!(setup.client().ask(Method::GET, REPLIES, "", &[]).await.status, 405);
    let asked = wait_for_questions(&approver, |found| found.len() == 1).await;
    assert_eq!(asked[0]["state"], "pending");
    // 3. A signed reply of a user with a grant counts, once, and its grant is the one that has answered.
    let good = reply("r-7", KEYS[1], "U1");
    assert_eq!(good.send(&setup).await, (200, json!("approved")));
    assert_eq!(good.send(&setup).await, (409, json!("reply_replayed")));
    assert_eq!(reply("r-8", KEYS[1], "U1").send(&setup).await, (409, json!("approval_closed")));
    starter.ended(&run).await;
    let closed = approver.get(&format!("/api/v1/approvals/{}", text(&data["id"]))).await.json();
    assert_eq!([&closed["state"], &closed["by"]], [&json!("consumed"), &json!(approver.id)]);
    let resolved = receive(&listener).await;
    assert_eq!(
        [&resolved["type"], &resolved["data"]["state"], &resolved["data"]["by"]],
        [&json!("approval.resolved"), &json!("approved"), &json!(approver.id)]
    );
    setup.stop(service);
}

/// Without a key of replies, the path does not exist.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_without_a_webhook_takes_no_reply() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let reply = SignedReply { id: "r-1", key: KEYS[1], body: reply_body(&json!({}), "U1") };
    assert_eq!(reply.send(&setup).await, (404, json!("no_such_path")));
    let run = service.run(&conversation_body("hello")).await;
    service.ended(&run).await;
    setup.stop(service);
}
