//! Linker options of optimised builds, for a quick start.
//!
//! Relocations of the program's own addresses are packed into a hundredth of the bytes. The loader of glibc 2.36 and
//! newer can read them; Debian 12 and Ubuntu 24.04 have it. Such a program does not start with an older glibc, so the
//! option is left out if the build machine's glibc is older. A static program has its own loader.
//!
//! GNU ld and lld, which rustc includes for x86-64, support the option. If a flag selects another linker, the option is
//! left out.

use std::env;
use std::process::Command;

/// The first glibc whose loader reads packed relocations.
const PACKED_SINCE: (u32, u32) = (2, 36);

pub(crate) fn print_arguments(target: &str) {
    println!("cargo::rerun-if-changed=docker/link.rs");
    let is_optimised = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    if !is_optimised || target != "x86_64-unknown-linux-gnu" || is_linker_chosen() {
        return;
    }
    if is_host(target) && glibc().is_some_and(|version| version >= PACKED_SINCE) {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// Returns whether a user's setting selects a linker.
fn is_linker_chosen() -> bool {
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    env::var_os("RUSTC_LINKER").is_some() || flags.contains("link")
}

fn is_host(target: &str) -> bool {
    env::var("HOST").is_ok_and(|host| host == target)
}

/// Reads the version of this machine's glibc from a line such as `glibc 2.36`.
fn glibc() -> Option<(u32, u32)> {
    let said = Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok()?;
    let said = String::from_utf8(said.stdout).ok()?;
    let (major, minor) = said.trim().strip_prefix("glibc ")?.split_once('.')?;
    Some((major.parse().ok()?, minor.split('.').next()?.parse().ok()?))
}
