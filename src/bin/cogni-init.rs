//! The static program of a sandbox, which does what the name says that it is called by.
//!
//! It is made of the rooms' files, and not linked with the library: what is in every sandbox is to be small, and the
//! linker would have to go through everything else to find that out.

#[path = ".."]
pub mod room {
    pub mod init;
}

use std::env;
use std::process::ExitCode;

use room::init;

fn main() -> ExitCode {
    // There is one program in here so far, and so no name but its own.
    init::main(env::args_os().skip(1))
}
