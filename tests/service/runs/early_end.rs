//! A4, G11, G12: Tests of early ends: a run that cannot begin is closed, and the last spans of a process are sent.

use std::fs;
use std::net::TcpListener;

use cogni_gateway::runner::agents;
use http::{Method, StatusCode};
use rusqlite::Connection;
use serde_json::json;

use super::{ServiceSetup, conversation_body};
use crate::support::github_server;
use crate::support::process::{list_gits, wait_until};
use crate::support::trace_collector::TraceCollector;

/// G11: The run's gateway was open when the next step failed. Its log is complete and proved like any other.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_cannot_begin_has_a_log_that_is_closed() {
    let mut setup = ServiceSetup::new("").await;
    let github = github_server::RunningGithub::start().await;
    setup.set("GITHUB_API_URL", github.hub.url());
    setup.set("GITHUB_TOKEN", github_server::TOKEN);
    let agents = setup.path().join("agents");
    fs::create_dir(&agents).unwrap();
    let entry = agents::builtin_file("sandbox:agent").unwrap();
    let long_running = "name = \"sandbox:kept\"\nmode = \"long_running\"";
    let long_running = entry.replace("name = \"sandbox:agent\"", long_running);
    fs::write(agents.join("sandbox-agent.toml"), entry).unwrap();
    fs::write(agents.join("sandbox-kept.toml"), long_running).unwrap();
    setup.write_config(&format!("agents_dir = \"{}\"", agents.display()));
    let service = setup.start();
    let outbox = Connection::open(setup.state_dir().join("outbox.sqlite")).unwrap();
    let full =
        "CREATE TRIGGER full BEFORE INSERT ON desk BEGIN SELECT RAISE(ABORT, 'it is full'); END";
    outbox.execute_batch(full).unwrap();
    for agent in ["sandbox:agent", "sandbox:kept"] {
        let mut body = conversation_body("work");
        body["agent"] = json!(agent);
        body["repo"] = json!(github.clone_url());
        body["branch_key"] = json!(agent.replace(':', "-"));
        let run = service.run(&body).await;
        let row = service.ended(&run).await;
        assert_eq!(row["error_code"], "internal", "{row}");
        assert!(row["result"]["error"].to_string().contains("it is full"), "{row}");
        let proof = service.get(&format!("/api/v1/runs/{run}/audit")).await.json();
        assert_eq!(json!([proof["verified"], proof["finished"]]), json!([true, true]), "{proof}");
    }
    setup.stop(service);
}

/// L4, L6, A3: The places of runs bound the gits that talk to remotes: a cancelled run ends when its gits have ended and its
/// branch is free.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_run_leaves_no_git_and_no_leased_branch() {
    let setup = ServiceSetup::new("").await;
    // The kernel accepts git's connections, and no program answers them.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let remote = format!("http://{}/", silent.local_addr().unwrap());
    let service = setup.start();
    let grant = setup.grant(&["--max-runs", "1", "--repo", &format!("{remote}*")]);
    let gits = || list_gits(&setup.state_dir());
    for _ in 0..3 {
        let mut body = conversation_body("work");
        body["repo"] = json!(format!("{remote}o/site.git"));
        body["branch_key"] = json!("one");
        let run = grant.run(&body).await;
        let told = || format!("no git has begun: {}", service.process.output());
        tokio::task::block_in_place(|| wait_until(|| gits().len() >= 2, told));
        let cancel = format!("/api/v1/runs/{run}/cancel");
        assert_eq!(grant.ask(Method::POST, &cancel, "", &[]).await.status, 202);
        let row = grant.ended(&run).await;
        assert_eq!(row["error_code"], "cancelled", "{row}");
        assert_eq!(gits(), [""; 0]);
    }
    setup.stop(service);
}

/// G12: The spans of a run that ends with its service are sent, too.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_spans_of_a_service_are_sent() {
    let collector = TraceCollector::start(StatusCode::OK).await;
    let mut setup = ServiceSetup::new("").await;
    let endpoint = format!("http://{}", collector.address);
    setup.set("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint);
    setup.write_config("drain_timeout = \"0s\"");
    let service = setup.start();
    let mut body = conversation_body("hello");
    body["model"] = json!("fake/gate=1");
    service.run(&body).await;
    setup.provider.gate.wait_for_waiting(1).await;
    setup.stop(service);
    setup.provider.gate.allow_answers(1);
    let spans = collector.seen().spans();
    let names: Vec<_> = spans.iter().map(|span| &*span.name).collect();
    assert!(names.contains(&"run"), "{names:?}");
}
