//! `cogni-gateway cogni-init FILE`: writes the first process of a sandbox to a file, for containers that are started by
//! other means.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;

use crate::sandbox::init_binary::{BUILT_IN_INIT, write_program_atomically};

#[derive(Debug, clap::Args)]
pub struct CogniInitArgs {
    /// The file to write, or `-` for standard output
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub fn run(args: &CogniInitArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    if args.file == Path::new("-") {
        out.write_all(BUILT_IN_INIT)?;
    } else {
        let shown = args.file.display();
        // A container that starts at the same time must never see half a file.
        write_program_atomically(&args.file, BUILT_IN_INIT).with_context(|| {
            format!("cannot write `{shown}`; name a file in a writable directory")
        })?;
        writeln!(out, "{shown} is cogni-init, {} KiB, static", BUILT_IN_INIT.len() / 1024)?;
    }
    Ok(ExitCode::SUCCESS)
}
