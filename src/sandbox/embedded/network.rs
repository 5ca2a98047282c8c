//! The network of an embedded sandbox: a loopback interface that is up, and nothing else.

use std::io;

use libcontainer::network::link::LinkClient;
use libcontainer::network::wrapper::create_network_client;
use rustix::thread::UnshareFlags;

use super::privilege;

/// Gives this process, which has one thread, and its later children a new network namespace.
pub(super) fn unshare_network() -> io::Result<()> {
    privilege::unshare_namespaces(UnshareFlags::NEWNET)?;
    // A new network namespace starts with its loopback down.
    let up = LinkClient::new(create_network_client())
        .and_then(|mut links| links.set_up(LOOPBACK_IFINDEX));
    up.map_err(io::Error::other)
}

/// The kernel's `LOOPBACK_IFINDEX`: the index of the loopback interface in each network namespace.
const LOOPBACK_IFINDEX: u32 = 1;
