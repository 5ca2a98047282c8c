//! G15: Tests of load: a request takes no memory before it may be sent upstream, and no more than the limits after.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use cogni_gateway::fakes::model_provider::AnswerEnd;
use futures_util::stream::{FuturesUnordered, Stream, StreamExt as _};
use http::{Method, Request, header};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use tempfile::TempDir;

use crate::support::app::TestApp;
use crate::support::client::UntakenReplies;
use crate::support::model_provider;
use crate::support::process::{ChildProcess, wait_until};

/// G15: The process holds nothing for a run whose calls cannot be admitted, on any number of connections.
#[tokio::test]
async fn bodies_that_cannot_be_admitted_are_not_held() {
    let gateway = GatewayInProcess::start(&["--max-turns", "0"]).await;
    let before = gateway.resident();
    let (sender, answers) = mpsc::channel();
    let _sockets: Vec<_> = (0..40).map(|_| gateway.send(31 * MIB, &sender)).collect();
    for status in answers.iter().take(40) {
        assert_eq!(status, "HTTP/1.1 402 Payment Required");
        assert!(gateway.resident() < before + 16 * MIB);
    }
}

/// G15: The process holds nothing for such a run on one HTTP/2 connection either.
#[tokio::test]
async fn streams_that_cannot_be_admitted_are_not_held() {
    let gateway = GatewayInProcess::start(&["--max-turns", "0"]).await;
    let before = gateway.resident();
    let statuses: Vec<_> = gateway.streams(16, 31 * MIB).await.collect().await;
    assert_eq!(statuses, [402; 16]);
    assert!(gateway.resident() < before + 16 * MIB);
}

/// G15: Bodies in flight take no more than the run's limit, and their memory is returned.
#[tokio::test]
async fn bodies_in_flight_are_bounded_and_their_memory_is_returned() {
    let gateway = GatewayInProcess::start(&[]).await;
    let before = gateway.resident();
    let (sender, answers) = mpsc::channel();
    let sockets: Vec<_> = (0..16).map(|_| gateway.send(31 * MIB, &sender)).collect();
    // There is room for three bodies; they wait for their last byte.
    for status in answers.iter().take(13) {
        assert_eq!(status, "HTTP/1.1 429 Too Many Requests");
    }
    let most = gateway.resident();
    assert!(most < before + 136 * MIB, "{before} {most}");
    for socket in sockets {
        socket.shutdown(Shutdown::Both).unwrap();
    }
    wait_until(|| gateway.resident() < before + 24 * MIB, || gateway.resident().to_string());
}

#[tokio::test]
async fn streams_in_flight_are_bounded_like_connections() {
    let gateway = GatewayInProcess::start(&[]).await;
    let before = gateway.resident();
    let statuses: Vec<_> = gateway.streams(16, 31 * MIB).await.take(13).collect().await;
    assert_eq!(statuses, [429; 13], "there is room for three");
    assert!(gateway.resident() < before + 136 * MIB);
}

/// G15: An answer that costs nothing and that its client does not take is bounded, too: a stream too many is reset.
#[tokio::test]
async fn untaken_answers_on_streams_are_bounded() {
    let app = TestApp::start().await;
    let mut answers = FuturesUnordered::new();
    for _ in 0..33 {
        let socket = tokio::net::UnixStream::connect(&app.socket).await.unwrap();
        let mut client = http2::Builder::new(TokioExecutor::new());
        client.initial_stream_window_size(0);
        let (sender, connection) = client.handshake(TokioIo::new(socket)).await.unwrap();
        tokio::spawn(connection);
        for _ in 0..128 {
            let mut sender = sender.clone();
            let request = Request::get("http://localhost/run/status").body(String::new()).unwrap();
            answers.push(async move { sender.send_request(request).await });
        }
    }
    let (mut held, mut reset) = (vec![], 0);
    while let Some(answered) = answers.next().await {
        match answered {
            Ok(answer) => held.push(answer),
            Err(_) => reset += 1,
        }
    }
    assert_eq!((held.len(), reset), (4096, 128));
    drop(held);
    app.stop().await;
}

