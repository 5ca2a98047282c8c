//! A2, R3, R7, L2: Tests of the service with sandboxes of a real Docker Engine: from a chat to a pull request, and
//! chats that share a sandbox.

use std::fs;
use std::path::PathBuf;

use cogni_gateway::service::billing::CallUsage;
use serde_json::{Value, json};
use tokio::task::block_in_place;

use super::driver::list_containers;
use crate::support::docker_engine::{self, docker_output};
use crate::support::github_server;
use crate::support::process::wait_until;
use crate::support::repository::run_git;
use crate::support::service::{
    ServiceProcess, ServiceSetup, SseEvent, chat_body, conversation_body, parse_events,
    tool_call_script,
};

/// A2, R3, L2, B1, B4: The container has no network; its calls reach the upstream, its work is delivered, its cost is
/// known, and each call has its receipt.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_in_a_container_ends_in_a_pull_request() {
    let commit = "ls /sys/class/net > nets && git add nets && git commit --quiet --message=Look";
    let mut setup = service_setup(commit, "").await;
    let github = github_server::RunningGithub::start().await;
    setup.set("GITHUB_API_URL", github.hub.url());
    setup.set("GITHUB_TOKEN", github_server::TOKEN);
    let mut service = setup.start();
    let line = json!({"repo": github.clone_url(), "branchKey": "nets", "pullRequest": true});
    let chat = ServiceChat::new(&service, line).await;
    assert_eq!(chat.end()["ok"], true, "{}", chat.end());
    assert_eq!(chat.end()["relay"]["branch"], "sandbox/nets", "{}", chat.end());
    assert_eq!(github.hub.pulls(github_server::NAME)[0].head, "sandbox/nets");
    assert_eq!(run_git(&github.bare(), &["show", "sandbox/nets:nets"]), "lo");

    let facts = setup.books().calls_of_run(&chat.run).await.unwrap();
    let reported: Vec<_> = chat.all("usage_report").map(|data| &data["call_id"]).collect();
    assert_eq!(reported, facts.iter().map(|fact| &*fact.call_id).collect::<Vec<_>>());
    let audit = service.get(&format!("/api/v1/runs/{}/audit", chat.run)).await.json();
    assert_eq!(
        json!([audit["verified"], audit["finished"], audit["admitted"], audit["open"]]),
        json!([true, true, 2, 0])
    );
    assert_eq!(list_containers(&chat.run), "");

    let items: Vec<_> = facts.iter().map(litellm_charge).collect();
    let answer = service.post("/api/internal/billing/ingest", &json!(items)).await.json();
    assert_eq!((&answer["new"], &answer["foreign"]), (&json!(2), &json!(0)), "{answer}");
    let shown = service.get(&format!("/api/v1/runs/{}/receipts", chat.run)).await.json();
    assert_eq!(
        (&shown["bill"]["state"], &shown["bill"]["amount_usd"], &shown["bill"]["flags"]),
        (&json!("complete"), &json!("0.0001"), &json!([])),
        "{shown}"
    );
    service.process.terminate();
    assert_nothing_is_left(&setup);
}

/// Returns the charge that LiteLLM's callback would report for a call.
fn litellm_charge(fact: &CallUsage) -> Value {
    json!({
        "litellm_call_id": fact.call_id,
        "status": "success",
        "response_cost": 0.000_05,
        "prompt_tokens": fact.usage.input,
        "completion_tokens": fact.usage.output,
        "endTime": 1_795_339_851.847,
        "metadata": {"spend_logs_metadata": {"run_id": fact.run}},
    })
}

