//! `cogni-gateway relay verify`: what a relay has said beside a commit, and whether it has.

use std::io::Write;
use std::process::Command;

use anyhow::Context;

use crate::relay::delivery::statement::{ProvenanceStatement, StatementError};
use crate::relay::repo::ObjectId;
use crate::telemetry::audit::AuditPublicKey;

#[derive(Debug, clap::Args)]
pub struct VerifyStatementArgs {
    /// A commit of the repository in the current directory
    commit: String,

    /// The key that must have signed: 32 bytes as hexadecimal or base64
    #[arg(long, value_name = "KEY")]
    public_key: String,
}

/// Prints the statement, where it is theirs and about this commit; else why nothing is proved. Returns whether it is.
pub(super) fn run(args: &VerifyStatementArgs, out: &mut impl Write) -> anyhow::Result<bool> {
    let VerifyStatementArgs { commit, public_key } = args;
    let key = AuditPublicKey::parse_public_key(public_key).context("--public-key")?;
    let named =
        run_git(&["rev-parse", "--verify", "--end-of-options", &format!("{commit}^{{commit}}")])?;
    let named = named.with_context(|| format!("there is no commit `{commit}` here"))?;
    let note = run_git(&["notes", "--ref=cogni", "show", named.trim_end()])?;
    match verify_note(note.as_deref(), named.trim_end(), &key) {
        Ok(statement) => {
            serde_json::to_writer(&mut *out, &statement)?;
            writeln!(out)?;
            Ok(true)
        }
        Err(unproved) => {
            writeln!(out, "UNPROVED: {unproved}")?;
            Ok(false)
        }
    }
}

/// Why nothing is proved about a commit.
#[derive(Debug, thiserror::Error)]
enum VerifyStatementError {
    #[error(
        "there is no statement beside it; `git fetch origin refs/notes/cogni:refs/notes/cogni` brings them"
    )]
    Nothing,
    #[error("what is beside it proves nothing: {0}")]
    Invalid(#[from] StatementError),
    #[error("the statement beside it is about another commit, `{0}`")]
    Other(ObjectId),
}

fn verify_note(
    note: Option<&str>,
    commit: &str,
    key: &AuditPublicKey,
) -> Result<ProvenanceStatement, VerifyStatementError> {
    let note = note.ok_or(VerifyStatementError::Nothing)?;
    let statement = ProvenanceStatement::verify(note.trim_end(), key)?;
    if statement.head.to_string() == commit {
        Ok(statement)
    } else {
        Err(VerifyStatementError::Other(statement.head))
    }
}

/// What git says, where it does not fail.
fn run_git(words: &[&str]) -> anyhow::Result<Option<String>> {
    let output = Command::new("git").args(words).output().context("`git` is missing")?;
    Ok(output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned()))
}
