//! R5: Tests of engines that are slow, silent, cut off or gone: the result of the run, and that nothing remains.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::driver::{Sandboxed, sh};
use crate::support::docker_engine;
use crate::support::engine_proxy::{Call, EngineProxy, Fault};
use crate::support::process::Process;

/// R5: If an answer of the engine is missing or incomplete, or its connection ends, the run ends at its deadline at the
/// latest and leaves nothing, including what the engine has made by then.
#[test]
fn an_engine_whose_answers_are_lost_costs_the_run_and_leaves_nothing() {
    let mut table = String::new();
    for call in [
        Call::Image,
        Call::Create,
        Call::Attach,
        Call::Start,
        Call::Wait,
        Call::Inspect,
        Call::Remove,
    ] {
        for fault in [Fault::AnswerLost, Fault::AnswerCut, Fault::Refused] {
            let outcome = came_of(call, fault);
            writeln!(table, "{:8} {:11} {outcome}", format!("{call:?}"), format!("{fault:?}"))
                .unwrap();
        }
    }
    insta::assert_snapshot!(table);
}

fn came_of(call: Call, fault: Fault) -> String {
    let runner = Sandboxed::new();
    let engine_proxy = EngineProxy::new(&runner.path(), Path::new(docker_engine::SOCKET));
    engine_proxy.inject(call, fault);
    // A lost answer at the end is requested again or not needed; before that, only the deadline helps.
    let is_late = matches!(call, Call::Inspect | Call::Remove) || fault != Fault::AnswerLost;
    let max_runtime = if is_late { "60s" } else { "1s" };
    let flags = ["--docker-socket", engine_proxy.socket(), "--max-runtime", max_runtime];
    // If the run ends without the fault, the program must end by itself; if the run ends at its deadline, the program
    // must not.
    let script = if call == Call::Wait && !is_late { "sleep 600" } else { "true" };
    let result = runner.run(&flags, &sh(script));
    let error = result.json["error"].as_str().unwrap_or_default().split(':').next().unwrap();
    format!("{} {error}", result.json["error_code"].as_str().unwrap_or("ok")).trim_end().to_owned()
}

/// R5: A slow engine alone ends no run.
#[test]
fn an_engine_that_is_slow_does_its_work() {
    let runner = Sandboxed::new();
    let engine_proxy = EngineProxy::new(&runner.path(), Path::new(docker_engine::SOCKET));
    engine_proxy.always(Fault::Late(Duration::from_millis(200)));
    let result = runner.run(&["--docker-socket", engine_proxy.socket()], &sh("echo hi"));
    assert_eq!(result.facts(), json!([true, 0, null]), "{}", result.json);
    assert_eq!(result.json["stdout"], "hi\n");
}

/// R5: The deadline holds, and a container that the engine makes afterwards is removed.
#[test]
fn a_container_that_comes_after_the_deadline_is_removed() {
    // On a slow machine the first deadline may pass before anything is made.
    for seconds in [3, 12, 48] {
        let runner = Sandboxed::new();
        let engine_proxy = EngineProxy::new(&runner.path(), Path::new(docker_engine::SOCKET));
        engine_proxy.inject(Call::Create, Fault::Slow(Duration::from_secs(seconds + 1)));
        let max_runtime = format!("{seconds}s");
        let flags = ["--docker-socket", engine_proxy.socket(), "--max-runtime", &max_runtime];
        let result = runner.run(&flags, &["true"]);
        assert_eq!(result.facts(), json!([false, null, "timeout"]), "{}", result.json);
        let calls = engine_proxy.calls();
        if calls.contains(&Call::Create) {
            assert!(calls.contains(&Call::Remove), "{calls:?}");
            return;
        }
    }
    panic!("the engine was not asked for a container in time");
}

/// R5: An engine that returns removes what it had lost.
#[test]
fn an_engine_that_goes_away_and_comes_back_keeps_nothing() {
    let runner = Sandboxed::new();
    let engine_proxy = EngineProxy::new(&runner.path(), Path::new(docker_engine::SOCKET));
    let run = format!("run-engine-back-{}", std::process::id());
    let mut process = started(&runner, &engine_proxy, &run);
    engine_proxy.disconnect();
    process.until(|output| output.contains("cannot remove the container yet"));
    engine_proxy.reconnect();
    assert_eq!(result(&mut process)["error_code"], "internal");
    runner.assert_nothing_is_left(&run);
}

/// R5: A run does not wait for an engine that does not return, and the next run removes the rest.
#[test]
fn an_engine_that_goes_away_for_good_costs_a_bounded_time() {
    let runner = Sandboxed::new();
    let engine_proxy = EngineProxy::new(&runner.path(), Path::new(docker_engine::SOCKET));
    let run = format!("run-engine-gone-{}", std::process::id());
    let mut process = started(&runner, &engine_proxy, &run);
    engine_proxy.disconnect();
    let result = result(&mut process);
    assert_eq!(result["error_code"], "internal");
    assert_eq!(runner.left(&run), "container (running)");
    assert!(process.output().contains("the container is left behind"), "{}", process.output());
    runner.run(&["--run-id", &run], &["true"]);
}

fn started(runner: &Sandboxed, engine_proxy: &EngineProxy, run: &str) -> Process {
    let flags = ["--run-id", run, "--docker-socket", engine_proxy.socket()];
    let mut command = runner.prepare(&flags, &sh("echo up; sleep 600"));
    let mut process = Process::start(command.env("LOG", "debug"), "");
    process.until(|output| output.contains("up\n"));
    process
}

fn result(process: &mut Process) -> Value {
    assert_eq!(process.wait().code(), Some(1));
    let output = process.output();
    let line = output.lines().find(|line| line.starts_with("{\"run_id\"")).expect("a result");
    serde_json::from_str(line).unwrap()
}
