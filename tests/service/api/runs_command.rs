//! R8: Tests of `cogni-gateway runs`, which lists and ends a service's runs from a shell.

use std::process::Command;

use serde_json::{Value, json};

use super::{run_body, wait_until_async};
use crate::support::service::ServiceSetup;

/// A4: The command lists a run, shows it, follows it to its end, and prints its output.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_inspected_from_a_shell() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let grant = setup.grant(&[]);
    let run = grant.run(&run_body("fake/text=one two")).await;
    let (code, watched, complaint) = run_cogni(&setup, &grant.token, &["watch", &run]);
    assert_eq!(code, 0, "{complaint}");
    assert!(watched.contains("one two") && watched.contains("result      ok"), "{watched}");
    let (_, lines, _) = run_cogni(&setup, &grant.token, &["watch", "--json", &run]);
    let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert_eq!((&last["event"], &last["data"]["ok"]), (&json!("final"), &json!(true)));
    let (code, listed, _) = run_cogni(&setup, &grant.token, &["list", "--state", "ended"]);
    assert!(code == 0 && listed.lines().count() == 2 && listed.contains(&run), "{listed}");
    let (code, shown, _) = run_cogni(&setup, &grant.token, &["show", &run]);
    assert!(code == 0 && shown.contains("spent       1 turn,"), "{shown}");
    let (code, printed, _) = run_cogni(&setup, &grant.token, &["output", &run]);
    assert!(code == 0 && printed.contains("one two"), "{printed}");
    setup.stop(service);
}

/// A4: The command ends a run; a run that the grant may not see does not exist for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_ended_from_a_shell() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let (grant, other) = (setup.grant(&[]), setup.grant(&[]));
    let run = grant.run(&run_body("fake/gate=1")).await;
    setup.provider.gate.wait_for_waiting(1).await;
    let (code, _, complaint) = run_cogni(&setup, &other.token, &["cancel", &run]);
    assert!(code == 2 && complaint.contains("answers 404"), "{complaint}");
    let (code, output, _) = run_cogni(&setup, &grant.token, &["cancel", &run]);
    assert_eq!((code, output), (0, format!("run {run} is being ended\n")));
    let (code, watched, _) = run_cogni(&setup, &grant.token, &["watch", &run]);
    assert!(code == 1 && watched.contains("cancelled"), "{watched}");
    let (code, _, complaint) = run_cogni(&setup, "cgr_wrong", &["list"]);
    assert!(code == 2 && complaint.contains("`--token-file`"), "{complaint}");
    setup.stop(service);
}

/// A token is not sent over a network without TLS.
#[test]
fn a_token_stays_on_this_machine_or_goes_by_tls() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
    let flags = ["runs", "list", "--service", "http://192.0.2.1:7070"];
    let done = command.args(flags).env_clear().env("COGNI_TOKEN", "cgr_x").output().unwrap();
    let output = String::from_utf8(done.stderr).unwrap();
    insta::assert_snapshot!(output, @"error: `--service` is `http://192.0.2.1:7070`, which would send the token over a network in the clear; give `https://`");
}

/// Readiness reports whether the upstream is reachable and accepts the key, without its address.
#[tokio::test(flavor = "multi_thread")]
async fn readiness_reports_the_upstream() {
    let mut setup = ServiceSetup::new("").await;
    let service = setup.start();
    wait_until_async(async || service.get("/readyz").await.json()["upstream"] == "ok").await;
    let ready = service.get("/readyz").await.json();
    assert_eq!(ready["checks"]["forge"], "no credential", "{ready}");
    setup.stop(service);
    setup.set("LITELLM_HOST", "127.0.0.1:9");
    let service = setup.start();
    let expected = "upstream_unreachable: connection_refused";
    wait_until_async(async || service.get("/readyz").await.json()["upstream"] == expected).await;
    let ready = service.get("/readyz").await;
    assert_eq!(ready.status, 200, "another instance would have the same");
    assert!(!ready.text().contains("127.0.0.1"), "{}", ready.text());
    assert!(service.process.output().contains("hint="), "{}", service.process.output());
    setup.stop(service);
}

/// Returns exit code, standard output and standard error.
fn run_cogni(setup: &ServiceSetup, token: &str, arguments: &[&str]) -> (i32, String, String) {
    let service = format!("unix:{}", setup.path().join("api.sock").display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
    command.arg("runs").args(arguments).env_clear();
    command.env("COGNI_SERVICE", service).env("COGNI_TOKEN", token);
    let done = tokio::task::block_in_place(|| command.output()).unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (done.status.code().unwrap(), text(done.stdout), text(done.stderr))
}
