//! What is asked of a sandbox. What it is denied is not asked for: [`docker::container_body`] and [`oci::build_oci_spec`] deny it
//! to every one, each in the words of its driver; what is [`layout`] stands here once.

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

/// One sandbox, as its host describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxSpec {
    /// Made by the host.
    pub run: String,
    pub root: RootSource,
    /// Executed as it stands, without a shell. A slot has none, and is told in its [`claim`](SandboxSpec::encode_claim).
    pub argv: Vec<String>,
    /// The user inside, and on this machine where root makes the sandbox. Its group has the same number.
    pub uid: u32,
    /// Wins over what every agent is given.
    pub env: BTreeMap<String, String>,
    pub limits: SandboxLimits,
    /// Between SIGTERM and SIGKILL, for its first process, which ends the agent only when that time is over, too.
    pub grace: Duration,
    pub workspace: WorkspaceMount,
    pub mounts: Vec<BindMount>,
    pub volumes: Vec<VolumeMount>,
    /// The directory of the run's socket on this machine, with [`HOSTS_FILE`] beside it.
    pub socket_dir: PathBuf,
    /// `cogni-init` on this machine, which becomes the sandbox's first process. Without it the engine's own does,
    /// and there is no bridge to the run's socket but what the image brings.
    pub init: Option<PathBuf>,
    /// Whether a gateway serves the run's socket. Without one, `cogni-init` makes no bridge, and starts the program at once.
    pub has_gateway: bool,
}

/// Where the programs of a sandbox come from. Whatever it is, nothing is ever written to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RootSource {
    /// An image of the engine, by its id, `sha256:…`: a name may mean another image a moment later.
    Image(String),
    /// An unpacked root of this machine.
    Directory(PathBuf),
    /// The programs of this machine, and the few files in `/etc` that they need.
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

/// Who answers for a sandbox, and until when it is good.
#[derive(Clone, Debug)]
pub struct OwnerLabels {
    pub owner: OwnerProcess,
    /// Where the runs of its installation have their directories: one engine may serve many.
    pub run_dir: PathBuf,
    pub deadline: SystemTime,
}

/// What a sandbox may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SandboxLimits {
    /// From the first word to the engine until it is told to end.
    pub max_runtime: Duration,
    /// Bytes, tmpfs included; there is no swap beside it.
    pub max_memory: u64,
    /// Processes and threads.
    pub pids: u32,
    pub cpus: f64,
    /// What is kept of each of stdout and stderr, in bytes.
    pub max_output_bytes: usize,
    /// Bytes of a workspace that is a directory made for its runs. Whoever runs it looks after that: no driver does.
    pub max_workspace: u64,
}

/// What stands at `/workspace`, the agent's home.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WorkspaceMount {
    /// An empty directory in memory, gone with the sandbox.
    #[default]
    None,
    /// An empty directory of this machine, made by the runner, and gone with the run: its host may put something in
    /// before the start, and take something out of it meanwhile.
    Fresh,
    /// A directory of this machine.
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

/// A directory or file of this machine, shown in the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BindMount {
    pub source: PathBuf,
    pub target: PathBuf,
    #[serde(default)]
    pub access: MountAccess,
}

/// A volume of the engine, shown in the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeMount {
    pub name: String,
    pub target: PathBuf,
    #[serde(default)]
    pub access: MountAccess,
}

