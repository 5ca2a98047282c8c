//! The messages between the driver and its helper: one line of JSON each.

use std::path::PathBuf;

use libcontainer::oci_spec::runtime::Spec;
use serde::{Deserialize, Serialize};

/// The driver's first message: the container to make.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct HelperTask {
    pub(super) name: String,
    pub(super) config: Spec,
    /// The directory for the container's files. The helper makes the directory, which is removed with the run's own.
    pub(super) directory: PathBuf,
    /// The cgroup for the limits; `None` if the container has no limits.
    pub(super) cgroup: Option<PathBuf>,
    pub(super) is_rootless: bool,
}

/// A later message of the driver: a signal for the container.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum HelperSignal {
    Terminate,
    Kill,
}

/// A message of the helper.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum HelperEvent {
    /// The program runs.
    Started,
    /// The program does not exist or cannot be executed; the exit code is the one that a shell uses (127 or 126).
    NotStarted {
        exit_code: i64,
        message: String,
    },
    Ended {
        exit_code: i64,
        oom_killed: bool,
    },
    /// The container could not be made.
    Failed {
        message: String,
    },
    /// The connection has ended without a final event. The helper never sends this event.
    Lost,
}

pub(super) fn encode_line(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("messages are texts and numbers");
    line.push(b'\n');
    line
}
