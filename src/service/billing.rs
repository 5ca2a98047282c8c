//! What runs cost, and that each call was charged once: facts from our own audit logs, receipts from who was paid.
//!
//! A [`CallUsage`] is one call as our own records have it, on whichever way it ended. A [`ChargeNotice`] is what somebody else says of
//! a call: LiteLLM's callback, LiteLLM's spend logs, or our price table where there is no LiteLLM to ask. Where both are
//! there the call has a [`ChargeReceipt`], and only one, whoever comes first and however often. Call ids are made by the gateway
//! for each request, so they join the two.
//!
//! What stands where: [`call_usage`] reads an audit log while it grows, [`ingest`] what LiteLLM calls back with, [`store`] keeps
//! both, [`reconcile`] asks LiteLLM for what is missing, [`reconcile_task`] does so again and again, and tells the metrics.
//!
//! **Invariant:** a call is charged at most once. A notice that contradicts an earlier one is kept beside it and flagged.
//!
//! **Invariant:** a call that cost something and has no receipt in time is flagged; it is never silently free.

pub mod call_usage;
pub mod ingest;
pub mod litellm;
pub mod notice;
pub mod receipt;
pub mod reconcile;
pub mod reconcile_task;
pub mod store;

use std::path::PathBuf;

use crate::base::db;
use crate::telemetry::audit;

pub use call_usage::CallUsage;
pub use ingest::IngestReport;
pub use notice::{ChargeNotice, ChargeSource};
pub use receipt::{BillFlag, BillState, ChargeReceipt, RunBill};
pub use store::{BillingStore, SCHEMA};

/// Why the books cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum BillingError {
    #[error(transparent)]
    Database(#[from] db::DatabaseError),
    #[error("the audit log `{}` cannot be read", path.display())]
    Log { path: PathBuf, source: audit::read::AuditReadError },
}
