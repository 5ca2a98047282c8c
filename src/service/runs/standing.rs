//! Whether the upstream and the forge can be reached, and accept what this service shows them. They are asked when somebody
//! wants to know, and not more often than twice a minute.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use super::RunService;
use crate::gateway::upstream::check::probe;

/// What was found last, and when.
#[derive(Debug, Default)]
pub(super) struct CachedServiceStatus(Mutex<Option<(Instant, ServiceStatus)>>);

/// How the service stands with those that it depends on, in words for everybody: `ok`, or why not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceStatus {
    pub upstream: String,
    pub forge: String,
}

impl RunService {
    /// Returns how the service stands with the upstream and the forge. Takes as long as those take to answer, where it was
    /// not asked within the last half minute.
    pub async fn standing(&self) -> ServiceStatus {
        // Held while they are asked, so that all who want to know at the same time ask once.
        let mut known = self.0.standing.0.lock().await;
        if let Some((asked, standing)) = &*known
            && asked.elapsed() < FRESH
        {
            return standing.clone();
        }
        let config = self.0.config.load_full();
        let (upstream, forge) = tokio::join!(Box::pin(probe(&config.upstream)), self.forge());
        let upstream = match upstream {
            Ok(()) => OK.to_owned(),
            Err(error) => {
                let (found, hint) = (error.found(), error.hint());
                tracing::warn!(upstream = %config.upstream.url, found, hint, "upstream is not usable");
                error.public()
            }
        };
        known.insert((Instant::now(), ServiceStatus { upstream, forge })).1.clone()
    }

    async fn forge(&self) -> String {
        let Some(relay) = self.delivery_service() else { return "no relay".to_owned() };
        match relay.check_credential().await {
            None => "no credential".to_owned(),
            Some(Ok(())) => OK.to_owned(),
            Some(Err(error)) => {
                tracing::warn!(%error, "forge does not accept the credential, or is not reached");
                error.code().to_owned()
            }
        }
    }
}

const OK: &str = "ok";

/// Whoever looks more often is told what was found.
const FRESH: Duration = Duration::from_secs(30);
