//! R2, R3, R5: runs in sandboxes of our own, with neither a daemon nor an image. What they have in common with Docker's
//! is tested by the same files.

#[path = "runner/contract.rs"]
mod contract;
#[path = "runner/ending.rs"]
mod ending;
#[path = "runner/isolation.rs"]
mod isolation;
#[path = "runner/left.rs"]
mod left;
mod leftover;
#[path = "runner/repository.rs"]
mod repository;
mod root;
mod rootless;
mod sandboxed;
mod sockets;
mod traced;
mod users;
