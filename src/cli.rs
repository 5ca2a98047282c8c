//! What the command line offers, one file per command.

pub mod audit;
