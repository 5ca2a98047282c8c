//! Tests of servers that are programs and end in the middle of the run's calls.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cogni_gateway::base::task_group::TaskGroup;
use cogni_gateway::sandbox::spec::MountAccess;
use cogni_gateway::tools::config::ToolConfig;
use cogni_gateway::tools::job::{JobCall, JobFuture, JobRunner, ServerFuture};
use cogni_gateway::tools::mcp_server::lock_file::definition_digest;
use cogni_gateway::tools::mcp_server::{McpCommandHost, McpServer};
use cogni_gateway::tools::pinned_tool::PinnedTool;
use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::oneshot;

/// Programs with one tool, which ends the program if it is told to.
#[derive(Clone, Default)]
struct FakePrograms {
    is_modern: bool,
    /// True if each program defines its tool in another way.
    changes: bool,
    started: Arc<AtomicUsize>,
    /// The arguments of the calls that were received, in order.
    called: Arc<Mutex<Vec<String>>>,
}

impl FakePrograms {
    fn client(&self) -> McpServer {
        let table = toml::from_str("granted = []\n[mcp.own]\ncommand = ['/bin/server']\n").unwrap();
        let config = ToolConfig::from_table(&table).unwrap();
        let host = McpCommandHost { jobs: Arc::new(self.clone()), tasks: TaskGroup::default() };
        McpServer::new("own", &config.mcp["own"], &Arc::default(), Some(&host)).unwrap()
    }

    /// Answers the messages of one program, until it ends.
    async fn serve(self, stream: UnixStream, number: usize) -> String {
        let (mut is_open, stream) = (self.is_modern, BufReader::new(stream));
        let mut lines = stream.lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let message: Value = serde_json::from_str(&line).unwrap();
            let Some(id) = message.get("id") else { continue };
            let version = if self.changes { number } else { 0 };
            let answer = match message["method"].as_str().unwrap() {
                "server/discover" if self.is_modern => json!({"supportedVersions": ["2026-07-28"]}),
                "initialize" => {
                    is_open = true;
                    json!({"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "a", "version": "1"}})
                }
                "tools/list" if is_open => {
                    let description = format!("version {version}");
                    json!({"tools": [{"name": "act", "description": description, "inputSchema": {"type": "object"}}]})
                }
                "tools/call" if is_open => {
                    let told = message["params"]["arguments"]["x"].as_str().unwrap();
                    self.called.lock().unwrap().push(told.to_owned());
                    if told.starts_with("end") {
                        // The other calls wait for the program meanwhile.
                        tokio::time::sleep(Duration::from_millis(50)).await;
                        return "it has ended".to_owned();
                    }
                    json!({"content": [{"type": "text", "text": told}]})
                }
                _ => Value::Null,
            };
            let answer = match answer {
                Value::Null => {
                    json!({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "no"}})
                }
                answer => json!({"jsonrpc": "2.0", "id": id, "result": answer}),
            };
            lines.get_mut().write_all(format!("{answer}\n").as_bytes()).await.unwrap();
        }
        "its input has ended".to_owned()
    }
}

impl JobRunner for FakePrograms {
    fn run_job(&self, _: JobCall) -> JobFuture {
        unreachable!("only servers are started")
    }

    fn run_server(&self, call: JobCall, connected: oneshot::Sender<UnixStream>) -> ServerFuture {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let (own, other) = UnixStream::pair().unwrap();
        connected.send(other).unwrap();
        let programs = self.clone();
        Box::pin(async move {
            tokio::select! {
                reason = programs.serve(own, number) => reason,
                () = call.stop.cancelled() => "it was stopped".to_owned(),
            }
        })
    }

    fn workspace_access(&self) -> Option<MountAccess> {
        None
    }
}

/// Calls the tool once for each text, all at the same time. Returns the results, or the codes of the errors.
async fn call_at_once(programs: &FakePrograms, texts: &[String]) -> Vec<String> {
    let client = programs.client();
    let definition = client.list_tools().await.unwrap().remove("act").unwrap();
    let tool = PinnedTool {
        server: "own".to_owned(),
        name: "act".to_owned(),
        digest: definition_digest(&definition),
        input_schema: json!({"type": "object"}),
        job: None,
    };
    let calls = texts.iter().map(async |text| {
        let arguments = json!({"x": text}).to_string();
        match client.call_tool(&tool, &arguments, 4096).await {
            Ok(result) => {
                let result: Value = serde_json::from_str(&result).unwrap();
                result["content"][0]["text"].as_str().unwrap().to_owned()
            }
            Err(error) => error.code.to_owned(),
        }
    });
    join_all(calls).await
}

/// T2, T5: a call that ends the program fails alone. The calls that wait for it go to the next program, in both eras, and
/// no call is sent twice.
#[tokio::test]
async fn a_program_that_ends_fails_only_its_own_call() {
    for is_modern in [true, false] {
        let programs = FakePrograms { is_modern, ..FakePrograms::default() };
        let text = |number| {
            if number % 4 == 0 { format!("end {number}") } else { format!("do {number}") }
        };
        let texts: Vec<_> = (0..16).map(text).collect();
        let results = call_at_once(&programs, &texts).await;
        let result = |text: &String| {
            if text.starts_with("end") { "tool_failed".to_owned() } else { text.clone() }
        };
        assert_eq!(results, texts.iter().map(result).collect::<Vec<_>>());
        let mut called = programs.called.lock().unwrap().clone();
        called.sort_unstable();
        let mut sent = texts.clone();
        sent.sort_unstable();
        assert_eq!(called, sent, "each call is sent once");
        let started = programs.started.load(Ordering::Relaxed);
        assert!((4..=5).contains(&started), "{started} programs");
    }
}

/// T2: a call that waits for the next program is not sent to it if that defines the tool in another way.
#[tokio::test]
async fn the_next_program_is_checked_again() {
    let programs = FakePrograms { is_modern: true, changes: true, ..FakePrograms::default() };
    let texts = ["end", "do 1", "do 2"].map(str::to_owned);
    let results = call_at_once(&programs, &texts).await;
    assert_eq!(results, ["tool_failed", "tool_definition_changed", "tool_definition_changed"]);
    assert_eq!(*programs.called.lock().unwrap(), ["end"]);
}
