//! Parts any hyper service could use unchanged.
//!
//! **Invariant:** nothing here knows what a run is.

pub mod secret;
