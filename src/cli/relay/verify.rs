//! `cogni-gateway relay verify`: what a relay has said beside a commit, and whether it has.

use std::io::Write;
use std::process::Command;

use anyhow::{Context, bail};

use crate::audit::PublicKey;
use crate::delivery::statement::Statement;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// A commit of the repository in the current directory
    commit: String,

    /// The key that must have signed: 32 bytes as hexadecimal or base64
    #[arg(long, value_name = "KEY")]
    public_key: String,
}

/// Prints the statement, where it is theirs and about this commit.
pub(super) fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<()> {
    let Args { commit, public_key } = args;
    let key = PublicKey::parse(public_key).context("--public-key")?;
    let named =
        git(&["rev-parse", "--verify", "--end-of-options", &format!("{commit}^{{commit}}")])?;
    let named = named.with_context(|| format!("there is no commit `{commit}` here"))?;
    let Some(note) = git(&["notes", "--ref=cogni", "show", named.trim_end()])? else {
        bail!(
            "there is no statement beside `{commit}`; `git fetch origin refs/notes/cogni:refs/notes/cogni` brings them"
        );
    };
    let statement = Statement::verify(note.trim_end(), &key)?;
    let head = statement.head.to_string();
    if head != named.trim_end() {
        bail!("the statement beside `{commit}` is about another commit, `{head}`");
    }
    serde_json::to_writer(&mut *out, &statement)?;
    Ok(writeln!(out)?)
}

/// What git says, where it does not fail.
fn git(words: &[&str]) -> anyhow::Result<Option<String>> {
    let output = Command::new("git").args(words).output().context("`git` is missing")?;
    Ok(output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned()))
}
