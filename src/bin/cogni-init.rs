//! The static file of a sandbox, with two programs in it: the name it is called by says which.
//!
//! It is made of the library's files, and not linked with the library: what is in every sandbox is to be small, and the
//! linker would have to go through everything else to find that out.

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
    // The driver chooses under which name it mounts us.
    match Path::new(&path).file_name().and_then(OsStr::to_str) {
        Some("cogni-agent") => agent::main(arguments),
        _ => init::main(arguments),
    }
}
