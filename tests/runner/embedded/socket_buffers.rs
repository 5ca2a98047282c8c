//! R3: Tests of the memory in a sandbox's socket buffers.

use super::driver::{TestedRunner, shell_argv};

/// R3: Buffers of sockets on a sandbox's own loopback hold no more than its memory limit, over TCP or UDP, whether the
/// kernel counts them as memory or separately.
#[test]
fn socket_buffers_are_limited() {
    for script in [TCP, UDP] {
        let result = TestedRunner::new()
            .run(&["--max-memory", "64m"], &shell_argv(&format!("perl -e '{script}'")));
        if result.json["error_code"] == "oom_killed" {
            continue;
        }
        let held = result.json["stdout"].as_str().and_then(|held| held.trim().parse::<u64>().ok());
        let held = held.unwrap_or_else(|| panic!("{}", result.json));
        assert!((1 << 20..80 << 20).contains(&held), "{held} bytes: {script}");
    }
}

/// Prints how many bytes 60 connections have taken whose other ends do not read.
const TCP: &str = r#"
    use Socket; use IO::Handle;
    socket(my $l, PF_INET, SOCK_STREAM, 0) or die; bind($l, sockaddr_in(0, INADDR_LOOPBACK)) or die;
    listen($l, 100) or die;
    my ($held, @all) = (0);
    for (1 .. 60) {
        socket(my $c, PF_INET, SOCK_STREAM, 0) or die; setsockopt($c, SOL_SOCKET, SO_SNDBUF, 4 << 20);
        connect($c, getsockname($l)) or die; accept(my $a, $l) or die;
        setsockopt($a, SOL_SOCKET, SO_RCVBUF, 8 << 20); push @all, $c, $a; $c->blocking(0);
        while (my $sent = syswrite($c, "x" x 65536)) { $held += $sent }
    }
    print $held;
"#;

/// Prints how many bytes can be read from 60 sockets that were sent 24 MB each.
const UDP: &str = r#"
    use Socket;
    my ($held, @all) = (0);
    for (1 .. 60) {
        socket(my $to, PF_INET, SOCK_DGRAM, 0) or die; setsockopt($to, SOL_SOCKET, SO_RCVBUF, 8 << 20);
        bind($to, sockaddr_in(0, INADDR_LOOPBACK)) or die; push @all, $to;
        socket(my $from, PF_INET, SOCK_DGRAM, 0) or die;
        for (1 .. 400) { send($from, "x" x 60000, 0, getsockname($to)) }
    }
    for my $to (@all) { $held += length($_) while defined recv($to, $_, 65536, MSG_DONTWAIT) }
    print $held;
"#;
