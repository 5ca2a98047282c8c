//! A network that has nothing but its loopback, which works.

use std::io;

use libcontainer::network::link::LinkClient;
use libcontainer::network::wrapper::create_network_client;
use rustix::thread::UnshareFlags;

use super::privilege;

/// Gives this process, which has one thread, a network of its own, and those that it starts.
pub(super) fn unshare_network() -> io::Result<()> {
    privilege::unshare_namespaces(UnshareFlags::NEWNET)?;
    let up = LinkClient::new(create_network_client())
        .and_then(|mut links| links.set_up(LOOPBACK_IFINDEX));
    up.map_err(io::Error::other)
}

/// The kernel's `LOOPBACK_IFINDEX`: the first of each network.
const LOOPBACK_IFINDEX: u32 = 1;
