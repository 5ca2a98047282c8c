//! A4: Tests of request logging: the log, the metrics and the request's trace name the caller.

use std::fs;

use http::Method;
use serde_json::{Value, json};

use super::{run_body, wait_until_async};
use crate::support::client::build_request;
use crate::support::service::ServiceSetup;

/// The calls of a run are spans of the request that started it. A repeated request within another span is still the
/// same request.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_part_of_the_trace_that_it_is_asked_for_in() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let within = |span: &str| format!("00-0af7651916cd43dd8448eb211c80319c-{span}-01");
    let ask = async |span: &str| {
        let headers = [("idempotency-key", "job-7"), ("traceparent", &*within(span))];
        let body = run_body("fake").to_string();
        service.ask(Method::POST, "/api/v1/runs", &body, &headers).await
    };
    let first = ask("b7ad6b7169203331").await;
    let run = first.json()["id"].as_str().unwrap().to_owned();
    service.ended(&run).await;
    let log = fs::read_to_string(setup.audit_log(&run)).unwrap();
    assert!(log.contains("0af7651916cd43dd8448eb211c80319c"), "{log}");
    let again = ask("b7ad6b7169203332").await;
    assert_eq!((again.status.as_u16(), &again.json()["id"]), (200, &json!(run)));
    // An invalid header is ignored.
    let headers = [("traceparent", "00-0-0-00")];
    let odd = service.post_with("/api/v1/runs", &run_body("fake"), &headers).await;
    assert_eq!(odd.status, 201, "{}", odd.text());
    service.ended(odd.json()["id"].as_str().unwrap()).await;
    setup.stop(service);
}

/// Requests with wrong tokens are counted, too; no token is logged.
#[tokio::test(flavor = "multi_thread")]
async fn each_request_is_logged_and_counted_with_its_caller() {
    let setup = ServiceSetup::new("").await;
    setup.write_config("[metrics]\naddress = \"127.0.0.1:0\"");
    let mut service = setup.start();
    let run = service.run(&run_body("fake/gate=1")).await;
    let (ended, other) = (format!("/api/v1/runs/{run}/cancel"), setup.grant(&[]));
    assert_eq!(other.ask(Method::POST, &ended, "", &[]).await.status, 404);
    assert_eq!(service.ask(Method::POST, &ended, "", &[]).await.status, 202);
    service.ended(&run).await;
    let wrong = [("authorization", "Bearer cgr_wrong")];
    let refused = setup.client().send(build_request(Method::GET, "/api/v1/runs", "", &wrong)).await;
    assert_eq!(refused.status, 401);
    assert_eq!(setup.client().get("/healthz").await.status, 200);

    let id = refused.header("x-request-id").unwrap();
    tokio::task::block_in_place(|| service.process.until(|output| output.contains(id)));
    let printed = service.process.output();
    let line = |text: &str| printed.lines().find(|line| line.contains(text)).unwrap_or_default();
    let cancelled = line("cancelled by a grant");
    assert!(cancelled.contains(&run) && cancelled.contains(&service.id), "{printed}");
    assert!(line(id).contains("status=401"), "{printed}");
    assert!(printed.lines().any(|line| line.contains(&other.id) && line.contains("status=404")));
    assert!(!printed.contains("healthz") && !printed.contains("cgr_"), "{printed}");
    let scraped = select_lines(&printed).await;
    for series in [
        "cogni_gateway_api_requests_total{route=\"/api/v1/runs\",status=\"401\"} 1",
        "cogni_gateway_api_requests_total{route=\"/api/v1/runs/{id}/cancel\",status=\"202\"} 1",
        "cogni_gateway_api_requests_total{route=\"/healthz\",status=\"200\"} 1",
    ] {
        assert!(scraped.contains(series), "{series} is not in {scraped}");
    }
    setup.stop(service);
}

