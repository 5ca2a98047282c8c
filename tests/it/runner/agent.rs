//! A1: an agent of the catalog, in a container of any image.

use serde_json::json;

use super::sandboxed::Sandboxed;

/// A1, R4: the image knows nothing of the agent, whose program is mounted into it.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_runs_in_an_image_that_knows_nothing_of_it() {
    let runner = Sandboxed::with_provider().await;
    let arguments = r#"{"argv":["sh"%2c"-c"%2c"id -u && ls /cogni-agent && touch it"]}"#;
    let model = format!("fake/tool=exec,echo=yes,arguments={arguments}");
    let agent = ["--agent", "sandbox:agent", "--message", "hi", "--model", &model];
    let result = runner.run(&agent, &[]);
    assert_eq!(result.facts(), json!([true, 0, null]), "{}", result.json);
    let text = result.json["agent"]["payloads"][0]["text"].as_str().unwrap();
    assert_eq!(text, r#"{"exit_code":0,"stderr":"","stdout":"1001\n/cogni-agent\n"}"#);
    assert_eq!(result.json["usage"]["turns"], 2);
}
