//! Builds `cogni-init`, the first process of a sandbox, and passes it to the compiler: the gateway contains it in its
//! own file.
//!
//! `cogni-init` runs in images without libc, so it is linked statically, with its own profile (`init` in Cargo.toml).
//! Cargo has no stable way to depend on a program of another profile, so this script calls cargo again. It builds in
//! `target/init`, which debug and release builds share.
//!
//! `docker/link.rs` has the other linker options.
#![expect(
    clippy::panic,
    clippy::print_stdout,
    reason = "a build script talks to cargo by its output, and ends a build by a panic"
)]

#[path = "../link.rs"]
mod link;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The source files of `cogni-init`.
const SOURCES: &[&str] = &[
    "Cargo.lock",
    "Cargo.toml",
    "docker/cogni-init/Cargo.toml",
    "docker/cogni-init/embed.rs",
    "src/guest/agent",
    "src/guest/agent.rs",
    "src/bin/cogni-init.rs",
    "src/guest/init",
    "src/guest/init.rs",
    "src/guest/tool.rs",
];

/// The largest file that is embedded, in bytes. Every sandbox maps the file, so its pages count.
const MAX_SIZE_BYTES: usize = 1536 * 1024;

fn main() {
    for source in SOURCES {
        println!("cargo::rerun-if-changed={source}");
    }
    let out = PathBuf::from(required_variable("OUT_DIR"));
    let target = required_variable("TARGET").into_string().expect("a target's name is text");
    link::print_arguments(&target);
    // out -> package -> build -> profile -> target directory
    let shared = out.ancestors().nth(4).expect("cargo nests OUT_DIR").join("init");
    let built = build_program(&target, &shared);
    let program = fs::read(&built)
        .unwrap_or_else(|error| panic!("`{}` cannot be read: {error}", built.display()));
    assert!(
        program.len() <= MAX_SIZE_BYTES,
        "cogni-init has {} bytes, the limit is {MAX_SIZE_BYTES}: make it smaller",
        program.len()
    );
    // A copy keeps the mode: tests and benches execute this file.
    fs::copy(&built, out.join("cogni-init")).expect("OUT_DIR can be written");
    let mut digest = DefaultHasher::new();
    digest.write(&program);
    println!("cargo::rustc-env=COGNI_INIT_DIGEST={:016x}", digest.finish());
}

/// Returns the path of the program that the inner cargo has built.
fn build_program(target: &str, target_dir: &Path) -> PathBuf {
    // Naming the target keeps crt-static away from procedural macros, which cannot be static.
    let mut cargo = Command::new(required_variable("CARGO"));
    cargo
        .args(["build", "--quiet", "--locked", "--profile", "init", "--package", "cogni-init"])
        .args(["--target", target, "--target-dir"])
        .arg(target_dir)
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static");
    // Settings of the outer cargo must not reach this build: flags, and the wrapper with which clippy replaces rustc.
    for name in
        ["CARGO_ENCODED_RUSTFLAGS", "RUSTC_WORKSPACE_WRAPPER", "CLIPPY_ARGS", "CARGO_BUILD_TARGET"]
    {
        cargo.env_remove(name);
    }
    let status = cargo.status().unwrap_or_else(|error| panic!("cargo cannot be started: {error}"));
    assert!(
        status.success(),
        "cogni-init cannot be built: see cargo's words above. It is linked statically, which needs the static libc \
         (`libc6-dev` of Debian and Ubuntu, `glibc-static` of Fedora)"
    );
    target_dir.join(target).join("init/cogni-init")
}

fn required_variable(name: &str) -> OsString {
    env::var_os(name).unwrap_or_else(|| panic!("cargo sets {name} for build scripts"))
}
