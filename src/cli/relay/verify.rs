//! `cogni-gateway relay verify`: verifies the provenance statement of a commit.

use std::io::Write;
use std::process::Command;

use anyhow::Context;

use crate::relay::delivery::statement::{ProvenanceStatement, StatementError};
use crate::relay::repo::ObjectId;
use crate::telemetry::audit::AuditPublicKey;

/// The flags of `relay verify`.
#[derive(Debug, clap::Args)]
pub struct VerifyStatementArgs {
    /// A commit of the repository in the current directory
    commit: String,

    /// The key that must have signed: 32 bytes as hexadecimal or base64
    #[arg(long, value_name = "KEY")]
    public_key: String,
}

/// Prints the statement if it is valid and about this commit, otherwise the reason. Returns true if the statement is
/// valid.
pub(super) fn run(args: &VerifyStatementArgs, out: &mut impl Write) -> anyhow::Result<bool> {
    let VerifyStatementArgs { commit, public_key } = args;
    let key = AuditPublicKey::parse_public_key(public_key).context("--public-key")?;
    // `^{commit}` resolves a tag to its commit, and `--end-of-options` keeps a name that begins with a dash from being
    // a flag.
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

/// The reason why a commit has no valid statement.
#[derive(Debug, thiserror::Error)]
enum VerifyStatementError {
    #[error(
        "the commit has no statement here; fetch it with `git fetch origin refs/notes/cogni:refs/notes/cogni`"
    )]
    NoStatement,
    #[error("the commit's note is not a valid statement: {0}")]
    Invalid(#[from] StatementError),
    #[error("the commit's statement is about another commit, `{0}`")]
    OtherCommit(ObjectId),
}

fn verify_note(
    note: Option<&str>,
    commit: &str,
    key: &AuditPublicKey,
) -> Result<ProvenanceStatement, VerifyStatementError> {
    let note = note.ok_or(VerifyStatementError::NoStatement)?;
    // A valid note can be copied to another commit, so that its commit must match too.
    let statement = ProvenanceStatement::verify(note.trim_end(), key)?;
    if statement.head.to_string() == commit {
        Ok(statement)
    } else {
        Err(VerifyStatementError::OtherCommit(statement.head))
    }
}

/// Runs git, and returns its output if it succeeds.
fn run_git(words: &[&str]) -> anyhow::Result<Option<String>> {
    let output = Command::new("git").args(words).output().context("`git` is missing")?;
    Ok(output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned()))
}
