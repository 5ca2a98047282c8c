//! R7: Tests of a sandbox that waits for its claim, and of what it accepts as a claim.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};

use super::{InitEnd, InitFixture, PROGRAM};

/// R7: The claim replaces the command line, and the sandbox's own variables stay unless the claim sets them.
#[test]
fn a_claim_is_the_command_line() {
    let sandbox = InitFixture::new();
    let (slot, mut host) = start_slot(&sandbox);
    let (socket, address) = (sandbox.path("llm.sock"), sandbox.address.to_string());
    let script = "echo $OWN $GIVEN \"$0\" \"$1\"; ls /proc/self/fd | wc -l";
    host.write_all(&claim_message(&[
        "--socket",
        &socket,
        "--listen",
        &address,
        "--env",
        "GIVEN=given",
        "--",
        "sh",
        "-c",
        script,
        "",
        "a b",
    ]))
    .unwrap();
    let mut answer = vec![];
    host.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, [0]);
    let ended = finish_slot(slot);
    // No descriptor of the claim's connection stays open.
    let files = sandbox.script(&[], "ls /proc/self/fd | wc -l").stdout;
    assert_eq!((ended.code, ended.stdout), (Some(0), format!("own given  a b\n{files}")));
}

/// R7: An incomplete claim starts nothing.
#[test]
fn an_incomplete_or_invalid_claim_starts_nothing() {
    let sandbox = InitFixture::new();
    let whole = claim_message(&["--", "sh", "-c", "echo started"]);
    let mut messages = vec![];
    for bytes in [
        &whole[..0],
        &whole[..3],
        &whole[..whole.len() - 1],
        &[&whole[..], b"more"].concat(),
        &[255, 255, 255, 255],
        &[0, 0, 0, 0],
        &claim_message(&["--"]),
        &claim_message(&["--slot", "/again"]),
        &claim_message(&["--env", "=x", "true"]),
    ] {
        let (slot, mut host) = start_slot(&sandbox);
        host.write_all(bytes).unwrap();
        host.shutdown(Shutdown::Write).unwrap();
        let ended = finish_slot(slot);
        assert_eq!(ended.stdout, "");
        messages.push(format!("{} {}", ended.code.unwrap(), ended.stderr));
    }
    insta::assert_snapshot!(messages.concat(), @r"
    69 cogni-init: the process that started this sandbox has disconnected; no agent was started
    69 cogni-init: the process that started this sandbox has disconnected; no agent was started
    69 cogni-init: the process that started this sandbox has disconnected; no agent was started
    125 cogni-init: cannot take the claim: it is too long
    125 cogni-init: cannot take the claim: it is too long
    69 cogni-init: the process that started this sandbox has disconnected; no agent was started
    125 cogni-init: cannot take the claim: there is no program to start; give one, with its arguments, after `--`
    125 cogni-init: cannot take the claim: it has no program
    125 cogni-init: cannot take the claim: `--env` is `=x`; give NAME=VALUE
    ");
}

/// R7: A waiting slot ends at once when it gets a signal.
#[test]
fn a_waiting_slot_ends_on_a_signal() {
    let (slot, _host) = start_slot(&InitFixture::new());
    assert!(
        Command::new("kill").args(["-TERM", &slot.id().to_string()]).status().unwrap().success()
    );
    assert_eq!(finish_slot(slot).code, Some(143));
}

/// Starts a slot and connects to it.
fn start_slot(sandbox: &InitFixture) -> (Child, UnixStream) {
    let path = sandbox.path("slot");
    let listener = UnixListener::bind(&path).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["--slot", &path]).env("OWN", "own").env("GIVEN", "own");
    let slot = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (host, _) = listener.accept().unwrap();
    std::fs::remove_file(path).unwrap();
    (slot, host)
}

fn claim_message(arguments: &[&str]) -> Vec<u8> {
    let text: String = arguments.iter().flat_map(|argument| [*argument, "\0"]).collect();
    let length = u32::try_from(text.len()).unwrap();
    [&length.to_be_bytes(), text.as_bytes()].concat()
}

fn finish_slot(slot: Child) -> InitEnd {
    slot.wait_with_output().unwrap().into()
}
