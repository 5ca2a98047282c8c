//! `cogni-gateway completions` and `cogni-gateway man`: what shells and `man` read of this command, made from its flags.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

use super::command;

#[derive(Debug, clap::Args)]
pub struct Completions {
    /// The shell, such as `bash`: `cogni-gateway completions bash >/etc/bash_completion.d/cogni-gateway`
    shell: Shell,
}

#[derive(Debug, clap::Args)]
pub struct ManualPages {
    /// The directory, such as `/usr/local/share/man/man1`
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Prints the completions of a shell.
pub fn completions(wanted: &Completions, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let mut script = vec![];
    clap_complete::generate(wanted.shell, &mut command(), NAME, &mut script);
    out.write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a page for each command, and says how many.
pub fn manual_pages(wanted: &ManualPages, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let directory = &wanted.directory;
    fs::create_dir_all(directory)
        .with_context(|| format!("directory `{}` cannot be made", directory.display()))?;
    let mut command = command();
    command.build();
    let written = write_page(&command, NAME, directory)?;
    writeln!(out, "{written} pages are in `{}`", directory.display())?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the page of a command, and of all below it. Returns how many.
fn write_page(command: &Command, name: &str, directory: &Path) -> anyhow::Result<usize> {
    let path = directory.join(format!("{name}.1"));
    let mut page = vec![];
    Man::new(command.clone().name(name.to_owned())).render(&mut page)?;
    fs::write(&path, page).with_context(|| format!("`{}` cannot be written", path.display()))?;
    let mut written = 1;
    for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
        written += write_page(below, &format!("{name}-{}", below.get_name()), directory)?;
    }
    Ok(written)
}

const NAME: &str = "cogni-gateway";
