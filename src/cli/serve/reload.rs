//! What a service takes over of files that were read again, and what it cannot.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::options::ServeOptions;
use crate::gateway::config::GatewayConfig;
use crate::gateway::process::GatewayHost;
use crate::gateway::upstream::{self, UpstreamKind};
use crate::service::billing::BillingStore;
use crate::service::billing::litellm::{self, LitellmClient};
use crate::service::billing::reconcile_task::ReconcileTask;
use crate::service::runs::RunService;
use crate::telemetry::metrics::MetricsRegistry;

/// Puts in force what runs that come have of configuration, agents and relay. After an error nothing has changed.
pub(super) struct ServiceReloader<'a> {
    /// What the service was started with.
    pub(super) first: &'a ServeOptions,
    pub(super) supervisor: &'a RunService,
    pub(super) seats: &'a GatewayHost,
    /// Where LiteLLM is asked what it has charged.
    pub(super) litellm: watch::Sender<Option<litellm::LitellmConfig>>,
}

impl ServiceReloader<'_> {
    pub(super) fn apply(&self, fresh: ServeOptions) -> anyhow::Result<()> {
        self.first.check_reloadable(&fresh)?;
        let relay = super::open_delivery_service(&fresh)?;
        let litellm = litellm_config(&fresh.config.upstream);
        if let Some(settings) = litellm.clone() {
            build_client(settings)?;
        }
        // The last of what may fail. A run that comes before the supervisor has the rest is opened as it is configured.
        self.seats.reload_defaults(&fresh.config)?;
        let agents = fresh.catalog.entries().len();
        self.supervisor.reload(fresh.config, fresh.catalog, relay);
        self.litellm.send_replace(litellm);
        tracing::info!(agents, "configuration, agents and relay are read again");
        Ok(())
    }
}

impl ServeOptions {
    /// Says whether others may follow these while the service runs.
    fn check_reloadable(&self, next: &Self) -> anyhow::Result<()> {
        self.serve.check_reloadable(&next.serve)?;
        let (old, new) = (&self.config, &next.config);
        // A key that is changed is the next runs'; their connections are those that there are.
        let upstream = upstream::UpstreamConfig {
            api_key: old.upstream.api_key.clone(),
            ..new.upstream.clone()
        };
        let changed = [
            ("`[server]`", old.server != new.server),
            ("`[upstream]` but for its key", old.upstream != upstream),
            ("`AUDIT_SIGNING_KEY`", old.audit.signing_key != new.audit.signing_key),
            ("`access_log`", old.access_log != new.access_log),
            ("`[metrics]`", old.metrics != new.metrics),
            ("`[telemetry]`", old.telemetry != new.telemetry),
            ("`drain_timeout`", old.drain_timeout != new.drain_timeout),
            ("cogni-init's place", self.init != next.init),
        ];
        match changed.into_iter().find(|(_, has_changed)| *has_changed) {
            Some((what, _)) => {
                bail!("{what} cannot change while it serves; restart for that, or take it back")
            }
            None => Ok(()),
        }
    }
}

/// Keeps the books, and asks LiteLLM by the settings that are in force.
pub(super) struct ReconcileRunner {
    books: BillingStore,
    metrics: Arc<MetricsRegistry>,
    every: Duration,
    litellm: watch::Receiver<Option<litellm::LitellmConfig>>,
}

impl ReconcileRunner {
    /// With what changes the settings.
    ///
    /// # Errors
    /// LiteLLM cannot be asked by those that there are.
    pub(super) fn new(
        (books, metrics): (BillingStore, Arc<MetricsRegistry>),
        config: &GatewayConfig,
        every: Duration,
    ) -> anyhow::Result<(Self, watch::Sender<Option<litellm::LitellmConfig>>)> {
        let settings = litellm_config(&config.upstream);
        if let Some(settings) = settings.clone() {
            build_client(settings)?;
        }
        let (sender, litellm) = watch::channel(settings);
        Ok((Self { books, metrics, every, litellm }, sender))
    }

    /// Goes on until `stop`.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let settings = self.litellm.borrow_and_update().clone();
            let (books, metrics, every) =
                (self.books.clone(), Arc::clone(&self.metrics), self.every);
            let litellm = settings.and_then(|settings| build_client(settings).ok());
            let watch = ReconcileTask { books, litellm, metrics, every };
            let until = stop.child_token();
            let changed = async {
                // Who could change them is gone at the end only.
                if !matches!(stop.run_until_cancelled(self.litellm.changed()).await, Some(Ok(()))) {
                    stop.cancelled().await;
                }
                until.cancel();
            };
            tokio::join!(watch.run(until.clone()), changed);
        }
    }
}

/// Where LiteLLM charges, it is asked for the receipts that its callback has not brought.
fn litellm_config(upstream: &upstream::UpstreamConfig) -> Option<litellm::LitellmConfig> {
    (upstream.kind == UpstreamKind::Litellm).then(|| {
        let (url, key) = (upstream.url.clone(), upstream.api_key.clone());
        litellm::LitellmConfig { url, key, ca_file: upstream.ca_file.clone() }
    })
}

fn build_client(settings: litellm::LitellmConfig) -> anyhow::Result<LitellmClient> {
    LitellmClient::new(settings).context("the upstream's authorities cannot be loaded")
}
