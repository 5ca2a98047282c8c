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

use crate::audit;
use crate::base::db;

pub use books::{Books, SCHEMA};
pub use facts::Fact;
pub use ingest::Ingested;
pub use notice::{Notice, Source};
pub use receipt::{Flag, Receipt, RunBill, State};

/// Why the books cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Database(#[from] db::Error),
    #[error("the audit log `{}` cannot be read", path.display())]
    Log { path: PathBuf, source: audit::read::Error },
}
