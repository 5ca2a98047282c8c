//! The `cogni-gateway` command. If the file is called by the helper's name, it is the helper that starts a sandbox.

use std::env;
use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use cogni_gateway::cli;
use cogni_gateway::sandbox::embedded::helper;

pub(crate) fn main() -> ExitCode {
    let mut arguments = env::args_os();
    let path = arguments.next().unwrap_or_default();
    match Path::new(&path).file_name().and_then(OsStr::to_str) {
        Some(helper::HELPER_PROGRAM_NAME) => helper::main(),
        _ => cli::main(),
    }
}
