//! The `cogni-gateway` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    cogni_gateway::cli::main()
}
