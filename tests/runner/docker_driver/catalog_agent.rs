//! A1: Tests of a catalog agent in a container of any image.

use std::fs;
use std::process::Command;

use serde_json::json;

use super::driver::TestedRunner;
use crate::support::docker_engine;

/// A1, R4: The image contains nothing of the agent; the agent's program is mounted.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_runs_in_an_image_that_knows_nothing_of_it() {
    let runner = TestedRunner::with_provider().await;
    let arguments =
        r#"{"argv":["sh"%2c"-c"%2c"test $(id -u) -ge 2100000000 && ls /cogni-agent && touch it"]}"#;
    let model = format!("fake/tool=exec;echo=yes;arguments={arguments}");
    let agent = ["--agent", "sandbox:agent", "--message", "hi", "--model", &model];
    let result = runner.run(&agent, &[]);
    assert_eq!(result.facts(), json!([true, 0, null]), "{}", result.json);
    let text = result.json["agent"]["payloads"][0]["text"].as_str().unwrap();
    assert_eq!(text, r#"{"exit_code":0,"stderr":"","stdout":"/cogni-agent\n"}"#);
    assert_eq!(result.json["usage"]["turns"], 2);
}

/// A2: The catalog asks the engine whether an agent's image exists, by name or id.
#[test]
fn a_missing_image_is_the_reason_why_an_agent_cannot_run() {
    let runner = TestedRunner::new();
    let id = docker_engine::docker_output(&[
        "image",
        "inspect",
        "--format",
        "{{.Id}}",
        docker_engine::BUSYBOX,
    ]);
    let agents = runner.path().join("agents");
    fs::create_dir(&agents).unwrap();
    let images = [("a", docker_engine::BUSYBOX), ("b", &id), ("c", "cogni-gateway-test:absent")];
    for (name, image) in images {
        let text = format!(
            "name = '{name}'\ndescription = 'd'\nversion = 1\nargv = ['true']\nimage = '{image}'\n"
        );
        fs::write(agents.join(format!("{name}.toml")), text).unwrap();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
        .env_clear()
        .args([
            "agents",
            "--all",
            "--init",
            docker_engine::init_path(),
            "--docker-socket",
            docker_engine::SOCKET,
        ])
        .args(["--agents-dir".as_ref(), agents.as_os_str()])
        .output()
        .unwrap();
    let shown = String::from_utf8(output.stdout).unwrap().replace(&id, "sha256:…");
    insta::assert_snapshot!(shown, @r"
    a                    version 1, needs the image `cogni-gateway-test:busybox`
                         d
    b                    version 1, needs the image `sha256:…`
                         d
    c                    version 1, needs the image `cogni-gateway-test:absent`
                         d
                         cannot run here: image `cogni-gateway-test:absent` is not on this machine; build or load it
    ");
}
