//! Tests of wrong options, and of a sandbox that is not ready.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::Command;

use cogni_gateway::sandbox::InitBinary;
use cogni_gateway::sandbox::init_binary::BUILT_IN_INIT;

use super::{InitEnd, InitFixture, PROGRAM};

#[test]
fn wrong_use_is_reported_with_a_remedy() {
    let messages: Vec<_> = [
        &[][..],
        &["--"],
        &["--nonsense"],
        &["--listen"],
        &["--listen", "8080", "true"],
        &["--grace=5", "true"],
        &["--max-runtime", "99999h", "true"],
        &["--socket-timeout=-1s", "true"],
    ]
    .map(|arguments| InitEnd::of(Command::new(PROGRAM).args(arguments)))
    .iter()
    .map(|ended| format!("{} {}", ended.code.unwrap(), ended.stderr))
    .collect();
    insta::assert_snapshot!(messages.concat(), @r"
    2 cogni-init: there is no program to start; give one, with its arguments, after `--`; see `cogni-init --help`
    2 cogni-init: there is no program to start; give one, with its arguments, after `--`; see `cogni-init --help`
    2 cogni-init: there is no option `--nonsense`; see `cogni-init --help`
    2 cogni-init: `--listen` needs a value; see `cogni-init --help`
    2 cogni-init: `--listen` is `8080`; give an address such as `127.0.0.1:8080`; see `cogni-init --help`
    2 cogni-init: `--grace` is `5`; give a time of up to 10000h, such as `500ms`, `5s`, `10m` or `1h`; see `cogni-init --help`
    2 cogni-init: `--max-runtime` is `99999h`; give a time of up to 10000h, such as `500ms`, `5s`, `10m` or `1h`; see `cogni-init --help`
    2 cogni-init: `--socket-timeout` is `-1s`; give a time of up to 10000h, such as `500ms`, `5s`, `10m` or `1h`; see `cogni-init --help`
    ");
}

#[test]
fn help_and_version_are_printed() {
    let help = InitEnd::of(Command::new(PROGRAM).arg("--help"));
    assert_eq!((help.code, help.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(help.stdout, @r"
    The first process of a sandbox: gives the agent the run's socket as a local port, starts it, and ends with it.

    Usage: cogni-init [OPTIONS] [--] PROGRAM [ARGUMENT]...

    Options:
      --listen ADDRESS       the address at which the agent finds its LLM [default: 127.0.0.1:8080]
      --socket PATH          the run's socket [default: /llm-sock/llm.sock]
      --socket-timeout TIME  how long the socket may take to answer before the agent starts [default: 5s]
      --no-gateway           the run has no socket: do not listen, and start the agent at once
      --tunnels              the run has tunnels: write their certificate to /run, and set the variables of programs for it
      --max-runtime TIME     end the agent after this time, also without its runner [default: none]
      --grace TIME           time between SIGTERM and SIGKILL [default: 2s]
      --env NAME=VALUE       a variable for the agent; it overrides an inherited one
      --write PATH           the agent may write below this, and nowhere else, if the kernel has Landlock; may be repeated
      --stdio PATH           connect to this socket, and make it the agent's standard input and output
      --slot PATH            connect to this socket, and wait for a claim with these options and the program
      --long-running         in a claim only: after the agent has ended, wipe its files and wait for the next claim
      --commands             run several commands one after the other, without a gateway, and report their output in frames
      --allow-unix-sockets   let the agent make unix sockets; without this it gets EPERM, and socketpair(2) works
      --help                 print this
      --version              print the version

    A TIME is `500ms`, `5s`, `10m` or `1h`. PROGRAM is executed as it stands, without a shell.

    Exit status: the agent's own, or 128 and the signal that killed it; and if it is not the agent's:
      2 wrong use, 69 the run's socket does not answer, 124 --max-runtime has passed, 125 the sandbox is not set up as required,
      126 PROGRAM cannot be executed, 127 PROGRAM is not found
    ");
    let version = InitEnd::of(Command::new(PROGRAM).arg("--version"));
    assert_eq!(version.stdout, format!("cogni-init {}\n", env!("CARGO_PKG_VERSION")));
}

/// R4: The socket is checked before the agent starts.
#[test]
fn a_socket_that_does_not_answer_is_reported_before_the_agent_starts() {
    let sandbox = InitFixture::without_gateway();
    let mut messages = vec![];
    let mut attempt = || {
        let ended = sandbox.script(&["--socket-timeout=10ms"], "echo started");
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(69), ""));
        messages.push(ended.stderr.replace(sandbox.folder.path().to_str().unwrap(), "/llm-sock"));
    };
    attempt();
    // A listener that has ended leaves its file behind.
    drop(UnixListener::bind(sandbox.socket()).unwrap());
    attempt();
    fs::remove_file(sandbox.socket()).unwrap();
    fs::write(sandbox.socket(), "no socket").unwrap();
    attempt();
    insta::assert_snapshot!(messages.concat(), @r"
    cogni-init: the run's socket `/llm-sock/llm.sock` is not there; mount its directory into the sandbox, or name it with --socket
    cogni-init: no process listens on the run's socket `/llm-sock/llm.sock`; start the run's gateway first, and check that it still runs
    cogni-init: no process listens on the run's socket `/llm-sock/llm.sock`; start the run's gateway first, and check that it still runs
    ");
}

/// R4: Without a gateway, nothing waits for one, and nothing listens.
#[test]
fn without_a_gateway_the_agent_starts_at_once() {
    let sandbox = InitFixture::without_gateway();
    let script = format!(
        "use IO::Socket::INET;
         print IO::Socket::INET->new('{}') ? 'connected' : \"refused: $!\"",
        sandbox.address
    );
    let options = ["--no-gateway", "--socket-timeout=10000h"];
    let ended = InitEnd::of(&mut sandbox.command(&options, &["perl", "-e", &script]));
    let result = (ended.code, &*ended.stdout, &*ended.stderr);
    assert_eq!(result, (Some(0), "refused: Connection refused", ""));
    let ended = sandbox.script(&["--no-gateway"], "exit 7");
    assert_eq!(ended.code, Some(7), "{}", ended.stderr);
}

#[test]
fn a_socket_of_another_user_is_reported() {
    let sandbox = InitFixture::new();
    fs::set_permissions(sandbox.folder.path(), Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(sandbox.socket(), Permissions::from_mode(0o600)).unwrap();
    let program = sandbox.path("cogni-init");
    fs::copy(PROGRAM, &program).unwrap();
    let user = ["setpriv", "--reuid=1001", "--regid=1001", "--clear-groups"];
    let options = ["--socket-timeout=10ms", "--socket", &sandbox.path("llm.sock")];
    let ended =
        InitEnd::of(Command::new(user[0]).args(&user[1..]).arg(program).args(options).arg("true"));
    assert_eq!(ended.code, Some(69));
    let stderr = ended.stderr.replace(sandbox.folder.path().to_str().unwrap(), "/llm-sock");
    insta::assert_snapshot!(stderr, @"cogni-init: uid 1001 may not connect to the run's socket `/llm-sock/llm.sock`; make the socket its own, or its mode 0666");
}

#[test]
fn a_gateway_that_is_late_is_waited_for() {
    let sandbox = InitFixture::without_gateway();
    let started = sandbox.command(&["--socket-timeout=60s"], &["true"]).spawn();
    let _gateway = UnixListener::bind(sandbox.socket()).unwrap();
    assert!(started.unwrap().wait().unwrap().success());
}

#[test]
fn a_port_in_use_is_reported() {
    let sandbox = InitFixture::new();
    let _taken = std::net::TcpListener::bind(sandbox.address).unwrap();
    let ended = sandbox.run(&["true"]);
    assert_eq!(ended.code, Some(125));
    let stderr = ended.stderr.replace(&sandbox.address.to_string(), "127.0.0.1:8080");
    insta::assert_snapshot!(stderr, @"cogni-init: cannot listen on `127.0.0.1:8080`: another process of the sandbox does; give another port with --listen");
}

#[test]
fn a_loopback_interface_that_is_down_is_brought_up() {
    let sandbox = InitFixture::new();
    let connect = "use IO::Socket::INET; IO::Socket::INET->new($ARGV[0]) or die $@";
    let agent = ["perl", "-e", connect, &sandbox.address.to_string()];
    let ended = InitEnd::of(&mut sandbox.under(&["unshare", "--net"], &[], &agent));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let drop = ["--bounding-set=-net_admin", "--inh-caps=-net_admin"];
    let unprivileged = [&["unshare", "--net", "setpriv"][..], &drop].concat();
    let ended = InitEnd::of(&mut sandbox.under(&unprivileged, &[], &agent));
    assert_eq!(ended.code, Some(125));
    let stderr = ended.stderr.replace(&sandbox.address.to_string(), "127.0.0.1:8080");
    insta::assert_snapshot!(stderr, @"cogni-init: cannot listen on `127.0.0.1:8080`: the loopback interface is down, and this process may not bring it up (Operation not permitted (os error 1)); let the runner do it: `ip link set lo up` in the sandbox's network namespace");
}

/// R4: One file is enough: the gateway contains `cogni-init` and writes it to a file for the sandboxes.
#[test]
fn the_gateway_carries_this_program() {
    let dir = tempfile::tempdir().unwrap();
    let first = InitBinary::BuiltIn { directory: dir.path().join("state") };
    let file = first.install_file().unwrap().unwrap();
    let version = InitEnd::of(Command::new(&file).arg("--version"));
    assert_eq!(version.stdout, format!("cogni-init {}\n", env!("CARGO_PKG_VERSION")));
    assert!(!names_a_loader(BUILT_IN_INIT), "an image need not have the loader");
    assert!(names_a_loader(&fs::read(env!("CARGO_BIN_EXE_cogni-gateway")).unwrap()));

    // A file that another user could have written is not trusted.
    fs::write(&file, vec![b'x'; BUILT_IN_INIT.len()]).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o777)).unwrap();
    assert_eq!(first.install_file().unwrap().unwrap(), file);
    assert_eq!(fs::read(&file).unwrap(), BUILT_IN_INIT);
    fs::set_permissions(file.parent().unwrap(), Permissions::from_mode(0o777)).unwrap();
    let refused = first.install_file().unwrap_err().to_string();
    assert!(
        refused.contains("other users of this machine could replace what is kept there"),
        "{refused}"
    );

    let gateway = env!("CARGO_BIN_EXE_cogni-gateway");
    let printed = Command::new(gateway).args(["cogni-init", "-"]).output().unwrap();
    assert_eq!(printed.stdout, BUILT_IN_INIT);
}

/// Returns whether an ELF-64 file has a program header of the kind `PT_INTERP` (elf(5)).
fn names_a_loader(file: &[u8]) -> bool {
    let number = |at: usize, bytes: usize| {
        file[at..at + bytes].iter().rev().fold(0, |value, byte| value << 8 | usize::from(*byte))
    };
    let (table, size, count) = (number(0x20, 8), number(0x36, 2), number(0x38, 2));
    (0..count).any(|index| number(table + index * size, 4) == 3)
}
