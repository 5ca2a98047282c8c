//! The specification of a sandbox. It has no fields for what every sandbox is denied: [`docker::container_body`] and
//! [`oci::build_oci_spec`] deny that to each sandbox, in the format of their driver. The [`layout`] inside is the same
//! for both.

pub mod docker;
mod layout;
mod limit_overrides;
pub mod oci;
pub mod seccomp;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::Deserialize;

use super::{OwnerProcess, SandboxError};

pub use limit_overrides::{ByteSize, LimitOverrides};

/// The specification of one sandbox, as the host describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxSpec {
    /// The run's id, made by the host.
    pub run: String,
    pub root: RootSource,
    /// The program and its arguments, executed without a shell. A warm slot has none until its
    /// [`claim`](SandboxSpec::encode_claim).
    pub argv: Vec<String>,
    /// The user inside; if root makes the sandbox, also its user on this machine. The group has the same number.
    pub uid: u32,
    /// The variables of this sandbox, which override the variables that every agent gets.
    pub env: BTreeMap<String, String>,
    pub limits: SandboxLimits,
    /// The time between SIGTERM and SIGKILL. The first process itself kills the agent only after this time.
    pub grace: Duration,
    pub workspace: WorkspaceMount,
    pub mounts: Vec<BindMount>,
    pub volumes: Vec<VolumeMount>,
    /// The directory of the run's socket on this machine, with [`HOSTS_FILE`] in it.
    pub socket_dir: PathBuf,
    /// The path of `cogni-init` on this machine, the sandbox's first process. Without it, the engine's own init is the
    /// first process, and the image has to bring the bridge to the run's socket.
    pub init: Option<PathBuf>,
    /// True if the run has tunnels, whose certificate the first process asks the gateway for.
    pub has_tunnels: bool,
    pub task: SandboxTask,
}

/// The programs that a sandbox is started for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxTask {
    /// One program, which finds the run's gateway.
    Agent,
    /// One program, which has no gateway.
    Program,
    /// One program, which has no gateway, and whose standard input and output are the socket [`STDIO_SOCKET`]. Only
    /// `cogni-init` can connect it.
    Server,
    /// Several commands, one after the other, without a gateway. The arguments are an [encoded
    /// list](crate::guest::init::command_list::encode_commands), and the standard output is
    /// [frames](crate::guest::init::command_frames). Only `cogni-init` can run a list.
    Commands,
}

/// The source of a sandbox's programs. A sandbox never writes to its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RootSource {
    /// An image of the engine, by its id `sha256:…`, because a name may refer to another image a moment later.
    Image(String),
    /// An unpacked root directory of this machine.
    Directory(PathBuf),
    /// The programs of this machine, and the few files in `/etc` that the programs need.
    Host,
}

impl fmt::Display for RootSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(image) => f.write_str(image),
            Self::Directory(path) => path.display().fmt(f),
            Self::Host => f.write_str("this machine's programs"),
        }
    }
}

/// The owner of a sandbox, and the sandbox's deadline.
#[derive(Clone, Debug)]
pub struct OwnerLabels {
    pub owner: OwnerProcess,
    /// The run directory of the installation: one engine may serve several installations.
    pub run_dir: PathBuf,
    pub deadline: SystemTime,
}

/// The limits of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SandboxLimits {
    /// The maximum time from the beginning of the run until the sandbox is ordered to stop.
    pub max_runtime: Duration,
    /// The maximum memory in bytes, tmpfs included; there is no swap in addition.
    pub max_memory: u64,
    /// The maximum number of processes and threads.
    pub pids: u32,
    pub cpus: f64,
    /// The maximum number of stored bytes of each of stdout and stderr.
    pub max_output_bytes: usize,
    /// The maximum bytes of a workspace directory that was made for runs. The runner enforces this limit; no driver
    /// does.
    pub max_workspace: u64,
}

/// The mount at `/workspace`, the agent's home.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WorkspaceMount {
    /// An empty directory in memory, removed with the sandbox.
    #[default]
    None,
    /// An empty directory of this machine, made by the runner and removed with the run. The host may put files into the
    /// directory before the start, and read files while the sandbox runs.
    Fresh,
    /// An existing directory of this machine.
    Directory { path: PathBuf, access: MountAccess },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum MountAccess {
    #[default]
    #[serde(rename = "ro")]
    ReadOnly,
    #[serde(rename = "rw")]
    ReadWrite,
}

