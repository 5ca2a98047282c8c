//! What a run may still spend: turns, tokens, rate, concurrency and time.
//!
//! A call reserves before the first upstream byte and settles once, to what the provider reported.
//!
//! **Invariant:** spent plus reserved never exceeds a limit; only the difference between an estimate
//! and the truth can, and that difference is what [`Usage::source`] tells.

mod usage;

pub use usage::{Source, Spent, Tokens, Usage};
