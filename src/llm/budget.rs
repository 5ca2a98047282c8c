//! The limits of a run (turns, tokens, money, rate, concurrency and time) and the usage that counts
//! against them.
//!
//! A call reserves budget before the first upstream byte. The call settles once, to the usage that
//! the provider reported.
//!
//! **Invariant:** spent plus reserved never exceeds a limit when a reservation is granted. Only the
//! difference between an estimate and the real usage can exceed a limit, and [`TokenUsage::source`]
//! states which of the two was counted.

mod budget_error;
mod cost;
mod ledger;
mod limits;
mod operator_limits;
pub mod price;
mod rate;
mod spending_limits;
mod usage;

pub use budget_error::BudgetError;
pub use cost::Nanodollars;
pub use ledger::{
    BudgetAnswer, BudgetAsker, BudgetLedger, BudgetRemainder, BudgetReservation, BudgetStatus,
    ByteDirection, CallKind, ConnectionBudgetError, ConnectionLimits, ConnectionReservation,
    ConnectionReserveRequest, ConnectionSpending, MAX_CALL_TOKENS, OpenCallPermit, PriorUsage,
    ReserveRequest, ToolBudgetError, ToolBudgetLimits, ToolReservation, ToolReserveRequest,
    ToolSpending,
};
pub use limits::BudgetLimits;
pub use price::{ModelPrice, PriceTable};
pub use rate::{FREE_CALLS_PER_MINUTE, RecentUsage};
pub use spending_limits::{RaiseError, SpendingLimit, SpendingLimits};
pub use usage::{BudgetAmount, TokenUsage, Tokens, UsageSource};