/// G15: Answers that are drained without their clients are discarded as they arrive, however many there are.
#[tokio::test(flavor = "multi_thread")]
async fn drained_answers_are_not_held() {
    let gateway = GatewayInProcess::start(&[]).await;
    let before = gateway.resident();
    let model = "fake/gate=head;chunks=48;size=64KiB";
    let body =
        json!({"model": model, "stream": true, "max_tokens": 5000, "messages": []}).to_string();
    let mut gone = vec![];
    for _ in 0..DRAINED {
        let mut socket = UnixStream::connect(&gateway.socket).unwrap();
        socket.write_all(head_to("/v1/messages", body.len()).as_bytes()).unwrap();
        socket.write_all(body.as_bytes()).unwrap();
        gone.push(socket);
    }
    let upstream = &gateway.upstream;
    upstream.gate.wait_for_waiting(DRAINED).await;
    drop(gone);
    upstream.gate.allow_answers(DRAINED);
    let mut most = 0;
    upstream
        .seen
        .wait_until(|seen| {
            most = most.max(gateway.resident());
            seen.requests().iter().all(|request| request.ended.is_some())
        })
        .await;
    let all = upstream.seen.requests();
    assert!(all.iter().all(|request| request.ended == Some(AnswerEnd::Completed)), "{all:?}");
    // Each answer has 3 MiB, of which one buffer is in memory at a time.
    assert!(most < before + 32 * MIB, "{before} {most}");
}

/// G15: Requests in flight count for the run on any connection, and drained calls count, too.
#[tokio::test]
async fn requests_in_flight_are_bounded_drains_included() {
    let app = TestApp::with(|config| {
        config.server.max_requests = 3;
        config.policy.on_client_gone =
            cogni_gateway::gateway::pipeline::policy::OnClientGone::Drain;
    })
    .await;
    let slow = json!({"model": "fake/gate=2", "stream": true, "messages": []});
    let mut streams = vec![];
    for _ in 0..3 {
        streams.push(app.client().open("/v1/chat/completions", &slow).await);
    }
    streams.pop();
    let refused = app.client().post("/v1/chat/completions", &slow).await;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (429, Some("1")));
    insta::assert_snapshot!(refused.text(), @r#"{"error":{"code":"overloaded","message":"the run has 3 requests in flight, which is the limit","param":null,"type":"rate_limit_error"}}"#);
    assert_eq!(app.client().get("/health").await.status, 200, "our own answers are not in flight");
    drop(streams);
}

/// G15: A reply of the gateway itself is in flight until the client has taken it.
#[tokio::test]
async fn replies_that_no_client_takes_count_as_requests_in_flight() {
    let app = TestApp::with(|config| {
        config.server.max_requests = 3;
        config.policy.body.models = (0..300).map(|number| format!("model-{number}")).collect();
    })
    .await;
    let lists = UntakenReplies::get(&app.socket, "/v1/models", 3).await;
    let refused = app.client().get("/v1/models").await;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (429, Some("1")));
    assert_eq!(app.client().get("/health").await.status, 200, "a health check has no limit");
    drop(lists);
    while app.client().get("/v1/models").await.status != 200 {}
    app.stop().await;
}

/// G9: A call whose body is still arriving counts as an open call.
#[tokio::test]
async fn a_call_whose_body_is_arriving_counts_as_open() {
    let app = TestApp::with(|config| config.budget.max_concurrent = Some(1)).await;
    let mut half = app.client().connect().await;
    tokio::io::AsyncWriteExt::write_all(&mut half, request_head(100).as_bytes()).await.unwrap();
    let ask = json!({"model": "fake", "messages": []});
    loop {
        let answer = app.client().post("/v1/chat/completions", &ask).await;
        if answer.status == 429 {
            assert!(answer.text().contains("too_many_concurrent_requests"), "{}", answer.text());
            break;
        }
    }
    drop(half);
    while app.client().post("/v1/chat/completions", &ask).await.status != 200 {}
    app.stop().await;
}

/// G15: A client that sends its whole request before it reads gets the answer instead of a broken pipe, and can use the
/// connection again.
#[tokio::test]
async fn a_refused_body_is_read_and_thrown_away() {
    let app = TestApp::with(|config| config.budget.max_turns = Some(0)).await;
    for (path, declared, status) in [
        ("/v1/chat/completions", 8 * MIB, "402"),
        ("/v1/chat/completions", 60 * MIB, "413"),
        ("/v1/nothing", 8 * MIB, "404"),
        ("/run/status", 8 * MIB, "404"),
    ] {
        let socket = app.socket.clone();
        let talk = move || {
            let mut socket = UnixStream::connect(socket).unwrap();
            for _ in 0..2 {
                socket.write_all(head_to(path, declared).as_bytes()).unwrap();
                write_body(&mut socket, declared).unwrap();
                let answer = read_head(&mut socket);
                assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{path}: {answer}");
                read_rest(&mut socket, &answer);
            }
        };
        tokio::task::spawn_blocking(talk).await.unwrap();
    }
}

