//! The static file `cogni-init` of a sandbox. It holds three programs, and the name by which it is called selects one.
//!
//! The file compiles the library's sources itself and does not link the library. Every sandbox contains this file, so
//! it must be small; a linker would have to search the whole library to leave the rest out.

#[path = "../guest"]
pub mod guest {
    pub mod agent;
    pub mod init;
    pub mod tool;
}

use std::env;
use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use guest::{agent, init, tool};

fn main() -> ExitCode {
    let mut arguments = env::args_os().peekable();
    let path = arguments.next().unwrap_or_default();
    // The driver mounts this file under one of the three names.
    match Path::new(&path).file_name().and_then(OsStr::to_str) {
        Some("cogni-agent") => agent::main(arguments),
        Some("cogni-tool") => tool::main(arguments),
        // A root that has no file of that name reaches the program by an option.
        _ if arguments.peek().is_some_and(|first| first == TOOL_OPTION) => {
            tool::main(arguments.skip(1))
        }
        _ => init::main(arguments),
    }
}

/// The option of `cogni-init` that selects the client of the run's tools.
const TOOL_OPTION: &str = "--tool";
