//! A network that has nothing but its loopback, which works.

use std::io;

use libcontainer::network::link::LinkClient;
use libcontainer::network::wrapper::create_network_client;
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Gives this process, which has one thread, a network of its own, and those that it starts.
#[expect(
    unsafe_code,
    reason = "of what can be taken from a thread, some would be missed; not this"
)]
pub(super) fn leave() -> io::Result<()> {
    // SAFETY: it does not take anything from this process that the library relies on.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
    let up = LinkClient::new(create_network_client()).and_then(|mut links| links.set_up(LOOPBACK));
    up.map_err(io::Error::other)
}

/// The kernel's `LOOPBACK_IFINDEX`: the first of each network.
const LOOPBACK: u32 = 1;