/// RFC 9110, 10.1.1: A client that expects `100 Continue` is answered at once, and need not send its body.
#[tokio::test]
async fn a_client_that_expects_100_continue_is_answered_at_once() {
    let app = TestApp::with(|config| config.budget.max_turns = Some(0)).await;
    let request = request_head(8 * MIB).replace("\r\n\r\n", "\r\nexpect: 100-continue\r\n\r\n");
    let mut socket = UnixStream::connect(&app.socket).unwrap();
    let talk = move || {
        let mut trickling = socket.try_clone().unwrap();
        let begun = Instant::now();
        socket.write_all(request.as_bytes()).unwrap();
        // A body that is discarded may take half a minute, if it arrives without a pause.
        thread::spawn(move || {
            while trickling.write_all(b" ").is_ok() {
                thread::sleep(Duration::from_millis(100));
            }
        });
        let answer = read_head(&mut socket);
        assert!(answer.starts_with("HTTP/1.1 402 "), "{answer}");
        // The end of the stream, or a reset because a byte reached the closed connection.
        let _ = socket.read_to_end(&mut vec![]);
        assert!(begun.elapsed() < Duration::from_secs(20), "the body is waited for");
    };
    tokio::task::spawn_blocking(talk).await.unwrap();
}

/// G15: Real clients see the status, each with a body that does not fit a socket's buffer.
#[tokio::test(flavor = "multi_thread")]
async fn real_clients_see_the_status() {
    let app = TestApp::with(|config| config.budget.max_turns = Some(0)).await;
    let dir = tempfile::tempdir().unwrap();
    let body = dir.path().join("body.json");
    fs::write(&body, vec![b' '; 8 * MIB]).unwrap();
    for (path, status) in [("/v1/chat/completions", 402), ("/v1/nothing", 404)] {
        for (program, argument, script) in
            [("python3", "-c", PYTHON), ("node", "-e", NODE), ("node", "-e", NODE_FETCH)]
        {
            let mut command = Command::new(program);
            command.args([argument, script]).arg(&app.socket).arg(path);
            assert_eq!(command_output(command), status.to_string(), "{program} {path}");
        }
        let mut command = Command::new("curl");
        command.args([
            "--silent",
            "--show-error",
            "--output",
            "/dev/null",
            "--write-out",
            "%{http_code}",
        ]);
        command
            .arg("--unix-socket")
            .arg(&app.socket)
            .args(["--header", "content-type: application/json"]);
        command.arg("--data-binary").arg(format!("@{}", body.display()));
        command.arg(format!("http://localhost{path}"));
        assert_eq!(command_output(command), status.to_string(), "curl {path}");
    }
}

/// G15: Go's client writes a body and reads the answer at the same time, and gives up if a write fails before the
/// answer has arrived. Go's compiler takes 450 MB, so this test reproduces `net/http.persistConn.roundTrip`.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_while_it_writes_sees_the_status() {
    let refusing = TestApp::with(|config| config.budget.max_turns = Some(0)).await;
    let small = TestApp::with(|config| config.policy.max_body_bytes = MIB as u64).await;
    for (app, path, status) in [
        (&refusing, "/v1/chat/completions", "402"),
        (&refusing, "/v1/nothing", "404"),
        (&small, "/v1/chat/completions", "413"),
        (&small, "/v1/messages", "413"),
    ] {
        for is_chunked in [false, true] {
            for _ in 0..8 {
                let (socket, path) = (app.socket.clone(), path.to_owned());
                let talk = move || round_trip(&socket, &path, is_chunked);
                let answer = tokio::task::spawn_blocking(talk).await.unwrap();
                assert_eq!(answer.as_deref(), Ok(status), "{is_chunked}");
            }
        }
    }
}

/// G15: A client that asked to close may write once more behind its body. Node.js 18 ends a large body with an empty
/// write, and reports a broken pipe instead of its answer if the connection is closed by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_closes_may_write_behind_its_body() {
    let app = TestApp::with(|config| config.budget.max_turns = Some(0)).await;
    for (path, status) in [("/v1/chat/completions", "402"), ("/v1/nothing", "404")] {
        let mut client = UnixStream::connect(&app.socket).unwrap();
        let talk = move || {
            let head = head_to(path, MIB).replace("host: x", "host: x\r\nconnection: close");
            client.write_all(head.as_bytes()).unwrap();
            write_body(&mut client, MIB).unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).unwrap();
            rustix::io::write(&client, b"").map(|_| answer)
        };
        let answer = tokio::task::spawn_blocking(talk).await.unwrap();
        assert_eq!(&answer.expect("the empty write succeeds")[9..12], status);
    }
}

