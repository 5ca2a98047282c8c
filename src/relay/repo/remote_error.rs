//! Errors of a remote, from the messages of git and of the server.

use super::RepoError;
use crate::relay::git;

/// Adds the server's reasons, which git prints on standard error, to the summary.
pub(super) fn rejection_message(summary: String, ended: &Result<(), git::GitError>) -> String {
    let said = ended.as_ref().err().and_then(git::GitError::stderr_text).unwrap_or_default();
    let told = said.lines().filter_map(|line| line.strip_prefix("remote: ")).map(str::trim);
    let told: Vec<_> = told.filter(|line| !line.is_empty()).take(MAX_MESSAGE_LINES).collect();
    if told.is_empty() { summary } else { format!("{summary}: {}", told.join(" ")) }
}

/// Maps an error of git to an error of the remote, if there was no answer about the ref.
pub(super) fn map_network_error(error: git::GitError) -> RepoError {
    let Some(said) = error.stderr_text() else {
        return match error {
            // A timeout is most often the network's fault, so a later attempt may succeed.
            git::GitError::Timeout { .. } => RepoError::Unreachable { why: error.to_string() },
            error => error.into(),
        };
    };
    let is = |phrases: &[&str]| phrases.iter().any(|phrase| said.contains(phrase));
    let said = git::summarize_stderr(said);
    if is(UNAUTHORIZED_MESSAGES) {
        RepoError::Unauthorized { why: format!("{said}; {TOKEN_ADVICE}") }
    } else if is(CERTIFICATE_MESSAGES) {
        RepoError::Unreachable { why: format!("{said}; {CERTIFICATE_ADVICE}") }
    } else {
        RepoError::Unreachable { why: said }
    }
}

/// Parts of git's messages, in the C locale, if a server requires another token or knows no such repository.
const UNAUTHORIZED_MESSAGES: &[&str] = &[
    "Authentication failed",
    "could not read Username",
    "could not read Password",
    "returned error: 401",
    "returned error: 403",
    "returned error: 404",
    "not found",
    "does not appear to be a git repository",
];

/// Parts of the messages of git's TLS libraries, OpenSSL and `GnuTLS`, if they do not accept a server's certificate.
const CERTIFICATE_MESSAGES: &[&str] =
    &["SSL certificate problem", "certificate verification failed"];

const TOKEN_ADVICE: &str = "check the repository's address, and give a token that may read and push to it in \
                            `GITHUB_TOKEN`, or check `GITHUB_APP_ID` and `GITHUB_APP_KEY_FILE`";
const CERTIFICATE_ADVICE: &str = "name the PEM file of the authority that signed the server's certificate in \
                                  `GITHUB_CA_FILE`";
/// The most lines of a server's reasons in a message. Our choice.
const MAX_MESSAGE_LINES: usize = 10;
