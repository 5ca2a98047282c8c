//! G14: Tests of the memory that a run of a shared listener holds.

use tokio::runtime::Builder;

use super::chat_body;
use crate::support::shared_app::{SharedApp, run_spec};

/// G14: A run holds no more memory than the manual says, before its first call and after its connection is closed.
#[test]
fn a_run_holds_no_more_than_its_figure() {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let app = runtime.block_on(SharedApp::start());
    let names: Vec<_> = (0..RUNS).map(|number| format!("used-{number}")).collect();
    let ask = |names: &[String]| {
        runtime.block_on(async {
            for name in names {
                let response = app.call(&app.token(name), "/v1/messages", &chat_body()).await;
                assert_eq!(response.status, 200);
            }
        });
    };
    let one_run = vec!["run-1".to_owned(); names.len()];
    // The listener, the pool and the provider grow with the first calls.
    ask(&one_run);
    let opened = measure_memory(|| {
        runtime.block_on(async {
            for name in &names {
                app.runs.open_run(run_spec(name, "acct-1")).unwrap();
            }
        });
    });
    // The calls of one run cost what the provider and the records keep of any call.
    let calls = measure_memory(|| ask(&one_run));
    let used = measure_memory(|| ask(&names)) - calls;
    let each = [opened / RUNS, (opened + used) / RUNS];
    assert!(each.iter().all(|bytes| bytes * 100 <= RUN_BYTES * 105), "{each:?}");
    runtime.block_on(app.stop());
}

/// Returns the bytes that `work` has allocated on this thread and has not freed.
fn measure_memory(work: impl FnOnce()) -> i64 {
    allocation_counter::measure(work).bytes_current
}

const RUNS: i64 = 100;
/// The bytes that an open run holds. The manual says the same.
const RUN_BYTES: i64 = 10_165;
