//! R4: Tests of `cogni-init` as the first process of real containers, in images that contain nothing of it.

use super::deployment::{ProxyContainer, ProxyDeployment, RUN};
use crate::support::docker_engine;

/// R4: It works in an image with only busybox, without network, privilege and writable directory.
#[test]
fn an_image_of_busybox_alone_reaches_the_gateway() {
    let deployment = ProxyDeployment::start(ProxyContainer::Gateway);
    let health = ["busybox", "wget", "-qO-", "http://127.0.0.1:8080/health"];
    let sandbox = deployment.sandbox(docker_engine::BUSYBOX, &[&["--"], &health[..]].concat());
    assert_eq!(sandbox.wait(), 0, "{}", sandbox.logs());
    assert!(sandbox.logs().contains(RUN), "{}", sandbox.logs());
}

/// R4: It works in an image with only the agent's program, without shell and libc.
#[test]
fn an_image_of_one_program_starts() {
    let deployment = ProxyDeployment::start(ProxyContainer::Gateway);
    let sandbox =
        deployment.sandbox(docker_engine::GATEWAY, &["--", "/cogni-gateway", "--version"]);
    assert_eq!(sandbox.wait(), 0, "{}", sandbox.logs());
    assert!(sandbox.logs().starts_with("cogni-gateway "), "{}", sandbox.logs());
}

/// R3: The first process has the agent's uid, but the agent cannot inspect it. R4: Signals and exit codes show that it
/// works.
#[test]
fn the_first_process_is_closed_to_the_agent() {
    let deployment = ProxyDeployment::start(ProxyContainer::Gateway);
    let script = "
        readlink /proc/1/exe; cat /proc/1/environ; (echo > /proc/1/mem); ls /proc/1/fd/
        kill -KILL 1; kill -STOP 1
        trap 'exit 42' TERM; echo ready; sleep 1000 & wait";
    let sandbox = deployment.sandbox(docker_engine::BUSYBOX, &["--", "sh", "-c", script]);
    crate::support::process::wait_until(|| sandbox.logs().contains("ready"), || sandbox.logs());
    sandbox.kill("TERM");
    assert_eq!(sandbox.wait(), 42, "{}", sandbox.logs());
    let output = sandbox.logs();
    let refused =
        output.lines().filter(|line| line.to_lowercase().contains("permission denied")).count();
    // `readlink` of busybox prints nothing and fails.
    assert_eq!((refused, output.contains("cogni-init")), (3, false), "{output}");
}
