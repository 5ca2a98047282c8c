//! Sandboxes that are kept ready for agents whose entries ask for them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;

use super::{Settings, Wanted};
use crate::catalog::{Catalog, Entry, Mode};
use crate::config::Config;
use crate::runner::slots::{self, Pool};
use crate::runner::{Message, Role};

/// A pool for each such agent of the catalog that the service began with.
pub(super) struct Stock(HashMap<String, Arc<Pool>>);

impl Stock {
    /// Nothing is started yet. An agent that cannot have slots is run without.
    pub(super) fn new(settings: &Settings, config: &Config, catalog: &Catalog) -> Self {
        let asks = |entry: &&Arc<Entry>| entry.slots > 0 && entry.mode == Mode::OneShot;
        let pools = catalog.entries().filter(asks).filter_map(|entry| {
            let pool = pool(entry, (settings, config, catalog));
            let told = |error| tracing::warn!(agent = entry.name, "there are no slots: {error:#}");
            Some((entry.name.clone(), Arc::new(pool.map_err(told).ok()?)))
        });
        Self(pools.collect())
    }

    pub(super) fn of(&self, agent: &str) -> Option<Arc<Pool>> {
        self.0.get(agent).cloned()
    }

    /// Keeps them until `stop`, and then takes them away.
    pub(super) async fn keep(&self, stop: &CancellationToken) {
        join_all(self.0.values().map(|pool| pool.keep(stop.clone()))).await;
    }
}

/// A run such as any of the agent's is what its slots are made for.
fn pool(entry: &Entry, parts: (&Settings, &Config, &Catalog)) -> anyhow::Result<Pool> {
    let models = &entry.models;
    let model = models.default.as_ref().or(models.allow.first()).cloned();
    let wanted = Wanted {
        agent: entry.name.clone(),
        model: model.or_else(|| Some("any".to_owned())),
        messages: vec![Message { role: Role::User, content: String::new() }],
        account: "-".to_owned(),
        ..Wanted::default()
    };
    let order = wanted.order("slot", parts)?;
    let stock = slots::Stock { count: entry.slots as usize, max_age: MAX_AGE };
    Ok(Pool::new(&order, stock)?)
}

/// What a root was made of may have changed since.
const MAX_AGE: Duration = Duration::from_hours(1);
