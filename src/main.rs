//! The `cogni-gateway` command, and under another name what is put into a sandbox: one file is enough for both ends.

use std::env;
use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use cogni_gateway::sandbox::embedded::helper;
use cogni_gateway::{agent, cli, init};

fn main() -> ExitCode {
    let mut arguments = env::args_os();
    let path = arguments.next().unwrap_or_default();
    match Path::new(&path).file_name().and_then(OsStr::to_str) {
        Some("cogni-agent") => agent::main(arguments),
        Some("cogni-init") => init::main(arguments),
        Some(helper::NAME) => helper::main(),
        _ => cli::main(),
    }
}
