//! A2, A4: Tests of clients that disconnect before the answer: no run is left without supervision.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};

use super::{chat_body, run_body, wait_until_async};
use crate::support::process::{TEST_TIMEOUT, pause_for};
use crate::support::service::{MintedGrant, ServiceSetup};

/// A4: An accepted run is executed, whenever its client disconnects.
#[tokio::test(flavor = "multi_thread")]
async fn an_accepted_run_is_executed_whenever_its_client_disconnects() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let grant = setup.grant(&[]);
    hang_up(&setup, &grant, "/api/v1/runs", &run_body("fake"));
    let rows = all_ended(&grant).await;
    let wrong: Vec<_> = rows.iter().filter(|row| row["error_code"] != Value::Null).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    setup.stop(service);
}

/// A2: A chat ends when its client disconnects, at whatever moment.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_ends_whenever_its_client_disconnects() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let grant = setup.grant(&[]);
    // The gate stays closed, so the chat would not end by itself.
    hang_up(&setup, &grant, "/api/v1/ai/chat", &chat_body("fake/text=one two;gate=1"));
    let rows = all_ended(&grant).await;
    let wrong: Vec<_> = rows.iter().filter(|row| row["error_code"] != "cancelled").collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    setup.stop(service);
}

/// Makes this many requests. Each client waits a little longer than the one before and then disconnects. The last client
/// waits for the first byte of the answer, so at least its run has been accepted when this function returns.
fn hang_up(setup: &ServiceSetup, grant: &MintedGrant, path: &str, body: &Value) {
    let body = body.to_string();
    for client in 0..CLIENTS {
        let mut stream = UnixStream::connect(setup.path().join("api.sock")).unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            grant.token,
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).unwrap();
        if client + 1 == CLIENTS {
            stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
            stream.read_exact(&mut [0]).unwrap();
        } else {
            pause_for(Duration::from_micros(u64::from(client) * 150));
        }
    }
}

/// Returns the runs that were accepted, after they have ended. How many of the earlier clients' runs are accepted depends
/// on the machine; the last client's run is always among them.
async fn all_ended(grant: &MintedGrant) -> Vec<Value> {
    let rows = async || {
        let listed = grant.get("/api/v1/runs?limit=200").await.json();
        listed["runs"].as_array().unwrap().clone()
    };
    assert!(!rows().await.is_empty(), "the run of the last client is not in the list");
    wait_until_async(async || rows().await.iter().all(|row| row["state"] == json!("ended"))).await;
    rows().await
}

const CLIENTS: u32 = 40;
