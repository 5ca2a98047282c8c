//! T3, A4: Tests of a service whose tools are files.

use std::fs;

use serde_json::json;

use super::{ServiceSetup, conversation_body};

const TOOL: &str = "name = 'text__count'\ndescription = 'Counts.'\nargv = ['/usr/bin/true']\n";

/// Makes a service whose runs may call a tool that is a file.
async fn setup_with_tool(options: &str) -> ServiceSetup {
    let setup = ServiceSetup::new(options).await;
    let directory = setup.path().join("tools");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("text__count.toml"), TOOL).unwrap();
    let shown = directory.display();
    setup.write_config(&format!("[tools]\ngranted = ['text__count']\ndirectory = '{shown}'"));
    setup
}

/// The log of a run whose process was killed is closed, though its tools need a sandbox that is gone.
#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_a_killed_run_is_closed() {
    let setup = setup_with_tool("gate=head").await;
    let mut service = setup.start();
    let run = service.run(&conversation_body("hello")).await;
    setup.provider.gate.wait_for_waiting(1).await;
    service.process.signal("KILL");
    tokio::task::block_in_place(|| service.process.wait());

    let service = setup.start();
    assert_eq!(service.ended(&run).await["error_code"], "interrupted");
    let proof = service.get(&format!("/api/v1/runs/{run}/audit")).await.json();
    assert_eq!((&proof["verified"], &proof["broken"]), (&json!(true), &json!(null)), "{proof}");
    setup.stop(service);
}

/// A tool's file counts as it was when the configuration was read. A file with a mistake stops no run, and the message
/// about it shows no value.
#[tokio::test(flavor = "multi_thread")]
async fn a_changed_file_counts_after_a_reload() {
    let setup = setup_with_tool("").await;
    let mut service = setup.start();
    let file = setup.path().join("tools/text__count.toml");
    fs::write(&file, format!("{TOOL}[env]\nTOKEN = \"hunter2\n")).unwrap();
    let run = service.run(&conversation_body("before")).await;
    assert_eq!(service.ended(&run).await["error_code"], json!(null));
    service.process.signal("HUP");
    tokio::task::block_in_place(|| {
        service.process.until(|output| output.contains("the reload has failed"));
    });
    assert!(service.process.output().contains("text__count.toml`: line 5"));
    assert!(!service.process.output().contains("hunter2"));
    let run = service.run(&conversation_body("after")).await;
    assert_eq!(service.ended(&run).await["error_code"], json!(null));
    setup.stop(service);
}
