//! A comparison of a run's socket with and without the lane: the upstream gets the same requests, the client gets the
//! same answers, and the same records are written. The tests and the fuzz target use it.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::base::task_group::TaskGroup;
use cogni_gateway::fakes::model_provider::{FakeProvider, ProviderScript};
use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::pipeline::server::LaneMode;
use cogni_gateway::gateway::process::GatewayProcess;
use cogni_gateway::llm::budget::Tokens;
use cogni_gateway::telemetry::access_log::AccessLogDestination;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

/// The observable results of a conversation.
#[derive(Debug, PartialEq)]
pub(crate) struct ConversationTraces {
    pub(crate) answers: Vec<String>,
    pub(crate) upstream: Vec<String>,
    pub(crate) records: Vec<Value>,
}

/// How a client ends a conversation. The client reads to the end in both cases.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ConversationEnd {
    /// A last request asks the server to close the connection.
    LastRequest,
    /// The client ends its writing side.
    EndOfWriting,
}

/// Sends the pieces to both servers and compares the results. Returns the common result.
///
/// An incomplete request ends by a timeout, which a busy machine may run into early. So a difference counts only if it
/// comes again.
pub(crate) async fn compare_servers(pieces: &[&[u8]], end: ConversationEnd) -> ConversationTraces {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let (lane, hyper) = tokio::join!(
            Box::pin(run_conversation(LaneMode::On, pieces, end)),
            Box::pin(run_conversation(LaneMode::Off, pieces, end)),
        );
        if lane == hyper || attempts == MAX_ATTEMPTS {
            let sent = pieces.iter().map(|piece| piece.escape_ascii().to_string());
            assert_eq!(lane, hyper, "the lane's on the left: {:#?}", sent.collect::<Vec<_>>());
            return lane;
        }
    }
}

/// Sends the pieces one after the other to a new gateway, and ends the conversation.
pub(crate) async fn run_conversation(
    mode: LaneMode,
    pieces: &[&[u8]],
    end: ConversationEnd,
) -> ConversationTraces {
    let provider =
        FakeProvider::bind(SocketAddr::from(([127, 0, 0, 1], 0)), ProviderScript::default()).await;
    let provider = provider.expect("a free port");
    let directory = tempfile::tempdir().expect("a temporary directory");
    let config = configure_run(directory.path(), provider.addr(), mode);
    let (log, seen) = (config.audit.path.clone().expect("set above"), provider.request_log());
    let app = GatewayProcess::build_process(config).expect("a good configuration");
    let socket = app.socket_path().expect("a run of its own").to_owned();
    let (stop, tasks) = (CancellationToken::new(), TaskGroup::default());
    tasks.spawn_task(provider.serve(stop.clone()));
    let closing = stop.clone();
    let served = async {
        // Every wait here ends because of the other side.
        app.serve_until_cancelled(closing).await.expect("an orderly end");
    };
    let exchange = async {
        let answers = tokio::time::timeout(TEST_TIMEOUT, send_pieces(&socket, pieces, end)).await;
        stop.cancel();
        answers.expect("the gateway has closed the connection")
    };
    let ((), answers) = tokio::join!(Box::pin(served), exchange);
    tasks.shut_down(Duration::ZERO).await;
    let seen = seen.requests();
    let upstream = seen.iter().map(|request| {
        let mut headers = request.headers.clone();
        headers.retain(|(name, _)| name != "host");
        headers.sort();
        let (method, path, text) = (&request.method, &request.path, &request.text);
        mask_ids(&format!("{method} {path} {headers:?} {text:?} {:?}", request.body_bytes))
    });
    let mut records = read_log(&log);
    let mut answers = answers_in(&answers);
    if forget_estimates(&mut records) {
        // The headers of later answers tell how much the estimates have left.
        for answer in &mut answers {
            *answer = without_number(answer, "x-cogni-budget-output-tokens-left: ");
        }
    }
    ConversationTraces { upstream: upstream.collect(), answers, records }
}

fn configure_run(directory: &Path, upstream: SocketAddr, mode: LaneMode) -> GatewayConfig {
    let mut config = GatewayConfig::default();
    "run-1".clone_into(&mut config.identity.run);
    "acct-1".clone_into(&mut config.identity.account);
    config.listen.socket_path = directory.join("llm.sock");
    config.upstream.url = upstream.to_string().parse().expect("an address");
    config.upstream.api_key = SecretString::new("sk-real");
    config.audit.path = Some(directory.join("audit.jsonl"));
    config.access_log = AccessLogDestination::Off;
    config.budget.max_output_tokens = Some(Tokens(100_000));
    config.server.lane = mode;
    config.server.header_timeout = SHORT;
    config.policy.body_timeout = SHORT;
    config.upstream.first_byte_timeout = SHORT;
    config.upstream.idle_timeout = SHORT;
    config.drain_timeout = Duration::ZERO;
    config
}

/// Sends the pieces, and returns all bytes that arrive until the gateway closes the connection.
async fn send_pieces(socket: &Path, pieces: &[&[u8]], end: ConversationEnd) -> Vec<u8> {
    let stream = UnixStream::connect(socket).await.expect("the gateway listens");
    let (mut reader, mut writer) = stream.into_split();
    let mut answers = vec![];
    let written = async {
        let last = match end {
            ConversationEnd::LastRequest => Some(LAST),
            ConversationEnd::EndOfWriting => None,
        };
        for piece in pieces.iter().copied().chain(last) {
            // The gateway may close before it has read everything.
            let _ = writer.write_all(piece).await;
            for _ in 0..TURNS {
                tokio::task::yield_now().await;
            }
        }
        if let ConversationEnd::EndOfWriting = end {
            let _ = writer.shutdown().await;
        }
        // An open write half keeps the connection open for all answers.
        writer
    };
    let _ = tokio::join!(reader.read_to_end(&mut answers), written);
    answers
}

