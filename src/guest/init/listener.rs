//! The local port, on a loopback interface that may have to be brought up first.

use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};

use super::InitFailure;

/// Binds and listens. In a network namespace whose loopback interface nobody has brought up, this does it, if it may.
pub(crate) fn bind_listener(address: SocketAddr) -> Result<OwnedFd, InitFailure> {
    let what = format!("listen on `{address}`");
    let failure = |error| match error {
        Errno::ADDRINUSE => InitFailure::setup_failure(
            &what,
            "another process of the sandbox does; give another port with --listen",
        ),
        Errno::ACCESS => InitFailure::setup_failure(
            &what,
            "ports below 1024 are root's; give a higher one with --listen",
        ),
        other => InitFailure::setup_failure(&what, io::Error::from(other)),
    };
    let listener = listen_on(address).map_err(failure)?;
    if !is_reachable(address) {
        bring_up_loopback().map_err(|error| {
            let remedy = "let the runner do it: `ip link set lo up` in the sandbox's network namespace";
            InitFailure::setup_failure(
                &what,
                format_args!("the loopback interface is down, and is not ours to bring up ({error}); {remedy}"),
            )
        })?;
    }
    Ok(listener)
}

/// The kernel binds to addresses of an interface that is down, and refuses to connect to them. Connecting a datagram
/// socket asks it for the way, and sends nothing.
fn is_reachable(address: SocketAddr) -> bool {
    let probe =
        net::socket_with(address_family(address), SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    probe.and_then(|probe| net::connect(&probe, &address)) != Err(Errno::NETUNREACH)
}

fn listen_on(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(address_family(address), SocketType::STREAM, flags, None)?;
    // Connections of an earlier process that linger in the namespace do not keep the port.
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
    // SAFETY: an `ifreq` is plain data, for which zeroes are a value.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = from.cast_signed() as libc::c_char;
    }
    let flags = libc::IFF_UP | libc::IFF_RUNNING;
    request.ifr_ifru.ifru_flags = flags.try_into().expect("both flags are in the lower seven bits");
    // SAFETY: the request reads an `ifreq`, which it is given, and keeps nothing of it.
    let done =
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What the kernel queues beyond the connections that are served; it cuts this to `net.core.somaxconn`, 4096 today.
const BACKLOG: i32 = 1024;
