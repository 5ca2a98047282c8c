//! A3: Tests of allowed addresses: for hosts that a tenant names, and for hosts that the operator names.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use cogni_gateway::base::host_reach::{HostReach, HostReachError, is_canonical_host};
use proptest::prelude::*;

/// A3: A tenant's host must be on the internet; an operator's host may be in a private network, too; and no host may be
/// a cloud's metadata address.
#[test]
fn an_address_is_allowed_by_its_kind() {
    let public =
        ["140.82.121.4", "1.1.1.1", "172.15.255.255", "172.32.0.0", "100.63.0.1", "100.128.0.1"];
    let public_v6 =
        ["2606:50c0:8000::154", "2a00:1450::1", "64:ff9b::8c52:7904", "2002:8c52:7904::1"];
    let private = [
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "100.64.0.1",
        "100.127.255.255",
        "192.0.2.1",
        "198.51.100.1",
        "203.0.113.1",
        "2001:db8::1",
        "3fff::1",
        "198.18.0.1",
        "127.0.0.1",
        "127.255.255.254",
        "::1",
        "fc00::1",
        "fd12:3456::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a00:1",
        "2002:7f00:1::",
        "2002:c0a8:101::1",
    ];
    let allowed = |reach: HostReach, text: &str| {
        assert_eq!(reach.allows_host(text), reach.allows_address(text.parse().unwrap()), "{text}");
        reach.allows_host(text)
    };
    for address in public.into_iter().chain(public_v6) {
        assert!(
            allowed(HostReach::Public, address) && allowed(HostReach::Named, address),
            "{address}"
        );
    }
    for address in private {
        assert!(
            !allowed(HostReach::Public, address) && allowed(HostReach::Named, address),
            "{address}"
        );
    }
    for address in NEVER {
        assert!(
            !allowed(HostReach::Public, address) && !allowed(HostReach::Named, address),
            "{address}"
        );
    }
}

/// A3: A host has one spelling. A text that resolvers read as an address in some way is not a name.
#[test]
fn a_host_is_a_name_or_an_address_in_full() {
    for good in [
        "github.com",
        "git",
        "a-b.c_d.example",
        "127.0.0.1.example",
        "1.2.3.4",
        "::1",
        "0x7f.example",
        "xn--bcher-kva.example",
    ] {
        assert!(is_canonical_host(good), "{good}");
    }
    for odd in [
        "127.1",
        "127.0.1",
        "0",
        "2130706433",
        "017700000001",
        "0177.0.0.1",
        "0x7f000001",
        "0x7F.0x0.0x0.0x1",
        "0x",
        "127.0.0.0x1",
        "256.256.256.256",
        "1.2.3.4.5",
        "host.1",
        "127.0.0.01",
        "",
        ".",
        "a..b",
        ".a",
        "a.",
        "localhost.",
        "-a",
        "a-.b",
        "a b",
        "a:1",
        "[::1]",
        "::1%lo",
        "fe80::1%1",
        "a/b",
        "a@b",
        "a,b",
        "ａ",
        "a\n",
        "*",
    ] {
        assert!(!is_canonical_host(odd), "{odd}");
        assert!(!HostReach::Named.allows_host(odd) && !HostReach::Public.allows_host(odd), "{odd}");
    }
    assert!(
        !is_canonical_host(&"a.".repeat(127))
            && is_canonical_host(&("a.".repeat(126) + "a"))
            && !is_canonical_host(&("a.".repeat(127) + "a"))
    );
    for local in ["localhost", "LOCALHOST", "x.localhost", "a.b.LocalHost"] {
        assert!(
            HostReach::Named.allows_host(local) && !HostReach::Public.allows_host(local),
            "{local}"
        );
    }
    assert!(HostReach::Public.allows_host("localhost.example"));
}

