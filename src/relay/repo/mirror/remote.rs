//! The connection to a mirror's remote, and its authentication.

use base64::prelude::*;

use super::{RepoError, RepoMirror};
use crate::base::host_reach::HostReachError;
use crate::base::secret::SecretString;
use crate::relay::git::GitCommand;

impl RepoMirror {
    /// Prepares a git command for the remote, and adds the token, if there is one. GitHub takes the token as the
    /// password of the user `x-access-token`.
    ///
    /// # Errors
    /// Returns [`RepoError::Unreachable`] if the remote's host has no address that may be connected to.
    pub(in crate::relay::repo) fn authenticate<'a>(
        &self,
        call: GitCommand<'a>,
        token: Option<&SecretString>,
    ) -> Result<GitCommand<'a>, RepoError> {
        let call = match self.repository.as_hosted() {
            None => call,
            Some(hosted) => call
                .with_remote(&hosted.server_uri(), hosted.reach())
                .map_err(|error| unreachable_error(&error))?,
        };
        let Some(token) = token.filter(|token| !token.is_empty()) else { return Ok(call) };
        let pair = format!("x-access-token:{}", token.expose_secret());
        let basic = format!("Authorization: Basic {}", BASE64_STANDARD.encode(pair));
        // The token goes into an HTTP header, and never into the URL, which can appear in messages.
        Ok(call.http_header(&self.remote_url(), &SecretString::new(basic)).redact_secret(token))
    }

    /// Prepares the git that lists the remote's refs with these names.
    pub(in crate::relay::repo) fn ref_list_command(
        &self,
        options: &[&str],
        names: &[String],
        token: Option<&SecretString>,
    ) -> Result<GitCommand<'_>, RepoError> {
        let call = self.git_command("ls-remote").args(options).arg("--").arg(self.remote_url());
        self.authenticate(call.args(names).limits(self.limits.of_ref_list()), token)
    }

    /// Prepares the git that fetches refs of the remote. It must run under the [fetch lock](Self::run_locked_fetch).
    pub(in crate::relay::repo) fn fetch_command(
        &self,
        refspecs: &[String],
        token: Option<&SecretString>,
    ) -> Result<GitCommand<'_>, RepoError> {
        let words = ["--quiet", "--no-tags", "--no-write-fetch-head", "--refmap=", "--"];
        let call = self.git_command("fetch").args(words).arg(self.remote_url()).args(refspecs);
        self.authenticate(call.limits(self.limits.of_git()), token)
    }

    /// Returns the URL that git gets.
    pub(in crate::relay::repo) fn remote_url(&self) -> String {
        self.repository.clone_url()
    }
}

/// Makes a temporary error, because the name may resolve to another address on another day.
fn unreachable_error(error: &HostReachError) -> RepoError {
    let why = match error {
        HostReachError::NotPublic { .. } => {
            format!(
                "{error}; a host in a private network is named by the grant, as in `https://HOST/*`"
            )
        }
        HostReachError::Unknown { source, .. } => format!("{error}: {source}"),
        HostReachError::Unusable { .. } => error.to_string(),
    };
    RepoError::Unreachable { why }
}