/// A directory or file of this machine, mounted into the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BindMount {
    pub source: PathBuf,
    pub target: PathBuf,
    #[serde(default)]
    pub access: MountAccess,
}

/// A volume of the engine, mounted into the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeMount {
    pub name: String,
    pub target: PathBuf,
    #[serde(default)]
    pub access: MountAccess,
}

impl SandboxSpec {
    /// Checks everything that needs no look at the machine; [`super::host_path`] checks the paths.
    ///
    /// # Errors
    /// Returns [`SandboxError::InvalidSpec`] with the first invalid value and its rule.
    pub fn check(&self) -> Result<(), SandboxError> {
        let wrong = |subject, value: String, rule| {
            Err(SandboxError::InvalidSpec { what: subject, value, rule })
        };
        if self.argv.first().is_none_or(String::is_empty) {
            return wrong(
                "argv",
                format!("{:?}", self.argv),
                "give a program and its arguments after `--`",
            );
        }
        if matches!(self.task, SandboxTask::Commands | SandboxTask::Server) && self.init.is_none() {
            let rule = "several commands, and servers of tools, need cogni-init";
            return wrong("the first process", "none".to_owned(), rule);
        }
        if matches!(&self.root, RootSource::Image(image) if image.is_empty()) {
            return wrong("the image", String::new(), "give its name or id");
        }
        // The kernel takes arguments and variables as zero-terminated texts, and the claim of a slot separates them so.
        if let Some(text) = self.argument_texts().find(|text| text.contains('\0')) {
            return wrong(
                "an argument or variable",
                text.escape_debug().to_string(),
                "it must not hold a zero byte",
            );
        }
        // In a variable, the first `=` separates the name from the value.
        if let Some(name) = self.env.keys().find(|name| name.is_empty() || name.contains('=')) {
            return wrong("a variable", name.clone(), "give it as NAME=VALUE");
        }
        let volumes = self.volumes.iter();
        // A path is not a volume's name: paths of the machine are mounts, which have checks of their own.
        if let Some(volume) = volumes.clone().find(|volume| !is_volume_name(&volume.name)) {
            return wrong("a volume", volume.name.clone(), "give its name; a path is a mount");
        }
        let targets = self.mounts.iter().map(|mount| &mount.target);
        let mut targets = targets.chain(volumes.map(|volume| &volume.target));
        if let Some(target) = targets.find(|target| !is_allowed_target(target)) {
            return wrong("a target", target.display().to_string(), TARGET_RULE);
        }
        if self.grace > MAX_GRACE {
            let days = format!("{} days", self.grace.as_secs() / 86_400);
            return wrong("grace", days, "give at most a day");
        }
        self.limits.check()
    }

    /// Returns the workspace's path on this machine; `None` if the sandbox has no existing directory as its workspace.
    pub fn workspace_path(&self) -> Option<&Path> {
        match &self.workspace {
            WorkspaceMount::None | WorkspaceMount::Fresh => None,
            WorkspaceMount::Directory { path, .. } => Some(path),
        }
    }

    fn argument_texts(&self) -> impl Iterator<Item = &String> {
        self.argv.iter().chain(self.env.iter().flat_map(<[&String; 2]>::from))
    }
}

