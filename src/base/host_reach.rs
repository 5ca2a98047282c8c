//! The addresses that a host's name may lead to, depending on who named the host.
//!
//! A name does not tell its address: many public names lead to the loopback address, and a name may have another
//! address at each lookup. So the addresses are checked, and the caller connects to the checked addresses without
//! another lookup.
//!
//! **Invariant:** no host leads to a link-local, multicast, unspecified or reserved address, where clouds keep
//! credentials.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use serde::{Deserialize, Serialize};

/// The addresses that a host may have.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum HostReach {
    /// Addresses on the internet, without this machine's own addresses. This reach is for hosts that a tenant or an
    /// agent named.
    #[default]
    Public,
    /// All public addresses, and those in private networks and on this machine. This reach is for hosts that the
    /// operator named.
    Named,
}

/// An error for a host that must not be connected to, or has no address.
#[derive(Debug, thiserror::Error)]
pub enum HostReachError {
    #[error("`{host}` cannot be looked up")]
    Unknown { host: String, source: io::Error },
    #[error("`{host}` has no address that a server can have")]
    Unusable { host: String },
    /// The text is the same for a name that does not exist, so that an answer does not reveal the names of a private
    /// network.
    #[error("`{host}` has no address on the internet")]
    NotPublic { host: String },
}

/// The purpose of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AddressPurpose {
    Public,
    Private,
    Loopback,
    /// An address of no server.
    Reserved,
}

impl HostReach {
    /// Returns true if the text of a host is allowed. The addresses of an allowed name must still be checked.
    pub fn allows_host(self, host: &str) -> bool {
        match host.parse() {
            Ok(address) => self.allows_address(address),
            Err(_) => is_canonical_host(host) && (self == Self::Named || !is_local_name(host)),
        }
    }

    /// Returns true if a connection to the address is allowed.
    pub fn allows_address(self, address: IpAddr) -> bool {
        match address_purpose(address) {
            AddressPurpose::Public => true,
            AddressPurpose::Private | AddressPurpose::Loopback => self == Self::Named,
            AddressPurpose::Reserved => false,
        }
    }

    /// Looks a host up, and returns the addresses that may be connected to; there is at least one. Blocks.
    ///
    /// # Errors
    /// Returns an error if the host has no address within this reach.
    pub fn resolve_host(self, host: &str, port: u16) -> Result<Vec<IpAddr>, HostReachError> {
        self.filter_addresses(host, resolve_addresses(host, port))
    }

    /// Returns the addresses of a finished look-up that may be connected to; there is at least one.
    ///
    /// # Errors
    /// Returns an error if the host has no address within this reach.
    pub fn filter_addresses(
        self,
        host: &str,
        found: io::Result<Vec<IpAddr>>,
    ) -> Result<Vec<IpAddr>, HostReachError> {
        let may_be = |address: &IpAddr| {
            self.allows_address(*address) && (self == Self::Named || !is_own_address(*address))
        };
        let allowed = |found: Vec<IpAddr>| -> Vec<_> {
            found.into_iter().filter(may_be).take(MAX_ADDRESSES).collect()
        };
        let host = host.to_owned();
        match (self, found.map(allowed)) {
            (_, Ok(allowed)) if !allowed.is_empty() => Ok(allowed),
            (Self::Public, _) => Err(HostReachError::NotPublic { host }),
            (Self::Named, Ok(_)) => Err(HostReachError::Unusable { host }),
            (Self::Named, Err(source)) => Err(HostReachError::Unknown { host, source }),
        }
    }
}

/// Returns true if a text is a host in the one spelling that all programs read alike: a full address, or a name.
/// Resolvers read a name that ends in a number as an address, whose parts may be octal, hexadecimal or missing.
pub fn is_canonical_host(text: &str) -> bool {
    if text.parse::<IpAddr>().is_ok() {
        return true;
    }
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let last = text.rsplit('.').next().unwrap_or_default().to_ascii_lowercase();
    let is_number = match last.strip_prefix("0x") {
        Some(digits) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
        None => last.bytes().all(|byte| byte.is_ascii_digit()),
    };
    text.len() <= MAX_NAME_BYTES && text.split('.').all(is_label) && !is_number
}

/// Returns true for a name that means this machine at every resolver (RFC 6761, section 6.3).
fn is_local_name(host: &str) -> bool {
    let host = host.to_ascii_lowercase();
    host == "localhost" || host.ends_with(".localhost")
}

