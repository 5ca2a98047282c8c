//! A2, A4, L7: Tests of a run's events: a watcher gets every event once and in order, whether the run, the client or
//! the service ends first.

mod agent_failures;
mod queued_runs;

use bytes::Bytes;
use cogni_gateway::fakes::github_server::{GithubOperation, InjectedFailure};
use http::{Request, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};

use super::{ServiceSetup, conversation_body};
use crate::support::client::ResponseStream;
use crate::support::github_server;
use crate::support::process::pause_for;
use crate::support::service::{ServiceProcess, SseEvent, parse_events, tool_call_script};

/// A service with a GitHub stand-in, and an agent that commits.
struct EventWork {
    place: ServiceSetup,
    forge: github_server::RunningGithub,
}

impl EventWork {
    async fn new() -> Self {
        let commit = "echo made > made && git add made && git commit --quiet --message=Make";
        let mut setup = ServiceSetup::new(&tool_call_script(commit)).await;
        let github = github_server::RunningGithub::start().await;
        setup.set("GITHUB_API_URL", github.hub.url());
        setup.set("GITHUB_TOKEN", github_server::TOKEN);
        Self { place: setup, forge: github }
    }

    fn asked(&self, key: &str) -> Value {
        let mut body = conversation_body("work");
        body["repo"] = json!(self.forge.clone_url());
        body["branch_key"] = json!(key);
        body["pull_request"] = json!(true);
        body
    }

    /// Starts a run whose agent has answered, and whose delivery waits for GitHub.
    async fn held(&self, service: &ServiceProcess, operation: GithubOperation) -> String {
        self.forge.hub.inject(operation, InjectedFailure::HoldBefore, 1);
        let run = service.run(&self.asked("task-2")).await;
        self.forge.hub.response_gate().wait_for_waiting(1).await;
        run
    }
}

/// The answer is available as soon as the agent has ended. The delivery follows, and a cancel has no effect on it.
#[tokio::test(flavor = "multi_thread")]
async fn the_answer_does_not_wait_for_the_branch() {
    let work = EventWork::new().await;
    let mut service = work.place.start();
    let run = work.held(&service, GithubOperation::Push).await;
    let mut watched = watch_run(&service, &run, None).await;
    let text = read_until(&mut watched, "assistant_final").await;
    let cancelled = service.post(&format!("/api/v1/runs/{run}/cancel"), &json!({})).await;
    assert_eq!(
        (cancelled.status, &cancelled.json()["state"]),
        (StatusCode::ACCEPTED, &json!("running"))
    );
    work.forge.hub.response_gate().allow_answers(1);
    let (rest, in_order) = watched.rest().await;
    assert!(in_order);
    let events = parse_events(&(text + &rest));
    let kinds = event_kinds(&events);
    assert_eq!(kinds[kinds.len() - 3..], ["assistant_final", "done", "final"], "{kinds:?}");
    assert_eq!(kinds.iter().filter(|kind| **kind == "usage_report").count(), 2, "{kinds:?}");
    let end = &events.last().unwrap().data;
    assert_eq!((&end["ok"], &end["relay"]["is_pushed"]), (&json!(true), &json!(true)), "{end}");
    service.process.terminate();
    work.place.assert_nothing_is_left();
}

/// The service is killed during the push or the pull request. The next process finishes the delivery and then reports
/// it once. Watchers continue where they were.
#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_run_ends_when_its_work_is_delivered() {
    for operation in [GithubOperation::Push, GithubOperation::CreatePull] {
        let work = EventWork::new().await;
        let mut service = work.place.start();
        let run = work.held(&service, operation).await;
        let mut watched = watch_run(&service, &run, None).await;
        let before = parse_events(&read_until(&mut watched, "assistant_final").await);
        service.process.signal("KILL");
        service.process.wait();
        let mut service = work.place.start();
        let last = before.last().unwrap().seq.to_string();
        let mut again = watch_run(&service, &run, Some(&last)).await;
        let after = parse_events(&read_until(&mut again, "final").await);
        assert_eq!(event_kinds(&after), ["error", "done", "final"], "{operation:?}");
        let end = &after.last().unwrap().data;
        let facts = ["error_code", "ok"].map(|fact| &end[fact]);
        assert_eq!(facts, [&json!("interrupted"), &json!(false)], "{end}");
        let relay = ["branch", "step", "verdict", "is_pushed"].map(|fact| &end["relay"][fact]);
        insta::allow_duplicates! {
            insta::assert_compact_json_snapshot!(relay, @r#"["sandbox/task-2", "done", "push", true]"#);
        }
        // The git process of the killed service fails.
        work.forge.hub.response_gate().allow_answers(1);
        let pulls = work.forge.hub.pulls(github_server::NAME);
        let urls: Vec<_> = pulls.iter().map(|pull| pull.head.as_str()).collect();
        assert_eq!(urls, ["sandbox/task-2"], "{operation:?}");
        assert!(end["relay"]["pull_request_url"].is_string(), "{end}");
        assert!(end["relay"]["head"].is_string(), "{end}");
        assert_once(&service.events(&run).await);
        let row = service.get(&format!("/api/v1/runs/{run}")).await.json();
        assert_eq!(&row["result"], end);
        service.process.terminate();
        work.place.assert_nothing_is_left();
    }
}

