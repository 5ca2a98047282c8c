//! Linker options of optimised builds, for a quick start and little memory.
//!
//! `docker/function_order.ld` puts the functions that run side by side, so that the program touches a fifth of the
//! pages. It names sections; a name that a build does not have is ignored.
//!
//! Relocations of the program's own addresses are packed into a hundredth of the bytes. The loader of glibc 2.36 and
//! newer can read them; Debian 12 and Ubuntu 24.04 have it. Such a program does not start with an older glibc, so
//! this option is left out if the build machine's glibc is older. A static program has its own loader.
//!
//! GNU ld and lld, which rustc includes for x86-64, support the options. If a flag selects another linker, the options
//! are left out.

use std::env;
use std::process::Command;

/// The linker script with the order of the functions.
const FUNCTION_ORDER: &str = "docker/function_order.ld";

/// The first glibc whose loader reads packed relocations.
const PACKED_SINCE: (u32, u32) = (2, 36);

pub(crate) fn print_arguments(target: &str) {
    println!("cargo::rerun-if-changed=docker/link.rs");
    println!("cargo::rerun-if-changed={FUNCTION_ORDER}");
    let is_optimised = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    if !is_optimised || target != "x86_64-unknown-linux-gnu" || is_linker_chosen() {
        return;
    }
    let root = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it for build scripts");
    println!("cargo::rustc-link-arg-bins=-T{root}/{FUNCTION_ORDER}");
    if is_host(target) && glibc_version().is_some_and(|version| version >= PACKED_SINCE) {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// Returns whether a user's setting selects a linker.
fn is_linker_chosen() -> bool {
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    // A flag is one text or two: `-Clinker=…`, or `-C` and `linker=…`.
    let is_of_linker = |flag: &str| flag.trim_start_matches("-C").starts_with("link");
    env::var_os("RUSTC_LINKER").is_some() || flags.split('\x1f').any(is_of_linker)
}

fn is_host(target: &str) -> bool {
    env::var("HOST").is_ok_and(|host| host == target)
}

/// Reads the version of this machine's glibc from a line such as `glibc 2.36`.
fn glibc_version() -> Option<(u32, u32)> {
    let said = Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok()?;
    let said = String::from_utf8(said.stdout).ok()?;
    let (major, minor) = said.trim().strip_prefix("glibc ")?.split_once('.')?;
    Some((major.parse().ok()?, minor.split('.').next()?.parse().ok()?))
}
