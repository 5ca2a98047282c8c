//! How often something is tried again, and how long is waited before.

use std::time::Duration;

use super::GithubError;

/// Waits that double, up to a bound. What needs a longer one is left for later, by whoever asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// How often something is tried in all.
    pub attempts: u32,
    /// The first wait.
    pub first: Duration,
    /// The longest: of ours, and of those that GitHub asks for.
    pub longest: Duration,
}

impl Default for RetryPolicy {
    /// Some ten seconds in all, so that a hiccup passes unseen and an outage holds nothing up.
    fn default() -> Self {
        Self { attempts: 4, first: Duration::from_millis(500), longest: Duration::from_secs(10) }
    }
}

impl RetryPolicy {
    /// Does something until it is done, or will not be soon.
    ///
    /// # Errors
    /// The last one.
    pub async fn retry<T, F>(&self, mut attempt: impl FnMut() -> F) -> Result<T, GithubError>
    where
        F: Future<Output = Result<T, GithubError>>,
    {
        let mut wait = self.first;
        for _ in 1..self.attempts {
            let error = match Box::pin(attempt()).await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let Some(pause) = error.retry_after().map(|after| after.max(wait)) else {
                return Err(error);
            };
            if pause > self.longest {
                return Err(error);
            }
            tracing::debug!(%error, ?pause, "trying again");
            tokio::time::sleep(pause).await;
            wait = (wait * 2).min(self.longest);
        }
        Box::pin(attempt()).await
    }
}
