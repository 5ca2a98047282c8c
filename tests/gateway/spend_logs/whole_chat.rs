//! A2, L6, B1 to B4: Tests of one chat through all real components: the service, a sandbox, its gateway, LiteLLM with
//! Postgres, the relay, a GitHub stand-in, and LiteLLM's callback.

use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::thread;

use serde_json::json;

use super::setup::{LitellmWithDatabase, PostgresServer};
use super::{run, wait_until_settled};
use crate::peers::command_output;
use crate::peers::setup::{KEY, peers_file};
use crate::support::github_server;
use crate::support::process::wait_until;
use crate::support::repository::run_git;
use crate::support::service::{ServiceSetup, SseEvent, parse_events, tool_call_script};

/// The agent's work becomes a pull request, and each of its calls has one receipt, at LiteLLM's own price.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_ends_in_a_pull_request_and_its_calls_have_their_receipts() {
    let commit = "echo hello > greeting && git add greeting && git commit --quiet --message=Greet";
    // The provider reports as many tokens as its text has, because a report below the observed text is not accepted.
    let model = format!("{},output=60", tool_call_script(commit));
    let mut setup = ServiceSetup::new(&model).await;
    let github = github_server::RunningGithub::start().await;
    let (litellm, _postgres) = tokio::task::block_in_place(|| start_litellm(&setup));
    let prices = peers_file("prices.toml").display().to_string();
    for (name, value) in [
        ("LITELLM_HOST", &*litellm.address),
        ("LITELLM_MASTER_KEY", KEY),
        ("PRICES_FILE", &prices),
        ("GITHUB_API_URL", github.hub.url()),
        ("GITHUB_TOKEN", github_server::TOKEN),
    ] {
        setup.set(name, value);
    }
    let service = setup.start();
    let body = json!({
        "graphName": "sandbox:agent", "model": "gpt", "messages": [{"role": "user", "content": "greet"}],
        "repo": github.clone_url(), "branchKey": "task-1", "pullRequest": true,
    });
    let answer = service.post("/api/v1/ai/chat", &body).await;
    let named = answer.header("x-run-id").unwrap_or_else(|| panic!("{}", answer.text())).to_owned();
    let events = parse_events(answer.text());
    let SseEvent { data: end, .. } = events.last().unwrap();
    assert_eq!(end["ok"], true, "{end}; {}", litellm.output());
    assert!(end["relay"]["pull_request_url"].is_string(), "{end}");
    assert_eq!(github.hub.pulls(github_server::NAME)[0].head, "sandbox/task-1");
    assert_eq!(run_git(&github.bare(), &["show", "sandbox/task-1:greeting"]), "hello");
    let calls = events.iter().filter(|event| event.kind == "usage_report").count();
    assert_eq!(
        calls, 2,
        "one in which it wants to run a program, and one in which it says what came of it"
    );

    // The callback delivers at least the first charge: LiteLLM drops calls that end while it posts earlier ones.
    let path = format!("/api/v1/runs/{named}/receipts");
    let by_callback = async || {
        let receipts = service.get(&path).await.json()["receipts"].clone();
        receipts.as_array().unwrap().iter().any(|receipt| receipt["source"] == "litellm_callback")
    };
    let handle = tokio::runtime::Handle::current();
    let state = setup.state_dir();
    let report = tokio::task::block_in_place(|| {
        wait_until(|| handle.block_on(by_callback()), || litellm.output());
        wait_until_settled(&state, &litellm, &named, 2).0
    });
    for none in ["missing", "unknown", "conflicting", "different"] {
        assert_eq!(report[none], json!([]), "{report}");
    }
    let deltas = ["delta_input", "delta_output", "delta_cost_nanodollars", "uncompared"];
    assert_eq!(deltas.map(|delta| &report[delta]), [&json!(0); 4], "{report}");

    let shown = service.get(&path).await.json();
    assert_eq!(
        (&shown["bill"]["state"], &shown["bill"]["flags"]),
        (&json!("complete"), &json!([]))
    );
    assert_eq!(shown["bill"]["amount_usd"], report["charged_usd"], "{shown}");
    let charged: Vec<_> =
        shown["receipts"].as_array().unwrap().iter().map(|one| &one["call_id"]).collect();
    let reported = events.iter().filter(|event| event.kind == "usage_report");
    assert_eq!(charged, reported.map(|event| &event.data["call_id"]).collect::<Vec<_>>());

    // A call of another gateway with the same LiteLLM does not belong to this service.
    tokio::task::block_in_place(|| {
        call_of_another(&litellm);
        wait_until(|| read_rows(&litellm).contains("run-of-another"), || litellm.output());
        let whole = run(&state, &litellm, &["reconcile", "--since", "1h", "--json"]);
        assert!(whole.contains("\"unknown\":[]") && whole.ends_with("exit 0"), "{whole}");
        let whole = run(&state, &litellm, &["status"]);
        assert!(whole.ends_with("nothing is flagged\nexit 0"), "{whole}");
    });
    setup.stop(service);
}

/// Starts LiteLLM in front of the test's provider; its callback has a grant for nothing else.
fn start_litellm(setup: &ServiceSetup) -> (LitellmWithDatabase, PostgresServer) {
    let teller = setup.mint(&["--access", "billing"]);
    let endpoint = format!(
        "http://{}/api/internal/billing/ingest",
        start_tcp_proxy(setup.path().join("api.sock"))
    );
    let provider = setup.provider.addr.to_string();
    let postgres = PostgresServer::start();
    (LitellmWithDatabase::start(&provider, &postgres, (&endpoint, &teller.token)), postgres)
}

/// Starts a TCP proxy in front of the service's unix socket, as an operator's reverse proxy would be; returns its
/// address.
fn start_tcp_proxy(socket: PathBuf) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            // The service may not be ready yet.
            let Ok(service) = UnixStream::connect(&socket) else { continue };
            thread::spawn(move || drop(copy_both(&client, &service)));
        }
    });
    address
}

fn copy_both(client: &TcpStream, service: &UnixStream) -> io::Result<()> {
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ended = io::copy(&mut &*client, &mut &*service);
            service.shutdown(Shutdown::Write)
        });
        let _ended = io::copy(&mut &*service, &mut &*client);
        client.shutdown(Shutdown::Both)
    })
}

fn call_of_another(litellm: &LitellmWithDatabase) {
    let metadata = json!({"run_id": "run-of-another", "cogni_deployment_id": "another"});
    let body = json!({"model": "mock", "messages": [{"role": "user", "content": "hello"}]});
    let (metadata, body) = (format!("x-litellm-spend-logs-metadata: {metadata}"), body.to_string());
    call_litellm(litellm, "/v1/chat/completions", &["--header", &metadata, "--json", &body]);
}

/// Returns the rows that LiteLLM has written.
fn read_rows(litellm: &LitellmWithDatabase) -> String {
    call_litellm(litellm, "/spend/logs/v2?start_date=2000-01-01&end_date=2100-01-01", &[])
}

fn call_litellm(litellm: &LitellmWithDatabase, path: &str, more: &[&str]) -> String {
    let (url, key) =
        (format!("http://{}{path}", litellm.address), format!("authorization: Bearer {KEY}"));
    let mut curl = Command::new("curl");
    command_output(
        curl.args(["--silent", "--show-error", "--fail", "--header", &key, &url]).args(more),
    )
}
