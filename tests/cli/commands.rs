//! Tests of the program: its output, its exit, and that killing it loses nothing.

mod admin;
mod earlier_files;
mod error_messages;
mod help;
mod log;
mod relay;
mod stdout;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cogni_gateway::telemetry::audit::verify::{self, AuditVerifyReport};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::client::TestClient;
use crate::support::model_provider;
use crate::support::process::ChildProcess;

/// G2: The snapshot shows the help as a person reads it.
#[test]
fn the_help_names_every_setting() {
    let (code, help, _) = run_cogni(&["proxy", "--help"], &[]);
    assert_eq!(code, 0);
    insta::assert_snapshot!(help);
}

/// G2: Wrong use exits with 2 and explains the mistake.
#[test]
fn wrong_use_is_explained() {
    let wrong = |arguments: &[&str], variables: &[(&str, &str)]| {
        let (code, _, said) = run_cogni(arguments, variables);
        format!("{code}: {said}")
    };
    insta::assert_snapshot!(wrong(&["proxy", "--max-turn", "5"], &[]), @r"
    2: error: unexpected argument '--max-turn' found

      tip: a similar argument exists: '--max-turns'

    Usage: cogni-gateway proxy --max-turns <COUNT>

    For more information, try '--help'.
    ");
    insta::allow_duplicates! {
        for arguments in [&["run", "sh"][..], &["run", "--image", "i", "sh"]] {
            insta::assert_snapshot!(wrong(arguments, &[]), @r"
            2: error: invalid value 'sh' for '[WORD]': the program and its arguments come after `--`: `cogni-gateway run … -- sh`; the message for an agent comes after `--message`

            For more information, try '--help'.
            ");
        }
    }
    insta::assert_snapshot!(wrong(&["proxy"], &[]), @"2: error: `RUN_ID` is not set, and every call is recorded and billed under it; give `--run-id ID`");
    insta::assert_snapshot!(wrong(&["proxy"], &[("RUN_ID", "r"), ("MAX_TURNS", "some")]), @"2: error: `MAX_TURNS` is `some`; give a whole number");
    insta::assert_snapshot!(wrong(&["health", "--socket-path", "/nowhere/llm.sock"], &[]), @"1: error: no process answers on `/nowhere/llm.sock`: No such file or directory (os error 2)");
}

/// G1: If the socket's owner cannot be set, nothing is served, and no file remains.
#[test]
fn a_socket_that_cannot_be_given_away_is_removed() {
    let place = tempfile::tempdir_in("/tmp").unwrap();
    let unprivileged = 65534;
    std::os::unix::fs::chown(place.path(), Some(unprivileged), Some(unprivileged)).unwrap();
    let binary = place.path().join("cogni-gateway");
    fs::copy(BINARY, &binary).unwrap();
    let socket = place.path().join("llm.sock");
    let output = Command::new(&binary)
        .arg("proxy")
        .env_clear()
        .envs([("RUN_ID", "run-1"), ("BILLING_ACCOUNT_ID", "a"), ("LITELLM_MASTER_KEY", "sk")])
        .env("SOCKET_PATH", &socket)
        .env("SOCKET_OWNER", "0")
        .uid(unprivileged)
        .gid(unprivileged)
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let said = said.replace(place.path().to_str().unwrap(), "[dir]");
    insta::assert_snapshot!(said, @"error: cannot bind `[dir]/llm.sock`: Operation not permitted (os error 1)");
    assert!(!socket.exists());
}

/// G2: SIGTERM lets an open stream end, and then the process ends; the next process replaces it.
#[tokio::test(flavor = "multi_thread")]
async fn sigterm_drains_an_open_stream() {
    let upstream = model_provider::start_default().await;
    let run = GatewaySetup::new(&upstream.addr.to_string());
    for starts in 1..=2 {
        let mut gateway = run.start();
        let mut stream = run.client().open("/v1/messages", &streamed_body("fake/gate=1")).await;
        assert!(stream.frame().await.unwrap().is_some());
        upstream.gate.wait_for_waiting(1).await;
        gateway.signal("TERM");
        gateway.until(|said| said.contains("draining"));
        upstream.gate.allow_answers(1);
        let (rest, in_order) = stream.rest().await;
        assert!(in_order && rest.contains("message_stop"), "{rest}");
        assert!(gateway.wait().success());
        assert!(!run.socket().exists());
        let report = run.verify();
        assert_eq!((report.starts, report.finished, report.open), (starts, true, 0));
        assert_eq!(report.spent.turns, starts);
    }
}

/// G13: SIGHUP reads the file again; a wrong file changes nothing and is reported.
#[tokio::test(flavor = "multi_thread")]
async fn a_hangup_reads_the_file_again() {
    let upstream = model_provider::start_default().await;
    let run = GatewaySetup::new(&upstream.addr.to_string());
    run.configure("[policy.body]\nmodels = ['fake']");
    let mut gateway = run.start();
    let call = |model: &str| json!({"model": model, "max_tokens": 5, "messages": []});
    let status = async |model| run.client().post("/v1/messages", &call(model)).await.status;
    assert_eq!(status("fake/output=7").await, 403);
    let open = run.client().open("/v1/messages", &streamed_body("fake")).await;

    for (file, complaint) in [
        ("[policy.body]\nmodel = ['fake']", "the old configuration stays in force: `"),
        ("drain_timeout = '1s'", "`drain_timeout` cannot change while a run is served"),
    ] {
        run.configure(file);
        gateway.signal("HUP");
        gateway.until(|said| said.contains(complaint));
        assert_eq!(status("fake/output=7").await, 403);
        assert_eq!(reload_failed(&gateway), "1");
    }
    assert!(gateway.output().contains("unknown field `model`"), "{}", gateway.output());

    run.configure("[policy.body]\nmodels = ['fake/output=7']\n[budget]\nmax_output_tokens = 1");
    gateway.signal("HUP");
    gateway.until(|said| said.contains("the policy has changed"));
    assert_eq!(reload_failed(&gateway), "0");
    // The whole budget is reserved by the open stream or spent, which is known before a body is read.
    assert_eq!(status("fake").await, 402);
    assert!(open.finish().await.is_ok(), "an open stream ends under the old policy");
    // The stream's tokens stay spent.
    assert_eq!(status("fake/output=7").await, 402);
    assert!(gateway.terminate().success());
    run.verify();
    let log = fs::read_to_string(run.audit_log()).unwrap();
    let changed: Vec<_> = log.lines().filter(|line| line.contains("policy.changed")).collect();
    assert_eq!(changed.len(), 1);
    assert!(
        changed[0].contains(r#""version":1"#) && changed[0].contains(r#""by":"signal""#),
        "{changed:?}"
    );
}

/// Returns the metric of the last reload.
fn reload_failed(gateway: &ChildProcess) -> String {
    let said = gateway.output();
    let address = said.split("metrics=").nth(1).unwrap().split(' ').next().unwrap();
    let mut scrape = TcpStream::connect(address).unwrap();
    scrape.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    scrape.read_to_string(&mut text).unwrap();
    let line = text.lines().find(|line| line.starts_with("cogni_gateway_reload_failed ")).unwrap();
    line.split(' ').nth(1).unwrap().to_owned()
}

/// G11: `kill -9` in the middle of 100 streams loses no admission, and the next process charges for them.
#[tokio::test(flavor = "multi_thread")]
async fn kill_9_amid_a_hundred_streams_loses_nothing() {
    let upstream = model_provider::start_default().await;
    let run = GatewaySetup::new(&upstream.addr.to_string());
    let mut gateway = run.start();
    let mut streams = vec![];
    for _ in 0..100 {
        let mut stream = run.client().open("/v1/messages", &streamed_body("fake/gate=1")).await;
        assert!(stream.frame().await.unwrap().is_some());
        streams.push(stream);
    }
    run.client()
        .post("/v1/messages", &json!({"model": "fake", "max_tokens": 5, "messages": []}))
        .await;
    gateway.signal("KILL");
    assert!(!gateway.wait().success());
    for stream in streams {
        assert!(!stream.rest().await.1, "a client takes the part for the whole");
    }
    let report = run.verify();
    assert_eq!((report.admitted, report.finished), (101, false));
    assert!(run.socket().exists(), "a crash leaves its socket");

    let mut gateway = run.start();
    let status = run.client().get("/run/status").await.json();
    assert_eq!(status["budget"]["spent"]["turns"], 101);
    assert_eq!(status["budget"]["turns_left"], 899);
    let call = json!({"model": "fake", "max_tokens": 5, "messages": []});
    assert_eq!(run.client().post("/v1/messages", &call).await.status, 200);
    gateway.signal("TERM");
    assert!(gateway.wait().success());
    let report = run.verify();
    let calls = (report.admitted, report.settled, report.open, report.unmatched);
    assert_eq!(calls, (102, 102, 0, 0));
    assert!((100..=101).contains(&report.crashed), "{report:?}");
    assert_eq!((report.starts, report.finished, report.spent.turns), (2, true, 102));
}

/// G11: The key is in no log, error, argument or record, at any log level.
#[tokio::test(flavor = "multi_thread")]
async fn the_key_is_written_nowhere() {
    let upstream = model_provider::start_default().await;
    let run = GatewaySetup::new(&upstream.addr.to_string());
    let mut gateway = run.start();
    for model in ["fake", "fake/status=401", "fake/fault=reset@head", "fake/fault=garbage@head"] {
        run.client().post("/v1/chat/completions", &json!({"model": model, "messages": []})).await;
    }
    run.client().get("/nothing").await;
    let pid = gateway.id();
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    assert!(!String::from_utf8_lossy(&arguments).contains(KEY));
    gateway.signal("TERM");
    gateway.wait();
    assert!(upstream.seen.last_request().unwrap().header("authorization").unwrap().contains(KEY));
    assert!(gateway.output().contains("ready"));
    assert!(!gateway.output().contains(KEY), "{}", gateway.output());
    let files = fs::read_dir(run.0.path()).unwrap().map(|file| file.unwrap().path());
    let files: Vec<_> = files.filter(|file| file.is_file()).collect();
    assert!(files.len() >= 2, "{files:?}");
    for file in files {
        let text = fs::read(&file).unwrap();
        assert!(!String::from_utf8_lossy(&text).contains(KEY), "{}", file.display());
    }
}

/// A run of the built program, with its files.
struct GatewaySetup(TempDir, String);

impl GatewaySetup {
    fn new(upstream: &str) -> Self {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("admin")).unwrap();
        Self(place, upstream.to_owned())
    }

    /// Starts a process and waits until it serves.
    fn start(&self) -> ChildProcess {
        let path = |name: &str| self.0.path().join(name);
        let mut command = Command::new(BINARY);
        command
            .arg("proxy")
            .env_clear()
            .env("RUN_ID", "run-1")
            .env("BILLING_ACCOUNT_ID", "acct-1")
            .env("LITELLM_MASTER_KEY", KEY)
            .env("LITELLM_HOST", &self.1)
            .env("SOCKET_PATH", self.socket())
            .env("AUDIT_LOG_PATH", self.audit_log())
            .env("ACCESS_LOG_PATH", path("access.log"))
            .env("ADMIN_SOCKET_PATH", self.admin_socket())
            .env("METRICS_ADDR", "127.0.0.1:0")
            .env("MAX_TURNS", "1000")
            .env("LOG", "trace");
        if path("gateway.toml").exists() {
            command.env("CONFIG", path("gateway.toml"));
        }
        let mut process = ChildProcess::start(&mut command, "build it with cargo");
        process.until(|said| said.contains("ready"));
        process
    }

    /// Writes the file that the next start or SIGHUP reads.
    fn configure(&self, file: &str) {
        fs::write(self.0.path().join("gateway.toml"), file).unwrap();
    }

    fn socket(&self) -> PathBuf {
        self.0.path().join("llm.sock")
    }

    /// Returns a socket path in its own directory, which the sandbox cannot see.
    fn admin_socket(&self) -> PathBuf {
        self.0.path().join("admin/admin.sock")
    }

    fn audit_log(&self) -> PathBuf {
        self.0.path().join("audit.jsonl")
    }

    fn client(&self) -> TestClient {
        TestClient::new(&self.socket())
    }

    /// Verifies the audit log with the command, as an operator does.
    fn verify(&self) -> AuditVerifyReport {
        let log = self.audit_log();
        let (code, said, _) = run_cogni(&["audit", "verify", log.to_str().unwrap()], &[]);
        assert_eq!(code, 0, "{said}");
        verify::verify_file(Path::new(&log), None).unwrap()
    }
}

/// Returns exit code, standard output and standard error.
fn run_cogni(arguments: &[&str], variables: &[(&str, &str)]) -> (i32, String, String) {
    let output = Command::new(BINARY)
        .args(arguments)
        .env_clear()
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn streamed_body(model: &str) -> Value {
    json!({"model": model, "max_tokens": 100, "stream": true, "messages": []})
}

const BINARY: &str = env!("CARGO_BIN_EXE_cogni-gateway");
const KEY: &str = "sk-very-secret";
