//! General parts that any hyper service could use without a change.
//!
//! **Invariant:** no module below knows what a run is.

pub mod alarm;
pub mod bounded_counter;
pub mod cancel_watch;
pub mod canonical;
pub mod condition;
pub mod db;
pub mod digest;
pub mod dir_tree;
pub mod disk;
pub mod file_digest;
pub mod header_lines;
pub mod hidden_characters;
pub mod host_lookups;
pub mod host_reach;
pub mod interim_limit;
pub mod json;
pub mod key_bytes;
pub mod keyed_permits;
pub mod local_endpoint;
pub mod log_line_limiter;
pub mod memory;
pub mod metrics;
pub mod outbound;
pub mod path_mask;
pub mod private_dir;
pub mod regular_file;
pub mod response_gate;
pub mod rope;
pub mod sanitize;
pub mod scratch;
pub mod secret;
pub mod secret_redactor;
pub mod serde_words;
pub mod shell;
pub mod socket;
pub mod streamed_endpoint;
pub mod task_group;
pub mod time;
pub mod timestamp;
pub mod tls;
pub mod trace_context;
pub mod unix;
pub mod url_component;
pub mod wall_clock;
