//! S1, A3: Tests of the queue: runs beyond the places wait, in their order and fairly, and outlive their process.

use futures_util::future::join_all;
use serde_json::{Value, json};

use super::events::{assert_once, event_kinds, read_until};
use super::{ServiceSetup, conversation_body};
use crate::support::client::ResponseStream;
use crate::support::service::{MintedGrant, ServiceProcess, chat_body, parse_events};

/// S1: A hundred requests at once are all accepted, and all runs end well, in a service with few places.
#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_runs_at_once_all_end() {
    let place = ServiceSetup::new("").await;
    place.set_max_runs(8);
    let service = place.start();
    let asked = (0..100).map(|number| {
        let (service, body) = (&service, conversation_body(&format!("I am number {number}")));
        async move { service.run(&body).await }
    });
    let runs = join_all(asked).await;
    for row in join_all(runs.iter().map(|run| service.ended(run))).await {
        assert_eq!((&row["error_code"], &row["queue_position"]), (&Value::Null, &Value::Null));
    }
    for told in join_all(runs.iter().map(|run| service.events(run))).await {
        assert_once(&told);
        let positions = told.iter().filter(|event| event.kind == "queued").count();
        assert!(positions <= 8, "{positions} positions are a flood");
    }
    place.stop(service);
}

/// A3: Two grants take turns, however many runs one of them has; the position says so.
#[tokio::test(flavor = "multi_thread")]
async fn two_grants_take_turns() {
    let place = ServiceSetup::new("gate=head").await;
    place.set_max_runs(1);
    let service = place.start();
    let (busy, other) = (place.grant(&[]), place.grant(&[]));
    busy.run(&conversation_body("busy 0")).await;
    place.provider.gate.wait_for_waiting(1).await;
    let mut waiting = vec![];
    for number in 1..=4 {
        waiting.push(busy.run(&conversation_body(&format!("busy {number}"))).await);
    }
    for number in 1..=2 {
        waiting.push(other.run(&conversation_body(&format!("other {number}"))).await);
    }
    let mut positions = vec![];
    for (index, run) in waiting.iter().enumerate() {
        let grant = if index < 4 { &busy } else { &other };
        let row = grant.get(&format!("/api/v1/runs/{run}")).await.json();
        assert_eq!((&row["state"], &row["started_at"]), (&json!("queued"), &Value::Null), "{row}");
        positions.push(row["queue_position"].as_u64().unwrap());
    }
    assert_eq!(positions, [1, 3, 5, 6, 2, 4]);
    let listed = busy.get("/api/v1/runs?state=queued").await.json();
    let listed: Vec<_> = listed["runs"].as_array().unwrap().iter().collect();
    let shown: Vec<_> = listed.iter().map(|run| run["queue_position"].as_u64()).collect();
    assert_eq!(shown, [Some(6), Some(5), Some(3), Some(1)]);
    place.provider.gate.allow_answers(1000);
    for (index, run) in waiting.iter().enumerate() {
        let grant = if index < 4 { &busy } else { &other };
        assert_eq!(grant.ended(run).await["error_code"], Value::Null);
    }
    let expected = ["busy 0", "busy 1", "other 1", "busy 2", "other 2", "busy 3", "busy 4"];
    assert_eq!(asked_texts(&place), expected);
    place.stop(service);
}

/// A3: A grant's own maximum of running runs lets its further runs wait, and holds up no other grant.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_has_no_more_runs_at_once_than_it_may() {
    let place = ServiceSetup::new("gate=head").await;
    let service = place.start();
    let (bound, other) = (place.grant(&["--max-runs", "1"]), place.grant(&[]));
    let first = bound.run(&conversation_body("bound 1")).await;
    let second = bound.run(&conversation_body("bound 2")).await;
    let free = other.run(&conversation_body("other")).await;
    place.provider.gate.wait_for_waiting(2).await;
    let state = async |grant: &MintedGrant, run: &str| {
        grant.get(&format!("/api/v1/runs/{run}")).await.json()["state"].clone()
    };
    assert_eq!(state(&bound, &first).await, "running");
    assert_eq!(state(&bound, &second).await, "queued");
    assert_eq!(state(&other, &free).await, "running");
    place.provider.gate.allow_answers(1000);
    for (grant, run) in [(&bound, &first), (&bound, &second), (&other, &free)] {
        assert_eq!(grant.ended(run).await["error_code"], Value::Null);
    }
    place.stop(service);
}