impl SandboxLimits {
    /// Checks that an engine can apply the limits.
    ///
    /// # Errors
    /// Returns [`SandboxError::InvalidSpec`] with the first invalid value and its rule.
    pub fn check(&self) -> Result<(), SandboxError> {
        let wrong = |subject, value: String, rule| {
            Err(SandboxError::InvalidSpec { what: subject, value, rule })
        };
        if self.max_memory < MIN_MEMORY_BYTES {
            return wrong("max_memory", self.max_memory.to_string(), "give at least 6m");
        }
        // One of them is the process that makes the first process.
        if self.pids < 2 {
            return wrong("pids", self.pids.to_string(), "give at least 2");
        }
        // The range also excludes NaN, and keeps the conversion to the engines' integers within their bounds.
        if !(0.01..=1024.0).contains(&self.cpus) {
            return wrong("cpus", self.cpus.to_string(), "give a number from 0.01 to 1024");
        }
        // A run time of zero would end every run before its start.
        if self.max_runtime.is_zero() {
            return wrong("max_runtime", "0s".to_owned(), "give a time, such as 10m");
        }
        if self.max_runtime > MAX_RUNTIME {
            let days = format!("{} days", self.max_runtime.as_secs() / 86_400);
            return wrong("max_runtime", days, "give at most a year");
        }
        Ok(())
    }
}

impl Default for SandboxLimits {
    fn default() -> Self {
        Self {
            max_runtime: Duration::from_mins(10),
            max_memory: 512 << 20,
            // This is enough for Node or a JVM, and bounds a fork bomb.
            pids: 256,
            cpus: 1.0,
            max_output_bytes: 1 << 20,
            // The same value as the largest file in `ULIMITS`.
            max_workspace: 4 << 30,
        }
    }
}

/// The longest run time that a client may request: our choice. The arithmetic with clocks stays far from its limits.
const MAX_RUNTIME: Duration = Duration::from_hours(365 * 24);

/// The longest grace: our choice. A run time of a year and this grace are still below the longest wait of `cogni-init`.
const MAX_GRACE: Duration = Duration::from_hours(24);

fn is_volume_name(name: &str) -> bool {
    let rest = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    name.len() >= 2 && name.as_bytes()[0].is_ascii_alphanumeric() && name.bytes().all(rest)
}

/// Returns true if a mount at this path would hide none of the gateway's own mounts and none of the kernel's.
pub(super) fn is_allowed_target(target: &Path) -> bool {
    // A part such as `..` could lead to a reserved path, so only plain names are allowed.
    let is_plain =
        target.components().skip(1).all(|part| matches!(part, std::path::Component::Normal(_)));
    // Both directions count: a mount above a reserved path hides the reserved path too.
    let meets = |own: &&str| target.starts_with(own) || Path::new(own).starts_with(target);
    target.is_absolute() && is_plain && !RESERVED_TARGETS.iter().any(meets)
}

/// The usual user of images, and its group, for sandboxes without a [user of their own](super::host_users).
pub const SANDBOX_UID: u32 = 1001;

/// The profile of allowed system calls, in Docker's format.
pub const SECCOMP_PROFILE: &str = include_str!("../../config/seccomp.json");

/// The directory of the run's socket in a sandbox. A directory below `/run` would be hidden by the tmpfs there.
pub const SOCKET_DIR_TARGET: &str = "/llm-sock";

/// The name of the socket that is a program's standard input and output, in the socket's directory.
pub const STDIO_SOCKET: &str = "stdio";

/// The name of a warm slot's claim socket, beside the run's socket. The socket is removed before any program is
/// started.
pub const CLAIM_SOCKET: &str = "slot";

/// The file beside the socket that becomes the sandbox's `/etc/hosts`. Without such a file, only clients that resolve
/// `localhost` by themselves find the gateway: curl does, but Node and all clients that ask libc do not.
pub const HOSTS_FILE: &str = "hosts";

/// The text of [`HOSTS_FILE`]. It names the IPv4 address only, because the bridge listens there only.
pub const HOSTS_TEXT: &str = "127.0.0.1 localhost sandbox\n";

/// The path of the workspace in a sandbox, the agent's home.
pub const WORKSPACE_TARGET: &str = "/workspace";

/// The paths with mounts of the gateway or of the kernel.
const RESERVED_TARGETS: &[&str] =
    &["/cogni-init", "/dev", "/etc", "/llm-sock", "/proc", "/run", "/sys", "/tmp", "/workspace"];

const TARGET_RULE: &str = "give an absolute path that is not at, above or below `/workspace`, `/llm-sock`, `/tmp`, `/run`, `/etc` or what is the kernel's";

/// The minimum of memory in bytes: Docker Engine's own.
const MIN_MEMORY_BYTES: u64 = 6 << 20;
