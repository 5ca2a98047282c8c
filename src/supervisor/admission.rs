//! Whether a run may begin. A run is accepted when it is in the journal, and not before.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::conduct::Failed;
use super::{Shared, Supervisor, Wanted};
use crate::base::{db, disk};
use crate::budget::Nanodollars;
use crate::catalog;
use crate::grant;
use crate::journal::{Added, Caps, Exhausted, Feed, New};

/// A run that was accepted, now or before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Started {
    pub run: String,
    /// Whether it was asked for before, with the same key.
    pub is_known: bool,
}

/// On what terms a run is asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Asked again with the same one, it is the same run.
    pub key: Option<String>,
    /// How many runs its grant may have at once.
    pub most: Option<u32>,
    /// The money that its grant's runs may cost together.
    pub caps: Caps,
}

/// Why a run was not accepted. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error("the service is stopping; try again elsewhere, or later")]
    Draining,
    #[error("{0} runs are under way, and no more are allowed at once; try again later")]
    Full(usize),
    #[error(
        "{0} runs of this grant are under way, and it may have no more at once; wait for one to end"
    )]
    GrantFull(u32),
    #[error("{0}")]
    GrantBudget(Exhausted),
    #[error("{0}; an operator can discard some of it, with `cogni-gateway relay discard`")]
    WorkspacesFull(String),
    #[error(transparent)]
    NoAgent(#[from] catalog::Unknown),
    #[error("{0}")]
    Invalid(String),
    #[error("the idempotency key was used for another run, `{0}`, which asked for something else")]
    Conflict(String),
    /// Not the caller's fault.
    #[error("the outbox cannot be read: {0}")]
    Outbox(String),
    /// Not the caller's fault.
    #[error("the run cannot be written down")]
    Journal(#[from] db::Error),
}

impl Refused {
    /// For programs: stable, and documented.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Draining => "draining",
            Self::Full(_) => "overloaded",
            Self::GrantFull(_) => "too_many_runs",
            Self::GrantBudget(_) => "grant_budget_exhausted",
            Self::WorkspacesFull(_) => "workspaces_full",
            Self::NoAgent(_) => "no_such_agent",
            Self::Invalid(_) => "invalid_request",
            Self::Conflict(_) => "idempotency_conflict",
            Self::Journal(error) if disk::is_full(error) => "storage_full",
            Self::Outbox(_) | Self::Journal(_) => "internal",
        }
    }
}

/// Whoever holds it is one of so many.
pub(super) type Place = OwnedSemaphorePermit;

impl Supervisor {
    /// Accepts a run, which begins at once. Asked again with the same key, it is the same run.
    ///
    /// # Errors
    /// Why it is not accepted.
    pub async fn start(&self, wanted: Wanted, terms: Terms) -> Result<Started, Refused> {
        // Whoever asks may go away meanwhile; what is in the journal is conducted all the same.
        let this = self.clone();
        let start = async move { Box::pin(this.try_start(wanted, terms)).await };
        let started = self.0.tasks.carry(start).await;
        started.inspect_err(|refused| self.0.seats.metrics().admission_refused(refused.code()))
    }

    async fn try_start(&self, wanted: Wanted, terms: Terms) -> Result<Started, Refused> {
        let Terms { key, most, caps } = terms;
        if let Some(key) = &key
            && let Some(known) = self.known(&wanted, key).await?
        {
            return Ok(known);
        }
        if self.is_draining() {
            return Err(Refused::Draining);
        }
        let run = format!("run-{}", Uuid::now_v7());
        let (model, max_cost_usd) = self.0.check(&wanted, &run)?;
        self.check_kept(&wanted, &run).await?;
        let places = Arc::clone(&self.0.places);
        let full = |_| Refused::Full(self.0.settings.max_runs);
        let place = places.try_acquire_owned().map_err(full)?;
        let new = New {
            id: run.clone(),
            grant: wanted.grant.clone(),
            idempotency_key: key,
            most,
            caps,
            max_cost_usd,
            digest: wanted.digest(),
            agent: wanted.agent.clone(),
            account: wanted.account.clone(),
            model,
            wanted: wanted.to_json(),
        };
        match self.0.journal.add(new).await? {
            Added::New(feed, reserved) => {
                self.conduct(wanted.within_money(reserved), feed, Some(place));
                Ok(Started { run, is_known: false })
            }
            Added::Known(row) => Ok(Started { run: row.id, is_known: true }),
            Added::Conflict(row) => Err(Refused::Conflict(row.id)),
            Added::Full => Err(Refused::GrantFull(most.unwrap_or_default())),
            Added::Exhausted(exhausted) => Err(Refused::GrantBudget(exhausted)),
        }
    }

