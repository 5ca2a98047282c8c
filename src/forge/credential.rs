//! What the relay shows to a forge: a token that was given, or one that an app asks for, a repository at a time.
//!
//! **Invariant:** a token goes to the API and to the host of its own repository, and nowhere else: not into a log, an
//! error, an argument or a file.

mod app;

use std::fmt;

use serde::de::IgnoredAny;

use super::github::{Api, Error};
use crate::base::secret::Secret;
use crate::relay::repository::Hosted;

pub use app::App;

/// Who the relay is.
pub enum Credential {
    /// A personal or fine-grained token, as it was given.
    Token(Secret),
    /// A GitHub App.
    App(Box<App>),
}

impl Credential {
    /// A token that is good for one repository for some minutes at least.
    ///
    /// # Errors
    /// The repository is not on the API's host; or the app has no access to it; or as every call.
    pub async fn token(&self, api: &Api, repository: &Hosted) -> Result<Secret, Error> {
        if !api.serves(repository) {
            let (api, host) = (api.to_string(), repository.authority().to_owned());
            return Err(Error::Foreign { api, host });
        }
        match self {
            Self::Token(token) => Ok(token.clone()),
            Self::App(app) => app.token(api, repository).await,
        }
    }

    /// Asks whether the forge accepts the credential. An Enterprise that limits no rates does not know the question, and has
    /// looked at the token before it says so.
    ///
    /// # Errors
    /// As every call.
    pub async fn check(&self, api: &Api) -> Result<(), Error> {
        let asked = match self {
            Self::Token(token) => api.get(token, "/rate_limit").await,
            Self::App(app) => app.check(api).await,
        };
        match asked {
            Ok(IgnoredAny) | Err(Error::NotFound) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Does something with a token; once more with a new one, where an app's was taken back before its time.
    ///
    /// # Errors
    /// As [`Credential::token`], and what `attempt` says.
    pub async fn with<T, F>(
        &self,
        api: &Api,
        repository: &Hosted,
        attempt: impl Fn(Secret) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let first = Box::pin(attempt(self.token(api, repository).await?)).await;
        match (self, first) {
            (Self::App(app), Err(Error::Unauthorized(_))) => {
                app.forget(repository).await;
                Box::pin(attempt(self.token(api, repository).await?)).await
            }
            (_, done) => done,
        }
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Token(_) => f.write_str("Token(***)"),
            Self::App(app) => f.debug_tuple("App").field(app).finish(),
        }
    }
}
