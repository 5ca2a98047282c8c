//! What runs cost, and that each call was charged once: facts from our own audit logs, receipts from who was paid.
//!
//! A [`Fact`] is one call as our own records have it, on whichever way it ended. A [`Notice`] is what somebody else says of
//! a call: LiteLLM's callback, LiteLLM's spend logs, or our price table where there is no LiteLLM to ask. Where both are
//! there the call has a [`Receipt`], and only one, whoever comes first and however often. Call ids are made by the gateway
//! for each request, so they join the two.
//!
//! What stands where: [`facts`] reads an audit log while it grows, [`ingest`] what LiteLLM calls back with, [`books`] keeps
//! both, [`reconcile`] asks LiteLLM for what is missing, [`watch`] does so again and again, and tells the metrics.
//!
//! **Invariant:** a call is charged at most once. A notice that contradicts an earlier one is kept beside it and flagged.
//!
//! **Invariant:** a call that cost something and has no receipt in time is flagged; it is never silently free.

pub mod books;
pub mod facts;
pub mod ingest;
pub mod litellm;
pub mod notice;
pub mod receipt;
pub mod reconcile;
pub mod watch;

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use crate::audit;
use crate::base::db;
use crate::base::secret::Secret;

pub use books::{Books, SCHEMA};
pub use facts::Fact;
pub use ingest::Ingested;
pub use notice::{Notice, Source};
pub use receipt::{Flag, Receipt, RunBill, State};

/// How a service keeps its books.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// How long after its end a call may be without a receipt; then its run is flagged.
    #[serde(with = "humantime_serde")]
    pub receipt_bound: Duration,
    /// How often LiteLLM is asked about calls without a receipt.
    #[serde(with = "humantime_serde")]
    pub reconcile_every: Duration,
    /// What LiteLLM's callback must show; without one, none is listened to. It comes from the environment or a file.
    #[serde(skip)]
    pub callback_secret: Secret,
}

/// Why the books cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Database(#[from] db::Error),
    #[error("the audit log `{}` cannot be read", path.display())]
    Log { path: PathBuf, source: audit::read::Error },
}

impl Default for Config {
    fn default() -> Self {
        Self {
            receipt_bound: books::BOUND,
            reconcile_every: Duration::from_mins(5),
            callback_secret: Secret::default(),
        }
    }
}