/// A3: A full queue refuses a run and stores nothing; one grant cannot fill the queue of the others.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses_a_run() {
    let place = ServiceSetup::new("gate=head").await;
    place.write_config("max_queued_runs = 2\nmax_queued_runs_per_grant = 1");
    place.set_max_runs(1);
    let service = place.start();
    let (busy, other, third) = (place.grant(&[]), place.grant(&[]), place.grant(&[]));
    let impatient = place.grant(&["--max-queued-runs", "0"]);
    let mut runs = vec![(&busy, busy.run(&conversation_body("1")).await)];
    place.provider.gate.wait_for_waiting(1).await;
    runs.push((&busy, busy.run(&conversation_body("2")).await));
    let refused = busy.post("/api/v1/runs", &conversation_body("3")).await;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (429, Some("10")));
    insta::assert_snapshot!(refused.text(), @r#"{"error":{"code":"queue_full","message":"1 runs of this grant wait for a place, and no more of its runs may wait; try again when some of them have begun"}}"#);
    let refused = impatient.post("/api/v1/runs", &conversation_body("4")).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.json()["error"]["code"]),
        (429, &json!("queue_full"))
    );
    runs.push((&other, other.run(&conversation_body("5")).await));
    let refused = third.post("/api/v1/ai/chat", &chat_body("6")).await;
    assert_eq!(refused.status, 429);
    insta::assert_snapshot!(refused.text(), @r#"{"error":{"code":"queue_full","message":"2 runs of this service wait for a place, and no more may wait; try again when some of them have begun"}}"#);
    let listed = service.get("/api/v1/runs").await.json();
    assert_eq!(listed["runs"].as_array().unwrap().len(), 3, "{listed}");
    let ready = service.get("/readyz").await;
    assert_eq!(
        (ready.status.as_u16(), ready.json()["checks"]["queue"].as_str()),
        (200, Some("full: 2 runs wait, and new runs are refused"))
    );
    place.provider.gate.allow_answers(1000);
    for (grant, run) in runs {
        assert_eq!(grant.ended(&run).await["error_code"], Value::Null);
    }
    let again = third.run(&conversation_body("7")).await;
    assert_eq!(third.ended(&again).await["error_code"], Value::Null);
    place.stop(service);
}

/// A5, R5: Queued runs outlive a killed process, and begin in their order in the next one.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_keeps_the_order_of_the_queue() {
    let place = ServiceSetup::new("gate=head").await;
    place.set_max_runs(1);
    let mut service = place.start();
    let begun = service.run(&conversation_body("0")).await;
    place.provider.gate.wait_for_waiting(1).await;
    let mut waiting = vec![];
    for number in 1..=5 {
        waiting.push(service.run(&conversation_body(&number.to_string())).await);
    }
    service.process.signal("KILL");
    tokio::task::block_in_place(|| service.process.wait());
    place.provider.gate.allow_answers(1000);
    let service = place.start();
    assert_eq!(service.ended(&begun).await["error_code"], "interrupted");
    for run in &waiting {
        assert_eq!(service.ended(run).await["error_code"], Value::Null);
        assert_once(&service.events(run).await);
    }
    assert_eq!(asked_texts(&place), ["0", "1", "2", "3", "4", "5"]);
    place.stop(service);
}

