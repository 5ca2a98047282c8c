//! G1: Tests of the peer process of a connection, as the kernel reports it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::app::TestApp;

/// G1: The audit log has the process behind a connection, and each request refers to it.
#[tokio::test(flavor = "multi_thread")]
async fn the_audit_names_the_process_that_connected() {
    let app = TestApp::with(|config| config.listen.socket_mode = 0o666).await;
    let call = json!({"model": "fake", "max_tokens": 5, "messages": []});
    for _ in 0..3 {
        assert_eq!(app.client().post("/v1/messages", &call).await.status, 200);
    }
    app.client().get("/nothing").await;
    let records = app.stop().await;
    let opened = select_events(&records, "connection.opened");
    assert_eq!(opened.len(), 1, "one process, one record: {opened:?}");
    let pid = std::process::id();
    assert_eq!(opened[0]["pid"], pid);
    assert_eq!((&opened[0]["uid"], &opened[0]["gid"]), (&json!(0), &json!(0)));
    for event in ["request.admitted", "request.refused"] {
        assert!(
            select_events(&records, event).iter().all(|record| record["pid"] == pid),
            "{event}"
        );
    }
}

/// G1: The kernel's report counts, so another user's process is recorded with that user.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_of_another_user_is_known_as_such() {
    let app = open_to_all(&[]).await;
    assert_eq!(ask_as(&app, 1001, 1002), "200");
    assert_eq!(ask_as(&app, 1003, 1003), "200");
    let records = app.stop().await;
    let opened = select_events(&records, "connection.opened");
    let users: Vec<_> = opened.iter().map(|record| (&record["uid"], &record["gid"])).collect();
    assert_eq!(users, [(&json!(1001), &json!(1002)), (&json!(1003), &json!(1003))]);
    assert_ne!(opened[0]["pid"], opened[1]["pid"]);
}

/// G1: A user who may not connect gets the same refusal for any request, and it is recorded.
#[tokio::test(flavor = "multi_thread")]
async fn only_the_required_user_is_served() {
    let app = open_to_all(&[1001, 1004]).await;
    for (uid, status) in [(1001, 200), (1002, 403), (1004, 200), (0, 403)] {
        let answer = ask_as(&app, uid, uid);
        assert!(answer.contains(&status.to_string()), "{uid}: {answer}");
    }
    let answer = app.client().raw(HEALTH.as_bytes()).await.replace("\r\n", "\n");
    insta::assert_snapshot!(answer, @r#"
    HTTP/1.1 403 Forbidden
    content-type: application/json
    content-length: 28
    x-should-retry: false
    connection: close

    {"error":"peer_not_allowed"}
    "#);
    let records = app.stop().await;
    let refused = select_events(&records, "request.refused");
    let code_and_status = |record: &Value| (record["code"].clone(), record["status"].clone());
    assert_eq!(
        refused.iter().map(code_and_status).collect::<Vec<_>>(),
        vec![(json!("peer_not_allowed"), json!(403)); 3]
    );
    let opened = select_events(&records, "connection.opened");
    let tried = opened.iter().find(|record| record["uid"] == 1002).unwrap();
    assert_eq!(tried["pid"], refused[0]["pid"], "the refusal leads to who tried");
    assert_eq!(records.last().map(|record| &record["event"]), Some(&json!("log.checkpoint")));
}

/// G14: A sandbox can make any number of processes and connections; the log stays small.
#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_of_processes_does_not_fill_the_disk() {
    let app = open_to_all(&[1001]).await;
    for _ in 0..80 {
        assert!(ask_as(&app, 1002, 1002).contains("403"));
    }
    for _ in 0..100 {
        assert!(app.client().raw(HEALTH.as_bytes()).await.starts_with("HTTP/1.1 403 "));
    }
    let records = app.stop().await;
    let opened = select_events(&records, "connection.opened");
    let (singly, more): (Vec<_>, Vec<_>) =
        opened.into_iter().partition(|record| record["repeats"].is_null());
    let more: u64 = more.iter().map(|record| record["repeats"].as_u64().unwrap()).sum();
    assert_eq!((singly.len(), more), (64, 116), "the 65th process and all after it are a number");
}

/// Serves a run whose socket every user may connect to.
async fn open_to_all(uids: &[u32]) -> TestApp {
    let app = TestApp::with(|config| {
        config.listen.socket_mode = 0o666;
        config.listen.require_uid = uids.to_vec();
    })
    .await;
    let directory = app.socket.parent().unwrap();
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
    app
}

/// Requests the run's health from a process of another user; returns the answer or the error.
///
/// That process makes the connection itself, because the kernel remembers which process connected.
fn ask_as(app: &TestApp, uid: u32, gid: u32) -> String {
    let binary = app.socket.with_file_name("cogni-gateway");
    if !binary.exists() {
        // Other users may not read the program where cargo has put it. Another process copies it: a test that starts a
        // program meanwhile would hand on the copy, open for writing, and the copy could not be executed.
        let copy =
            Command::new("cp").arg(env!("CARGO_BIN_EXE_cogni-gateway")).arg(&binary).status();
        assert!(copy.unwrap().success());
    }
    let mut ask = Command::new(binary);
    ask.args(["health", "--socket-path"]).arg(&app.socket).env_clear().uid(uid).gid(gid);
    let output = ask.output().unwrap();
    let printed = String::from_utf8(output.stderr).unwrap();
    if output.status.success() { "200".to_owned() } else { printed }
}

fn select_events(records: &[Value], event: &str) -> Vec<Value> {
    records.iter().filter(|record| record["event"] == event).cloned().collect()
}

const HEALTH: &str = "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
