//! The retries of calls to GitHub, and the waits between them.

use std::time::Duration;

use super::GithubError;

/// A policy of waits that double up to a maximum. A call that needs a longer wait is left to the caller's later
/// attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// The number of attempts in all.
    pub attempts: u32,
    /// The first wait.
    pub initial_delay: Duration,
    /// The longest wait, both of this policy and of GitHub's demands.
    pub max_delay: Duration,
}

impl Default for RetryPolicy {
    /// Retries for some ten seconds in all: a short disturbance passes unnoticed, and an outage does not hold the
    /// caller up.
    fn default() -> Self {
        Self {
            attempts: 4,
            initial_delay: Duration::from_millis(500),
            max_delay: Duration::from_secs(10),
        }
    }
}

impl RetryPolicy {
    /// Calls `attempt` until it succeeds, fails for good, or needs a longer wait than the policy allows.
    ///
    /// # Errors
    /// Returns the error of the last attempt.
    pub async fn retry<T, F>(&self, mut attempt: impl FnMut() -> F) -> Result<T, GithubError>
    where
        F: Future<Output = Result<T, GithubError>>,
    {
        let mut wait = self.initial_delay;
        for _ in 1..self.attempts {
            let error = match Box::pin(attempt()).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let Some(pause) = error.retry_after().map(|after| after.max(wait)) else {
                return Err(error);
            };
            // GitHub demands a longer wait than the caller can spend. The outbox waits instead.
            if pause > self.max_delay {
                return Err(error);
            }
            tracing::debug!(%error, ?pause, "trying again");
            tokio::time::sleep(pause).await;
            wait = (wait * 2).min(self.max_delay);
        }
        // The last attempt has no wait behind it.
        Box::pin(attempt()).await
    }
}
