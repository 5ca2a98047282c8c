//! The credential of the relay at a forge: a configured token, or a GitHub App that requests tokens for one repository
//! each.
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

/// The identity of the relay at the forge.
pub enum ForgeCredential {
    /// A personal or fine-grained token from the configuration.
    Token(SecretString),
    /// A GitHub App.
    App(Box<GithubApp>),
}

impl ForgeCredential {
    /// Returns a token that is valid for one repository for some minutes at least.
    ///
    /// # Errors
    /// Returns [`GithubError::OtherHost`] if the repository is not on the API's host. Returns an error of the call if
    /// the app has no access to the repository.
    pub async fn token(
        &self,
        api: &GithubClient,
        repository: &HostedRepository,
    ) -> Result<SecretString, GithubError> {
        // The host is checked before any token exists: a token for one host must never be sent to another host.
        if !api.serves_repository(repository) {
            let (api, host) = (api.to_string(), repository.authority().to_owned());
            return Err(GithubError::OtherHost { api, host });
        }
        match self {
            Self::Token(token) => Ok(token.clone()),
            Self::App(app) => app.token(api, repository).await,
        }
    }

    /// Asks whether the forge accepts the credential. A GitHub Enterprise server without rate limits answers 404, after
    /// a check of the token, which counts as accepted.
    ///
    /// # Errors
    /// Returns a [`GithubError`] if the forge rejects the credential or does not answer.
    pub async fn check(&self, api: &GithubClient) -> Result<(), GithubError> {
        let response = match self {
            Self::Token(token) => api.get(token, "/rate_limit").await,
            Self::App(app) => app.check(api).await,
        };
        match response {
            Ok(IgnoredAny) | Err(GithubError::NotFound) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Calls `attempt` with a token. If the forge rejects an app's token, which may be revoked early, calls `attempt`
    /// once more with a new token.
    ///
    /// # Errors
    /// Returns the errors of [`ForgeCredential::token`] and of `attempt`.
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
            // Only an app can get another token. A configured token stays rejected.
            (Self::App(app), Err(GithubError::Unauthorized(_))) => {
                app.invalidate(repository).await;
                Box::pin(attempt(self.token(api, repository).await?)).await
            }
            (_, result) => result,
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
