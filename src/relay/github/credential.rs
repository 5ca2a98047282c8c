//! What the relay shows to a forge: a token that was given, or one that an app asks for, a repository at a time.
//!
//! **Invariant:** a token goes to the API and to the host of its own repository, and nowhere else: not into a log, an
//! error, an argument or a file.

mod github_app;

use std::fmt;

use serde::de::IgnoredAny;

use super::client::{GithubClient, GithubError};
use crate::base::secret::SecretString;
use crate::relay::repo::repository::HostedRepository;

pub use github_app::GithubApp;

/// Who the relay is.
pub enum ForgeCredential {
    /// A personal or fine-grained token, as it was given.
    Token(SecretString),
    /// A GitHub App.
    App(Box<GithubApp>),
}

impl ForgeCredential {
    /// A token that is good for one repository for some minutes at least.
    ///
    /// # Errors
    /// The repository is not on the API's host; or the app has no access to it; or as every call.
    pub async fn token(
        &self,
        api: &GithubClient,
        repository: &HostedRepository,
    ) -> Result<SecretString, GithubError> {
        if !api.serves_repository(repository) {
            let (api, host) = (api.to_string(), repository.authority().to_owned());
            return Err(GithubError::Foreign { api, host });
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
    pub async fn check(&self, api: &GithubClient) -> Result<(), GithubError> {
        let asked = match self {
            Self::Token(token) => api.get(token, "/rate_limit").await,
            Self::App(app) => app.check(api).await,
        };
        match asked {
            Ok(IgnoredAny) | Err(GithubError::NotFound) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Does something with a token; once more with a new one, where an app's was taken back before its time.
    ///
    /// # Errors
    /// As [`ForgeCredential::token`], and what `attempt` says.
    pub async fn with_token<T, F>(
        &self,
        api: &GithubClient,
        repository: &HostedRepository,
        attempt: impl Fn(SecretString) -> F,
    ) -> Result<T, GithubError>
    where
        F: Future<Output = Result<T, GithubError>>,
    {
        let first = Box::pin(attempt(self.token(api, repository).await?)).await;
        match (self, first) {
            (Self::App(app), Err(GithubError::Unauthorized(_))) => {
                app.invalidate(repository).await;
                Box::pin(attempt(self.token(api, repository).await?)).await
            }
            (_, done) => done,
        }
    }
}

impl fmt::Debug for ForgeCredential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Token(_) => f.write_str("Token(***)"),
            Self::App(app) => f.debug_tuple("App").field(app).finish(),
        }
    }
}
