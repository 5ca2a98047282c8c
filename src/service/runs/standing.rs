//! Checks that the upstream and the forge can be reached and accept the service's credentials. The checks run on
//! request, at most twice a minute.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use super::RunService;
use crate::gateway::upstream::check::probe;

/// A cache of the last check's result, with its time.
#[derive(Debug, Default)]
pub(super) struct CachedServiceStatus(Mutex<Option<(Instant, ServiceStatus)>>);

/// The state of the upstream and of the forge, in texts for unauthenticated readers: `ok`, or the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceStatus {
    pub upstream: String,
    pub forge: String,
}

impl RunService {
    /// Returns the state of the upstream and of the forge. The call waits for their answers, unless the cached result
    /// is younger than half a minute.
    pub async fn standing(&self) -> ServiceStatus {
        // The lock is held during the checks, so that simultaneous callers send one request.
        let mut known = self.0.upstream_status.0.lock().await;
        if let Some((asked, standing)) = &*known
            && asked.elapsed() < FRESH
        {
            return standing.clone();
        }
        let config = self.0.config.load_full();
        let (upstream, forge) = tokio::join!(Box::pin(probe(&config.upstream)), self.forge());
        self.0.gateway_host.metrics().record_upstream_contact(upstream.is_ok());
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

/// The state of a service that works.
const OK: &str = "ok";

/// The time for which a result is cached. Our choice.
const FRESH: Duration = Duration::from_secs(30);
