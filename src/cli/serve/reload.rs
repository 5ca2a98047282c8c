//! What a service takes over of files that were read again, and what it cannot.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::given::Given;
use crate::app::Seats;
use crate::billing::Books;
use crate::billing::litellm::{self, Client};
use crate::billing::watch::Watch;
use crate::config::Config;
use crate::observe::metrics::Metrics;
use crate::supervisor::Supervisor;
use crate::upstream::{self, Kind};

/// Puts in force what runs that come have of configuration, agents and relay. After an error nothing has changed.
pub(super) struct Reload<'a> {
    /// What the service was started with.
    pub(super) first: &'a Given,
    pub(super) supervisor: &'a Supervisor,
    pub(super) seats: &'a Seats,
    /// Where LiteLLM is asked what it has charged.
    pub(super) litellm: watch::Sender<Option<litellm::Settings>>,
}

impl Reload<'_> {
    pub(super) fn take_over(&self, fresh: Given) -> anyhow::Result<()> {
        self.first.check_lasting(&fresh)?;
        let relay = super::relay(&fresh)?;
        let litellm = asked(&fresh.config.upstream);
        if let Some(settings) = litellm.clone() {
            client(settings)?;
        }
        // The last of what may fail. A run that comes before the supervisor has the rest is opened as it is configured.
        self.seats.renew(&fresh.config)?;
        let agents = fresh.catalog.entries().len();
        self.supervisor.reload(fresh.config, fresh.catalog, relay);
        self.litellm.send_replace(litellm);
        tracing::info!(agents, "configuration, agents and relay are read again");
        Ok(())
    }
}

impl Given {
    /// Says whether others may follow these while the service runs.
    fn check_lasting(&self, next: &Self) -> anyhow::Result<()> {
        self.serve.check_lasting(&next.serve)?;
        let (old, new) = (&self.config, &next.config);
        // A key that is changed is the next runs'; their connections are those that there are.
        let upstream =
            upstream::Config { api_key: old.upstream.api_key.clone(), ..new.upstream.clone() };
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
pub(super) struct Bookkeeper {
    books: Books,
    metrics: Arc<Metrics>,
    every: Duration,
    litellm: watch::Receiver<Option<litellm::Settings>>,
}

impl Bookkeeper {
    /// With what changes the settings.
    ///
    /// # Errors
    /// LiteLLM cannot be asked by those that there are.
    pub(super) fn new(
        (books, metrics): (Books, Arc<Metrics>),
        config: &Config,
        every: Duration,
    ) -> anyhow::Result<(Self, watch::Sender<Option<litellm::Settings>>)> {
        let settings = asked(&config.upstream);
        if let Some(settings) = settings.clone() {
            client(settings)?;
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
            let litellm = settings.and_then(|settings| client(settings).ok());
            let watch = Watch { books, litellm, metrics, every };
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
fn asked(upstream: &upstream::Config) -> Option<litellm::Settings> {
    (upstream.kind == Kind::Litellm).then(|| {
        let (url, key) = (upstream.url.clone(), upstream.api_key.clone());
        litellm::Settings { url, key, ca_file: upstream.ca_file.clone() }
    })
}

fn client(settings: litellm::Settings) -> anyhow::Result<Client> {
    Client::new(settings).context("the upstream's authorities cannot be loaded")
}
