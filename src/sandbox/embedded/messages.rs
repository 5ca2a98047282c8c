//! What the driver and its helper tell each other: one line of JSON each.

use std::path::PathBuf;

use libcontainer::oci_spec::runtime::Spec;
use serde::{Deserialize, Serialize};

/// The driver's first words.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct HelperTask {
    pub(super) name: String,
    pub(super) config: Spec,
    /// For what the container is made of. It is made for this, and goes with the run's own.
    pub(super) directory: PathBuf,
    /// None where there are no limits.
    pub(super) cgroup: Option<PathBuf>,
    pub(super) is_rootless: bool,
}

/// The driver's later ones.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum HelperSignal {
    Terminate,
    Kill,
}

/// What the helper says.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum HelperEvent {
    /// The program runs.
    Started,
    /// The program is not there, or is none: what a shell says with these exit codes.
    NotStarted {
        exit_code: i64,
        message: String,
    },
    Ended {
        exit_code: i64,
        oom_killed: bool,
    },
    /// There is no container.
    Failed {
        message: String,
    },
    /// It says nothing any more.
    Lost,
}

pub(super) fn encode_line(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("messages are texts and numbers");
    line.push(b'\n');
    line
}
