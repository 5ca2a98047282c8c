//! The gateway once more, for `tests/run` to link as a static program: an image from scratch has no libc.

use std::process::ExitCode;

#[path = "../src/main.rs"]
mod program;

fn main() -> ExitCode {
    program::main()
}