/// Splits the bytes into answers without their variable parts; also tells whether the last answer is complete.
fn answers_in(mut bytes: &[u8]) -> Vec<String> {
    let mut answers = vec![];
    while !bytes.is_empty() {
        let mut fields = [httparse::EMPTY_HEADER; 64];
        let mut head = httparse::Response::new(&mut fields);
        let Ok(httparse::Status::Complete(length)) = head.parse(bytes) else {
            answers.push(format!("no answer: {}", bytes.escape_ascii()));
            break;
        };
        let value = |name| {
            let field = head.headers.iter().find(|field| field.name == name);
            field.map(|field| String::from_utf8_lossy(field.value).into_owned())
        };
        let (body, rest) = match value("content-length") {
            Some(content_length) => {
                let content_length: usize = content_length.parse().expect("a number");
                let end = bytes.len().min(length + content_length);
                (bytes[length..end].to_vec(), &bytes[end..])
            }
            None if value("transfer-encoding").is_some() => split_chunks(&bytes[length..]),
            None => (vec![], &bytes[length..]),
        };
        let mut lines: Vec<_> = head.headers.iter().filter(|field| field.name != "date").collect();
        lines.sort_by_key(|field| (field.name, field.value));
        let is_last = head.code.is_some_and(|code| code >= 200);
        assert_eq!(
            head.headers.len() - lines.len(),
            usize::from(is_last),
            "an answer has one date"
        );
        let lines: Vec<_> = lines
            .iter()
            .map(|field| format!("{}: {}", field.name, field.value.escape_ascii()))
            .collect();
        let body = body.escape_ascii().to_string();
        answers.push(mask_ids(&format!("{:?} {:?} {lines:?} {body}", head.code, head.reason)));
        bytes = rest;
    }
    answers
}

/// Splits a chunked body from the bytes after it. A body without its end is marked.
fn split_chunks(mut bytes: &[u8]) -> (Vec<u8>, &[u8]) {
    let mut body = vec![];
    loop {
        let Ok(httparse::Status::Complete((at, size))) = httparse::parse_chunk_size(bytes) else {
            body.extend_from_slice(b"[broken off]");
            return (body, &[]);
        };
        let end = at + usize::try_from(size).expect("a small chunk");
        let whole = bytes.get(at..end).filter(|_| bytes.get(end..end + 2) == Some(b"\r\n"));
        let Some(data) = whole else {
            body.extend_from_slice(b"[broken off]");
            return (body, &[]);
        };
        body.extend_from_slice(data);
        bytes = &bytes[end + 2..];
        if size == 0 {
            return (body, bytes);
        }
    }
}

fn read_log(log: &Path) -> Vec<Value> {
    let text = fs::read_to_string(log).expect("the log is there");
    let records = text.lines().map(|line| serde_json::from_str(&mask_ids(line)).expect("JSON"));
    let mut records: Vec<Value> =
        records.filter(|record: &Value| record["event"] != "log.checkpoint").collect();
    for record in &mut records {
        let record = record.as_object_mut().expect("an object");
        record.retain(|name, _| !TIMED.contains(&name.as_str()));
    }
    records
}

/// Returns a text without the digits behind `label`.
fn without_number(text: &str, label: &str) -> String {
    let Some((before, after)) = text.split_once(label) else { return text.to_owned() };
    let rest = after.trim_start_matches(|digit: char| digit.is_ascii_digit());
    format!("{before}{label}{rest}")
}

/// Removes estimates, because they depend on the time without data. Returns true if there are estimates.
fn forget_estimates(records: &mut [Value]) -> bool {
    let mut is_any_estimated = false;
    for record in records {
        let is_estimated = record["usage"]["source"] == "estimated";
        is_any_estimated |= is_estimated;
        for (name, is_of_time) in
            [("usage", is_estimated), ("charged", is_estimated), ("spent", is_any_estimated)]
        {
            if let Some(counts) = record.get_mut(name).and_then(Value::as_object_mut)
                && is_of_time
            {
                counts.remove("output");
            }
        }
    }
    is_any_estimated
}

/// Replaces ids and times. A truncated body may end inside an id.
fn mask_ids(text: &str) -> String {
    let is_id = |word: &str| {
        let is_uuid = word.split('-').map(str::len).eq([8, 4, 4, 4, 12]);
        let last = word.rsplit('-').next().unwrap_or_default();
        let is_long = last.len() >= 12 || is_uuid;
        is_long && last.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let is_time = |word: &str| word.len() == 10 && word.bytes().all(|byte| byte.is_ascii_digit());
    let mut out = String::with_capacity(text.len());
    for word in text.split_inclusive(|c: char| !c.is_ascii_alphanumeric() && c != '-') {
        let end = word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric() && c != '-').len();
        let (word, end) = word.split_at(end);
        out.push_str(if is_id(word) || is_time(word) { "[]" } else { word });
        out.push_str(end);
    }
    out
}

/// Asks the server to close the connection, if the server still parses requests.
const LAST: &[u8] = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";

/// Record fields that differ between any two runs.
const TIMED: &[&str] = &[
    "time",
    "prev",
    "hash",
    "public_key",
    "policy",
    "frames",
    "first_byte_ms",
    "duration_ms",
    "pid",
    "cgroup",
];

/// The comparisons after which a difference is one.
const MAX_ATTEMPTS: u32 = 3;

/// The scheduler turns that the gateway gets to read one piece before the next is sent.
const TURNS: usize = 16;

/// The time to wait for the rest of an incomplete request.
const SHORT: Duration = Duration::from_millis(150);

const TEST_TIMEOUT: Duration = Duration::from_mins(1);
