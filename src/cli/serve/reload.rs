//! Reload of a service: the settings that take effect at run time, and those that need a restart.

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

/// The reloader of configuration, agents and relay for new runs. An error leaves all settings unchanged.
pub(super) struct ServiceReloader<'a> {
    /// The options at the start of the service.
    pub(super) options: &'a ServeOptions,
    pub(super) run_service: &'a RunService,
    pub(super) gateway_host: &'a GatewayHost,
    /// The settings for asking LiteLLM about its charges.
    pub(super) litellm: watch::Sender<Option<litellm::LitellmConfig>>,
}

impl ServiceReloader<'_> {
    pub(super) fn apply(&self, fresh: ServeOptions) -> anyhow::Result<()> {
        self.options.check_reloadable(&fresh)?;
        let relay = super::open_delivery_service(&fresh)?;
        let litellm = litellm_config(&fresh.config.upstream);
        // The client is only built to find errors before anything changes.
        if let Some(settings) = litellm.clone() {
            build_client(settings)?;
        }
        // This is the last step that may fail. A run that starts before the next line has the new defaults and the old
        // catalog.
        self.gateway_host.reload_defaults(&fresh.config)?;
        let agents = fresh.catalog.entries().len();
        self.run_service.reload(fresh.config, fresh.catalog, relay);
        self.litellm.send_replace(litellm);
        tracing::info!(agents, "configuration, agents and relay are read again");
        Ok(())
    }
}

impl ServeOptions {
    /// Checks that a running service can take over the new options.
    fn check_reloadable(&self, next: &Self) -> anyhow::Result<()> {
        self.serve.check_reloadable(&next.serve)?;
        let (old, new) = (&self.config, &next.config);
        // A changed key is used by new runs; existing connections stay.
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
            ("the path of cogni-init", self.init != next.init),
        ];
        match changed.into_iter().find(|(_, has_changed)| *has_changed) {
            Some((what, _)) => {
                bail!(
                    "{what} cannot change while the service runs; restart the service, or undo the change"
                )
            }
            None => Ok(()),
        }
    }
}

/// The task that reconciles the billing records with LiteLLM, by the settings in force.
pub(super) struct ReconcileRunner {
    billing: BillingStore,
    metrics: Arc<MetricsRegistry>,
    every: Duration,
    litellm: watch::Receiver<Option<litellm::LitellmConfig>>,
}

impl ReconcileRunner {
    /// Creates the task, and the sender that changes its settings.
    ///
    /// # Errors
    /// Returns an error if a client cannot be built with the current settings.
    pub(super) fn new(
        (billing, metrics): (BillingStore, Arc<MetricsRegistry>),
        config: &GatewayConfig,
        every: Duration,
    ) -> anyhow::Result<(Self, watch::Sender<Option<litellm::LitellmConfig>>)> {
        let settings = litellm_config(&config.upstream);
        if let Some(settings) = settings.clone() {
            build_client(settings)?;
        }
        let (sender, litellm) = watch::channel(settings);
        Ok((Self { billing, metrics, every, litellm }, sender))
    }

    /// Reconciles until `stop`. New settings restart the inner task.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let settings = self.litellm.borrow_and_update().clone();
            let (billing, metrics, every) =
                (self.billing.clone(), Arc::clone(&self.metrics), self.every);
            // The settings were checked before they came into force, so that no error is expected here.
            let litellm = settings.and_then(|settings| build_client(settings).ok());
            let watch = ReconcileTask { billing, litellm, metrics, every };
            // Cancelled by new settings or by the shutdown.
            let until = stop.child_token();
            let changed = async {
                // The sender is dropped only when the service ends.
                if !matches!(stop.run_until_cancelled(self.litellm.changed()).await, Some(Ok(()))) {
                    stop.cancelled().await;
                }
                until.cancel();
            };
            tokio::join!(watch.run(until.clone()), changed);
        }
    }
}

/// Returns the settings for LiteLLM if LiteLLM is the upstream. The service asks LiteLLM for receipts that the callback
/// has not delivered.
fn litellm_config(upstream: &upstream::UpstreamConfig) -> Option<litellm::LitellmConfig> {
    (upstream.kind == UpstreamKind::Litellm).then(|| {
        let (url, key) = (upstream.url.clone(), upstream.api_key.clone());
        litellm::LitellmConfig { url, key, ca_file: upstream.ca_file.clone() }
    })
}

fn build_client(settings: litellm::LitellmConfig) -> anyhow::Result<LitellmClient> {
    LitellmClient::new(settings).context("the upstream's authorities cannot be loaded")
}
