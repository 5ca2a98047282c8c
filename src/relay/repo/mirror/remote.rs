//! How git gets to a mirror's remote, and is let in.

use super::{RepoError, RepoMirror};
use crate::base::b64;
use crate::base::host_reach::HostReachError;
use crate::base::secret::SecretString;
use crate::relay::git::GitCommand;

impl RepoMirror {
    /// Lets a call in, where there is a token; GitHub takes it as the password of this user.
    ///
    /// # Errors
    /// [`RepoError::Unreachable`] where the remote's host leads to no address that may be connected to.
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
        let mut basic = String::from("Authorization: Basic ");
        let from = basic.len();
        b64::encode_base64(
            format!("x-access-token:{}", token.expose_secret()).as_bytes(),
            &mut basic,
        );
        // Servers want the older alphabet, and padding.
        let mut basic =
            basic[..from].to_owned() + &basic[from..].replace('-', "+").replace('_', "/");
        while (basic.len() - from) % 4 != 0 {
            basic.push('=');
        }
        Ok(call.http_header(&self.remote_url(), &SecretString::new(basic)).redact_secret(token))
    }

    /// What git is given.
    pub(in crate::relay::repo) fn remote_url(&self) -> String {
        self.repository.clone_url()
    }
}

/// A name may be looked up to another end on another day.
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