/// The service does not wait for a faulty GitHub after the crash: the run ends with what is known, and the delivery is
/// retried later, as the run's result says.
#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_run_does_not_wait_for_a_faulty_github() {
    let work = EventWork::new().await;
    let mut service = work.place.start();
    let run = work.held(&service, GithubOperation::Push).await;
    service.process.signal("KILL");
    service.process.wait();
    work.forge.hub.inject(
        GithubOperation::Branch,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        1000,
    );
    let mut service = work.place.start();
    let row = service.ended(&run).await;
    let relay = &row["result"]["relay"];
    assert_eq!((&row["error_code"], &relay["is_pushed"]), (&json!("interrupted"), &json!(false)));
    assert!(relay["why"].as_str().is_some_and(|why| why.contains("502")), "{relay}");
    let now = &service.get(&format!("/api/v1/runs/{run}/relay")).await.json()["deliveries"][0];
    assert_eq!((&now["step"], &now["is_pushed"]), (&relay["step"], &json!(false)), "{now}");
    assert_eq!(work.forge.hub.pulls(github_server::NAME).len(), 0);
    assert_once(&service.events(&run).await);
    service.process.terminate();
    work.place.assert_nothing_is_left();
}

/// SIGTERM lets open runs end. After a second signal the service does not wait: agents are stopped, and the next
/// process continues the deliveries.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_the_wait() {
    let work = EventWork::new().await;
    work.place.write_config("drain_timeout = \"10m\"");
    let mut service = work.place.start();
    let mut waits = conversation_body("wait");
    waits["model"] = json!("fake/tool=none;gate=head");
    let waiting = service.run(&waits).await;
    work.place.provider.gate.wait_for_waiting(1).await;
    let delivering = work.held(&service, GithubOperation::Push).await;
    service.process.signal("TERM");
    tokio::task::block_in_place(|| service.process.until(|output| output.contains("draining")));
    service.process.signal("TERM");
    let ended = tokio::task::block_in_place(|| service.process.wait());
    assert!(ended.success(), "{}", service.process.output());
    let mut service = work.place.start();
    let row = service.ended(&waiting).await;
    let why = ["error_code", "error"].map(|fact| &row["result"][fact]);
    insta::assert_compact_json_snapshot!(why, @r#"["cancelled", "the service was stopped, and has not waited for the run"]"#);
    let row = service.ended(&delivering).await;
    assert_eq!(row["error_code"], Value::Null, "{row}");
    insta::assert_compact_json_snapshot!(row["result"]["relay"]["why"], @r#""the caller has stopped waiting for this delivery; a later attempt continues it""#);
    for run in [&waiting, &delivering] {
        assert_once(&service.events(run).await);
    }
    let path = format!("/api/v1/runs/{delivering}/relay");
    while service.get(&path).await.json()["deliveries"][0]["step"] != "done" {
        tokio::task::block_in_place(|| pause_for(std::time::Duration::from_millis(50)));
    }
    work.forge.hub.response_gate().allow_answers(1);
    assert_eq!(work.forge.hub.pulls(github_server::NAME).len(), 1);
    service.process.terminate();
    work.place.assert_nothing_is_left();
}

/// Watches a run from the event after `last`.
pub(super) async fn watch_run(
    service: &ServiceProcess,
    run: &str,
    last: Option<&str>,
) -> ResponseStream {
    let request = Request::get(format!("/api/v1/runs/{run}/events"));
    let request =
        last.into_iter().fold(request, |request, last| request.header("last-event-id", last));
    service.start(request.body(Full::<Bytes>::default()).unwrap()).await.unwrap()
}

/// Returns all events up to the first of a kind.
pub(super) async fn read_until(watched: &mut ResponseStream, kind: &str) -> String {
    let mut text = String::new();
    let last = format!("event: {kind}\n");
    while !text.contains(&last) || !text.ends_with("\n\n") {
        let frame = watched.frame().await.unwrap();
        let frame = frame.unwrap_or_else(|| panic!("it is over without `{kind}`: {text}"));
        text.push_str(std::str::from_utf8(&frame).unwrap());
    }
    text
}

pub(super) fn event_kinds(told: &[SseEvent]) -> Vec<&str> {
    let mut kinds: Vec<_> = told.iter().map(|told| &*told.kind).collect();
    // An answer arrives in as many events as there were reads.
    kinds.dedup_by(|kind, before| *kind == "text_delta" && kind == before);
    kinds
}

/// Asserts that the run has one end event, which is the last, and that no number is repeated.
pub(super) fn assert_once(told: &[SseEvent]) {
    let count = |kind: &str| told.iter().filter(|told| told.kind == kind).count();
    assert_eq!((count("done"), count("final")), (1, 1), "{told:?}");
    assert_eq!(told.last().map(|told| &*told.kind), Some("final"), "{told:?}");
    assert!(told.windows(2).all(|pair| pair[0].seq < pair[1].seq), "{told:?}");
}
