//! The layout inside a sandbox, the same for every driver: arguments and variables of its programs, mounts and limits.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::{
    BindMount, CLAIM_SOCKET, HOSTS_FILE, MountAccess, RootSource, SOCKET_DIR_TARGET, STDIO_SOCKET,
    SandboxSpec, SandboxTask, VolumeMount, WORKSPACE_TARGET, WorkspaceMount,
};

/// A directory in memory, as a mount.
pub(super) struct TmpfsMount {
    pub(super) target: &'static str,
    /// The mount options, in the form of mount(8).
    pub(super) options: String,
}

impl SandboxSpec {
    /// Returns the command of the sandbox's first process, with all its arguments.
    pub(super) fn init_command(&self) -> Vec<String> {
        let mut command = vec![];
        if self.init.is_some() {
            command.push(INIT_TARGET.to_owned());
            // A slot gets its options and its program later, with the claim.
            if self.is_warm_slot() {
                command
                    .extend(["--slot".to_owned(), format!("{SOCKET_DIR_TARGET}/{CLAIM_SOCKET}")]);
            } else {
                command.extend(self.init_options());
                command.push("--".to_owned());
            }
        }
        command.extend_from_slice(&self.argv);
        command
    }

    /// Encodes the claim that makes a slot this run's sandbox: the arguments that the first process would have been
    /// started with.
    pub fn encode_claim(&self) -> Vec<u8> {
        self.encode_arguments(self.init_options())
    }

    /// Encodes a run's claim for a long-running sandbox, whose first process waits for the next claim after the run.
    pub fn encode_long_running_claim(&self) -> Vec<u8> {
        let mut options = self.init_options();
        options.push("--long-running".to_owned());
        self.encode_arguments(options)
    }

    fn encode_arguments(&self, mut arguments: Vec<String>) -> Vec<u8> {
        for (name, value) in self.environment() {
            arguments.extend(["--env".to_owned(), format!("{name}={value}")]);
        }
        arguments.push("--".to_owned());
        arguments.extend_from_slice(&self.argv);
        // The format is a length in four bytes (big-endian), and then the arguments, each with a zero byte at its end.
        // `SandboxSpec::check` has excluded zero bytes in the arguments.
        let text: Vec<u8> = arguments
            .into_iter()
            .flat_map(|argument| argument.into_bytes().into_iter().chain([0]))
            .collect();
        // A text that is too long for four bytes gets the largest length, which the first process refuses.
        let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
        [&length.to_be_bytes()[..], &text].concat()
    }

    /// Returns true if the sandbox is a warm slot, started before its run is known.
    fn is_warm_slot(&self) -> bool {
        self.argv.is_empty()
    }

    /// Returns the options of the first process for this run. The first process ends the agent by itself if the runner
    /// cannot, a little later than the runner would. It also keeps the agent from writing outside of the writable
    /// paths.
    fn init_options(&self) -> Vec<String> {
        let after = (self.limits.max_runtime + self.grace + WATCHDOG_DELAY).as_secs();
        let mut options = vec!["--max-runtime".to_owned(), format!("{after}s")];
        match self.task {
            SandboxTask::Agent if self.has_tunnels => options.push("--tunnels".to_owned()),
            SandboxTask::Agent => {}
            SandboxTask::Program => options.push("--no-gateway".to_owned()),
            SandboxTask::Server => {
                let socket = format!("{SOCKET_DIR_TARGET}/{STDIO_SOCKET}");
                options.extend(["--no-gateway".to_owned(), "--stdio".to_owned(), socket]);
            }
            SandboxTask::Commands => options.push("--commands".to_owned()),
        }
        for path in self.writable_paths() {
            options.extend(["--write".to_owned(), path]);
        }
        options
    }

    fn writable_paths(&self) -> Vec<String> {
        let is_read_only = matches!(
            self.workspace,
            WorkspaceMount::Directory { access: MountAccess::ReadOnly, .. }
        );
        let workspace = (!is_read_only).then_some(WORKSPACE_TARGET);
        let own = WRITABLE_PATHS.iter().copied().chain(workspace).map(str::to_owned);
        let mounts = self.mounts.iter().map(|BindMount { target, access, .. }| (target, access));
        let volumes =
            self.volumes.iter().map(|VolumeMount { target, access, .. }| (target, access));
        let writable =
            mounts.chain(volumes).filter(|(_, access)| **access == MountAccess::ReadWrite);
        own.chain(writable.map(|(target, _)| target.display().to_string())).collect()
    }

