//! `cogni-gateway demo`: a complete run in one process, with nothing else installed.
//!
//! A fake provider and a gateway start in a temporary directory. An agent's client calls through the run's socket. The
//! output shows what the agent received beside what the upstream received.

mod agent;
mod client;
mod connections;
mod tools;

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::audit;
use crate::base::secret::SecretString;
use crate::fakes::model_provider::{FakeProvider, ProviderRequestLog, ProviderScript};
use crate::gateway::config::GatewayConfig;
use crate::gateway::process::GatewayProcess;
use crate::telemetry::access_log::AccessLogDestination;
use client::{DemoHttpClient, DemoResponse};
use connections::{DemoApi, SeenToken};

/// Runs the demo and removes its temporary directory.
pub fn run(out: &mut impl Write) -> anyhow::Result<ExitCode> {
    // Every file of the demo is below this directory, so that nothing remains after its end.
    let directory = DemoTempDir::new()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        Box::pin(run_demo(&directory.0, out)).await?;
        Box::pin(agent::run_sandbox_demo(&directory.0, out)).await
    })?;
    // The gateway has closed the log by now, so that the chain is complete.
    let log = directory.0.join(AUDIT_LOG);
    write_heading(out, "The audit log, one record a line")?;
    audit::run(&audit::AuditCommand::Show { file: log.clone() }, out)?;
    write_heading(out, "The chain, verified")?;
    audit::run(&audit::AuditCommand::Verify { file: log, public_key: None }, out)
}

async fn run_demo(directory: &Path, out: &mut impl Write) -> anyhow::Result<()> {
    let provider =
        FakeProvider::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), ProviderScript::default())
            .await?;
    let (upstream, seen) = (provider.addr(), provider.request_log());
    let api = DemoApi::bind(directory).await?;
    let token = api.seen_token();
    let app = GatewayProcess::build_process(demo_config(directory, upstream, &api.table()?)?)?;
    let stop = CancellationToken::new();
    writeln!(
        out,
        "A provider listens on {upstream}; the gateway, on a unix socket, is the agent's only way to it."
    )?;
    writeln!(out, "The run may take {MAX_TURNS} turns. The agent holds no key.")?;
    let socket = app.socket_path().context("the demo has one run")?.to_path_buf();
    let agent = DemoAgent { socket, seen, token };
    // The narration ends both servers: the token stops them when the calls are done, also after an error.
    let narration = async {
        let result = narrate_calls(&agent, out).await;
        stop.cancel();
        result
    };
    // All of them run on this thread: the gateway, the provider, the API and the narration.
    let (served, (), (), result) = tokio::join!(
        app.serve_until_cancelled(stop.clone()),
        provider.serve(stop.clone()),
        api.serve(stop.clone()),
        narration
    );
    // An error of the narration is more specific than an error of the servers.
    result.and(served)
}

async fn narrate_calls(agent: &DemoAgent, out: &mut impl Write) -> anyhow::Result<()> {
    write_heading(out, "1. A call")?;
    let answer = agent
        .call_llm(
            &json!({"model": "demo", "messages": [{"role": "user", "content": "hello"}]}),
            &[],
        )
        .await?;
    let text = answer.json()["choices"][0]["message"]["content"].clone();
    writeln!(out, "  agent saw      {} {text}", answer.status)?;
    writeln!(
        out,
        "  upstream saw   {}",
        agent.upstream_headers_seen(&["authorization", "x-litellm-end-user-id"])
    )?;

    write_heading(out, "2. A stream; each frame is passed on when it arrives")?;
    let answer = agent
        .call_llm(&json!({"model": "fake/interval=40ms", "stream": true, "messages": []}), &[])
        .await?;
    for (after, frame) in &answer.frames {
        writeln!(out, "  {:>4} ms  {}", after.as_millis(), excerpt(frame))?;
    }
    writeln!(
        out,
        "  upstream saw   \"stream_options\": {}",
        agent.upstream_body("stream_options")
    )?;
    writeln!(
        out,
        "  agent saw      {}",
        // The gateway requests usage from the upstream, and hides the chunk from a client that did not request it.
        if answer.text().contains("\"usage\":{") {
            "a usage chunk"
        } else {
            "no usage chunk, since it asked for none"
        }
    )?;

    narrate_refusals(agent, out).await?;
    tools::narrate_tools(&agent.client(), out).await?;
    connections::narrate_connections(&agent.client(), &agent.token, out).await?;

    write_heading(out, "8. The last call of the budget, and one more")?;
    let plain = json!({"model": "demo", "messages": []});
    let answer = agent.call_llm(&plain, &[]).await?;
    writeln!(out, "  agent saw      {}", answer.status)?;
    let answer = agent.call_llm(&plain, &[]).await?;
    writeln!(out, "  agent saw      {} {}", answer.status, answer.text())?;
    writeln!(
        out,
        "  upstream saw   {} calls in all, and nothing of the others",
        agent.seen.request_count()
    )?;
    Ok(())
}

