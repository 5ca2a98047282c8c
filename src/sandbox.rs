//! One sandbox: what it is allowed, how it is made, and how it ends.
//!
//! [`spec`] says what is asked for and turns it into the engine's words, without touching anything; [`host_path`]
//! looks at the paths of this machine that it names; [`driver`] says who makes, watches and removes it: [`docker`],
//! or [`embedded`], which needs neither a daemon nor an image; a [`warm_slot`] is made before it is known what for, and a
//! [`long_running`] for one run after the other; [`output`] keeps what the sandbox prints; [`owner_process`] says which process of
//! this machine answers for it, and [`leftovers`] what this one has given up; [`host_users`] has a user for each; [`probe`] says what this machine can enforce.
//!
//! **Invariant:** a sandbox has no network, no capability and no way to get one, whatever was asked for: none of
//! that can be said in a [`spec::SandboxSpec`].

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
pub mod spec;
pub mod warm_slot;

use std::path::PathBuf;
use std::time::Duration;

use crate::base::hex;

pub use driver::{SandboxDriver, SandboxHandle, SandboxRequest};
pub use host_users::{UserLease, UserRange};
pub use init_binary::InitBinary;
pub use long_running::LongRunningSandbox;
pub use owner_process::OwnerProcess;
pub use spec::SandboxSpec;
pub use warm_slot::WarmSlot;

/// Why a sandbox was ended before it ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// It has run for as long as it may.
    Deadline,
    /// The run's budget is spent.
    Budget,
    /// Somebody asked for it.
    Cancelled,
    /// Its workspace holds more than it may.
    Workspace,
}

/// How a sandbox ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxExit {
    /// The exit code of its program; `None` where nobody could see it.
    pub exit_code: Option<i64>,
    /// Why it was ended; `None` where it ended by itself.
    pub cause: Option<StopReason>,
    /// The kernel killed one of its processes for want of memory.
    pub oom_killed: bool,
    /// What the engine says about a program that it could not start.
    pub not_started: Option<String>,
    /// From the deadline's arming to the program's start; `None` where it did not start.
    pub start: Option<Duration>,
}

/// Why there is no sandbox, or not for as long as there should be.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error("{what} is `{given}`; {rule}")]
    Spec { what: &'static str, given: String, rule: &'static str },
    #[error("`{}` cannot be given to a sandbox: {why}", path.display())]
    HostPath { path: PathBuf, why: String },
    #[error("image `{0}` is not on this machine; build or load it first, nothing is pulled")]
    NoImage(String),
    #[error(
        "image `{image}` has a `VOLUME` at `{place}`, which would be a disk of this machine's; {instead}build the image without"
    )]
    ImageVolume { image: String, place: String, instead: &'static str },
    #[error("there is no volume `{0}`; make it first, none is made for a run")]
    NoVolume(String),
    #[error(
        "volume `{name}` cannot be given to a sandbox: it shows {what}, and not a directory of the engine's own; give a directory as a mount"
    )]
    Volume { name: String, what: String },
    #[error(
        "run `{0}` has a sandbox already; wait for it, or use `cogni-gateway sweep` after a crash"
    )]
    Taken(String),
    #[error("the sandbox cannot be made: {0}")]
    Embedded(String),
    #[error(
        "no limits on memory, processes and processors can be set here: {0}; allow it to do without them with `--allow-unlimited`"
    )]
    Unlimited(String),
    #[error("the gateway's container has ended: {0}")]
    Proxy(String),
    #[error("the slot has failed: {0}")]
    Slot(String),
    #[error("the resident sandbox is lost: {0}")]
    Resident(String),
    #[error(
        "container engine at `{}` does not answer: {why}; start it, name its socket with `--docker-socket`, or leave \
         the image out for the driver `embedded`, which needs no engine",
        socket.display()
    )]
    NoEngine { socket: PathBuf, why: String },
    #[error("Docker Engine cannot {doing}")]
    Engine { doing: &'static str, source: bollard::errors::Error },
    #[error(
        "Docker Engine says nothing when it is to {0}; what it has made is left to `cogni-gateway sweep`"
    )]
    Silent(&'static str),
}

/// A name for what belongs to a run, in the characters that engines and sockets allow. The same run always has the
/// same one, so that it cannot have two sandboxes of its own at a time, nor two slots of our own driver's. No driver has
/// that name of a run in an engine's slot, or in a resident: there the run's directory, which no process makes twice, has.
pub fn sandbox_name(run: &str) -> String {
    format!("cogni-{}", &hex::sha256_hex(run.as_bytes())[..NAME_DIGITS])
}

/// A name for the container that serves a run's gateway.
pub fn gateway_container_name(run: &str) -> String {
    format!("{}-proxy", sandbox_name(run))
}

/// 64 bits: no two of a machine's runs meet by accident.
const NAME_DIGITS: usize = 16;
