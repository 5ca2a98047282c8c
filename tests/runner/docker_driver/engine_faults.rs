//! R5: Tests of engines that are slow, silent, cut off or gone: the result of the run, and that nothing remains.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::driver::{TestedRunner, shell_argv};
use crate::support::docker_engine;
use crate::support::engine_proxy::{EngineFault, EngineProxy, ProxiedCall};
use crate::support::process::ChildProcess;

/// R5: If an answer of the engine is missing or incomplete, or its connection ends, the run ends at its deadline at the
/// latest and leaves nothing, including what the engine has made by then.
#[test]
fn an_engine_whose_answers_are_lost_costs_the_run_and_leaves_nothing() {
    let mut table = String::new();
    for call in [
        ProxiedCall::Image,
        ProxiedCall::Create,
        ProxiedCall::Attach,
        ProxiedCall::Start,
        ProxiedCall::Wait,
        ProxiedCall::Inspect,
        ProxiedCall::Remove,
    ] {
        for fault in [EngineFault::AnswerLost, EngineFault::AnswerCut, EngineFault::Refused] {
            let outcome = came_of(call, fault);
            writeln!(table, "{:8} {:11} {outcome}", format!("{call:?}"), format!("{fault:?}"))
                .unwrap();
        }
    }
    insta::assert_snapshot!(table);
}

fn came_of(call: ProxiedCall, fault: EngineFault) -> String {
    let runner = TestedRunner::new();
    let engine_proxy = EngineProxy::new(&runner.path(), Path::new(docker_engine::SOCKET));
    engine_proxy.inject(call, fault);
    // A lost answer at the end is requested again or not needed; before that, only the deadline helps.
    let is_late = matches!(call, ProxiedCall::Inspect | ProxiedCall::Remove)
        || fault != EngineFault::AnswerLost;
    let max_runtime = if is_late { "60s" } else { "1s" };
    let flags = ["--docker-socket", engine_proxy.socket(), "--max-runtime", max_runtime];
    // If the run ends without the fault, the program must end by itself; if the run ends at its deadline, the program
    // must not.
    let script = if call == ProxiedCall::Wait && !is_late { "sleep 600" } else { "true" };
    let result = runner.run(&flags, &shell_argv(script));
    let error = result.json["error"].as_str().unwrap_or_default().split(':').next().unwrap();
    format!("{} {error}", result.json["error_code"].as_str().unwrap_or("ok")).trim_end().to_owned()
}

/// R5: A slow engine alone ends no run.
#[test]
fn an_engine_that_is_slow_does_its_work() {
    let runner = TestedRunner::new();
    let engine_proxy = EngineProxy::new(&runner.path(), Path::new(docker_engine::SOCKET));
    engine_proxy.always(EngineFault::Late(Duration::from_millis(200)));
    let result = runner.run(&["--docker-socket", engine_proxy.socket()], &shell_argv("echo hi"));
    assert_eq!(result.facts(), json!([true, 0, null]), "{}", result.json);
    assert_eq!(result.json["stdout"], "hi\n");
}

/// R5: The deadline holds, and a container that the engine makes afterwards is removed.
#[test]
fn a_container_that_comes_after_the_deadline_is_removed() {
    // On a slow machine the first deadline may pass before anything is made.
    for seconds in [3, 12, 48] {
        let runner = TestedRunner::new();
        let engine_proxy = EngineProxy::new(&runner.path(), Path::new(docker_engine::SOCKET));
        engine_proxy
            .inject(ProxiedCall::Create, EngineFault::Slow(Duration::from_secs(seconds + 1)));
        let max_runtime = format!("{seconds}s");
        let flags = ["--docker-socket", engine_proxy.socket(), "--max-runtime", &max_runtime];
        let result = runner.run(&flags, &["true"]);
        assert_eq!(result.facts(), json!([false, null, "timeout"]), "{}", result.json);
        let calls = engine_proxy.calls();
        if calls.contains(&ProxiedCall::Create) {
            assert!(calls.contains(&ProxiedCall::Remove), "{calls:?}");
            return;
        }
    }
    panic!("the engine was not asked for a container in time");
}

/// R5: An engine that returns removes what it had lost.
#[test]
fn an_engine_that_goes_away_and_comes_back_keeps_nothing() {
    let runner = TestedRunner::new();
    let engine_proxy = EngineProxy::new(&runner.path(), Path::new(docker_engine::SOCKET));
    let run = format!("run-engine-back-{}", std::process::id());
    let mut process = start_run(&runner, &engine_proxy, &run);
    engine_proxy.disconnect();
    process.until(|output| output.contains("cannot remove the container yet"));
    engine_proxy.reconnect();
    assert_eq!(run_result(&mut process)["error_code"], "internal");
    runner.assert_nothing_is_left(&run);
}

/// R5: A run that loses a part of its output ends with an error, and does not go on unheard. Nothing else of the engine
/// has failed.
#[test]
fn a_run_whose_output_breaks_off_ends_with_an_error() {
    let runner = TestedRunner::new();
    for (index, rest) in ["sleep 600", "sleep 3; echo unheard"].into_iter().enumerate() {
        let path = runner.path().join(index.to_string());
        fs::create_dir(&path).unwrap();
        let engine_proxy = EngineProxy::new(&path, Path::new(docker_engine::SOCKET));
        let run = format!("run-unheard-{index}-{}", std::process::id());
        let flags = ["--run-id", &run, "--docker-socket", engine_proxy.socket()];
        let script = format!("echo up; {rest}");
        let mut process =
            ChildProcess::start(&mut runner.prepare(&flags, &shell_argv(&script)), "");
        process.until(|output| output.contains("up\n"));
        engine_proxy.cut_attached();
        let result = run_result(&mut process);
        assert_eq!(result["error_code"], "internal", "{result}");
        let error = result["error"].as_str().unwrap();
        assert!(
            error.starts_with("Docker Engine has lost a part of the sandbox's output"),
            "{error}"
        );
        runner.assert_nothing_is_left(&run);
    }
}

/// R5: A run does not wait for an engine that does not return, and the next run removes the rest.
#[test]
fn an_engine_that_goes_away_for_good_costs_a_bounded_time() {
    let runner = TestedRunner::new();
    let engine_proxy = EngineProxy::new(&runner.path(), Path::new(docker_engine::SOCKET));
    let run = format!("run-engine-gone-{}", std::process::id());
    let mut process = start_run(&runner, &engine_proxy, &run);
    engine_proxy.disconnect();
    let result = run_result(&mut process);
    assert_eq!(result["error_code"], "internal");
    assert_eq!(runner.left(&run), "container (running)");
    assert!(process.output().contains("the container is left behind"), "{}", process.output());
    runner.run(&["--run-id", &run], &["true"]);
}

fn start_run(runner: &TestedRunner, engine_proxy: &EngineProxy, run: &str) -> ChildProcess {
    let flags = ["--run-id", run, "--docker-socket", engine_proxy.socket()];
    let mut command = runner.prepare(&flags, &shell_argv("echo up; sleep 600"));
    let mut process = ChildProcess::start(command.env("LOG", "debug"), "");
    process.until(|output| output.contains("up\n"));
    process
}

fn run_result(process: &mut ChildProcess) -> Value {
    assert_eq!(process.wait().code(), Some(1));
    let output = process.output();
    let line = output.lines().find(|line| line.starts_with("{\"run_id\"")).expect("a result");
    serde_json::from_str(line).unwrap()
}
