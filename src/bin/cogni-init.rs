//! The static file `cogni-init` of a sandbox. It holds two programs, and the name by which it is called selects one.
//!
//! The file compiles the library's sources itself and does not link the library. Every sandbox contains this file, so
//! it must be small; a linker would have to search the whole library to leave the rest out.

#[path = "../guest"]
pub mod guest {
    pub mod agent;
    pub mod init;
}

use std::env;
use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use guest::{agent, init};

fn main() -> ExitCode {
    let mut arguments = env::args_os();
    let path = arguments.next().unwrap_or_default();
    // The driver mounts this file under one of the two names.
    match Path::new(&path).file_name().and_then(OsStr::to_str) {
        Some("cogni-agent") => agent::main(arguments),
        _ => init::main(arguments),
    }
}
