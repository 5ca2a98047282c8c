//! The service as those see it who run it: ready or not, told to stop, told to read its files again, on TCP.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use http::Method;
use serde_json::{Value, json};

use super::{asked, until};
use crate::support::client::request;
use crate::support::process::Process;
use crate::support::service::{Place, Service};

/// SIGTERM: `/readyz` says so at once, nothing new is accepted, and what runs may end.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_is_told_to_stop_lets_its_runs_end() {
    let place = Place::new("").await;
    let mut service = place.start();
    let grant = place.grant(&[]);
    let client = place.client();
    assert_eq!(client.get("/readyz").await.status, 200);
    let run = grant.run(&asked("fake/text=one two;gate=1")).await;
    place.provider.gate.wait_for_waiting(1).await;
    service.process.signal("TERM");
    until(async || client.get("/readyz").await.status == 503).await;
    let ready = client.get("/readyz").await.json();
    assert_eq!(ready["checks"]["accepting"], "draining", "{ready}");
    assert_eq!(client.get("/healthz").await.status, 200);
    let refused = grant.post("/api/v1/runs", &asked("fake")).await;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (503, Some("1")));
    insta::assert_snapshot!(refused.text(), @r#"{"error":{"code":"draining","message":"the service is stopping; try again elsewhere, or later"}}"#);
    let path = format!("/api/v1/runs/{run}/events");
    let watched = grant.start(request(Method::GET, &path, "", &[])).await.unwrap();
    place.provider.gate.allow_answers(1);
    let (text, in_order) = watched.rest().await;
    assert!(in_order && text.contains("event: final"), "{text}");
    assert!(service.process.wait().success());
    let service = place.start();
    assert_eq!(grant.ended(&run).await["error_code"], Value::Null);
    place.stop(service);
}

/// What has not ended by the deadline is cancelled, and is at a definite end.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_does_not_end_in_time_is_cancelled() {
    let place = Place::new("").await;
    place.write_config("drain_timeout = \"100ms\"");
    let mut service = place.start();
    let grant = place.grant(&[]);
    let run = grant.run(&asked("fake/gate=1")).await;
    place.provider.gate.wait_for_waiting(1).await;
    assert!(service.process.terminate().success(), "{}", service.process.said());
    place.write_config("");
    let service = place.start();
    let row = grant.ended(&run).await;
    assert_eq!(
        (&row["state"], &row["error_code"]),
        (&json!("ended"), &json!("cancelled")),
        "{row}"
    );
    place.stop(service);
}

/// SIGHUP reads agents again; where one of them is wrong, nothing changes.
#[tokio::test(flavor = "multi_thread")]
async fn a_hangup_reads_the_agents_again() {
    let agents = tempfile::tempdir().unwrap();
    let file = agents.path().join("sandbox-agent.toml");
    fs::copy("config/agents/sandbox-agent.toml", &file).unwrap();
    let place = Place::new("").await;
    place.write_config(&format!("agents_dir = {:?}", agents.path()));
    let mut service = place.start();
    let grant = place.grant(&[]);
    let known = async || {
        let listed = grant.get("/api/v1/ai/agents?all=1").await.json();
        listed["agents"].as_array().unwrap().len()
    };
    assert_eq!(known().await, 1);
    let second =
        fs::read_to_string(&file).unwrap().replace("\"sandbox:agent\"", "\"sandbox:second\"");
    fs::write(agents.path().join("sandbox-second.toml"), &second).unwrap();
    service.process.signal("HUP");
    until(async || known().await == 2).await;
    fs::write(&file, "name = 7").unwrap();
    service.process.signal("HUP");
    service.process.until(|said| said.contains("nothing has changed"));
    assert_eq!(known().await, 2);
    place.stop(service);
}

