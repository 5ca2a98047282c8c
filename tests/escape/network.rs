//! Attempts to reach the outside: there is no network, and no socket but the run's own.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::{AttemptOutcome, EscapeAttempt, HostFacts, call_result};

pub(crate) const ATTEMPTS: &[EscapeAttempt] = &[
    network_attempt("an address of the internet", |_| connect_tcp("1.1.1.1:443")),
    network_attempt("the same over IPv6", |_| connect_tcp("[2606:4700:4700::1111]:443")),
    network_attempt("the cloud's metadata service", |_| connect_tcp("169.254.169.254:80")),
    network_attempt("Docker's bridge", |_| connect_tcp("172.17.0.1:22")),
    network_attempt("a port of the host's loopback", |facts| match facts.get("port") {
        Some(port) => connect_tcp(&format!("127.0.0.1:{port}")),
        None => find_untold("port"),
    }),
    network_attempt("DNS over UDP", |_| AttemptOutcome::of(query_dns())),
    network_attempt("DNS by way of the C library", |_| {
        AttemptOutcome::of(("example.com", 443).to_socket_addrs())
    }),
    network_attempt("multicast", |_| {
        AttemptOutcome::of(
            UdpSocket::bind("0.0.0.0:0")
                .and_then(|socket| socket.send_to(b"x", "224.0.0.251:5353")),
        )
    }),
    network_attempt("interfaces other than lo", |_| list_interfaces()),
    network_attempt("a raw socket", |_| {
        AttemptOutcome::of(open_socket(libc::AF_INET, libc::SOCK_RAW, 1))
    }),
    network_attempt("a packet socket", |_| {
        AttemptOutcome::of(open_socket(libc::AF_PACKET, libc::SOCK_RAW, 3))
    }),
    network_attempt("a socket to the hypervisor", |_| {
        AttemptOutcome::of(open_socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0))
    }),
    network_attempt("a socket to the kernel's crypto", |_| {
        AttemptOutcome::of(open_socket(libc::AF_ALG, libc::SOCK_SEQPACKET, 0))
    }),
    network_attempt("netlink, whose queues have no limit", |_| {
        AttemptOutcome::of(open_socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE))
    }),
    network_attempt("netlink beyond routes", |_| {
        AttemptOutcome::of(open_socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_AUDIT))
    }),
    network_attempt("an abstract unix socket of the host", |facts| match facts.get("abstract") {
        Some(name) => AttemptOutcome::of(abstract_socket(name)),
        None => find_untold("abstract"),
    }),
    network_attempt("a new unix socket of its own", |_| {
        AttemptOutcome::of(open_socket(libc::AF_UNIX, libc::SOCK_STREAM, 0))
    }),
    network_attempt("the run's socket, past the bridge", |_| {
        AttemptOutcome::of(std::os::unix::net::UnixStream::connect("/llm-sock/llm.sock"))
    }),
];

const fn network_attempt(
    what: &'static str,
    make: fn(&HostFacts) -> AttemptOutcome,
) -> EscapeAttempt {
    EscapeAttempt { area: "network", what, make }
}

fn find_untold(fact: &str) -> AttemptOutcome {
    AttemptOutcome::Escaped(format!("`{fact}=` was not given, so this was not tried"))
}

fn connect_tcp(address: &str) -> AttemptOutcome {
    let address: SocketAddr = address.parse().expect("the addresses above are well-formed");
    AttemptOutcome::of(TcpStream::connect_timeout(&address, CONNECT_TIMEOUT))
}

fn query_dns() -> io::Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_read_timeout(Some(CONNECT_TIMEOUT))?;
    socket.connect("8.8.8.8:53")?;
    socket.send(
        b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x03com\x00\x00\x01\x00\x01",
    )?;
    socket.recv(&mut [0; 512]).map(drop)
}

fn list_interfaces() -> AttemptOutcome {
    let table = fs::read_to_string("/proc/net/dev").unwrap_or_default();
    let names: Vec<_> =
        table.lines().filter_map(|line| Some(line.split_once(':')?.0.trim())).collect();
    AttemptOutcome::expect(names == ["lo"], names.join(" "))
}

/// Connects to its own listener and accepts nothing, until the sandbox is ended. The connections take memory that no
/// control group counts.
pub(crate) fn fill_accept_queues() -> io::Result<()> {
    let (mut listeners, data) = (vec![], vec![0; 60_000]);
    loop {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        for _ in 0..100 {
            let mut client = TcpStream::connect(listener.local_addr()?)?;
            client.set_nonblocking(true)?;
            // Data that does not fit is not sent.
            let _ = client.write(&data)?;
        }
        listeners.push(listener);
    }
}

fn abstract_socket(name: &str) -> io::Result<()> {
    let socket = open_socket(libc::AF_UNIX, libc::SOCK_STREAM, 0)?;
    let mut address = libc::sockaddr_un {
        sun_family: libc::sa_family_t::try_from(libc::AF_UNIX).expect("a family is small"),
        sun_path: [0; 108],
    };
    for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let length = libc::socklen_t::try_from(2 + 1 + name.len()).expect("a name is short");
    // SAFETY: the address lives through the call, and `length` is within it.
    call_result(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    File::from(socket).read(&mut [0; 1]).map(drop)
}

fn open_socket(family: i32, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let descriptor = call_result(unsafe { libc::socket(family, kind, protocol) })?;
    // SAFETY: the kernel has just given it to us.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(descriptor).expect("descriptors are ints")) })
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
