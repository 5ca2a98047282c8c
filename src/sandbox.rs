//! One sandbox: its limits, its creation and its end.
//!
//! - [`spec`] describes a sandbox and translates the description for a driver, without touching the machine.
//! - [`host_path`] checks the paths of this machine that the description names.
//! - [`driver`] makes, watches and removes the sandbox, by [`docker`] or by [`embedded`]. The embedded driver needs
//!   neither a daemon nor an image.
//! - [`warm_slot`] starts a sandbox ahead, before its run is known. [`long_running`] executes one run after the other.
//! - [`output`] captures the output.
//! - [`owner_process`] identifies the process that owns a sandbox. [`leftovers`] lists the objects that this process
//!   could not remove.
//! - [`host_users`] reserves a user for each sandbox. [`probe`] reports what this machine can enforce.
//!
//! **Invariant:** a sandbox has no network, no capability and no way to get one, for every request: a
//! [`spec::SandboxSpec`] has no field for any of them.

pub mod container_mark;
pub mod docker;
pub mod driver;
pub mod embedded;
pub mod host_path;
pub mod host_users;
pub mod init_binary;
pub mod leftovers;
pub mod long_running;
pub mod output;
pub mod owner_process;
pub mod probe;
mod slot_claim;
pub mod spec;
pub mod warm_slot;

use std::path::PathBuf;
use std::time::Duration;

use crate::base::digest::sha256_hex;

pub use driver::{SandboxDriver, SandboxHandle};
pub use host_users::{UserLease, UserRange};
pub use init_binary::InitBinary;
pub use long_running::LongRunningSandbox;
pub use owner_process::OwnerProcess;
use spec::OwnerLabels;
pub use spec::SandboxSpec;
pub use warm_slot::WarmSlot;

/// A request for one sandbox: its specification, its owner and its directory.
#[derive(Clone, Debug)]
pub struct SandboxRequest {
    pub spec: SandboxSpec,
    pub labels: OwnerLabels,
    /// The run's own directory on this machine.
    pub directory: PathBuf,
}

/// The reason to end a sandbox before its program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The sandbox has used its whole run time.
    Deadline,
    /// The run's budget is spent.
    BudgetExhausted,
    /// The caller cancelled the run, or the run's gateway stopped.
    Cancelled,
    /// The workspace exceeds its size limit.
    WorkspaceFull,
}

/// The end of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxExit {
    /// The exit code of the program; `None` if no exit code could be read.
    pub exit_code: Option<i64>,
    /// The reason for the early end; `None` if the sandbox ended by itself.
    pub cause: Option<StopReason>,
    /// True if the kernel killed a process of the sandbox because its memory was used up.
    pub oom_killed: bool,
    /// The engine's message about a program that could not be started.
    pub not_started: Option<String>,
    /// The time from the call of [`SandboxHandle::run`] or [`LongRunningSandbox::run`] to the program's start; `None` if
    /// the program did not start.
    pub start: Option<Duration>,
}

/// The outcome of a start.
enum SandboxStartOutcome {
    Running,
    /// The program does not exist or cannot be executed; the exit code is the one that a shell uses (127 or 126).
    NotStarted {
        exit_code: i64,
        message: String,
    },
}

/// The error of a sandbox that could not be made, or that ended too early.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error("{what} is `{value}`; {rule}")]
    InvalidSpec { what: &'static str, value: String, rule: &'static str },
    #[error("`{}` cannot be given to a sandbox: {why}", path.display())]
    HostPath { path: PathBuf, why: String },
    #[error("image `{0}` is not on this machine; build or load it first, nothing is pulled")]
    NoImage(String),
    #[error(
        "image `{image}` has a `VOLUME` at `{target}`, which would be a writable disk of this machine; {instead}build the image without the volume"
    )]
    ImageVolume { image: String, target: String, instead: &'static str },
    #[error(
        "{engine} gives sandboxes the machine's cgroup namespace, as it always does without cgroup v2; boot this machine with \
         cgroup v2, use Docker Engine, or leave the image out for the driver `embedded`"
    )]
    SharedCgroupNamespace { engine: &'static str },
    #[error("there is no volume `{0}`; make it first, the gateway makes none for a run")]
    NoVolume(String),
    #[error(
        "volume `{name}` cannot be given to a sandbox: it shows {what} instead of a directory of the engine; give a directory as a mount"
    )]
    UnsupportedVolume { name: String, what: String },
    #[error(
        "run `{0}` has a sandbox already; wait for it, or use `cogni-gateway sweep` after a crash"
    )]
    AlreadyExists(String),
    #[error(
        "the run's directory cannot be marked for its container: {0}; look at the space and the mode of the run directory"
    )]
    MarkFailed(std::io::Error),
    #[error("the sandbox cannot be made: {0}")]
    EmbeddedFailed(String),
    #[error(
        "no limits on memory, processes and processors can be set here: {0}; allow it to do without them with `--allow-unlimited`"
    )]
    LimitsUnavailable(String),
    #[error("the gateway's container has ended: {0}")]
    GatewayContainerEnded(String),
    /// `why` continues a sentence about the output.
    #[error("{engine} has lost a part of the sandbox's output: {why}; start the run again")]
    OutputLost { engine: &'static str, why: String },
    #[error("the slot has failed: {0}")]
    SlotFailed(String),
    #[error("the long-running sandbox is lost: {0}")]
    LongRunningLost(String),
    #[error(
        "container engine at `{}` does not answer: {why}; start it, name its socket with `--docker-socket`, or leave \
         the image out for the driver `embedded`, which needs no engine",
        socket.display()
    )]
    NoEngine { socket: PathBuf, why: String },
    /// `engine` is the engine's own name, as far as it is known.
    #[error("{engine} cannot {doing}")]
    Engine { engine: &'static str, doing: &'static str, source: bollard::errors::Error },
    #[error(
        "{engine} did not answer a request to {doing}; `cogni-gateway sweep` removes what remains"
    )]
    EngineTimeout { engine: &'static str, doing: &'static str },
}

/// The name of an engine whose own name is not known yet.
pub const ANY_ENGINE: &str = "the container engine";

/// Returns the name for the objects of a run, in the characters that engines and sockets allow.
///
/// A run always has the same name, so it cannot have two sandboxes of its own, nor two slots of the embedded driver,
/// at the same time. A run in an engine's slot or in a long-running sandbox does not use this name in any driver.
/// There the run's directory, which no process makes twice, excludes a second sandbox.
pub fn sandbox_name(run: &str) -> String {
    format!("cogni-{}", &sha256_hex(run.as_bytes())[..NAME_DIGITS])
}

/// Returns the name of the container that serves a run's gateway.
pub fn gateway_container_name(run: &str) -> String {
    format!("{}-proxy", sandbox_name(run))
}

/// The hexadecimal digits of a name: 64 bits, so that no two runs of a machine share a name by accident.
const NAME_DIGITS: usize = 16;