/// G12: A service shows its places, its queue, its upstream, its work and its disks.
#[tokio::test(flavor = "multi_thread")]
async fn a_scrape_shows_the_state_of_the_service() {
    let setup = ServiceSetup::new("").await;
    setup.write_config("[metrics]\naddress = \"127.0.0.1:0\"");
    setup.set_max_runs(3);
    let service = setup.start();
    wait_until_async(async || service.get("/readyz").await.json()["upstream"] == "ok").await;
    let scraped = select_lines(&service.process.output()).await;
    for series in [
        "cogni_gateway_places 3",
        "cogni_gateway_places_taken 0",
        "cogni_gateway_queued_runs 0",
        "cogni_gateway_queue_oldest_wait_seconds 0",
        &format!("cogni_gateway_upstream_up{{host=\"{}\"}} 1", setup.provider.addr),
        "cogni_gateway_undelivered_works 0",
        "cogni_gateway_undelivered_oldest_age_seconds 0",
        "cogni_gateway_kept_works 0",
        "cogni_gateway_kept_limit_works 5000",
        "cogni_gateway_kept_bytes 0",
        "cogni_gateway_kept_limit_bytes 137438953472",
    ] {
        assert!(scraped.lines().any(|line| line == series), "{series} is not in {scraped}");
    }
    let read = |family: &str, directory: &str| {
        let prefix = format!("cogni_gateway_disk_{family}_bytes{{directory=\"{directory}\"}} ");
        let value = scraped.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap();
        value.parse::<f64>().unwrap()
    };
    for directory in ["run", "state"] {
        let (free, size) = (read("free", directory), read("size", directory));
        assert!(0.0 < free && free < size, "{directory}: {free} of {size}");
    }
    setup.stop(service);
}

/// G12: The line of a request about a run names the run, and has its time as a number. A request that names a run that the
/// caller cannot see, or no run, has no `run`.
#[tokio::test(flavor = "multi_thread")]
async fn the_line_of_a_request_names_its_run() {
    let mut setup = ServiceSetup::new("").await;
    setup.set("LOG_FORMAT", "json");
    let mut service = setup.start();
    let begun = service.post_with("/api/v1/runs", &run_body("fake"), &[]).await;
    let run = begun.json()["id"].as_str().unwrap().to_owned();
    service.ended(&run).await;
    let chat = json!({"graphName": "sandbox:agent", "model": "fake", "messages": [{"role": "user", "content": "hi"}]});
    let chat = service.post_with("/api/v1/ai/chat", &chat, &[]).await;
    let other = setup.grant(&[]);
    let path = format!("/api/v1/runs/{run}");
    let hidden = other.ask(Method::GET, &path, "", &[]).await;
    let listed = service.ask(Method::GET, &format!("/api/v1/runs?cursor={run}"), "", &[]).await;
    assert_eq!((hidden.status.as_u16(), listed.status.as_u16()), (404, 200));
    let mut expected = vec![
        (begun.header("x-request-id").unwrap().to_owned(), json!(run)),
        (chat.header("x-request-id").unwrap().to_owned(), json!(chat.header("x-run-id").unwrap())),
        (hidden.header("x-request-id").unwrap().to_owned(), json!(null)),
        (listed.header("x-request-id").unwrap().to_owned(), json!(null)),
    ];
    for record in ["", "/output", "/audit", "/relay", "/artifacts", "/receipts", "/events"] {
        let read = service.ask(Method::GET, &format!("{path}{record}"), "", &[]).await;
        assert_eq!(read.status, 200, "{record}: {}", read.text());
        expected.push((read.header("x-request-id").unwrap().to_owned(), json!(run)));
    }
    let last = expected.last().unwrap().0.clone();
    tokio::task::block_in_place(|| service.process.until(|output| output.contains(&last)));
    let printed = service.process.output();
    for (id, run) in expected {
        let line = printed.lines().find(|line| line.contains(&id) && line.contains("answered"));
        let line: Value = serde_json::from_str(line.unwrap()).unwrap();
        assert_eq!(line["run"], run, "{line}");
        assert!(line["elapsed_ms"].is_u64() && line["status"].is_u64(), "{line}");
    }
    setup.stop(service);
}

async fn select_lines(text: &str) -> String {
    let address = text.split("metrics=").nth(1).and_then(|rest| rest.split_whitespace().next());
    super::get_over_tcp(address.unwrap(), "/metrics").await
}
