//! A3: Tests of fair shares: no caller can block the others by connections, by watching, or by sending nothing.

use std::fs::{self, File};

use http::Method;
use serde_json::json;

use super::{chat_body, run_body, wait_until_async};
use crate::support::client::build_request;
use crate::support::service::ServiceSetup;

/// While all connections are in use, health checks and charge notices are answered, and other requests get an error.
#[tokio::test(flavor = "multi_thread")]
async fn health_checks_and_charges_are_answered_at_the_connection_limit() {
    let setup = ServiceSetup::new("").await;
    setup.write_config("max_connections = 1");
    let service = setup.start();
    let client = setup.client();
    let held = client.connect().await;
    let refused = service.get("/api/v1/runs").await;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (503, Some("1")));
    insta::assert_snapshot!(refused.text(), @r#"{"error":{"code":"too_many_connections","message":"too many connections are open; try again later"}}"#);
    assert_eq!(client.get("/healthz").await.status, 200);
    assert_eq!(client.get("/readyz").await.status, 200);
    let response = service.post("/api/internal/billing/ingest", &json!([])).await;
    assert_eq!(response.status, 200, "{}", response.text());
    // The reserved connections serve one request each, and only with a grant.
    assert_eq!(client.post("/api/internal/billing/ingest", &json!([])).await.status, 401);

    // The reserved connections are limited, too.
    wait_until_async(async || {
        let mut open = vec![];
        for _ in 0..80 {
            open.push(client.connect().await);
        }
        let answer = client.raw(b"").await;
        answer.starts_with("HTTP/1.1 503 ") && answer.contains("too_many_connections")
    })
    .await;
    drop(held);
    let bearer = &setup.owner.token;
    let request = format!("GET /api/v1/runs HTTP/1.0\r\nauthorization: Bearer {bearer}\r\n\r\n");
    wait_until_async(async || client.raw(request.as_bytes()).await.starts_with("HTTP/1.0 200 "))
        .await;
    setup.stop(service);
}

/// A chat that cannot be watched is not started; a watcher that disconnects makes room.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_watches_no_more_runs_than_it_may() {
    let setup = ServiceSetup::new("").await;
    setup.write_config("max_watchers = 1");
    let service = setup.start();
    let (grant, other) = (setup.grant(&[]), setup.grant(&[]));
    let run = grant.run(&run_body("fake/gate=1")).await;
    let path = format!("/api/v1/runs/{run}/events");
    let watching = grant.start(build_request(Method::GET, &path, "", &[])).await.unwrap();
    assert_eq!(watching.status, 200);
    let refused = grant.get(&path).await;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (429, Some("1")));
    insta::assert_snapshot!(refused.text(), @r#"{"error":{"code":"too_many_watchers","message":"too many event streams: this grant may follow 1 runs at the same time; wait until one has ended"}}"#);
    assert_eq!(grant.post("/api/v1/ai/chat", &chat_body("fake")).await.status, 429);
    let listed = grant.get("/api/v1/runs").await.json();
    assert_eq!(listed["runs"].as_array().unwrap().len(), 1, "nothing has begun: {listed}");
    assert_eq!(other.post("/api/v1/ai/chat", &chat_body("fake")).await.status, 200);
    drop(watching);
    grant.ask(Method::POST, &format!("/api/v1/runs/{run}/cancel"), "", &[]).await;
    wait_until_async(async || grant.get(&path).await.status == 200).await;
    setup.stop(service);
}

/// A grant that reads files slowly is limited in their number, and takes none from other grants.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_reads_no_more_files_than_it_may() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let (grant, other) = (setup.grant(&[]), setup.grant(&[]));
    let mut paths = vec![];
    for grant in [&grant, &other] {
        let run = grant.run(&run_body("fake")).await;
        grant.ended(&run).await;
        // The file is larger than the socket buffers of a client that does not read.
        let log = File::options().write(true).open(setup.audit_log(&run)).unwrap();
        log.set_len(64 << 20).unwrap();
        paths.push(format!("/api/v1/runs/{run}/audit?raw=1"));
    }
    let mut reading = vec![];
    for _ in 0..4 {
        let answer = grant.start(build_request(Method::GET, &paths[0], "", &[])).await.unwrap();
        assert_eq!(answer.status, 200);
        reading.push(answer);
    }
    let refused = grant.get(&paths[0]).await;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (429, Some("1")));
    insta::assert_snapshot!(refused.text(), @r#"{"error":{"code":"too_many_downloads","message":"too many downloads: this grant may read 4 files at the same time; wait until one has ended"}}"#);
    let answer = other.start(build_request(Method::GET, &paths[1], "", &[])).await.unwrap();
    assert_eq!(answer.status, 200);
    drop((reading, answer));
    wait_until_async(async || {
        let answer = grant.start(build_request(Method::GET, &paths[0], "", &[])).await.unwrap();
        answer.status == 200
    })
    .await;
    setup.stop(service);
}

/// G14: Readers of a large output that take nothing of it hold no more memory than the downloads of a grant may.
#[tokio::test(flavor = "multi_thread")]
async fn large_outputs_count_as_downloads() {
    let setup = ServiceSetup::new("").await;
    let agents = setup.path().join("agents");
    fs::create_dir(&agents).unwrap();
    let entry = "name = 'loud'\ndescription = 'prints'\nversion = 1\nargv = ['sh', '-c', '''head -c 1000000 /dev/zero | tr '\\0' '\\1' >&2''']\n";
    fs::write(agents.join("loud.toml"), entry).unwrap();
    setup.write_config(&format!("agents_dir = \"{}\"", agents.display()));
    let service = setup.start();
    let grant = setup.grant(&["--agent", "*"]);
    let mut body = run_body("fake");
    body["agent"] = serde_json::json!("loud");
    let run = grant.run(&body).await;
    grant.ended(&run).await;
    let path = format!("/api/v1/runs/{run}/output");
    assert!(grant.get(&path).await.json()["stderr"].as_str().unwrap().len() > 500_000);
    let mut reading = vec![];
    for _ in 0..4 {
        let answer = grant.start(build_request(Method::GET, &path, "", &[])).await.unwrap();
        assert_eq!(answer.status, 200);
        reading.push(answer);
    }
    assert_eq!(grant.get(&path).await.status, 429);
    // A small answer is no download.
    assert_eq!(grant.get(&format!("/api/v1/runs/{run}")).await.status, 200);
    drop(reading);
    wait_until_async(async || grant.get(&path).await.status == 200).await;
    setup.stop(service);
}

/// A client that announces a body and sends none gets an error and is disconnected.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let setup = ServiceSetup::new("").await;
    setup.write_config("request_timeout = \"2s\"");
    let service = setup.start();
    for path in ["/api/v1/runs", "/api/v1/ai/chat", "/api/internal/billing/ingest"] {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\n\
             content-type: application/json\r\ncontent-length: 100\r\n\r\n{{",
            setup.owner.token
        );
        let answer = setup.client().raw(head.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 408 "), "{path}: {answer}");
        assert!(answer.contains("request_timeout"), "{path}: {answer}");
    }
    setup.stop(service);
}
