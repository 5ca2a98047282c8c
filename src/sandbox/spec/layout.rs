//! What a sandbox finds inside, whoever makes it: its programs' arguments and variables, its mounts and its limits.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::{
    BindMount, CLAIM_SOCKET, HOSTS_FILE, MountAccess, RootSource, SOCKET_DIR_TARGET, SandboxSpec,
    VolumeMount, WORKSPACE_TARGET, WorkspaceMount,
};

/// A directory in memory.
pub(super) struct TmpfsMount {
    pub(super) target: &'static str,
    /// As mount(8) takes them.
    pub(super) options: String,
}

impl SandboxSpec {
    /// The sandbox's first process, and all that it starts with.
    pub(super) fn init_command(&self) -> Vec<String> {
        let mut command = vec![];
        if self.init.is_some() {
            command.push(INIT_TARGET.to_owned());
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

    /// What a slot is told to be this run's, in the words of its first process: what that would have been started with.
    pub fn encode_claim(&self) -> Vec<u8> {
        self.encode_arguments(self.init_options())
    }

    /// The same for a resident, which waits for the next when this run is over.
    pub fn encode_long_running_claim(&self) -> Vec<u8> {
        let mut options = self.init_options();
        options.push("--resident".to_owned());
        self.encode_arguments(options)
    }

    fn encode_arguments(&self, mut arguments: Vec<String>) -> Vec<u8> {
        for (name, value) in self.environment() {
            arguments.extend(["--env".to_owned(), format!("{name}={value}")]);
        }
        arguments.push("--".to_owned());
        arguments.extend_from_slice(&self.argv);
        let text: Vec<u8> = arguments
            .into_iter()
            .flat_map(|argument| argument.into_bytes().into_iter().chain([0]))
            .collect();
        // One that is too long for this is refused at the other end, by what it says of itself.
        let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
        [&length.to_be_bytes()[..], &text].concat()
    }

    /// Whether it is started ahead, for a run that is not known yet.
    fn is_warm_slot(&self) -> bool {
        self.argv.is_empty()
    }

    /// What the first process is to see to by itself: it ends the agent when the runner cannot, and so a little later
    /// than that would; and it keeps the agent from writing anywhere else than here.
    fn init_options(&self) -> Vec<String> {
        let after = (self.limits.max_runtime + self.grace + WATCHDOG_DELAY).as_secs();
        let mut options = vec!["--max-runtime".to_owned(), format!("{after}s")];
        if !self.has_gateway {
            options.push("--no-gateway".to_owned());
        }
        for place in self.writable_paths() {
            options.extend(["--write".to_owned(), place]);
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
        let given = mounts.chain(volumes).filter(|(_, access)| **access == MountAccess::ReadWrite);
        own.chain(given.map(|(target, _)| target.display().to_string())).collect()
    }

    pub(super) fn environment(&self) -> BTreeMap<String, String> {
        if self.is_warm_slot() {
            return BTreeMap::new();
        }
        let given = AGENT_ENV.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let mut environment: BTreeMap<_, _> = given.collect();
        environment.insert("RUN_ID".to_owned(), self.run.clone());
        environment.extend(self.env.clone());
        environment
    }

    /// The directories in memory; some are `uid`'s own.
    pub(super) fn tmpfs_mounts(&self, uid: u32) -> Vec<TmpfsMount> {
        let memory = |target, options: String| TmpfsMount { target, options };
        let own = format!("uid={uid},gid={uid},mode=0700");
        let mut all = vec![
            memory("/tmp", "rw,nosuid,nodev,noexec,size=64m,mode=1777".to_owned()),
            memory("/run", format!("rw,nosuid,nodev,noexec,size=8m,{own}")),
        ];
        if self.workspace == WorkspaceMount::None {
            // Where agents write programs and run them.
            all.push(memory(WORKSPACE_TARGET, format!("rw,exec,nosuid,nodev,size=256m,{own}")));
        }
        all
    }

    /// What it sees of this machine: our own first, then what was asked for.
    pub(super) fn bind_mounts(&self) -> Vec<BindMount> {
        let bind = |source: &PathBuf, target: &str, access| BindMount {
            source: source.clone(),
            target: target.into(),
            access,
        };
        let mut binds = vec![bind(&self.socket_dir, SOCKET_DIR_TARGET, MountAccess::ReadOnly)];
        // An unpacked root is shown as it is: what is not in it cannot be mounted over.
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

/// Where a sandbox finds its first process, if we bring it.
pub(super) const INIT_TARGET: &str = "/cogni-init";

pub(super) const HOSTNAME: &str = "sandbox";

/// Open files, by whose square the kernel lets a process watch them with epoll; no core dumps; 4 GiB for a file.
pub(super) const ULIMITS: [(&str, u64); 3] = [("nofile", 1024), ("core", 0), ("fsize", 4 << 30)];

/// Where the whole machine is short of memory, a sandbox goes before its host.
pub(super) const OOM_SCORE_ADJ: i32 = 500;

/// What Docker hides, by now; an older engine knows fewer by itself.
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

/// What Docker lets nobody write to.
pub(super) const READ_ONLY_PATHS: &[&str] =
    &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// In memory, all of them.
const WRITABLE_PATHS: &[&str] = &["/dev/shm", "/run", "/tmp"];

/// After the runner's own deadline and all the time that it gives for an end.
const WATCHDOG_DELAY: Duration = Duration::from_secs(30);

/// Where every client finds the gateway. The keys are placeholders that clients insist on; the real one stays outside.
const AGENT_ENV: &[(&str, &str)] = &[
    ("ANTHROPIC_API_KEY", "placeholder"),
    ("ANTHROPIC_BASE_URL", "http://localhost:8080"),
    ("HOME", WORKSPACE_TARGET),
    ("OPENAI_API_BASE", "http://localhost:8080/v1"),
    ("OPENAI_API_KEY", "placeholder"),
    ("OPENAI_BASE_URL", "http://localhost:8080/v1"),
];