/// Looks up all addresses of a host, whatever they are. Blocks.
///
/// # Errors
/// Returns the resolver's error.
pub fn resolve_addresses(host: &str, port: u16) -> io::Result<Vec<IpAddr>> {
    if let Ok(address) = host.parse() {
        return Ok(vec![address]);
    }
    // RFC 6761 fixes the addresses of these names, so a resolver with another answer would be wrong.
    if is_local_name(host) {
        return Ok(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
    }
    let found = (host, port).to_socket_addrs()?;
    Ok(found.map(|address| address.ip()).collect())
}

/// Returns true if the kernel treats the address as this machine's: a connection to such an address has the same
/// address as its source. Connecting a datagram socket sends no packet.
fn is_own_address(address: IpAddr) -> bool {
    let any: SocketAddr = match address {
        IpAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        IpAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let source = UdpSocket::bind(any).and_then(|socket| {
        socket.connect((address, DISCARD_PORT))?;
        socket.local_addr()
    });
    source.is_ok_and(|source| source.ip() == address)
}

fn address_purpose(address: IpAddr) -> AddressPurpose {
    match address {
        IpAddr::V4(address) => ipv4_purpose(address),
        IpAddr::V6(address) => match embedded_ipv4(address) {
            Some(address) => ipv4_purpose(address),
            None => ipv6_purpose(address),
        },
    }
}

/// Returns the IPv4 address that a translator, or this machine itself, connects to in place of an IPv6 address.
fn embedded_ipv4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    if let Some(address) = address.to_ipv4_mapped() {
        return Some(address);
    }
    let segments = address.segments();
    let [high, low] = if is_in_network(address, NAT64_NETWORK) {
        [segments[6], segments[7]]
    } else if segments[0] == SIX_TO_FOUR_PREFIX {
        [segments[1], segments[2]]
    } else {
        return None;
    };
    Some(Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)))
}

fn ipv4_purpose(address: Ipv4Addr) -> AddressPurpose {
    let is_one_of = |nets: &[(Ipv4Addr, u32)]| {
        nets.iter().any(|(net, bits)| {
            let shift = 32 - bits;
            address.to_bits() >> shift == net.to_bits() >> shift
        })
    };
    if is_one_of(&RESERVED_V4) {
        AddressPurpose::Reserved
    } else if address.is_loopback() {
        AddressPurpose::Loopback
    } else if is_one_of(&PRIVATE_V4) {
        AddressPurpose::Private
    } else {
        AddressPurpose::Public
    }
}

fn ipv6_purpose(address: Ipv6Addr) -> AddressPurpose {
    // All assigned addresses are in 2000::/3 (IANA's registry of IPv6 global unicast addresses).
    let is_assigned = address.segments()[0] & 0xe000 == 0x2000;
    let is_one_of = |nets: &[(Ipv6Addr, u32)]| nets.iter().any(|net| is_in_network(address, *net));
    if address.is_loopback() {
        AddressPurpose::Loopback
    } else if is_one_of(&RESERVED_V6) {
        AddressPurpose::Reserved
    } else if is_one_of(&PRIVATE_V6) {
        AddressPurpose::Private
    } else if is_assigned {
        AddressPurpose::Public
    } else {
        AddressPurpose::Reserved
    }
}

fn is_in_network(address: Ipv6Addr, (net, bits): (Ipv6Addr, u32)) -> bool {
    let shift = 128 - bits;
    address.to_bits() >> shift == net.to_bits() >> shift
}

/// IPv4 networks without servers to connect to: IANA's registry of special-purpose addresses, without those in
/// [`PRIVATE_V4`], and the addresses of metadata services that show a machine's credentials.
const RESERVED_V4: [(Ipv4Addr, u32); 8] = [
    (Ipv4Addr::UNSPECIFIED, 8),
    // Alibaba Cloud's metadata service, in the range of shared addresses.
    (Ipv4Addr::new(100, 100, 100, 200), 32),
    // Azure's platform service, which has a public address.
    (Ipv4Addr::new(168, 63, 129, 16), 32),
    // Link-local addresses, with the metadata services of most clouds.
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    // Protocol assignments, with Oracle Cloud's metadata service.
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    // Multicast; reserved and broadcast.
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
];

/// Networks of companies and providers (RFC 1918, RFC 6598), of tests between networks (RFC 2544) and of documentation
/// (RFC 5737). Laboratories use the last two as well.
const PRIVATE_V4: [(Ipv4Addr, u32); 8] = [
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
];

/// Ranges inside `2000::/3` and `fc00::/7` without servers: protocols (such as Teredo), and the services of AWS (its whole
/// network) and Google Cloud that show a machine's credentials.
const RESERVED_V6: [(Ipv6Addr, u32); 3] = [
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
    (Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254), 128),
];

/// Networks of companies (RFC 4193) and of documentation (RFC 3849, RFC 9637).
const PRIVATE_V6: [(Ipv6Addr, u32); 3] = [
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
];

/// A translator's addresses, the last 32 bits of which are the IPv4 address that the translator connects to (RFC 6052).
const NAT64_NETWORK: (Ipv6Addr, u32) = (Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96);

/// The first 16 bits of a 6to4 address. The relay's IPv4 address follows them (RFC 3056).
const SIX_TO_FOUR_PREFIX: u16 = 0x2002;

/// The largest length of a DNS name, in bytes, without the dot at its end (RFC 1035).
const MAX_NAME_BYTES: usize = 253;

/// The largest number of addresses of a host that are used. Our choice: a resolver may return thousands.
const MAX_ADDRESSES: usize = 16;

/// The port for connecting a datagram socket (RFC 863). No packet is sent to it.
const DISCARD_PORT: u16 = 9;
