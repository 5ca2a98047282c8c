//! Parts any hyper service could use unchanged.
//!
//! **Invariant:** nothing here knows what a run is.

pub mod alarm;
pub mod b64;
pub mod bound;
pub mod cancel_watch;
pub mod canonical;
pub mod clock;
pub mod db;
pub mod disk;
pub mod drain;
pub mod gate;
pub mod header_lines;
pub mod hex;
pub mod json;
pub mod memory;
pub mod metrics;
pub mod network;
pub mod path_mask;
pub mod private_dir;
pub mod reach;
pub mod rope;
pub mod scratch;
pub mod secret;
pub mod serde_words;
pub mod socket;
pub mod time;
pub mod tls;
pub mod trace;
pub mod tree;
pub mod unix;
pub mod wall_clock;
