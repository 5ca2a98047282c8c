//! G9, A3: Tests of the total cost of a grant's runs over time.

use std::time::{Duration, SystemTime};

use cogni_gateway::llm::budget::Nanodollars;
use serde_json::{Value, json};

use super::run_body;
use crate::support::service::{MintedGrant, ServiceSetup};

/// Starts a service whose model costs money and waits until the test lets it answer.
async fn start_service() -> ServiceSetup {
    let setup = ServiceSetup::new("gate=1").await;
    setup.write_config("[prices]\nunknown = { input = \"3\", output = \"15\" }");
    setup
}

/// Returns a grant's costs, as the command line prints them.
fn grant_costs(setup: &ServiceSetup, grant: &MintedGrant) -> Value {
    let shown: Value = serde_json::from_str(&setup.cogni(&["grant", "show", &grant.id])).unwrap();
    shown["money"].clone()
}

fn parse_dollars(value: &Value) -> Nanodollars {
    Nanodollars::parse(value.as_str().unwrap()).unwrap()
}

/// A run without its own limit may cost what remains of the grant; the next run is refused until the first has ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_spends_no_more_than_its_caps() {
    let setup = start_service().await;
    let service = setup.start();
    let grant = setup.grant(&["--max-cost-usd-total", "2", "--max-cost-usd-per-day", "1"]);
    let run = grant.run(&run_body("fake/gate=1")).await;
    let reserved = grant_costs(&setup, &grant);
    assert_eq!(reserved["today"]["reserved_usd"], "1", "{reserved}");
    assert_eq!(reserved["today"]["left_usd"], "0", "{reserved}");
    assert_eq!(reserved["total"]["left_usd"], "1", "{reserved}");
    let refused = grant.post("/api/v1/runs", &run_body("fake/gate=1")).await;
    assert_eq!(refused.status, 402, "{}", refused.text());
    let error = &refused.json()["error"];
    assert_eq!(error["code"], "grant_budget_exhausted");
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with("the grant's budget of $1 for one day (UTC) is exhausted: $0 are charged, and $1 are reserved"), "{message}");
    let tomorrow = humantime::parse_rfc3339(reserved["day_ends"].as_str().unwrap()).unwrap();
    let left = tomorrow.duration_since(SystemTime::now()).unwrap();
    let after: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!(Duration::from_secs(after) + Duration::from_mins(1) >= left, "{after} {left:?}");

    setup.provider.gate.allow_answers(1);
    assert_eq!(grant.ended(&run).await["error_code"], Value::Null);
    let facts = setup.books().calls_of_run(&run).await.unwrap();
    let cost = facts.iter().fold(Nanodollars::ZERO, |sum, fact| sum + fact.cost);
    let settled = grant_costs(&setup, &grant);
    assert!(
        !cost.is_zero() && parse_dollars(&settled["total"]["charged_usd"]) == cost,
        "{settled}"
    );
    assert_eq!(settled["total"]["reserved_usd"], "0", "{settled}");
    let status = run_status(&grant, &setup, "0.25").await;
    assert_eq!(status, Value::Null, "a run that asks for less leaves the rest to others");
    setup.stop(service);
}

/// Makes a run with its own limit; returns its error.
async fn run_status(grant: &MintedGrant, setup: &ServiceSetup, limit: &str) -> Value {
    let mut body = run_body("fake/gate=1");
    body["budget"] = json!({"max_cost_usd": limit});
    let run = grant.run(&body).await;
    assert_eq!(grant_costs(setup, grant)["today"]["reserved_usd"], limit);
    setup.provider.gate.allow_answers(1);
    grant.ended(&run).await["error_code"].clone()
}

/// A run's reservation survives a crash, and its charges count after the next process has ended it.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_does_not_refund_costs() {
    let setup = start_service().await;
    let mut service = setup.start();
    let grant = setup.grant(&["--max-cost-usd-total", "1"]);
    let run = grant.run(&run_body("fake/gate=1")).await;
    setup.provider.gate.wait_for_waiting(1).await;
    service.process.signal("KILL");
    service.process.wait();
    assert_eq!(grant_costs(&setup, &grant)["total"]["reserved_usd"], "1");
    setup.provider.gate.allow_answers(1);
    let service = setup.start();
    assert_eq!(grant.ended(&run).await["error_code"], "interrupted");
    let facts = setup.books().calls_of_run(&run).await.unwrap();
    let cost = facts.iter().fold(Nanodollars::ZERO, |sum, fact| sum + fact.cost);
    let settled = grant_costs(&setup, &grant);
    assert!(
        !cost.is_zero() && parse_dollars(&settled["total"]["charged_usd"]) == cost,
        "{settled}"
    );
    assert_eq!(settled["total"]["reserved_usd"], "0", "{settled}");
    assert_eq!(settled["today"], Value::Null, "{settled}");
    setup.stop(service);
}
