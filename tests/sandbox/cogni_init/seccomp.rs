//! Tests of what the agent cannot do because its first process has set a filter.

use super::InitFixture;
use crate::support::run_command::landlock_version;

/// perl-base is part of every Debian; its error numbers are errno's.
const TRY: &str = r#"
use Socket;
print socket(my $s, AF_UNIX, SOCK_STREAM, 0) ? "unix\n" : "unix: $!\n";
print socket($s, AF_UNIX, SOCK_DGRAM, 0) ? "datagram\n" : "datagram: $!\n";
print syscall(41, AF_UNIX | (1 << 40), SOCK_STREAM, 0) >= 0 ? "wide\n" : "wide: $!\n" if `uname -m` eq "x86_64\n";
print syscall(41 | 0x40000000, AF_UNIX, SOCK_STREAM, 0) >= 0 ? "x32\n" : "x32: $!\n" if `uname -m` eq "x86_64\n";
print syscall(425, 1, 0) >= 0 ? "ring\n" : "ring: $!\n";
print socketpair($s, my $t, AF_UNIX, SOCK_STREAM, 0) ? "pair\n" : "pair: $!\n";
print socket($s, AF_INET, SOCK_STREAM, 0) ? "inet\n" : "inet: $!\n";
"#;

/// R3: After the bridge has started, the agent can make no unix socket; socket pairs and the local port work.
#[test]
fn the_agent_makes_no_unix_socket() {
    let sandbox = InitFixture::new();
    let ended = sandbox.run(&["perl", "-e", TRY]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let portable: Vec<_> = ended
        .stdout
        .lines()
        .filter(|line| !line.starts_with("wide") && !line.starts_with("x32"))
        .collect();
    insta::assert_snapshot!(portable.join("\n"), @r"
    unix: Operation not permitted
    datagram: Operation not permitted
    ring: Operation not permitted
    pair
    inet
    ");
    if cfg!(target_arch = "x86_64") {
        for name in ["wide", "x32"] {
            let line = format!("{name}: Operation not permitted\n");
            assert!(ended.stdout.contains(&line), "{}", ended.stdout);
        }
    }
}

/// L3, R3: The sandbox that extracts an agent's work has no gateway, and has the same filter and the same rules for
/// files.
#[test]
fn a_sandbox_without_a_gateway_is_confined_too() {
    let sandbox = InitFixture::without_gateway();
    let (own, other) = (sandbox.path("own"), sandbox.path("other"));
    for directory in [&own, &other] {
        std::fs::create_dir(directory).unwrap();
    }
    let options = ["--no-gateway", "--write", &own];
    let mut command = sandbox.command(&options, &["perl", "-e", TRY]);
    let ended = super::InitEnd::of(&mut command);
    assert!(ended.stdout.starts_with("unix: Operation not permitted\n"), "{}", ended.stdout);
    let script = format!("touch {own}/made && touch {other}/made");
    let ended = sandbox.script(&options, &script);
    let is_made = |directory: &str| std::path::Path::new(directory).join("made").exists();
    assert!(is_made(&own), "{}", ended.stderr);
    if landlock_version() >= 2 {
        assert_ne!(ended.code, Some(0));
        assert!(!is_made(&other));
    }
}

#[test]
fn unix_sockets_are_allowed_where_that_is_asked_for() {
    let sandbox = InitFixture::new();
    let mut command = sandbox.command(&["--allow-unix-sockets"], &["perl", "-e", TRY]);
    let ended = super::InitEnd::of(&mut command);
    assert!(ended.stdout.starts_with("unix\ndatagram\n"), "{}", ended.stdout);
}

/// R3: A program that the agent starts gains nothing from a set-user-ID bit.
#[test]
fn the_agent_gains_no_privilege() {
    let sandbox = InitFixture::new();
    let ended = sandbox.run(&["grep", "-E", "^(NoNewPrivs|Seccomp):", "/proc/self/status"]);
    assert_eq!(ended.stdout, "NoNewPrivs:\t1\nSeccomp:\t2\n");
}
