//! A4: The records of a grant's ended runs are bounded, and a request for removed records is refused.

use serde_json::Value;

use super::{chat_body, run_body, wait_until_async};
use crate::support::service::ServiceSetup;

/// The service removes the records of older runs that exceed the bound, at the end of each run. Their rows and logs stay.
#[tokio::test(flavor = "multi_thread")]
async fn records_that_were_removed_are_gone_and_the_run_is_not() {
    let setup = ServiceSetup::new("").await;
    setup.write_config("max_kept_bytes = 16777216");
    let service = setup.start();
    let grant = setup.grant(&[]);
    let asked_again = async || {
        let key = [("idempotency-key", "k")];
        grant.post_with("/api/v1/ai/chat", &chat_body("fake"), &key).await
    };
    let answer = asked_again().await;
    let run = answer.header("x-run-id").unwrap().to_owned();
    let before = grant.ended(&run).await;
    assert!(before["result"].is_object());
    // The run counts as one with large records.
    let database = setup.state_dir().join("state.db");
    let database = rusqlite::Connection::open(database).unwrap();
    database.execute("UPDATE run SET kept = 16777216 WHERE id = ?1", [&run]).unwrap();

    let next = grant.run(&run_body("fake")).await;
    assert!(grant.ended(&next).await["result"].is_object());
    let path = |of: &str| format!("/api/v1/runs/{run}/{of}");
    wait_until_async(async || grant.get(&path("output")).await.status == 410).await;
    for path in ["output", "events"].map(path) {
        let gone = grant.get(&path).await;
        assert_eq!(gone.status, 410, "{path}");
        assert_eq!(gone.json()["error"]["code"], "records_removed");
    }
    let gone = asked_again().await;
    let text = gone.text().replace(&run, "RUN");
    insta::assert_snapshot!(text, @r#"{"error":{"code":"records_removed","message":"the output, the result and the events of run `RUN` were removed, because later runs of its grant have filled `serve.max_kept_bytes`; its row and its audit log are still there"}}"#);
    let mut after = grant.get(&format!("/api/v1/runs/{run}")).await.json();
    assert_eq!(after["result"].take(), Value::Null);
    let mut before = before;
    before["result"].take();
    assert_eq!(after, before);
    assert_eq!(grant.get(&path("audit")).await.json()["verified"], true);
    setup.stop(service);
}