/// Sends headers, bodies and paths that the gateway overwrites or refuses, and prints both sides.
async fn narrate_refusals(agent: &DemoAgent, out: &mut impl Write) -> anyhow::Result<()> {
    write_heading(out, "3. A client that forges its identity")?;
    let answer = agent.call_llm(&json!({"model": "demo", "messages": []}), FORGED_HEADERS).await?;
    writeln!(out, "  {:<32} {:<24} upstream saw", "header", "agent sent")?;
    for (name, value) in FORGED_HEADERS {
        writeln!(out, "  {name:<32} {value:<24} {}", agent.upstream_header(name))?;
    }
    writeln!(
        out,
        "  agent saw      {}, and no header of LiteLLM's but x-litellm-call-id: {}",
        answer.status,
        answer.litellm_headers()
    )?;

    write_heading(out, "4. Bodies that lie, or lead out of the sandbox")?;
    for (what, field) in REFUSED_BODIES {
        let mut body = json!({"model": "demo", "messages": []});
        body[*what] = serde_json::from_str(field)?;
        let answer = agent.call_llm(&body, &[]).await?;
        writeln!(
            out,
            "  {:<44} {} {}",
            format!("{what}: {field}"),
            answer.status,
            answer.error_code()
        )?;
    }

    write_heading(out, "5. Where there is nothing to see")?;
    // Paths of LiteLLM's own API, and spellings that would reach it through a careless proxy.
    for path in ["/key/list", "/v1/mcp/server", "/v1/%6dodels", "/v1/chat/../models"] {
        let answer = agent.client().get(path).await?;
        writeln!(out, "  GET {path:<24} {} {}", answer.status, answer.text())?;
    }
    Ok(())
}

/// The untrusted side: a client on the run's socket, and the log of the upstream, to show the effect of its calls.
struct DemoAgent {
    socket: PathBuf,
    seen: Arc<ProviderRequestLog>,
    /// What the API behind the connection has received.
    token: SeenToken,
}

impl DemoAgent {
    fn client(&self) -> DemoHttpClient<'_> {
        DemoHttpClient { socket: &self.socket }
    }

    async fn call_llm(
        &self,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> anyhow::Result<DemoResponse> {
        self.client().post("/v1/chat/completions", body, headers).await
    }

    fn upstream_headers_seen(&self, names: &[&str]) -> String {
        let shown: Vec<_> =
            names.iter().map(|name| format!("{name}: {}", self.upstream_header(name))).collect();
        shown.join(", ")
    }

    fn upstream_header(&self, name: &str) -> String {
        let request = self.seen.last_request();
        request.as_ref().and_then(|request| request.header(name)).unwrap_or("nothing").to_owned()
    }

    fn upstream_body(&self, key: &str) -> Value {
        self.seen
            .last_request()
            .and_then(|request| request.body)
            .map_or(Value::Null, |body| body[key].clone())
    }
}

/// A temporary directory that is removed when the value is dropped.
struct DemoTempDir(PathBuf);

impl DemoTempDir {
    fn new() -> anyhow::Result<Self> {
        // `create_dir` fails if the path exists, so that another user's directory is never used.
        let path = std::env::temp_dir().join(format!("cogni-demo-{}", std::process::id()));
        std::fs::create_dir(&path)
            .with_context(|| format!("cannot create `{}`", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for DemoTempDir {
    // A directory that cannot be removed is only a leftover of a demo.
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn demo_config(
    directory: &Path,
    upstream: SocketAddr,
    connection: &str,
) -> anyhow::Result<GatewayConfig> {
    let mut config = GatewayConfig::default();
    "demo-run".clone_into(&mut config.identity.run);
    "acct-demo".clone_into(&mut config.identity.account);
    config.listen.socket_path = directory.join("llm.sock");
    config.upstream.url = upstream.to_string().parse()?;
    // The narration shows that this key never reaches the agent.
    config.upstream.api_key = SecretString::new("sk-real-key");
    config.budget.max_turns = Some(MAX_TURNS);
    config.tools = tools::demo_tools(connection)?;
    config.audit.path = Some(directory.join(AUDIT_LOG));
    // The lines of the access log would appear between the lines of the narration.
    config.access_log = AccessLogDestination::Off;
    config.validate()?;
    Ok(config)
}

fn write_heading(out: &mut impl Write, text: &str) -> anyhow::Result<()> {
    Ok(writeln!(out, "\n{text}")?)
}

/// Returns the first line of a frame, shortened.
fn excerpt(frame: &str) -> String {
    let line = frame.lines().next().unwrap_or_default();
    if line.chars().count() <= MAX_EXCERPT_CHARS {
        line.to_owned()
    } else {
        line.chars().take(MAX_EXCERPT_CHARS).chain(['…']).collect()
    }
}

const FORGED_HEADERS: &[(&str, &str)] = &[
    ("authorization", "Bearer stolen"),
    ("x-litellm-end-user-id", "someone-else"),
    ("x-litellm-customer-id", "someone-else"),
    ("x-litellm-api-key", "sk-attacker"),
    ("x-litellm-spend-logs-metadata", "{\"run_id\":\"other\"}"),
    ("x-litellm-tags", "free-of-charge"),
    ("user-agent", "definitely-not-an-agent"),
];

const REFUSED_BODIES: &[(&str, &str)] = &[
    ("api_key", "\"sk-attacker\""),
    ("fallbacks", "[\"a-dearer-model\"]"),
    ("web_search_options", "{}"),
    ("tools", "[{\"type\":\"mcp\",\"server_url\":\"https://x\"}]"),
    ("n", "50"),
];

const MAX_TURNS: u64 = 4;
const AUDIT_LOG: &str = "audit.jsonl";
const MAX_EXCERPT_CHARS: usize = 110;
