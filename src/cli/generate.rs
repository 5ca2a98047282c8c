//! `cogni-gateway completions` and `cogni-gateway man`: shell completions and manual pages, generated from the flags.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

use super::command;

/// The flags of `completions`.
#[derive(Debug, clap::Args)]
pub struct Completions {
    /// The shell, such as `bash`: `cogni-gateway completions bash >/etc/bash_completion.d/cogni-gateway`
    shell: Shell,
}

/// The flags of `man`.
#[derive(Debug, clap::Args)]
pub struct ManualPages {
    /// The directory, such as `/usr/local/share/man/man1`
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Prints the completions for a shell.
pub fn completions(wanted: &Completions, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    // The generator panics if a write fails, so that it writes to memory first.
    let mut script = vec![];
    clap_complete::generate(wanted.shell, &mut command(), NAME, &mut script);
    out.write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a page for each command, and prints the number of pages.
pub fn manual_pages(wanted: &ManualPages, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let directory = &wanted.directory;
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot create the directory `{}`", directory.display()))?;
    let mut command = command();
    // `build` adds the deferred flags of all commands.
    command.build();
    let written = write_page(&command, NAME, directory)?;
    writeln!(out, "{written} pages are in `{}`", directory.display())?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the page of a command and the pages of its subcommands. Returns the number of pages.
fn write_page(command: &Command, name: &str, directory: &Path) -> anyhow::Result<usize> {
    let path = directory.join(format!("{name}.1"));
    let mut page = vec![];
    Man::new(command.clone().name(name.to_owned())).render(&mut page)?;
    fs::write(&path, page).with_context(|| format!("`{}` cannot be written", path.display()))?;
    let mut written = 1;
    // clap's own `help` command needs no page.
    for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
        written += write_page(below, &format!("{name}-{}", below.get_name()), directory)?;
    }
    Ok(written)
}

const NAME: &str = "cogni-gateway";
