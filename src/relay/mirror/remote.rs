//! How git gets to a mirror's remote, and is let in.

use super::Mirror;
use crate::base::b64;
use crate::base::secret::Secret;
use crate::git::Call;

impl Mirror {
    /// Lets a call in, where there is a token; GitHub takes it as the password of this user.
    pub(in crate::relay) fn admit<'a>(&self, call: Call<'a>, token: Option<&Secret>) -> Call<'a> {
        let call = call.over_network();
        let Some(token) = token.filter(|token| !token.is_empty()) else { return call };
        let mut basic = String::from("Authorization: Basic ");
        let from = basic.len();
        b64::encode(format!("x-access-token:{}", token.expose()).as_bytes(), &mut basic);
        // Servers want the older alphabet, and padding.
        let mut basic =
            basic[..from].to_owned() + &basic[from..].replace('-', "+").replace('_', "/");
        while (basic.len() - from) % 4 != 0 {
            basic.push('=');
        }
        call.header(&self.url(), &Secret::new(basic)).secret(token)
    }

    /// What git is given.
    pub(in crate::relay) fn url(&self) -> String {
        self.repository.clone_url()
    }
}
