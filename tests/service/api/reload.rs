//! A4: Tests of SIGHUP: the service applies every setting that it can, and reports the others; a broken setting
//! prevents the start.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use super::{run_body, wait_until_async};
use crate::support::process::ChildProcess;
use crate::support::service::ServiceSetup;

/// A setting that would appear changed, and is not, makes the whole reload fail.
#[tokio::test(flavor = "multi_thread")]
async fn a_setting_that_needs_a_restart_is_reported() {
    let setup = ServiceSetup::new("").await;
    let (rules, key) = (setup.path().join("relay.toml"), setup.path().join("seed"));
    fs::write(&rules, "").unwrap();
    fs::write(&key, "11".repeat(32)).unwrap();
    let mut command = setup.command();
    command.env("COGNI_RELAY_CONFIG", &rules).env("AUDIT_SIGNING_KEY_FILE", &key);
    let mut process = ChildProcess::start(&mut command, "build it");
    tokio::task::block_in_place(|| process.until(|output| output.contains("ready")));
    for (more, expected) in [
        ("retention = \"1d\"", "`[serve]` cannot change"),
        ("[metrics]\naddress = \"127.0.0.1:0\"", "`[metrics]` cannot change"),
        (
            "[upstream]\nurl = \"elsewhere:4000\"\nfirst_byte_timeout = \"1s\"",
            "`[upstream]` but for its key cannot change",
        ),
        ("[telemetry]\nservice_name = \"other\"", "`[telemetry]` cannot change"),
        ("[server]\nmax_headers = 50", "`[server]` cannot change"),
        ("[budget]\nmax_turns = -1", "is not a valid configuration"),
        ("[prices]\nfile = \"/nowhere\"", "the prices cannot be used"),
        ("[admin]\nsocket_path = \"/nowhere/admin.sock\"", "`[admin]` is for"),
    ] {
        setup.write_config(more);
        process.signal("HUP");
        let refused = |text: &str| {
            text.lines().any(|line| {
                line.contains("the old configuration stays in force") && line.contains(expected)
            })
        };
        tokio::task::block_in_place(|| process.until(refused));
    }
    setup.write_config("");
    fs::write(&key, "22".repeat(32)).unwrap();
    process.signal("HUP");
    let named = |output: &str| {
        output.contains("the old configuration stays in force: `AUDIT_SIGNING_KEY` cannot change")
    };
    tokio::task::block_in_place(|| process.until(named));
    fs::write(&key, "11".repeat(32)).unwrap();
    let run = setup.owner.run(&run_body("fake")).await;
    assert_eq!(setup.owner.ended(&run).await["error_code"], Value::Null);
    fs::write(&rules, "no_such_key = 1").unwrap();
    process.signal("HUP");
    let named = |output: &str| {
        output.contains("the old configuration stays in force: the relay cannot be opened")
    };
    tokio::task::block_in_place(|| process.until(named));
    assert!(!process.output().contains("are read again"), "{}", process.output());
    assert!(tokio::task::block_in_place(|| process.terminate()).success());
}

/// A key that was changed in its file is used by the next run, without a restart.
#[tokio::test(flavor = "multi_thread")]
async fn an_upstreams_key_is_rotated() {
    let setup = ServiceSetup::new("").await;
    let key = setup.path().join("key");
    fs::write(&key, "sk-old").unwrap();
    let mut command = setup.command();
    command.env_remove("LITELLM_MASTER_KEY").env("LITELLM_MASTER_KEY_FILE", &key);
    let mut process = ChildProcess::start(&mut command, "build it");
    tokio::task::block_in_place(|| process.until(|output| output.contains("ready")));
    for (written, sent) in [("sk-old", "Bearer sk-old"), ("sk-new", "Bearer sk-new")] {
        fs::write(&key, written).unwrap();
        process.signal("HUP");
        let again = |text: &str| {
            text.matches("are read again").count() == if written == "sk-old" { 1 } else { 2 }
        };
        tokio::task::block_in_place(|| process.until(again));
        let run = setup.owner.run(&run_body("fake")).await;
        assert_eq!(setup.owner.ended(&run).await["error_code"], Value::Null);
        // The reconciliation task also sends requests there.
        let requests = setup.provider.seen.requests();
        let call = requests.iter().rev().find(|request| request.path.contains("completions"));
        assert_eq!(call.unwrap().header("authorization"), Some(sent));
    }
    assert!(tokio::task::block_in_place(|| process.terminate()).success());
}

