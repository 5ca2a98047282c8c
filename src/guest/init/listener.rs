//! The local port, on a loopback interface that may still be down.

use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};

use super::InitFailure;

/// Binds the port and listens. If the network namespace's loopback interface is down, brings the interface up, if this
/// process may.
pub(crate) fn bind_listener(address: SocketAddr) -> Result<OwnedFd, InitFailure> {
    let action = format!("listen on `{address}`");
    let failure = |error| match error {
        Errno::ADDRINUSE => InitFailure::setup_failure(
            &action,
            "another process of the sandbox does; give another port with --listen",
        ),
        Errno::ACCESS => InitFailure::setup_failure(
            &action,
            "ports below 1024 are root's; give a higher one with --listen",
        ),
        other => InitFailure::setup_failure(&action, io::Error::from(other)),
    };
    let listener = listen_on(address).map_err(failure)?;
    if !is_reachable(address) {
        bring_up_loopback().map_err(|error| {
            let remedy = "let the runner do it: `ip link set lo up` in the sandbox's network namespace";
            InitFailure::setup_failure(
                &action,
                format_args!("the loopback interface is down, and this process may not bring it up ({error}); {remedy}"),
            )
        })?;
    }
    Ok(listener)
}

/// Returns false if the address's interface is down. The kernel lets a process bind to such an address, and refuses to
/// connect to it. Connecting a datagram socket makes the kernel look up the route, and sends nothing.
fn is_reachable(address: SocketAddr) -> bool {
    let probe =
        net::socket_with(address_family(address), SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    probe.and_then(|probe| net::connect(&probe, &address)) != Err(Errno::NETUNREACH)
}

fn listen_on(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(address_family(address), SocketType::STREAM, flags, None)?;
    // Connections of an earlier process that linger in the namespace must not block the port.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    net::bind(&socket, &address)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn address_family(address: SocketAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

#[expect(unsafe_code, reason = "there is no safe call that sets the flags of a network interface")]
fn bring_up_loopback() -> io::Result<()> {
    let socket =
        net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: an `ifreq` is plain data, and all zeroes are a valid value.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = from.cast_signed() as libc::c_char;
    }
    let flags = libc::IFF_UP | libc::IFF_RUNNING;
    request.ifr_ifru.ifru_flags = flags.try_into().expect("both flags are in the lower seven bits");
    // SAFETY: the call reads the `ifreq` that it receives, and keeps no pointer to it.
    let done =
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The number of connections that the kernel queues beyond the served ones. The kernel lowers the number to
/// `net.core.somaxconn`, 4096 today.
const BACKLOG: i32 = 1024;
