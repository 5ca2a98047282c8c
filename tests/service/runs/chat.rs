//! A2, A4: Tests of one conversation, from the question to the pull request.

use std::fs;

use cogni_gateway::runner::agents;
use serde_json::{Value, json};

use super::{ServiceSetup, conversation_body};
use crate::support::github_server;
use crate::support::service::{chat_body, parse_events, tool_call_script};

/// The agent's text comes piece by piece, then the usage, then the answer, and then the end.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_streams_the_answer_and_its_usage() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let answer = service.post("/api/v1/ai/chat", &chat_body("hello")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let run = answer.header("x-run-id").unwrap().to_owned();
    let events = parse_events(answer.text());
    let kinds: Vec<_> = events.iter().map(|event| &*event.kind).collect();
    assert_eq!(kinds.first(), Some(&"run_started"), "{kinds:?}");
    assert_eq!(kinds[kinds.len() - 3..], ["assistant_final", "done", "final"], "{kinds:?}");
    let text = |kind: &str| -> String {
        let of_kind = events.iter().filter(|event| event.kind == kind);
        of_kind.map(|event| event.data["text"].as_str().unwrap()).collect()
    };
    assert!(!text("text_delta").is_empty());
    assert_eq!(text("text_delta"), text("assistant_final"));
    let reports: Vec<_> = events.iter().filter(|event| event.kind == "usage_report").collect();
    assert_eq!(reports.len(), 1, "{kinds:?}");
    assert_eq!(events.last().unwrap().data["ok"], true);

    let row = service.get(&format!("/api/v1/runs/{run}")).await.json();
    assert_eq!((&row["state"], &row["error_code"]), (&json!("ended"), &json!(null)), "{row}");
    let again = service.events(&run).await;
    assert_eq!(again, events, "a replay is what was told");
    setup.assert_nothing_is_left();
}

/// When the run has ended, the agent's commits are on GitHub with a pull request.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_ends_in_a_pull_request() {
    let commit = "echo hello > greeting && git add greeting && git commit --quiet --message=Greet";
    let mut setup = ServiceSetup::new(&tool_call_script(commit)).await;
    let github = github_server::RunningGithub::start().await;
    setup.set("GITHUB_API_URL", github.hub.url());
    setup.set("GITHUB_TOKEN", github_server::TOKEN);
    let service = setup.start();
    let mut body = chat_body("greet");
    body["repo"] = json!(github.clone_url());
    body["branchKey"] = json!("task-1");
    body["pullRequest"] = json!(true);
    let answer = service.post("/api/v1/ai/chat", &body).await;
    let events = parse_events(answer.text());
    let end = &events.last().unwrap_or_else(|| panic!("{} {}", answer.status, answer.text())).data;
    assert_eq!(end["ok"], true, "{end}");
    assert_eq!(end["relay"]["branch"], "sandbox/task-1", "{end}");
    let pulls = github.hub.pulls(github_server::NAME);
    assert_eq!(pulls.len(), 1, "{end}");
    assert!(end["relay"]["pull_request_url"].is_string(), "{end}");
    setup.assert_nothing_is_left();
}