/// A3: The result has the addresses that may be connected to. The error of a name without such addresses reveals
/// nothing else.
#[test]
fn a_name_is_judged_by_its_addresses() {
    let local: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    for name in ["localhost", "x.localhost"] {
        assert_eq!(HostReach::Named.resolve_host(name, 80).unwrap(), local, "{name}");
    }
    let told = |host: &str| HostReach::Public.resolve_host(host, 80).unwrap_err().to_string();
    for host in ["localhost", "127.0.0.1", "::1", "169.254.169.254", "10.0.0.1", "nowhere.invalid"]
    {
        assert_eq!(told(host), format!("`{host}` has no address on the internet"));
    }
    let unknown = HostReach::Named.resolve_host("nowhere.invalid", 80).unwrap_err();
    assert!(matches!(unknown, HostReachError::Unknown { .. }), "{unknown}");
    let unusable = HostReach::Named.resolve_host("169.254.169.254", 80).unwrap_err();
    assert!(matches!(unusable, HostReachError::Unusable { .. }), "{unusable}");
    assert_eq!(
        HostReach::Public.resolve_host("1.1.1.1", 443).unwrap(),
        [IpAddr::from([1, 1, 1, 1])]
    );
}

/// A3: A tenant's host is never an address of this machine.
#[test]
fn no_address_of_this_machine_is_on_the_internet() {
    // The address for outgoing connections; a machine without a network has none.
    let socket = UdpSocket::bind(("0.0.0.0", 0)).unwrap();
    if socket.connect(("1.1.1.1", 9)).is_err() {
        return;
    }
    let own = socket.local_addr().unwrap().ip().to_string();
    assert!(HostReach::Public.resolve_host(&own, 80).is_err(), "{own}");
    assert_eq!(HostReach::Named.resolve_host(&own, 80).unwrap().len(), 1);
}

proptest! {
    /// An IPv4 address is judged the same in each form of IPv6 that embeds it.
    #[test]
    fn an_address_within_another_is_judged_as_itself(bits: u32) {
        let address = Ipv4Addr::from(bits);
        let [a, b, c, d] = address.octets();
        let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        let written = [
            address.to_ipv6_mapped(),
            Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
            Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1),
        ];
        for reach in [HostReach::Public, HostReach::Named] {
            for within in written {
                prop_assert_eq!(reach.allows_address(within.into()), reach.allows_address(address.into()), "{}", within);
            }
        }
        // Every special address that the library knows is also in the table.
        let is_odd = address.is_loopback() || address.is_link_local() || address.is_private() || address.is_multicast()
            || address.is_unspecified() || address.is_broadcast() || address.is_documentation();
        prop_assert!(!is_odd || !HostReach::Public.allows_address(address.into()), "{}", address);
    }

    /// A text that is accepted as a name is never an address for the system's resolver.
    #[test]
    fn a_name_is_no_address_of_another_spelling(text in "(0[xX])?[0-9a-fA-F]{1,10}(\\.(0[xX])?[0-9a-fA-F]{0,6}){0,3}") {
        let text = &*text;
        let is_numeric = |part: &str| {
            let lower = part.to_ascii_lowercase();
            match lower.strip_prefix("0x") {
                Some(digits) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
                None => !lower.is_empty() && lower.bytes().all(|byte| byte.is_ascii_digit()),
            }
        };
        if text.split('.').all(is_numeric) && text.parse::<Ipv4Addr>().is_err() {
            prop_assert!(!is_canonical_host(text), "{}", text);
        }
    }
}

/// No intended server has one of these addresses.
const NEVER: &[&str] = &[
    "0.0.0.0",
    "0.1.2.3",
    "169.254.169.254",
    "169.254.0.1",
    "192.0.0.192",
    "192.88.99.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "168.63.129.16",
    "100.100.100.200",
    "::",
    "::127.0.0.1",
    "fe80::1",
    "febf::1",
    "fec0::1",
    "ff02::1",
    "fd00:ec2::254",
    "fd00:ec2::23",
    "fd20:ce::254",
    "2001::1",
    "64:ff9b:1::7f00:1",
    "100::1",
    "::ffff:0.0.0.0",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
    "4000::1",
    "::ffff:0:7f00:1",
];
