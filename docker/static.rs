//! The gateway as a separate program, which `tests/run` links statically, because an image from scratch has no libc.

use std::process::ExitCode;

#[path = "../src/main.rs"]
mod program;

fn main() -> ExitCode {
    program::main()
}
