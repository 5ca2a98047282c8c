//! R2, R3, R5: Tests of runs in sandboxes of the embedded driver, without a daemon and without an image. The files
//! shared with [`crate::docker_driver`] test what both drivers promise.

#[path = "docker_driver/branch_delivery.rs"]
mod branch_delivery;
mod command_runner;
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
