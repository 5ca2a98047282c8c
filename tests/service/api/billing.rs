//! A4, B2, B4: Tests of billing over HTTP: LiteLLM's charge notices, and the list of runs that need an operator's
//! attention.

use std::fs;

use futures_util::future::join_all;
use http::Method;
use serde_json::{Value, json};

use super::run_body;
use crate::support::service::ServiceSetup;

/// B2, G4: LiteLLM receives the id of the gateway's billing store with each call, whatever the client claims. Notices
/// for another store are not accepted.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_names_its_billing_store() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let mut body = run_body("fake");
    body["metadata"] = json!({"team": "ads"});
    let run = service.run(&body).await;
    assert_eq!(service.ended(&run).await["error_code"], Value::Null);
    let call = setup.provider.seen.last_request().unwrap();
    let metadata: Value =
        serde_json::from_str(call.header("x-litellm-spend-logs-metadata").unwrap()).unwrap();
    let deployment_id = setup.books().deployment_id().await.unwrap();
    assert_eq!(
        (&metadata["run_id"], &metadata["cogni_deployment_id"]),
        (&json!(run), &json!(deployment_id))
    );

    let item = |call: &str, deployment: &str| {
        let whose = json!({"run_id": run, "cogni_deployment_id": deployment});
        json!({"litellm_call_id": call, "status": "success", "response_cost": 0.000_05, "startTime": 1_795_339_851.781,
               "endTime": 1_795_339_851.847, "metadata": {"spend_logs_metadata": whose}})
    };
    let call = call.header("x-litellm-call-id").unwrap();
    let items = json!([item(call, &deployment_id), item("of-another", "another")]);
    let answer = service.post("/api/internal/billing/ingest", &items).await;
    let metadata = answer.json();
    assert_eq!(
        (&metadata["new"], &metadata["unknown"], &metadata["foreign"]),
        (&json!(1), &json!(0), &json!(1))
    );
    setup.stop(service);
}

/// B4: Only an admin can list the runs with calls without a receipt, page by page.
#[tokio::test(flavor = "multi_thread")]
async fn flagged_runs_are_listed() {
    let setup = ServiceSetup::new("").await;
    setup.write_config("receipt_bound = \"1ms\"");
    let service = setup.start();
    let mut runs = vec![];
    for _ in 0..2 {
        let run = service.run(&run_body("fake")).await;
        service.ended(&run).await;
        runs.push(run);
    }
    let flagged =
        async |more: &str| service.get(&format!("/api/v1/billing/flagged{more}")).await.json();
    super::wait_until_async(async || flagged("").await["runs"].as_array().unwrap().len() == 2)
        .await;
    let first = flagged("?limit=1").await;
    assert_eq!((&first["runs"][0]["run"], &first["next"]), (&json!(runs[0]), &json!(runs[0])));
    assert_eq!(first["runs"][0]["flags"], json!(["unreceipted"]));
    let second = flagged(&format!("?limit=1&cursor={}", runs[0])).await;
    assert_eq!((&second["runs"][0]["run"], &second["next"]), (&json!(runs[1]), &Value::Null));
    let ordinary = setup.grant(&[]);
    assert_eq!(ordinary.get("/api/v1/billing/flagged").await.status, 403);
    assert_eq!(service.get("/api/v1/billing/flagged?limit=0").await.status, 400);
    setup.stop(service);
}

/// B2, G15: Many concurrent reports of the maximum size take the memory of a few, and health checks are answered
/// meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn large_reports_cost_bounded_memory() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let body = format!("{{\"messages\":[{}0]}}", "0,".repeat((16 << 20) / 2 - 10));
    let before = peak_kib(service.process.id());
    let mut healthy = 0;
    {
        let report = async || {
            let headers = [("content-type", "application/json")];
            let path = "/api/internal/billing/ingest";
            let answer = service.ask(Method::POST, path, &body, &headers).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert_eq!(answer.json()["invalid"], json!(1));
        };
        let mut reports = std::pin::pin!(join_all((0..6).map(|_| report())));
        loop {
            tokio::select! {
                biased;
                _ = reports.as_mut() => break,
                answer = async { setup.client().get("/healthz").await } => {
                    assert_eq!(answer.status, 200);
                    healthy += 1;
                }
            }
        }
    }
    assert!(healthy >= 6, "the service answers between reports only");
    let grown = peak_kib(service.process.id()) - before;
    assert!(grown < 4 * 2 * 16 * 1024, "{grown} KiB");
    setup.stop(service);
}

/// Returns the peak memory of a process.
fn peak_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
