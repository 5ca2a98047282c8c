//! Tests of operating the service: readiness, shutdown, reload, and TCP.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use http::Method;
use serde_json::{Value, json};

use super::{run_body, wait_until_async};
use crate::support::client::build_request;
use crate::support::process::ChildProcess;
use crate::support::service::{ServiceProcess, ServiceSetup};

/// After SIGTERM, `/readyz` reports it at once, no new run is accepted, and open runs may end.
#[tokio::test(flavor = "multi_thread")]
async fn sigterm_lets_open_runs_end() {
    let setup = ServiceSetup::new("").await;
    let mut service = setup.start();
    let grant = setup.grant(&[]);
    let client = setup.client();
    assert_eq!(client.get("/readyz").await.status, 200);
    let run = grant.run(&run_body("fake/text=one two;gate=1")).await;
    setup.provider.gate.wait_for_waiting(1).await;
    service.process.signal("TERM");
    wait_until_async(async || client.get("/readyz").await.status == 503).await;
    let ready = client.get("/readyz").await.json();
    assert_eq!(ready["checks"]["accepting"], "draining", "{ready}");
    assert_eq!(client.get("/healthz").await.status, 200);
    let refused = grant.post("/api/v1/runs", &run_body("fake")).await;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (503, Some("1")));
    insta::assert_snapshot!(refused.text(), @r#"{"error":{"code":"draining","message":"the service is shutting down and accepts no new runs; try again after its restart"}}"#);
    let path = format!("/api/v1/runs/{run}/events");
    let watched = grant.start(build_request(Method::GET, &path, "", &[])).await.unwrap();
    setup.provider.gate.allow_answers(1);
    let (text, in_order) = watched.rest().await;
    assert!(in_order && text.contains("event: final"), "{text}");
    assert!(service.process.wait().success());
    let service = setup.start();
    assert_eq!(grant.ended(&run).await["error_code"], Value::Null);
    setup.stop(service);
}

/// A run that is still open at the deadline is cancelled and recorded as ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_does_not_end_in_time_is_cancelled() {
    let setup = ServiceSetup::new("").await;
    setup.write_config("drain_timeout = \"100ms\"");
    let mut service = setup.start();
    let grant = setup.grant(&[]);
    let run = grant.run(&run_body("fake/gate=1")).await;
    setup.provider.gate.wait_for_waiting(1).await;
    assert!(service.process.terminate().success(), "{}", service.process.output());
    setup.write_config("");
    let service = setup.start();
    let row = grant.ended(&run).await;
    assert_eq!(
        (&row["state"], &row["error_code"]),
        (&json!("ended"), &json!("cancelled")),
        "{row}"
    );
    setup.stop(service);
}

/// SIGHUP reads the agents again; if one of them is wrong, nothing changes.
#[tokio::test(flavor = "multi_thread")]
async fn a_hangup_reads_the_agents_again() {
    let agents = tempfile::tempdir().unwrap();
    let file = agents.path().join("sandbox-agent.toml");
    fs::copy("config/agents/sandbox-agent.toml", &file).unwrap();
    let setup = ServiceSetup::new("").await;
    setup.write_config(&format!("agents_dir = {:?}", agents.path()));
    let mut service = setup.start();
    let grant = setup.grant(&[]);
    let known = async || {
        let listed = grant.get("/api/v1/ai/agents?all=1").await.json();
        listed["agents"].as_array().unwrap().len()
    };
    assert_eq!(known().await, 1);
    let second =
        fs::read_to_string(&file).unwrap().replace("\"sandbox:agent\"", "\"sandbox:second\"");
    fs::write(agents.path().join("sandbox-second.toml"), &second).unwrap();
    service.process.signal("HUP");
    wait_until_async(async || known().await == 2).await;
    fs::write(&file, "name = 7").unwrap();
    service.process.signal("HUP");
    service.process.until(|output| output.contains("the old configuration stays in force"));
    assert_eq!(known().await, 2);
    setup.stop(service);
}