/// A pull request shows the text of the request, unless the request or the service forbids it.
#[tokio::test(flavor = "multi_thread")]
async fn a_pull_request_can_hide_the_request() {
    let commit = "echo hello > greeting && git add greeting && git commit --quiet --message=Greet";
    for (hides_one, hides_all, is_shown) in
        [(false, false, true), (true, false, false), (false, true, false)]
    {
        let mut setup = ServiceSetup::new(&tool_call_script(commit)).await;
        setup.write_config(&format!("hide_requests = {hides_all}"));
        let github = github_server::RunningGithub::start().await;
        setup.set("GITHUB_API_URL", github.hub.url());
        setup.set("GITHUB_TOKEN", github_server::TOKEN);
        let service = setup.start();
        let mut body = chat_body("greet the zebra");
        body["repo"] = json!(github.clone_url());
        body["branchKey"] = json!("task-1");
        body["pullRequest"] = json!(true);
        body["hideRequest"] = json!(hides_one);
        let answer = service.post("/api/v1/ai/chat", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let pulls = github.hub.pulls(github_server::NAME);
        let text = pulls[0].body.as_ref().unwrap();
        let case = format!("{hides_one} {hides_all}: {text}");
        assert_eq!(text.contains("The request was:"), is_shown, "{case}");
        assert_eq!(text.contains("greet the zebra"), is_shown, "{case}");
        assert!(text.contains("- verdict of the rules:"), "{case}");
        setup.assert_nothing_is_left();
    }
}

/// R5: A cancelled run, a run that is too slow and a run that fails by itself have different codes.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_fails_says_why() {
    let setup = ServiceSetup::new("first_byte=60s").await;
    let service = setup.start();
    let run = service.run(&conversation_body("wait")).await;
    let mut slow = conversation_body("wait");
    // The agent's own timeout is one second, and must not come first.
    slow["max_runtime"] = json!("100ms");
    let late = service.run(&slow).await;
    let cancelled = service.post(&format!("/api/v1/runs/{run}/cancel"), &json!({})).await;
    assert!(cancelled.status.is_success(), "{}", cancelled.text());
    assert_eq!(service.ended(&run).await["error_code"], "cancelled");
    assert_eq!(service.ended(&late).await["error_code"], "timeout");
    setup.assert_nothing_is_left();
}

/// R7: If the agent's entry asks for it, a run begins in a warm sandbox, with no other difference.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_may_begin_in_a_warm_sandbox() {
    let mut setup = ServiceSetup::new("").await;
    let agents = setup.path().join("agents");
    fs::create_dir(&agents).unwrap();
    let entry = agents::builtin_file("sandbox:agent").unwrap();
    fs::write(agents.join("sandbox-agent.toml"), format!("slots = 2\n{entry}")).unwrap();
    setup.write_config(&format!("agents_dir = \"{}\"", agents.display()));
    setup.set("LOG", "debug");
    let mut service = setup.start();
    tokio::task::block_in_place(|| {
        service.process.until(|output| output.contains("a slot is ready"));
    });
    let run = service.run(&conversation_body("hello")).await;
    let row = service.ended(&run).await;
    assert_eq!(row["result"]["ok"], true, "{row}");
    let claimed = |text: &str| {
        text.lines().any(|line| line.contains("claimed a slot") && line.contains(&run))
    };
    assert!(claimed(&service.process.output()), "{}", service.process.output());
    assert_eq!(setup.provider.seen.requests().len(), 1);
    service.process.terminate();
    setup.assert_nothing_is_left();
}

/// A1: An agent that needs a model list gets the upstream's.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_gets_the_upstreams_models() {
    let setup = ServiceSetup::new("").await;
    let agents = setup.path().join("agents");
    fs::create_dir(&agents).unwrap();
    let script = "cat .openclaw/openclaw.json >&2; echo '{\"payloads\":[],\"meta\":{}}'";
    let entry = format!(
        "name = 'claw'\ndescription = 'as OpenClaw'\nversion = 1\nsetup = 'openclaw'\nargv = ['sh', '-c', '''{script} ''']\n"
    );
    fs::write(agents.join("claw.toml"), entry).unwrap();
    setup.write_config(&format!("agents_dir = \"{}\"", agents.display()));
    let service = setup.start();
    let mut body = conversation_body("hello");
    body["agent"] = json!("claw");
    let run = service.run(&body).await;
    service.ended(&run).await;
    let output = service.get(&format!("/api/v1/runs/{run}/output")).await.json();
    let config: Value = serde_json::from_str(output["stderr"].as_str().unwrap())
        .unwrap_or_else(|error| panic!("{error}: {output}"));
    let models = config["models"]["providers"]["cogni"]["models"].as_array().unwrap();
    let ids: Vec<_> = models.iter().map(|model| model["id"].as_str().unwrap()).collect();
    insta::assert_compact_json_snapshot!(ids);
}
