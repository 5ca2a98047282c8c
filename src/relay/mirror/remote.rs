//! How git gets to a mirror's remote, and is let in.

use super::{Error, Mirror};
use crate::base::b64;
use crate::base::reach::HostError;
use crate::base::secret::Secret;
use crate::git::Call;

impl Mirror {
    /// Lets a call in, where there is a token; GitHub takes it as the password of this user.
    ///
    /// # Errors
    /// [`Error::Unreachable`] where the remote's host leads to no address that may be connected to.
    pub(in crate::relay) fn admit<'a>(
        &self,
        call: Call<'a>,
        token: Option<&Secret>,
    ) -> Result<Call<'a>, Error> {
        let call = match self.repository.hosted() {
            None => call,
            Some(hosted) => call
                .over_network(&hosted.server(), hosted.reach())
                .map_err(|error| without_address(&error))?,
        };
        let Some(token) = token.filter(|token| !token.is_empty()) else { return Ok(call) };
        let mut basic = String::from("Authorization: Basic ");
        let from = basic.len();
        b64::encode(format!("x-access-token:{}", token.expose()).as_bytes(), &mut basic);
        // Servers want the older alphabet, and padding.
        let mut basic =
            basic[..from].to_owned() + &basic[from..].replace('-', "+").replace('_', "/");
        while (basic.len() - from) % 4 != 0 {
            basic.push('=');
        }
        Ok(call.header(&self.url(), &Secret::new(basic)).secret(token))
    }

    /// What git is given.
    pub(in crate::relay) fn url(&self) -> String {
        self.repository.clone_url()
    }
}

/// A name may be looked up to another end on another day.
fn without_address(error: &HostError) -> Error {
    let why = match error {
        HostError::NotPublic { .. } => {
            format!(
                "{error}; a host in a private network is named by the grant, as in `https://HOST/*`"
            )
        }
        HostError::Unknown { source, .. } => format!("{error}: {source}"),
        HostError::Unusable { .. } => error.to_string(),
    };
    Error::Unreachable { why }
}