/// The service is not ready if no agent can run, so a load balancer sends no work.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_without_usable_agents_is_not_ready_and_says_why() {
    let agents = tempfile::tempdir().unwrap();
    let text = fs::read_to_string("config/agents/sandbox-agent.toml").unwrap();
    let text = text.replace("[env]", "image = \"no-such-image\"\n[env]");
    fs::write(agents.path().join("sandbox-agent.toml"), text).unwrap();
    let setup = ServiceSetup::new("").await;
    setup.write_config(&format!("agents_dir = {:?}", agents.path()));
    let service = setup.start();
    wait_until_async(async || setup.client().get("/readyz").await.json()["upstream"] == "ok").await;
    let ready = setup.client().get("/readyz").await;
    assert_eq!(ready.status, 503);
    insta::assert_snapshot!(ready.text(), @r#"{"ready":false,"checks":{"accepting":"ok","agents":"no agent can run here: it needs the image `no-such-image`, and the driver `embedded` knows no images","audit":"ok","database":"ok","forge":"no credential","queue":"ok","relay":"ok","run_dir":"ok","storage":"ok","upstream":"ok"},"upstream":"ok"}"#);
    setup.stop(service);
}

/// A3: TCP is served only with grants, or, if explicitly configured, without grants on a loopback address.
#[tokio::test(flavor = "multi_thread")]
async fn tcp_is_served_and_never_by_accident_without_grants() {
    let mut setup = ServiceSetup::new("").await;
    setup.set("COGNI_LISTEN", "127.0.0.1:0");
    let service = setup.start();
    assert!(get_path(&service, "/readyz").await.starts_with("HTTP/1.1 200 OK"));
    assert!(get_path(&service, "/api/v1/runs").await.starts_with("HTTP/1.1 401"));
    setup.stop(service);
    setup.write_config("insecure_no_auth = true");
    let open = setup.start();
    assert!(get_path(&open, "/api/v1/runs").await.starts_with("HTTP/1.1 200 OK"));
    setup.stop(open);
    let said = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
        .args(["serve", "--listen", "0.0.0.0:0", "--insecure-no-auth", "--litellm-host", "h:1"])
        .env_clear()
        .env("LITELLM_MASTER_KEY", "sk")
        .output()
        .unwrap();
    assert_eq!(said.status.code(), Some(2));
    insta::assert_snapshot!(String::from_utf8_lossy(&said.stderr), @"error: `serve.insecure_no_auth` is `true` and `serve.listen` is `0.0.0.0:0`; every client that reaches that address could run agents: listen on 127.0.0.1 or on a unix socket, or ask for grants");
}

/// Two services with one state directory would both start its runs.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_service_does_not_start() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    // A second service that opened the database would report this unknown version.
    let database = rusqlite::Connection::open(setup.state_dir().join("state.db")).unwrap();
    database.execute("UPDATE schema SET version = version + 1", []).unwrap();
    let elsewhere = format!("unix:{}/second.sock", setup.path().display());
    let mut second =
        ChildProcess::start(setup.command().env("COGNI_LISTEN", elsewhere), "build it");
    let status = tokio::task::block_in_place(|| second.wait());
    assert_eq!(status.code(), Some(2));
    let output = second.output().replace(setup.path().to_str().unwrap(), "[dir]");
    assert!(output.contains("another service has the state directory `[dir]/state`"), "{output}");
    setup.stop(service);
}

async fn get_path(service: &ServiceProcess, path: &str) -> String {
    let output = service.process.output();
    let address = output.split("address=").nth(1).unwrap().split_whitespace().next().unwrap();
    super::get_over_tcp(address, path).await
}

/// Files in the state directory belong to its owner, also if other users may enter the directory.
#[tokio::test(flavor = "multi_thread")]
async fn files_in_the_state_directory_belong_to_its_owner() {
    let setup = ServiceSetup::new("").await;
    fs::set_permissions(setup.state_dir(), Permissions::from_mode(0o755)).unwrap();
    let service = setup.start();
    let run = service.run(&run_body("fake")).await;
    service.ended(&run).await;
    for entry in fs::read_dir(setup.state_dir()).unwrap() {
        let path = entry.unwrap().path();
        // Every sandbox's user executes this file.
        if path.file_name().unwrap().to_string_lossy().starts_with("cogni-init") {
            continue;
        }
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o077;
        assert_eq!(mode, 0, "{}", path.display());
    }
    setup.stop(service);
}