/// R7: Two chats of one conversation run in the same container, each with its own identity. The same key in another
/// account is another conversation.
#[tokio::test(flavor = "multi_thread")]
async fn chats_of_one_conversation_share_a_container() {
    let look = "cat said 2>/dev/null; echo $RUN_ID >> said; stat -c %i /proc/1/ns/pid >&2";
    let setup = service_setup(look, "mode = 'long_running'\n").await;
    let mut service = setup.start();
    let mut chats = vec![];
    let mut found = vec![];
    let talk = |account| json!({"stateKey": "talk", "branchKey": "talk", "account": account});
    for _ in 0..2 {
        chats.push(ServiceChat::new(&service, talk("acct-1")).await);
        found.push(service_containers(&setup));
    }
    let other = ServiceChat::new(&service, talk("acct-2")).await;

    let [first, second] = &chats[..] else { unreachable!() };
    assert_eq!((found[0].lines().count(), &found[0]), (1, &found[1]), "it is another container");
    assert_eq!(service_containers(&setup).lines().count(), 2);
    let (before, after) = (first.printed(), second.printed());
    assert_eq!(before["stdout"], "");
    assert_eq!(after["stdout"], format!("{}\n", first.run));
    assert_eq!(before["stderr"], after["stderr"], "they see other processes");
    assert_eq!(other.printed()["stdout"], "", "it has what is of another conversation");

    for (chat, account) in chats.iter().chain([&other]).zip(["acct-1", "acct-1", "acct-2"]) {
        let row = service.get(&format!("/api/v1/runs/{}", chat.run)).await.json();
        assert_eq!((&row["account"], &row["error_code"]), (&json!(account), &json!(null)));
        let raw = service.get(&format!("/api/v1/runs/{}/audit?raw=1", chat.run)).await;
        let records = raw.text().lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        assert!(records.into_iter().all(|record| record["run"] == *chat.run), "{}", raw.text());
        let facts = setup.books().calls_of_run(&chat.run).await.unwrap();
        assert_eq!(facts.len(), 2);
        assert!(facts.iter().all(|fact| fact.account == account), "{facts:?}");
        // The container carries no run's label.
        assert_eq!(list_containers(&chat.run), "");
    }
    service.process.terminate();
    assert_nothing_is_left(&setup);
}

/// T7, R6: Runs share a workspace as their agent's scope says: those of one agent, or those of all agents with the scope
/// `shared`, each in a sandbox of its own. Two accounts never share one, and a shared workspace takes no repository.
#[tokio::test(flavor = "multi_thread")]
async fn the_scope_of_an_agent_says_which_runs_share_a_workspace() {
    let look = "cat said 2>/dev/null; echo $RUN_ID >> said";
    let kept = |scope: &str| format!("mode = 'long_running'\n[modes]\nscope = '{scope}'\n");
    let setup = service_setup(look, &kept("shared")).await;
    let agents = setup.path().join("agents");
    let entry = fs::read_to_string(agents.join("worker.toml")).unwrap();
    for (name, scope) in [("friend", "shared"), ("loner", "agent")] {
        let text = entry.replace("'worker'", &format!("'{name}'"));
        let text = text.replace("scope = 'shared'", &format!("scope = '{scope}'"));
        fs::write(agents.join(format!("{name}.toml")), text).unwrap();
    }
    let mut service = setup.start();
    let chat = async |agent: &str, account: &str, state: &str| {
        let more = json!({"graphName": agent, "account": account, "stateKey": state});
        let chat = ServiceChat::new(&service, more).await;
        (chat.run.clone() + "\n", chat.printed()["stdout"].as_str().unwrap().to_owned())
    };
    let (first, found) = chat("worker", "acct-1", "a").await;
    assert_eq!(found, "");
    let (second, found) = chat("friend", "acct-1", "b").await;
    assert_eq!(found, first, "the friend does not find what the worker has left");
    assert_eq!(chat("worker", "acct-2", "a").await.1, "", "another account finds it");
    let (own, found) = chat("loner", "acct-1", "a").await;
    assert_eq!(found, "", "the loner finds what the others have left");
    assert_eq!(chat("loner", "acct-1", "b").await.1, own);
    assert_eq!(chat("worker", "acct-1", "c").await.1, first + &second);
    let mut body = conversation_body("go");
    let repository =
        json!({"agent": "worker", "repo": "https://github.com/acme/app", "branch_key": "x"});
    body.as_object_mut().unwrap().extend(repository.as_object().unwrap().clone());
    let refused = service.post("/api/v1/runs", &body).await;
    assert_eq!(refused.status, 422, "{}", refused.text());
    assert!(refused.text().contains("`modes.scope` of `worker`"), "{}", refused.text());
    service.process.terminate();
    assert_nothing_is_left(&setup);
}