/// Sends a request with a body of 8 MiB. Returns the status, or the error of a write that failed before the status
/// arrived.
fn round_trip(socket: &Path, path: &str, is_chunked: bool) -> Result<String, String> {
    let mut reading = UnixStream::connect(socket).unwrap();
    let mut writing = reading.try_clone().unwrap();
    let (events, first) = mpsc::channel();
    let head = if is_chunked {
        head_to(path, 0).replace("content-length: 0", "transfer-encoding: chunked")
    } else {
        head_to(path, 8 * MIB)
    };
    let failed = events.clone();
    let writer = thread::spawn(move || {
        let mut write = || {
            writing.write_all(head.as_bytes())?;
            if !is_chunked {
                return write_body(&mut writing, 8 * MIB);
            }
            for _ in 0..8 * MIB / CHUNK.len() {
                writing.write_all(b"10000\r\n")?;
                writing.write_all(&CHUNK)?;
                writing.write_all(b"\r\n")?;
            }
            writing.write_all(b"0\r\n\r\n")
        };
        if let Err(error) = write() {
            // The test has received an answer and has ended the connection.
            let _ = failed.send(Err(format!("write: {error}")));
        }
    });
    let reader = thread::spawn(move || {
        let mut start = [0; 12];
        let read = reading.read_exact(&mut start);
        let status = read.map(|()| String::from_utf8_lossy(&start[9..]).into_owned());
        let _ = events.send(status.map_err(|error| format!("read: {error}")));
        reading
    });
    let answer = first.recv().unwrap();
    // Go does the same with a connection whose request was not completely sent.
    reader.join().unwrap().shutdown(Shutdown::Both).unwrap();
    writer.join().unwrap();
    answer
}

fn command_output(mut command: Command) -> String {
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// G15: The process raises its descriptor limit to the allowed maximum.
#[tokio::test]
async fn the_limit_of_descriptors_is_raised() {
    let gateway = GatewayInProcess::start_within("ulimit -Sn 300; ulimit -Hn 3000").await;
    let limits = fs::read_to_string(format!("/proc/{}/limits", gateway.process.id())).unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(files.split_whitespace().nth(3), Some("3000"), "{files}");
    let output = gateway.process.output();
    assert!(output.contains("too few descriptors"), "{output}");
}

/// A gateway in its own process, so that its memory can be measured.
struct GatewayInProcess {
    process: ChildProcess,
    socket: PathBuf,
    upstream: model_provider::RunningProvider,
    _directory: TempDir,
}

impl GatewayInProcess {
    async fn start(flags: &[&str]) -> Self {
        Self::launch(Command::new(env!("CARGO_BIN_EXE_cogni-gateway")), flags).await
    }

    /// Starts the gateway under limits that a shell sets.
    async fn start_within(limits: &str) -> Self {
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(format!("{limits}; exec \"$0\" \"$@\""));
        shell.arg(env!("CARGO_BIN_EXE_cogni-gateway"));
        Self::launch(shell, &[]).await
    }

    async fn launch(mut command: Command, flags: &[&str]) -> Self {
        let upstream = model_provider::start_default().await;
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("llm.sock");
        command.arg("proxy").args(flags).arg("--socket-path").arg(&socket);
        command.args([
            "--run-id",
            "run-1",
            "--billing-account-id",
            "acct-1",
            "--access-log-path",
            "off",
        ]);
        command.arg("--litellm-host").arg(upstream.addr.to_string());
        command.arg("--audit-log-path").arg(directory.path().join("audit.jsonl"));
        command.env("LITELLM_MASTER_KEY", "sk-real").stdin(Stdio::null());
        let mut process = ChildProcess::start(&mut command, "build the gateway");
        process.until(|output| output.contains("ready"));
        Self { process, socket, upstream, _directory: directory }
    }

    /// Returns the bytes of memory in use.
    fn resident(&self) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() * 1024
    }

    /// Sends a body without its last byte. The received status, or the reason why there is none, goes to the channel.
    fn send(&self, length: usize, answers: &mpsc::Sender<String>) -> UnixStream {
        let socket = UnixStream::connect(&self.socket).unwrap();
        let (mut talking, answers) = (socket.try_clone().unwrap(), answers.clone());
        thread::spawn(move || {
            let mut talk = || {
                talking.write_all(request_head(length).as_bytes())?;
                write_body(&mut talking, length - 1)?;
                let mut answer = [0; 512];
                let length = talking.read(&mut answer)?;
                Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
            };
            let answer = talk().unwrap_or_else(|error: std::io::Error| error.to_string());
            // The test may have ended already.
            let _ = answers.send(answer.lines().next().unwrap_or_default().to_owned());
        });
        socket
    }

    /// Sends requests whose bodies do not end on one connection, and returns their statuses as they arrive.
    async fn streams(&self, count: usize, length: usize) -> impl Stream<Item = u16> {
        let socket = tokio::net::UnixStream::connect(&self.socket).await.unwrap();
        let io = TokioIo::new(socket);
        let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
        tokio::spawn(connection);
        let answers = (0..count).map(|_| {
            let chunks = length / CHUNK.len();
            let frames = futures_util::stream::unfold(0, move |sent| async move {
                if sent == chunks {
                    std::future::pending::<()>().await;
                }
                let frame = Frame::data(Bytes::from_static(&CHUNK));
                Some((Ok::<_, std::convert::Infallible>(frame), sent + 1))
            });
            let request = Request::builder()
                .method(Method::POST)
                .uri("http://localhost/v1/chat/completions")
                .header(header::CONTENT_TYPE, "application/json")
                .body(StreamBody::new(frames).boxed_unsync())
                .unwrap();
            let answer = sender.clone().send_request(request);
            async move { answer.await.unwrap().status().as_u16() }
        });
        answers.collect::<FuturesUnordered<_>>()
    }
}