/// A2, A3: A queued run ends when it is cancelled, when its grant is revoked, when its chat's client leaves, and when it
/// has waited as long as it may. None of them costs anything.
#[tokio::test(flavor = "multi_thread")]
async fn a_queued_run_ends_without_having_begun() {
    let place = ServiceSetup::new("gate=head").await;
    place.set_max_runs(1);
    let service = place.start();
    let revoked = place.grant(&[]);
    let begun = service.run(&conversation_body("begun")).await;
    place.provider.gate.wait_for_waiting(1).await;
    let cancelled = service.run(&conversation_body("cancelled")).await;
    let of_revoked = revoked.run(&conversation_body("revoked")).await;
    let mut left = service.open("/api/v1/ai/chat", &chat_body("left")).await;
    let of_left = run_of(&left);
    assert!(read_until(&mut left, "queued").await.contains("\"position\":"));
    drop(left);
    service.post(&format!("/api/v1/runs/{cancelled}/cancel"), &json!({})).await;
    place.cogni(&["grant", "revoke", &revoked.id]);
    for (run, code) in
        [(&cancelled, "cancelled"), (&of_revoked, "grant_revoked"), (&of_left, "cancelled")]
    {
        let row = service.ended(run).await;
        assert_eq!((&row["error_code"], &row["started_at"]), (&json!(code), &Value::Null), "{row}");
        let told = service.events(run).await;
        let kinds = event_kinds(&told);
        assert_eq!(
            (kinds[0], &kinds[kinds.len() - 3..]),
            ("queued", &["error", "done", "final"][..])
        );
        assert_eq!(place.books().run_bill(run).await.unwrap().calls, 0);
    }
    place.provider.gate.allow_answers(1);
    assert_eq!(service.ended(&begun).await["error_code"], Value::Null);
    place.stop(service);
}

/// A run that has waited as long as it may ends, and says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_waits_no_longer_than_it_may() {
    let place = ServiceSetup::new("gate=head").await;
    place.write_config("max_queue_wait = \"1s\"");
    place.set_max_runs(1);
    let service = place.start();
    let begun = service.run(&conversation_body("begun")).await;
    place.provider.gate.wait_for_waiting(1).await;
    let waiting = service.run(&conversation_body("waiting")).await;
    let row = service.ended(&waiting).await;
    assert_eq!(row["error_code"], "queue_timeout");
    insta::assert_snapshot!(row["result"]["error"].as_str().unwrap(), @"the run waited 1s for a place, which is as long as this service lets a run wait; try again later");
    place.provider.gate.allow_answers(1);
    assert_eq!(service.ended(&begun).await["error_code"], Value::Null);
    place.stop(service);
}

/// A2: A chat waits for its place like any run: its stream tells the position, and then the run.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_waits_in_the_queue() {
    let place = ServiceSetup::new("gate=head").await;
    place.set_max_runs(1);
    let service = place.start();
    let first = service.run(&conversation_body("first")).await;
    place.provider.gate.wait_for_waiting(1).await;
    let mut stream = service.open("/api/v1/ai/chat", &chat_body("second")).await;
    let run = run_of(&stream);
    let text = read_until(&mut stream, "queued").await;
    let shown = runs_command(&place, &service, &["show", &run]);
    assert!(shown.contains("state       queued #1\n"), "{shown}");
    let listed = runs_command(&place, &service, &["list", "--state", "queued"]);
    assert!(listed.contains("queued #1 "), "{listed}");
    place.provider.gate.allow_answers(2);
    let (rest, is_whole) = stream.rest().await;
    let told = parse_events(&(text + &rest));
    assert!(is_whole);
    assert_eq!(event_kinds(&told)[..2], ["queued", "run_started"]);
    assert_eq!(
        (&told[0].data, told.last().unwrap().kind.as_str()),
        (&json!({"run": run, "position": 1}), "final")
    );
    let watched = runs_command(&place, &service, &["watch", &run]);
    assert!(
        watched.starts_with(&format!("run {run}: waits for a place, position 1 in the queue\n")),
        "{watched}"
    );
    assert_eq!(service.ended(&first).await["error_code"], Value::Null);
    place.stop(service);
}

fn run_of(stream: &ResponseStream) -> String {
    stream.headers["x-run-id"].to_str().unwrap().to_owned()
}

/// Returns the texts that the provider was asked, in their order.
fn asked_texts(place: &ServiceSetup) -> Vec<String> {
    let requests = place.provider.seen.requests().into_iter();
    let bodies = requests.filter_map(|request| request.body);
    let texts = bodies.filter_map(|body| {
        let messages = body["messages"].as_array()?;
        let user = messages.iter().rev().find(|message| message["role"] == "user")?;
        user["content"].as_str().map(str::to_owned)
    });
    texts.collect()
}

fn runs_command(place: &ServiceSetup, service: &ServiceProcess, arguments: &[&str]) -> String {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
    let socket = format!("unix:{}", place.path().join("api.sock").display());
    let command = command.arg("runs").args(arguments).args(["--service", &socket]);
    command.env_clear().env("COGNI_TOKEN", &service.token);
    let output = tokio::task::block_in_place(|| command.output()).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