    /// What earlier runs have left bounds how many may leave more.
    async fn check_kept(&self, wanted: &Wanted, run: &str) -> Result<(), Refused> {
        let Some(relay) = self.relay() else { return Ok(()) };
        if !matches!(wanted.line(run), Ok(Some(_))) {
            return Ok(());
        }
        let grant = wanted.grant.clone();
        match spawn_blocking(move || relay.is_full(Some(&grant))).await {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(why))) => Err(Refused::WorkspacesFull(why)),
            Ok(Err(error)) => Err(Refused::Outbox(error.to_string())),
            Err(error) => Err(Refused::Outbox(error.to_string())),
        }
    }

    /// The run that was asked for before, whether or not a new one could begin.
    async fn known(&self, wanted: &Wanted, key: &str) -> Result<Option<Started>, Refused> {
        match self.0.journal.keyed(&wanted.grant, key).await? {
            Some(row) if row.digest != wanted.digest() => Err(Refused::Conflict(row.id)),
            row => Ok(row.map(|row| Started { run: row.id, is_known: true })),
        }
    }

    /// Takes a run that is in the journal to its end, in the background; without a place, when there is one.
    pub(super) fn conduct(&self, wanted: Wanted, feed: Feed, place: Option<Place>) {
        // Where runs are not waited for any more by now, this one is not, either.
        let (shared, cancel) = (Arc::clone(&self.0), self.0.leave.child_token());
        shared.live().insert(feed.run().to_owned(), cancel.clone());
        self.0.tasks.spawn(async move {
            let turn = match place {
                Some(place) => Turn::Begins(place),
                None => shared.turn(&cancel, &wanted.grant).await,
            };
            match turn {
                Turn::Begins(place) => {
                    Box::pin(shared.run_to_its_end(&wanted, &feed, cancel, place)).await;
                }
                Turn::Cancelled => {
                    let done = Err(Failed::Cancelled);
                    shared.end(&mut shared.bill(&feed), shared.ended(done, &feed)).await;
                }
                Turn::Refused(why) => {
                    shared.end(&mut shared.bill(&feed), shared.ended(Err(why), &feed)).await;
                }
                Turn::Left => shared.journal.part(&feed),
            }
            shared.live().remove(feed.run());
        });
    }
}

/// What becomes of a run that waits for a place.
enum Turn {
    Begins(Place),
    Cancelled,
    /// Its grant is worth nothing any more.
    Refused(Failed),
    /// The process ends before it: the next one begins it.
    Left,
}

impl Shared {
    async fn turn(&self, cancel: &CancellationToken, grant: &str) -> Turn {
        let places = Arc::clone(&self.places);
        let turn = tokio::select! {
            biased;
            // It cancels every run, but those that have not begun are the next one's.
            () = self.leave.cancelled() => Turn::Left,
            () = cancel.cancelled() => Turn::Cancelled,
            () = self.draining.cancelled() => Turn::Left,
            place = places.acquire_owned() => place.map_or(Turn::Left, Turn::Begins),
        };
        // Whoever accepted the run checked its grant; it may have been revoked while the run waited.
        match turn {
            Turn::Begins(place) => match self.grants.check_id(grant).await {
                Ok(()) => Turn::Begins(place),
                Err(grant::Error::Denied(denied)) => Turn::Refused(Failed::Grant(denied)),
                Err(error) => Turn::Refused(Failed::Internal(error.into())),
            },
            turn => turn,
        }
    }

    /// All that can be told without making anything. Returns the run's model and its own limit of money.
    fn check(&self, wanted: &Wanted, run: &str) -> Result<(String, Option<Nanodollars>), Refused> {
        let catalog = self.catalog.load();
        catalog.find(&wanted.agent)?;
        let invalid = |error: anyhow::Error| {
            let mut why = format!("{error:#}");
            self.mask(run, &mut why);
            Refused::Invalid(why)
        };
        let line = wanted.line(run).map_err(|error| Refused::Invalid(error.to_string()))?;
        if line.is_some() {
            let relay = self.relay.load();
            let missing = match &*relay {
                None => Some("this service has no relay, so no repositories"),
                Some(relay) if wanted.branch.pull_request && !relay.has_credential() => Some(
                    "`pull_request` needs a credential of the forge, and this service has none; leave it out, or ask \
                     the service's operator to set `GITHUB_TOKEN`",
                ),
                Some(_) => None,
            };
            if let Some(missing) = missing {
                return Err(Refused::Invalid(missing.to_owned()));
            }
        }
        let order = wanted.order(run, (&self.settings, &self.config.load(), &catalog));
        let order = order.map_err(invalid)?;
        order.check().map_err(invalid)?;
        let limit = order.config.budget.max_cost_usd;
        Ok((order.model().unwrap_or_default().to_owned(), limit))
    }
}