    pub(super) fn environment(&self) -> BTreeMap<String, String> {
        if self.is_warm_slot() {
            return BTreeMap::new();
        }
        let defaults =
            AGENT_ENV.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let mut environment: BTreeMap<_, _> = defaults.collect();
        if self.is_tool() {
            environment.insert("HOME".to_owned(), TOOL_HOME.to_owned());
        }
        environment.insert("RUN_ID".to_owned(), self.run.clone());
        environment.extend(self.env.clone());
        environment
    }

    /// Returns the directory in which the sandbox's programs start. A server of tools may have a credential, and an
    /// interpreter runs code that it finds in its working directory or its home: neither is the workspace, which the agent writes.
    pub(super) fn working_dir(&self) -> &'static str {
        if self.task == SandboxTask::Server { TOOL_HOME } else { WORKSPACE_TARGET }
    }

    /// Returns true if the sandbox runs a tool, for an agent that does not see what happens inside.
    fn is_tool(&self) -> bool {
        matches!(self.task, SandboxTask::Program | SandboxTask::Server)
    }

    /// Returns the tmpfs mounts; some of them belong to user `uid`.
    pub(super) fn tmpfs_mounts(&self, uid: u32) -> Vec<TmpfsMount> {
        let memory = |target, options: String| TmpfsMount { target, options };
        let own = format!("uid={uid},gid={uid},mode=0700");
        let mut all = vec![
            memory("/tmp", "rw,nosuid,nodev,noexec,size=64m,mode=1777".to_owned()),
            memory("/run", format!("rw,nosuid,nodev,noexec,size=8m,{own}")),
        ];
        if self.workspace == WorkspaceMount::None {
            // Agents write programs here and run them, so this directory allows execution.
            all.push(memory(WORKSPACE_TARGET, format!("rw,exec,nosuid,nodev,size=256m,{own}")));
        }
        all
    }

    /// Returns the mounts from this machine: the gateway's own, and then the requested ones.
    pub(super) fn bind_mounts(&self) -> Vec<BindMount> {
        let bind = |source: &PathBuf, target: &str, access| BindMount {
            source: source.clone(),
            target: target.into(),
            access,
        };
        let mut binds = vec![bind(&self.socket_dir, SOCKET_DIR_TARGET, MountAccess::ReadOnly)];
        // An unpacked root is shown unchanged, and a file that is missing there cannot be mounted over.
        if !matches!(self.root, RootSource::Directory(_)) {
            binds.push(bind(
                &self.socket_dir.join(HOSTS_FILE),
                "/etc/hosts",
                MountAccess::ReadOnly,
            ));
        }
        binds.extend(self.init.iter().map(|path| bind(path, INIT_TARGET, MountAccess::ReadOnly)));
        if let WorkspaceMount::Directory { path, access } = &self.workspace {
            binds.push(bind(path, WORKSPACE_TARGET, *access));
        }
        binds.extend(self.mounts.iter().cloned());
        binds
    }
}

/// The path of the gateway's `cogni-init` in a sandbox.
pub(super) const INIT_TARGET: &str = "/cogni-init";

pub(super) const HOSTNAME: &str = "sandbox";

/// The limits of a process: open files (the kernel bounds epoll's watches by the square of this number), no core
/// dumps, and 4 GiB for a file.
pub(super) const ULIMITS: [(&str, u64); 3] = [("nofile", 1024), ("core", 0), ("fsize", 4 << 30)];

/// The adjustment that makes the kernel kill a sandbox before its host if the whole machine is short of memory.
pub(super) const OOM_SCORE_ADJ: i32 = 500;

/// The paths that current Docker versions hide; an older engine hides fewer by itself.
pub(super) const MASKED_PATHS: &[&str] = &[
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];

/// The paths that Docker mounts read-only.
pub(super) const READ_ONLY_PATHS: &[&str] =
    &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// The writable directories of every sandbox, all in memory.
/// The home of a tool's program: in memory, and new for each sandbox.
const TOOL_HOME: &str = "/tmp";

const WRITABLE_PATHS: &[&str] = &["/dev/shm", "/run", "/tmp"];

/// The time after the run time and the grace at which the first process ends the agent by itself.
const WATCHDOG_DELAY: Duration = Duration::from_secs(30);

/// The variables through which clients find the gateway. The keys are placeholders, which clients require; the
/// upstream's key stays outside of the sandbox.
const AGENT_ENV: &[(&str, &str)] = &[
    ("ANTHROPIC_API_KEY", "placeholder"),
    ("ANTHROPIC_BASE_URL", "http://localhost:8080"),
    ("HOME", WORKSPACE_TARGET),
    ("OPENAI_API_BASE", "http://localhost:8080/v1"),
    ("OPENAI_API_KEY", "placeholder"),
    ("OPENAI_BASE_URL", "http://localhost:8080/v1"),
];