impl SandboxSpec {
    /// Checks what can be told from the words alone; [`super::host_path`] looks at the machine.
    ///
    /// # Errors
    /// What is wrong, and what is allowed.
    pub fn check(&self) -> Result<(), SandboxError> {
        let wrong = |what, given: String, rule| Err(SandboxError::Spec { what, given, rule });
        if self.argv.first().is_none_or(String::is_empty) {
            return wrong(
                "argv",
                format!("{:?}", self.argv),
                "give a program and its arguments after `--`",
            );
        }
        if matches!(&self.root, RootSource::Image(image) if image.is_empty()) {
            return wrong("the image", String::new(), "give its name or id");
        }
        if let Some(text) = self.argument_texts().find(|text| text.contains('\0')) {
            return wrong(
                "an argument or variable",
                text.escape_debug().to_string(),
                "it must not hold a zero byte",
            );
        }
        if let Some(name) = self.env.keys().find(|name| name.is_empty() || name.contains('=')) {
            return wrong("a variable", name.clone(), "give it as NAME=VALUE");
        }
        let volumes = self.volumes.iter();
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

    /// Its workspace on this machine, where it has one.
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
    fn check(&self) -> Result<(), SandboxError> {
        let wrong = |what, given: String, rule| Err(SandboxError::Spec { what, given, rule });
        if self.max_memory < MIN_MEMORY_BYTES {
            return wrong("max_memory", self.max_memory.to_string(), "give at least 6m");
        }
        // One is the process that makes the first.
        if self.pids < 2 {
            return wrong("pids", self.pids.to_string(), "give at least 2");
        }
        if !(0.01..=1024.0).contains(&self.cpus) {
            return wrong("cpus", self.cpus.to_string(), "give a number from 0.01 to 1024");
        }
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
            // Enough for Node or a JVM; a fork bomb ends there.
            pids: 256,
            cpus: 1.0,
            max_output_bytes: 1 << 20,
            // As the largest file.
            max_workspace: 4 << 30,
        }
    }
}

/// Above it nobody means it, and arithmetic with clocks stays far from its ends.
const MAX_RUNTIME: Duration = Duration::from_hours(365 * 24);

/// With a year it is still less than `cogni-init` waits for.
const MAX_GRACE: Duration = Duration::from_hours(24);

fn is_volume_name(name: &str) -> bool {
    let rest = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    name.len() >= 2 && name.as_bytes()[0].is_ascii_alphanumeric() && name.bytes().all(rest)
}

/// Whether nothing of ours or of the kernel's would be hidden by it.
pub(super) fn is_allowed_target(target: &Path) -> bool {
    let is_plain =
        target.components().skip(1).all(|part| matches!(part, std::path::Component::Normal(_)));
    let meets = |own: &&str| target.starts_with(own) || Path::new(own).starts_with(target);
    target.is_absolute() && is_plain && !RESERVED_TARGETS.iter().any(meets)
}

/// The user that images know, and its group: for sandboxes that have no [user of their own](super::host_users).
pub const SANDBOX_UID: u32 = 1001;

/// What an agent may call the kernel for, as Docker writes it.
pub const SECCOMP_PROFILE: &str = include_str!("../../config/seccomp.json");

/// Where the run's socket is found in a sandbox. Not below `/run`: a tmpfs would hide it.
pub const SOCKET_DIR_TARGET: &str = "/llm-sock";

/// The socket beside the run's on which a slot waits for its claim. It is gone before anything is started.
pub const CLAIM_SOCKET: &str = "slot";

/// The file beside the socket that is a sandbox's `/etc/hosts`. Where nothing says what `localhost` is, only those find
/// the gateway who know by themselves: curl does, Node and everyone who asks libc do not.
pub const HOSTS_FILE: &str = "hosts";

/// IPv4 only, as the bridge is.
pub const HOSTS_TEXT: &str = "127.0.0.1 localhost sandbox\n";

/// The agent's home.
pub const WORKSPACE_TARGET: &str = "/workspace";

/// What is mounted there is ours or the kernel's.
const RESERVED_TARGETS: &[&str] =
    &["/cogni-init", "/dev", "/etc", "/llm-sock", "/proc", "/run", "/sys", "/tmp", "/workspace"];

const TARGET_RULE: &str = "give an absolute path that is not at, above or below `/workspace`, `/llm-sock`, `/tmp`, `/run`, `/etc` or what is the kernel's";

/// Docker Engine's own minimum.
const MIN_MEMORY_BYTES: u64 = 6 << 20;
