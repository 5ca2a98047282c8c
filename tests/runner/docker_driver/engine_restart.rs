//! R5: Tests of a real Docker Engine that is stopped, killed and restarted during a run.

use serde_json::Value;

use super::driver::{TestedRunner, shell_argv};
use crate::support::docker_daemon::{ContainerFate, DockerDaemon};
use crate::support::docker_engine;
use crate::support::process::ChildProcess;

/// R5: The run ends with a reason, and its container is removed as soon as the engine is back.
#[test]
fn an_engine_that_is_restarted_keeps_nothing_of_the_run() {
    let mut dockerd = DockerDaemon::start(ContainerFate::EndWithIt, docker_engine::HOST);
    for (containers, end) in [
        (ContainerFate::EndWithIt, DockerDaemon::stop as fn(&mut DockerDaemon)),
        (ContainerFate::EndWithIt, DockerDaemon::kill),
        (ContainerFate::LiveOn, DockerDaemon::stop),
        (ContainerFate::LiveOn, DockerDaemon::kill),
    ] {
        dockerd.stop();
        dockerd.start_again(containers);
        let runner = TestedRunner::new();
        let run = format!("run-restart-{}", std::process::id());
        let socket = dockerd.socket().display().to_string();
        let flags = ["--run-id", &run, "--docker-socket", &socket];
        let mut process =
            ChildProcess::start(&mut runner.prepare(&flags, &shell_argv("echo up; sleep 600")), "");
        process.until(|output| output.contains("up\n"));
        end(&mut dockerd);
        dockerd.start_again(containers);

        assert_eq!(process.wait().code(), Some(1));
        let printed = process.output();
        let line = printed.lines().find(|line| line.starts_with("{\"run_id\"")).expect("a result");
        let result: Value = serde_json::from_str(line).unwrap();
        // An engine that ends its containers may or may not report how they ended.
        let code = result["error_code"].as_str().unwrap();
        assert!(["internal", "container_failed"].contains(&code), "{result}");
        assert_eq!(dockerd.containers(), "", "{printed}");
        runner.assert_nothing_is_left(&run);
    }
}