/// R5, R7: If the service is killed while a long-running sandbox works, that run is lost, but not what the branch had
/// stored. Unused workspaces are removed at their time.
#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_outlives_a_killed_service_and_expires() {
    let work = "cat said 2>/dev/null; echo $RUN_ID >> said; [ -e go ] || sleep 1000";
    let setup = service_setup(work, "mode = 'long_running'\n").await;
    let mut service = setup.start();
    let mut body = conversation_body("go");
    body["agent"] = json!("worker");
    body["branch_key"] = json!("talk");
    let first = service.run(&body).await;
    let said_file =
        || stored_workspaces(&setup).into_iter().next().map(|home| home.join("workspace/said"));
    block_in_place(|| {
        let is_said = || said_file().is_some_and(|path| path.exists());
        wait_until(is_said, || "it does not begin".to_owned());
    });
    service.process.signal("KILL");
    service.process.wait();

    service = setup.start();
    let row = service.get(&format!("/api/v1/runs/{first}")).await.json();
    assert_eq!((&row["state"], &row["error_code"]), (&json!("ended"), &json!("interrupted")));
    assert_eq!(service_containers(&setup), "", "its container is still there");
    fs::write(said_file().unwrap().with_file_name("go"), "").unwrap();
    let next = ServiceChat::new(&service, json!({"branchKey": "talk"})).await;
    assert_eq!(next.printed()["stdout"], format!("{first}\n"));
    assert_eq!(service_containers(&setup).lines().count(), 1);
    service.process.terminate();
    assert_nothing_is_left(&setup);
    assert_eq!(stored_workspaces(&setup).len(), 1);

    setup.write_config("workspace_retention = \"0s\"");
    service = setup.start();
    block_in_place(|| {
        wait_until(
            || stored_workspaces(&setup).is_empty(),
            || format!("{:?}", stored_workspaces(&setup)),
        );
        service.process.until(|printed| printed.contains("forgot an unused workspace"));
    });
    service.process.terminate();
}

/// Returns the stored workspaces.
fn stored_workspaces(setup: &ServiceSetup) -> Vec<PathBuf> {
    let entries = fs::read_dir(setup.state_dir().join("workspaces"));
    entries.into_iter().flatten().map(|entry| entry.unwrap().path()).collect()
}

/// A chat, from its question to its end.
struct ServiceChat {
    run: String,
    told: Vec<SseEvent>,
}

impl ServiceChat {
    async fn new(service: &ServiceProcess, more: Value) -> Self {
        let mut body = chat_body("go");
        body["graphName"] = "worker".into();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = service.post("/api/v1/ai/chat", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        Self {
            run: answer.header("x-run-id").unwrap().to_owned(),
            told: parse_events(answer.text()),
        }
    }

    fn all<'chat_body>(
        &'chat_body self,
        kind: &'chat_body str,
    ) -> impl Iterator<Item = &'chat_body Value> {
        self.told.iter().filter(move |event| event.kind == kind).map(|event| &event.data)
    }

    fn end(&self) -> &Value {
        &self.told.last().unwrap().data
    }

    /// Returns the output of the command, which the model repeats at the end.
    fn printed(&self) -> Value {
        let answer = self.all("assistant_final").next();
        let answer = answer.unwrap_or_else(|| panic!("{:?}", self.told));
        serde_json::from_str(answer["text"].as_str().unwrap()).unwrap()
    }
}

/// Starts a service whose only agent is `cogni-agent`, which runs `command` in an image that contains nothing of it.
async fn service_setup(command: &str, more: &str) -> ServiceSetup {
    docker_engine::need_images(&[docker_engine::HOST]);
    let mut setup = ServiceSetup::new(&tool_call_script(command)).await;
    let agents = setup.path().join("agents");
    fs::create_dir(&agents).unwrap();
    let entry = format!(
        "name = 'worker'\ndescription = 'd'\nversion = 1\nimage = '{}'\nargv = ['/cogni-agent']\n\
         program = '/cogni-agent'\nstream = 'events'\n{more}",
        docker_engine::HOST
    );
    fs::write(agents.join("worker.toml"), entry).unwrap();
    setup.set("COGNI_AGENTS_DIR", agents.to_str().unwrap());
    setup.set("COGNI_DRIVER", "docker");
    setup.set("COGNI_INIT", docker_engine::init_path());
    setup
}

/// Returns the ids of this service's containers.
fn service_containers(setup: &ServiceSetup) -> String {
    let filter = format!("label=cogni.dir={}", setup.run_dir().display());
    docker_output(&["ps", "--all", "--quiet", "--no-trunc", "--filter", &filter])
}

fn assert_nothing_is_left(setup: &ServiceSetup) {
    assert_eq!(service_containers(setup), "");
    setup.assert_nothing_is_left();
}
