//! The cost of runs, and the proof that each call was charged once: usage from our own audit logs, receipts from the
//! charging side.
//!
//! A [`CallUsage`] is one call as our own audit log has it, whichever way the call ended. A [`ChargeNotice`] is a
//! report of a call's price from LiteLLM's callback, from LiteLLM's spend logs, or from our price table if there is no
//! LiteLLM. If a call has both, the call gets one [`ChargeReceipt`], whichever arrives first and however often. The
//! gateway generates a call id for each request, and the call id joins usage and notice.
//!
//! The modules: [`call_usage`] reads an audit log while the log grows. [`ingest`] reads the bodies of LiteLLM's
//! callback. [`store`] keeps both sides in the database. [`reconcile`] asks LiteLLM for missing receipts, and
//! [`reconcile_task`] does so periodically and updates the metrics.
//!
//! **Invariant:** a call is charged at most once. A notice that contradicts an earlier notice is stored beside it and
//! flagged.
//!
//! **Invariant:** a call that cost money and has no receipt in time is flagged; the call is never silently free.

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

/// An error of reading or writing the billing store.
#[derive(Debug, thiserror::Error)]
pub enum BillingError {
    #[error(transparent)]
    Database(#[from] db::DatabaseError),
    #[error("the audit log `{}` cannot be read", path.display())]
    Log { path: PathBuf, source: audit::read::AuditReadError },
}