/// Where no agent can run, nobody is sent here.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_can_run_nothing_is_not_ready_and_says_why() {
    let agents = tempfile::tempdir().unwrap();
    let text = fs::read_to_string("config/agents/sandbox-agent.toml").unwrap();
    let text = text.replace("[env]", "image = \"no-such-image\"\n[env]");
    fs::write(agents.path().join("sandbox-agent.toml"), text).unwrap();
    let place = Place::new("").await;
    place.write_config(&format!("agents_dir = {:?}", agents.path()));
    let service = place.start();
    until(async || place.client().get("/readyz").await.json()["upstream"] == "ok").await;
    let ready = place.client().get("/readyz").await;
    assert_eq!(ready.status, 503);
    insta::assert_snapshot!(ready.text(), @r#"{"ready":false,"checks":{"accepting":"ok","agents":"no agent can run here: it needs the image `no-such-image`, and the driver `embedded` knows no images","database":"ok","forge":"no credential","relay":"ok","run_dir":"ok","storage":"ok","upstream":"ok"},"upstream":"ok"}"#);
    place.stop(service);
}

/// A3: TCP is served, and never without grants but where the words say so, and then on a loopback address only.
#[tokio::test(flavor = "multi_thread")]
async fn tcp_is_served_and_never_by_accident_without_grants() {
    let mut place = Place::new("").await;
    place.set("COGNI_LISTEN", "127.0.0.1:0");
    let service = place.start();
    assert!(ask(&service, "/readyz").await.starts_with("HTTP/1.1 200 OK"));
    assert!(ask(&service, "/api/v1/runs").await.starts_with("HTTP/1.1 401"));
    place.stop(service);
    place.write_config("insecure_no_auth = true");
    let open = place.start();
    assert!(ask(&open, "/api/v1/runs").await.starts_with("HTTP/1.1 200 OK"));
    place.stop(open);
    let said = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
        .args(["serve", "--listen", "0.0.0.0:0", "--insecure-no-auth", "--litellm-host", "h:1"])
        .env_clear()
        .env("LITELLM_MASTER_KEY", "sk")
        .output()
        .unwrap();
    assert_eq!(said.status.code(), Some(2));
    insta::assert_snapshot!(String::from_utf8_lossy(&said.stderr), @"error: `serve.insecure_no_auth` is `true` and `serve.listen` is `0.0.0.0:0`; every client that reaches that address could run agents: listen on 127.0.0.1 or on a unix socket, or ask for grants");
}

/// Two services with one state directory would both begin its runs.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_service_keeps_off() {
    let place = Place::new("").await;
    let service = place.start();
    // What the second would say that looks into the database: its tables are of a version that it does not know.
    let database = rusqlite::Connection::open(place.state_dir().join("state.db")).unwrap();
    database.execute("UPDATE schema SET version = version + 1", []).unwrap();
    let elsewhere = format!("unix:{}/second.sock", place.path().display());
    let mut second = Process::start(place.command().env("COGNI_LISTEN", elsewhere), "build it");
    let status = tokio::task::block_in_place(|| second.wait());
    assert_eq!(status.code(), Some(2));
    let said = second.said().replace(place.path().to_str().unwrap(), "[dir]");
    assert!(said.contains("another service has the state directory `[dir]/state`"), "{said}");
    place.stop(service);
}

async fn ask(service: &Service, path: &str) -> String {
    let said = service.process.said();
    let address = said.split("address=").nth(1).unwrap().split_whitespace().next().unwrap();
    super::get(address, path).await
}

/// What lies in the state directory is its owner's, also where the directory lets others in.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_in_the_state_directory_is_its_owners() {
    let place = Place::new("").await;
    fs::set_permissions(place.state_dir(), Permissions::from_mode(0o755)).unwrap();
    let service = place.start();
    let run = service.run(&asked("fake")).await;
    service.ended(&run).await;
    for entry in fs::read_dir(place.state_dir()).unwrap() {
        let path = entry.unwrap().path();
        // Each sandbox's user executes it.
        if path.file_name().unwrap().to_string_lossy().starts_with("cogni-init") {
            continue;
        }
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o077;
        assert_eq!(mode, 0, "{}", path.display());
    }
    place.stop(service);
}
