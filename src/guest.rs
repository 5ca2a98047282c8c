//! The programs that run inside a sandbox.
//!
//! [`init`] is the first process of every sandbox, [`agent`] is a small agent, and [`tool`] calls the run's tools. All are
//! compiled into one static file, `cogni-init`, so they import no other module of this crate and no async runtime.

pub mod agent;
pub mod init;
pub mod tool;
