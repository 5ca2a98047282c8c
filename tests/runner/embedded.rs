//! R2, R3, R5: runs in sandboxes of our own, with neither a daemon nor an image. What they have in common with Docker's
//! is tested by the same files.

#[path = "docker_driver/branch_delivery.rs"]
mod branch_delivery;
#[path = "docker_driver/contract.rs"]
mod contract;
mod driver;
mod host_users;
#[path = "docker_driver/isolation.rs"]
mod isolation;
#[path = "docker_driver/orphans.rs"]
mod orphans;
mod rootfs;
mod rootless;
#[path = "docker_driver/run_end.rs"]
mod run_end;
mod socket_buffers;
mod spans;
mod sweep;
