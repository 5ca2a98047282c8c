//! G1: Tests of the command `shared`: its messages, and how it ends.

use std::fs;
use std::process::Command;
use std::sync::Arc;

use cogni_gateway::cli;
use cogni_gateway::cli::shared::load_config;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpStream;

use crate::support::client::{ResponseStream, post_request};
use crate::support::model_provider;
use crate::support::process::ChildProcess;
use crate::support::shared_app::{KEYS, token_keys};
use crate::support::test_ca::TestCa;

/// G1: The error names a wrong file or field, and how to correct it.
#[test]
fn a_wrong_configuration_is_explained() {
    let error = |text: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        let path = file.path().to_str().unwrap();
        let matches = cli::command()
            .try_get_matches_from(["cogni-gateway", "shared", "--config", path])
            .unwrap();
        let variable = |name: &str| (name == "LITELLM_MASTER_KEY").then(|| "sk".to_owned());
        let error = load_config(matches.subcommand().unwrap().1, variable).unwrap_err();
        format!("{error:#}").replace(path, "[file]")
    };
    let shared = |rest: &str| error(&format!("[shared]\ntoken_keys_file = 'keys'\n{rest}"));
    let messages = [
        error(""),
        error("[shared]"),
        shared(""),
        shared("tls_cert_file = 'a'"),
        shared("plaintext = true\nlisten = '0.0.0.0:80'"),
        shared("plaintext = true\ntls_cert_file = 'a'"),
        shared("[[shared.runs]]\naccount = 'a'"),
        shared("[[shared.runs]]\nrun_id = 'r'\nbudget = { turns = 1 }"),
    ];
    insta::assert_snapshot!(messages.join("\n\n"), @r"
    there is no `[shared]`; name a file that has it with `--config`

    `shared.token_keys_file` is not set; tokens tell the runs apart

    `shared.tls_cert_file` and `shared.tls_key_file` are not both set; give both, or say `plaintext = true` on a loopback address

    `shared.tls_cert_file` and `shared.tls_key_file` are not both set; give both, or say `plaintext = true` on a loopback address

    `shared.plaintext` is `true` and `shared.listen` is `0.0.0.0:80`; tokens must not cross a network in the clear: listen on 127.0.0.1, or give `shared.tls_cert_file` and `shared.tls_key_file`

    `shared.plaintext` is `true` and files for TLS are given; take one of them out

    `[file]` is not a valid configuration: TOML parse error at line 3, column 1
      |
    3 | [[shared.runs]]
      | ^^^^^^^^^^^^^^^
    field `run_id` is missing; give it

    `[file]` is not a valid configuration: TOML parse error at line 5, column 12
      |
    5 | budget = { turns = 1 }
      |            ^^^^^
    unknown field `turns`, expected one of `max_turns`, `max_total_tokens`, `max_input_tokens`, `max_output_tokens`, `max_cost_usd`, `max_concurrent`, `requests_per_minute`, `tokens_per_minute`, `free_calls_per_minute`, `deadline`
    ");
}

/// G1: `proxy` serves one run and `shared` serves many; `proxy` refuses settings for many runs.
#[test]
fn proxy_refuses_settings_for_many_runs() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "[shared]\n").unwrap();
    let path = file.path().to_str().unwrap();
    let matches =
        cli::command().try_get_matches_from(["cogni-gateway", "proxy", "--config", path]).unwrap();
    let error = cli::proxy::load_config(matches.subcommand().unwrap().1, |_| None).unwrap_err();
    insta::assert_snapshot!(error, @"`[shared]` is for `cogni-gateway shared`; take it out, or use that command");
}

