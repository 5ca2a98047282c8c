//! Parts any hyper service could use unchanged.
//!
//! **Invariant:** nothing here knows what a run is.

pub mod drain;
pub mod hex;
pub mod metrics;
pub mod secret;
pub mod unix;
