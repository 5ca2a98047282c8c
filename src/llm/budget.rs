//! What a run may still spend: turns, tokens, money, rate, concurrency and time.
//!
//! A call reserves before the first upstream byte and settles once, to what the provider reported.
//!
//! **Invariant:** spent plus reserved never exceeds a limit when a reservation is granted; only the
//! difference between an estimate and the truth can, and [`TokenUsage::source`] tells which it was.

mod cost;
mod ledger;
mod limits;
mod operator_limits;
pub mod price;
mod rate;
mod usage;

pub use cost::Nanodollars;
pub use ledger::{
    BudgetError, BudgetLedger, BudgetReservation, BudgetStatus, CallKind, FREE_CALLS_PER_MINUTE,
    OpenCallPermit, PriorUsage, ReserveRequest,
};
pub use limits::BudgetLimits;
pub use price::{ModelPrice, PriceTable};
pub use usage::{BudgetAmount, TokenUsage, Tokens, UsageSource};
