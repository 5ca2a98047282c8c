//! G12: Tests of the program's own log in JSON.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;

use http::Method;
use serde_json::Value;

use super::BINARY;
use crate::support::client::{TestClient, build_request};
use crate::support::model_provider;
use crate::support::process::{ChildProcess, wait_until};
use crate::support::test_ca::TestCa;

/// G12: Each line is one flat JSON object, with the run and its trace if the line is about a run.
#[tokio::test(flavor = "multi_thread")]
async fn a_json_line_names_its_run_and_trace() {
    let upstream = model_provider::start_default().await;
    let place = tempfile::tempdir().unwrap();
    let mut command = Command::new(BINARY);
    command
        .arg("proxy")
        .env_clear()
        .env("RUN_ID", "run-1")
        .env("BILLING_ACCOUNT_ID", "acct-1")
        .env("LITELLM_MASTER_KEY", "sk-very-secret")
        .env("LITELLM_HOST", upstream.addr.to_string())
        .env("SOCKET_PATH", place.path().join("llm.sock"))
        .env("ACCESS_LOG_PATH", "off")
        .env("TRACEPARENT", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        .env("LOG_FORMAT", "json");
    let mut gateway = ChildProcess::start(&mut command, "build it with cargo");
    gateway.until(|said| said.contains(r#""message":"ready""#));
    assert!(gateway.terminate().success());
    let lines: Vec<Value> =
        gateway.output().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &lines {
        humantime::parse_rfc3339(line["time"].as_str().unwrap()).unwrap();
    }
    let shown: Vec<_> = lines.iter().map(Value::to_string).collect();
    insta::with_settings!({filters => [
        (r#""time":"[^"]+""#, r#""time":"[time]""#),
        (r#""socket":"[^"]+""#, r#""socket":"[socket]""#),
        (r"http://127\.0\.0\.1:\d+", "[upstream]"),
    ]}, {
        insta::assert_snapshot!(shown.join("\n"), @r#"
        {"level":"INFO","message":"ready","run":"run-1","runs":1,"socket":"[socket]","target":"cogni_gateway::gateway::process","time":"[time]","trace_id":"0af7651916cd43dd8448eb211c80319c","upstream":"[upstream]"}
        {"level":"INFO","message":"draining","run":"run-1","target":"cogni_gateway::gateway::process","time":"[time]","trace_id":"0af7651916cd43dd8448eb211c80319c"}
        {"level":"INFO","message":"stopped","run":"run-1","target":"cogni_gateway::gateway::process","time":"[time]","trace_id":"0af7651916cd43dd8448eb211c80319c"}
        "#);
    });
}

/// G2: `LOG_FORMAT=json` selects JSON for the access log, too.
#[tokio::test(flavor = "multi_thread")]
async fn the_access_log_is_json_like_the_log() {
    let upstream = model_provider::start_default().await;
    let place = tempfile::tempdir().unwrap();
    let (socket, path) = (place.path().join("llm.sock"), place.path().join("access.log"));
    let mut command = Command::new(BINARY);
    command
        .arg("proxy")
        .env_clear()
        .env("RUN_ID", "run-1")
        .env("BILLING_ACCOUNT_ID", "acct-1")
        .env("LITELLM_MASTER_KEY", "sk-very-secret")
        .env("LITELLM_HOST", upstream.addr.to_string())
        .env("SOCKET_PATH", &socket)
        .env("ACCESS_LOG_PATH", &path)
        .env("LOG_FORMAT", "json");
    let mut gateway = ChildProcess::start(&mut command, "build it with cargo");
    gateway.until(|said| said.contains(r#""message":"ready""#));
    let call = serde_json::json!({"model": "fake \"two\"", "messages": []});
    let answer = TestClient::new(&socket).post("/v1/chat/completions", &call).await;
    assert!(tokio::task::block_in_place(|| gateway.terminate()).success());
    let text = std::fs::read_to_string(&path).unwrap();
    let line: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(line["runId"], "run-1", "{text}");
    assert_eq!(line["attempt"], 0, "{text}");
    assert_eq!(line["status"], answer.status.as_u16(), "{text}");
    assert_eq!(line["model"], "fake \"two\"", "{text}");
    assert!(line["request_time"].is_f64() && line["request_bytes"].is_u64(), "{text}");
}

/// G14: If the log is not read, neither requests nor the shutdown are delayed; lines that do not fit are lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_without_a_reader_delays_nothing() {
    let place = tempfile::tempdir().unwrap();
    let (socket, pipe) = (place.path().join("llm.sock"), place.path().join("pipe"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // The pipe is opened for reading and writing, so that neither side waits for the other.
    let mut reader = File::options().read(true).write(true).open(&pipe).unwrap();
    let mut command = Command::new("sh");
    command
        .args(["-c", "exec 2<>\"$0\"; exec \"$@\""])
        .arg(&pipe)
        .args([BINARY, "proxy"])
        .env_clear()
        .env("RUN_ID", "run-1")
        .env("BILLING_ACCOUNT_ID", "acct-1")
        .env("LITELLM_MASTER_KEY", "sk-very-secret")
        .env("LITELLM_HOST", "127.0.0.1:9")
        .env("SOCKET_PATH", &socket)
        .env("ACCESS_LOG_PATH", "off")
        .env("LOG", "trace");
    let mut gateway = ChildProcess::start(&mut command, "build it with cargo");
    let is_served = || UnixStream::connect(&socket).is_ok();
    tokio::task::block_in_place(|| wait_until(is_served, || gateway.output()));
    let mut connection = TestClient::new(&socket).http2().await;
    // HTTP/2 logs several lines per request: more than a pipe and the queue hold.
    for _ in 0..1000 {
        let asked = build_request(Method::GET, "http://x/health", "", &[]);
        assert_eq!(connection.send_request(asked).await.unwrap().status(), 200);
    }
    drop(connection);
    assert!(tokio::task::block_in_place(|| gateway.terminate()).success());
    let mut kept = vec![0; 1 << 20];
    let length = reader.read(&mut kept).unwrap();
    let kept = String::from_utf8_lossy(&kept[..length]);
    assert!(kept.contains("ready") && !kept.contains("stopped"), "{kept}");
}

/// G15: The crate h2 warns about a client that resets many streams. The log has none of these warnings, however many
/// there are.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_cannot_fill_our_log_through_the_crates_below_us() {
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("llm.sock");
    let mut command = Command::new(BINARY);
    command
        .arg("proxy")
        .env_clear()
        .env("RUN_ID", "run-1")
        .env("BILLING_ACCOUNT_ID", "acct-1")
        .env("LITELLM_MASTER_KEY", "sk-very-secret")
        .env("LITELLM_HOST", "127.0.0.1:9")
        .env("SOCKET_PATH", &socket)
        .env("ACCESS_LOG_PATH", "off");
    let mut gateway = ChildProcess::start(&mut command, "build it with cargo");
    gateway.until(|said| said.contains("ready"));
    for _ in 0..10 {
        let mut client = UnixStream::connect(&socket).unwrap();
        let _ = client.write_all(&streams_taken_back());
        // The gateway ends the connection.
        let _ = client.read_to_end(&mut vec![]);
    }
    assert!(gateway.terminate().success());
    let said = gateway.output();
    assert!(said.contains("stopped") && !said.contains("WARN"), "{said}");
}

/// The bytes of an HTTP/2 connection that opens more streams than a server tolerates and resets each at once.
fn streams_taken_back() -> Vec<u8> {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    for stream in (1_u32..200).step_by(2) {
        // `GET / http` by the static table, and a reset with `CANCEL`.
        bytes.extend_from_slice(b"\0\0\x03\x01\x05");
        bytes.extend_from_slice(&stream.to_be_bytes());
        bytes.extend_from_slice(b"\x82\x84\x86\0\0\x04\x03\0");
        bytes.extend_from_slice(&stream.to_be_bytes());
        bytes.extend_from_slice(b"\0\0\0\x08");
    }
    bytes
}

/// G8: An unreachable upstream is logged once a minute, with its host, the cause and what to do; so is a refused key.
/// Clients learn none of that.
#[tokio::test(flavor = "multi_thread")]
async fn the_log_says_why_the_upstream_fails() {
    let upstream = model_provider::start_default().await;
    let (here, authority) = (upstream.addr.to_string(), TestCa::new());
    let causes = [
        ("nowhere.invalid:4000", "fake", "upstream_unreachable", "cause=dns"),
        ("127.0.0.1:9", "fake", "upstream_unreachable", "cause=connection_refused"),
        (&*format!("https://{here}"), "fake", "upstream_unreachable", "cause=tls"),
        (&*here, "fake/status=401", "upstream_auth", "status=401"),
        (&*here, "fake/fault=garbage@head", "upstream_malformed", "cause=not_http"),
    ];
    for (host, model, code, cause) in causes {
        let place = tempfile::tempdir().unwrap();
        let socket = place.path().join("llm.sock");
        let mut command = Command::new(BINARY);
        command
            .arg("proxy")
            .env_clear()
            .env("RUN_ID", "run-1")
            .env("BILLING_ACCOUNT_ID", "acct-1")
            .env("LITELLM_MASTER_KEY", "sk-very-secret")
            .env("LITELLM_HOST", host)
            .env("UPSTREAM_CA_FILE", &authority.file)
            .env("SOCKET_PATH", &socket)
            .env("ACCESS_LOG_PATH", "off");
        let mut gateway = ChildProcess::start(&mut command, "build it with cargo");
        gateway.until(|said| said.contains("ready"));
        for _ in 0..3 {
            let call = serde_json::json!({"model": model, "messages": []});
            let answer = TestClient::new(&socket).post("/v1/chat/completions", &call).await;
            assert_eq!(answer.json()["error"]["code"], code, "{host}");
            let told = answer.text();
            assert!(!told.contains("127.0.0.1") && !told.contains("nowhere"), "{told}");
        }
        assert!(tokio::task::block_in_place(|| gateway.terminate()).success());
        let said = gateway.output();
        let warnings: Vec<_> = said.lines().filter(|line| line.contains("WARN")).collect();
        assert_eq!(warnings.len(), 1, "{host}: {said}");
        let name = host.trim_start_matches("https://");
        for part in [name, code, cause, "hint="] {
            assert!(warnings[0].contains(part), "{host}: `{part}` is not in {}", warnings[0]);
        }
        assert!(!said.contains("sk-very-secret"), "{said}");
    }
}

/// R8: `doctor` tries the configured upstream, and names the setting to change if that fails.
#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_asks_the_upstream() {
    let upstream = model_provider::start_default().await;
    let place = tempfile::tempdir().unwrap();
    let state = place.path().join("state");
    let doctor = |host: &str, key: &str| {
        let flags = ["doctor", "--state-dir", state.to_str().unwrap(), "--litellm-host", host];
        let (_, said, _) = super::run_cogni(&flags, &[("LITELLM_MASTER_KEY", key)]);
        let at = said.lines().position(|line| line.contains(" upstream ")).unwrap();
        let found: Vec<_> = said.lines().skip(at).take(2).collect();
        found.join("\n").replace(&upstream.addr.to_string(), "HOST")
    };
    let here = upstream.addr.to_string();
    let told = tokio::task::block_in_place(|| {
        [doctor(&here, "sk-x"), doctor("127.0.0.1:9", "sk-x"), doctor("nowhere.invalid", "sk-x")]
    });
    assert!(told[0].starts_with("ok       upstream           http://HOST answers"), "{}", told[0]);
    insta::assert_snapshot!(told[1], @r"
    missing  upstream           http://127.0.0.1:9: cannot reach the upstream (connection_refused): Connection refused (os error 111)
                                nothing listens at the upstream's port; start the upstream, or check LITELLM_HOST
    ");
    assert!(told[2].contains("cannot reach the upstream (dns)"), "{}", told[2]);
}
