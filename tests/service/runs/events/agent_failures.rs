//! A2, R5: Tests of agents that fail: watchers get a code and a reason, and then the end.

use std::fmt::Write;
use std::fs;

use serde_json::{Value, json};

use super::super::{ServiceSetup, conversation_body};
use super::{assert_once, event_kinds};

/// Each agent is a whole program.
const AGENTS: &[(&str, &str)] = &[
    ("silent", "exit 0"),
    ("plain", "echo hello"),
    ("broken", "echo '{\"payloads\":['"),
    ("no-envelope", "echo '{\"text\":\"hello\"}'"),
    ("twice", "echo '{\"payloads\":[],\"meta\":{}}'; echo '{\"payloads\":[],\"meta\":{}}'"),
    (
        "sorry",
        "echo '{\"payloads\":[],\"meta\":{\"error\":{\"kind\":\"context_overflow\",\"message\":\"too long\"}}}'",
    ),
    ("exit-1", "echo 'no such option' >&2; exit 1"),
    ("answer-exit-1", "echo '{\"payloads\":[{\"text\":\"so far\"}],\"meta\":{}}'; exit 1"),
    ("exit-137", "kill -9 $$"),
    ("too-slow", "sleep 600"),
    ("too-large", "x=x; while :; do x=$x$x; done"),
    ("not-there", "exec /no/such/program"),
];

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_fails_says_how() {
    let setup = ServiceSetup::new("").await;
    let agents = setup.path().join("agents");
    fs::create_dir(&agents).unwrap();
    for (name, script) in AGENTS {
        let limits = match *name {
            "too-slow" => "max_runtime = '1s'",
            "too-large" => "max_memory = '32m'",
            _ => "",
        };
        let entry = format!(
            "name = '{name}'\ndescription = 'fails'\nversion = 1\nsetup = 'messages'\n\
             argv = ['sh', '-c', '''{script} ''']\n[limits]\n{limits}\n"
        );
        fs::write(agents.join(format!("{name}.toml")), entry).unwrap();
    }
    setup.write_config(&format!("agents_dir = \"{}\"", agents.display()));
    let mut service = setup.start();
    let mut messages = String::new();
    for (name, _) in AGENTS {
        let mut body = conversation_body("hello");
        body["agent"] = json!(name);
        let run = service.run(&body).await;
        let events = service.events(&run).await;
        assert_once(&events);
        let error = events.iter().find(|event| event.kind == "error").map(|event| &event.data);
        let error = error.unwrap_or(&Value::Null);
        let (code, message) = (error["code"].as_str(), error["message"].as_str());
        let row = service.get(&format!("/api/v1/runs/{run}")).await.json();
        assert_eq!(row["error_code"].as_str(), code, "{row}");
        let kinds = event_kinds(&events)[1..].join(" ");
        writeln!(messages, "{name}: {kinds}\n  {} {}", code.unwrap(), message.unwrap()).unwrap();
    }
    insta::assert_snapshot!(messages);
    service.process.terminate();
    setup.assert_nothing_is_left();
}

/// G9: A spent budget has its own code.
#[tokio::test(flavor = "multi_thread")]
async fn a_budget_that_is_spent_is_an_error_with_a_code() {
    let setup = ServiceSetup::new("").await;
    let mut service = setup.start();
    let mut body = conversation_body("hello");
    body["budget"] = json!({"max_turns": 0});
    let run = service.run(&body).await;
    let events = service.events(&run).await;
    assert_once(&events);
    let error = events.iter().find(|event| event.kind == "error").unwrap();
    assert_eq!(error.data["code"], "budget_exhausted");
    // The agent itself may report it first.
    assert!(error.data["message"].as_str().unwrap().contains("budget"), "{}", error.data);
    service.process.terminate();
    setup.assert_nothing_is_left();
}