/// G1: The help of `shared` does not contain settings of a single run.
#[test]
fn the_help_has_no_settings_of_one_run() {
    let mut command = cli::shared::command();
    let help = command.render_help().to_string();
    for flag in ["--socket-path", "--run-id", "--audit-log-path", "--billing-account-id"] {
        assert!(!help.contains(&format!("{flag} <")), "{flag}");
    }
    let (head, tail) = (help.split("Options:").next(), help.split("Print help").nth(1));
    insta::assert_snapshot!(format!("{}[…]{}", head.unwrap(), tail.unwrap()), @r"
    Serve many runs on one address, told apart by run tokens

    Usage: shared [OPTIONS]

    […]

    The listener, its keys and the runs are in the file's `[shared]`. Budgets and policy are the
    defaults of runs. A client uses its run's token as its API key.

    Example:
      cogni-gateway shared --config gateway.toml --litellm-master-key-file /run/secrets/litellm
      cogni-gateway token mint --run-id run-1 --ttl 1h --keys-file /run/secrets/run-tokens
    ");
}

/// G1: SIGHUP reads keys and certificates again, so both rotate while streams continue; a wrong file changes nothing.
/// SIGTERM drains as it does for one run.
#[tokio::test(flavor = "multi_thread")]
async fn keys_and_certificates_rotate_while_streams_go_on() {
    let upstream = model_provider::start_default().await;
    let command = SharedCommand::new(&upstream.addr.to_string());
    let mut gateway = command.start();
    let old = token_keys().mint_token("run-1", HOUR, None, std::time::SystemTime::now()).unwrap();
    let mut stream = command.open(&old, "fake/gate=1").await.unwrap();
    assert!(stream.frame().await.unwrap().is_some());
    upstream.gate.wait_for_waiting(1).await;

    let both = format!("k2 = {}\n{KEYS}", "22".repeat(32));
    let new = cogni_gateway::gateway::run::token::RunTokenKeys::parse_keys(&both).unwrap();
    let new = new.mint_token("run-1", HOUR, None, std::time::SystemTime::now()).unwrap();
    assert_eq!(command.open(&new, "fake").await.unwrap().status, 401);
    fs::write(command.path("keys"), "k2 = hunter2").unwrap();
    gateway.signal("HUP");
    gateway.until(|output| {
        output.contains("the old configuration stays in force: line 1 of the run token keys")
    });
    assert!(!gateway.output().contains("hunter2"));
    assert_eq!(command.open(&old, "fake").await.unwrap().status, 200);

    fs::write(command.path("keys"), &both).unwrap();
    let next = TestCa::new();
    command.write_certificates(&next);
    gateway.signal("HUP");
    gateway.until(|printed| printed.contains("the policy has changed"));
    assert!(
        command.open(&new, "fake").await.is_err(),
        "the certificate is another authority's now"
    );
    let command = SharedCommand { authority: next, ..command };
    for token in [&old, &new] {
        assert_eq!(command.open(token, "fake").await.unwrap().status, 200);
    }

    gateway.signal("TERM");
    gateway.until(|output| output.contains("draining"));
    upstream.gate.allow_answers(1);
    assert!(stream.rest().await.1);
    assert!(gateway.wait().success());
    let report = cogni_gateway::telemetry::audit::verify::verify_file(
        &command.path("audit/run-1.jsonl"),
        None,
    )
    .unwrap();
    assert!(report.finished && report.open == 0 && report.admitted == 4, "{report:?}");
}

/// The built program and its files.
struct SharedCommand {
    directory: tempfile::TempDir,
    authority: TestCa,
    port: u16,
}

impl SharedCommand {
    fn new(upstream: &str) -> Self {
        let (directory, authority) = (tempfile::tempdir().unwrap(), TestCa::new());
        let command = Self { directory, authority, port: crate::support::process::free_port() };
        fs::create_dir(command.path("audit")).unwrap();
        fs::write(command.path("keys"), KEYS).unwrap();
        command.write_certificates(&command.authority);
        command.configure(upstream);
        command
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    fn write_certificates(&self, authority: &TestCa) {
        let files = authority.files("127.0.0.1");
        fs::copy(files.certificate, self.path("tls.crt")).unwrap();
        fs::copy(files.key, self.path("tls.key")).unwrap();
    }

    fn configure(&self, upstream: &str) {
        let (path, port) = (|name: &str| self.path(name).display().to_string(), self.port);
        let text = format!(
            "access_log = 'off'\n[upstream]\nurl = '{upstream}'\n[shared]\nlisten = '127.0.0.1:{port}'\n\
             tls_cert_file = '{}'\ntls_key_file = '{}'\ntoken_keys_file = '{}'\naudit_dir = '{}'\n\
             [[shared.runs]]\nrun_id = 'run-1'\naccount = 'acct-1'\n",
            path("tls.crt"),
            path("tls.key"),
            path("keys"),
            path("audit"),
        );
        fs::write(self.path("gateway.toml"), text).unwrap();
    }

    fn start(&self) -> ChildProcess {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
        command.args(["shared", "--config"]).arg(self.path("gateway.toml")).env_clear();
        command.env("LITELLM_MASTER_KEY", "sk-real");
        let mut process = ChildProcess::start(&mut command, "build it with cargo");
        process.until(|output| output.contains("ready"));
        process
    }

    /// Opens a stream with a token, or returns the reason why the connection failed.
    async fn open(&self, token: &str, model: &str) -> std::io::Result<ResponseStream> {
        let config = Arc::new(self.authority.client(None, &["http/1.1"]));
        let stream = TcpStream::connect(("127.0.0.1", self.port)).await?;
        let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
        let stream = tokio_rustls::TlsConnector::from(config).connect(name, stream).await?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let body = json!({"model": model, "stream": true, "max_tokens": 5, "messages": []});
        let request = post_request("/v1/messages", &body, &[("x-api-key", token)]);
        Ok(sender.send_request(request).await.unwrap().into())
    }
}

const HOUR: std::time::Duration = std::time::Duration::from_hours(1);