/// A wrong relay rules file, or an unusable run directory, is reported at the start.
#[tokio::test(flavor = "multi_thread")]
async fn a_broken_setting_prevents_the_start() {
    let setup = ServiceSetup::new("").await;
    let rules = setup.path().join("relay.toml");
    fs::write(&rules, "no_such_key = 1").unwrap();
    for (name, value, expected) in [
        ("COGNI_RELAY_CONFIG", rules.to_str().unwrap(), "no_such_key"),
        ("COGNI_RELAY_CONFIG", "/nowhere/relay.toml", "/nowhere/relay.toml"),
        ("COGNI_RUN_DIR", "/proc/x", "`serve.run_dir` is `/proc/x`, which cannot be used"),
    ] {
        let mut process = ChildProcess::start(setup.command().env(name, value), "build it");
        let status = tokio::task::block_in_place(|| process.wait());
        assert_eq!(status.code(), Some(2), "{name}={value}: {}", process.output());
        assert!(process.output().contains(expected), "{name}={value}: {}", process.output());
    }
}

/// A value that cannot be counted to is refused, and the error explains the setting.
#[tokio::test(flavor = "multi_thread")]
async fn the_error_explains_a_wrong_setting() {
    let setup = ServiceSetup::new("").await;
    let file = setup.path().join("serve.toml");
    let said = |text: &str| {
        fs::write(&file, text).unwrap();
        let mut process = ChildProcess::start(&mut setup.command(), "build it");
        assert_eq!(tokio::task::block_in_place(|| process.wait()).code(), Some(2));
        process.output().trim_end().to_owned()
    };
    let said = [
        said("[serve]\nmax_connections = 9000000000000000000"),
        said("[serve]\nrequest_timeout = \"0s\""),
        said("[serve]\nreconcile_every = \"0s\""),
        said("[serve]\ndrain_timeout = \"200000000000000d\""),
        said("[serve]\nreceipt_bound = \"101y\""),
        said("[serve]\naudit_retention = \"101y\""),
        said("[serve]\nbilling_retention = \"3d\""),
        said("workers = 4\n[serve]"),
        said("[serve]\n[admin]\nsocket_path = \"/run/admin.sock\""),
    ];
    insta::assert_snapshot!(said.join("\n"), @"
    error: `serve.max_connections` is `9000000000000000000`; give 1 to 1000000
    error: `serve.request_timeout` is `0s`; give 1ms to 36500d
    error: `serve.reconcile_every` is `0s`; give 1s to 36500d
    error: `serve.drain_timeout` is `547570157426years 5months 1day 7h 12m`; give 0s to 36500d
    error: `serve.receipt_bound` is `101years`; give 0s to 36500d
    error: `serve.audit_retention` is `101years`; give 0s to 36500d
    error: `serve.billing_retention` is `3days`; give 4days to 36500d
    error: `workers` is `4`; take it out: a service has a thread for each processor
    error: `[admin]` is for `cogni-gateway proxy` and `cogni-gateway shared`; take it out: `POST /api/v1/runs/ID/cancel` ends a run of a service
    ");
    let help = setup.cogni(&["serve", "--help"]);
    assert!(help.starts_with("Serve agents, chats and runs over HTTP"), "{help}");
}

/// Agents without repositories need no git, and the log says that there is none.
#[tokio::test(flavor = "multi_thread")]
async fn without_git_there_are_runs_and_no_relay() {
    let setup = ServiceSetup::new("").await;
    let served = setup.command();
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", WITHOUT_GIT, "sh"]).arg(served.get_program());
    command.args(served.get_args()).env_clear();
    command.envs(served.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut process = ChildProcess::start(&mut command, "run it as root");
    tokio::task::block_in_place(|| process.until(|output| output.contains("ready")));
    let ready = setup.client().get("/readyz").await;
    assert_eq!(ready.status, 200, "{}", ready.text());
    let relay = ready.json()["checks"]["relay"].as_str().unwrap().to_owned();
    assert!(relay.starts_with("there is no git that is new enough"), "{relay}");
    let run = setup.owner.run(&run_body("fake")).await;
    assert_eq!(setup.owner.ended(&run).await["error_code"], Value::Null);
    assert!(tokio::task::block_in_place(|| process.terminate()).success());
}

/// A missing run directory makes the service not ready, so a load balancer sends no work.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_run_directory_makes_the_service_not_ready() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let ready = setup.client().get("/readyz").await;
    assert_eq!((ready.status.as_u16(), &ready.json()["checks"]["relay"]), (200, &json!("ok")));
    fs::remove_dir_all(setup.run_dir()).unwrap();
    let ready = setup.client().get("/readyz").await;
    assert_eq!(ready.status, 503);
    let message = ready.json()["checks"]["run_dir"].as_str().unwrap().to_owned();
    assert!(message.contains("cannot be written: No such file or directory"), "{message}");
    fs::create_dir(setup.run_dir()).unwrap();
    wait_until_async(async || setup.client().get("/readyz").await.status == 200).await;
    setup.stop(service);
}

/// Runs a program that finds a device in place of each git.
const WITHOUT_GIT: &str = "for git in /usr/bin/git /usr/local/bin/git; do \
    if [ -e $git ]; then mount --bind /dev/null $git || exit 1; fi; done; exec \"$@\"";