fn request_head(length: usize) -> String {
    head_to("/v1/chat/completions", length)
}

fn head_to(path: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
}

/// Spaces are valid JSON as long as nothing follows.
fn write_body(socket: &mut UnixStream, length: usize) -> std::io::Result<()> {
    for _ in 0..length / CHUNK.len() {
        socket.write_all(&CHUNK)?;
    }
    socket.write_all(&CHUNK[..length % CHUNK.len()])
}

fn read_head(socket: &mut UnixStream) -> String {
    let mut seen = vec![];
    while !seen.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        socket.read_exact(&mut byte).unwrap();
        seen.extend(byte);
    }
    String::from_utf8(seen).unwrap()
}

fn read_rest(socket: &mut UnixStream, head: &str) {
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    socket.read_exact(&mut vec![0; length.parse().unwrap()]).unwrap();
}

const MIB: usize = 1024 * 1024;

/// The number of abandoned calls, each with an answer of 3 MiB.
const DRAINED: usize = 48;

static CHUNK: [u8; 64 * 1024] = [b' '; 64 * 1024];

/// Python's requests and httpx over a unix socket: they send everything before they read.
const PYTHON: &str = r"
import http.client, socket, sys
connection = http.client.HTTPConnection('localhost')
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(sys.argv[1])
connection.request('POST', sys.argv[2], b' ' * (8 << 20), {'content-type': 'application/json'})
print(connection.getresponse().status)
";

const NODE: &str = r"
const http = require('node:http');
const [socketPath, path] = process.argv.slice(-2);
const headers = { 'content-type': 'application/json' };
const request = http.request({ socketPath, path, method: 'POST', headers }, (answer) => {
  answer.resume();
  console.log(answer.statusCode);
});
request.end(Buffer.alloc(8 << 20, ' '));
";

/// The JavaScript SDKs: undici over TCP, through a bridge to the socket as in a sandbox.
const NODE_FETCH: &str = r"
const net = require('node:net');
const [socketPath, path] = process.argv.slice(-2);
const bridge = net.createServer((near) => {
  const far = net.connect(socketPath);
  near.pipe(far).pipe(near);
  near.on('error', () => far.destroy());
  far.on('error', () => near.destroy());
});
bridge.listen(0, '127.0.0.1', async () => {
  const url = `http://127.0.0.1:${bridge.address().port}${path}`;
  const headers = { 'content-type': 'application/json' };
  const answer = await fetch(url, { method: 'POST', headers, body: Buffer.alloc(8 << 20, ' ') });
  await answer.text();
  console.log(answer.status);
  process.exit();
});
";
