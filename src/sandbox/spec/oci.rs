//! A sandbox in the words of the Open Container Initiative's runtime specification. Pure: what is enforced can be
//! read, and tested, without making anything.

use std::path::{Path, PathBuf};

use libcontainer::oci_spec::runtime::Spec;
use serde_json::{Value, json};

use super::inside::{HOSTNAME, MASKED, Memory, OOM_SCORE_ADJ, READ_ONLY, ULIMITS};
use super::{Access, Mount, RunSpec, WORKSPACE};

/// Where on this machine a sandbox is put together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The directory that becomes its root. What is in there is gone with it.
    pub root: PathBuf,
    /// The programs, shown in the root.
    pub programs: Vec<Mount>,
    /// How many files this process may let others open.
    pub max_files: u64,
    /// The group of processes that its limits are for; without one there are no limits but those of a process.
    pub cgroup: Option<PathBuf>,
    /// Whether the group has a limit of its own for the buffers of sockets, as with cgroup v1: no other limit is for them.
    pub limits_sockets: bool,
    /// Whether its user is the one who makes it, who is not root. To the runtime that one is root, and nobody else is
    /// there; the user that the sandbox has comes last, when nothing needs root any more.
    pub is_rootless: bool,
}

/// What a runtime is to make. The filter of system calls is not in it: [`super::seccomp`] is put on by the process that
/// becomes the sandbox's first.
pub fn config(spec: &RunSpec, place: &Place) -> Spec {
    let uid = user(spec, place);
    // The kernel asks it of whoever says that root is somebody else now, which is what such a user says at last: with
    // that it is gone.
    let last = if place.is_rootless { vec!["CAP_SETFCAP"] } else { vec![] };
    let environment = spec.environment().into_iter();
    // Any image says where its programs are; here nobody else does.
    let path = (!spec.env.contains_key("PATH")).then(|| format!("PATH={PATH}"));
    let variables = environment.map(|(name, value)| format!("{name}={value}")).chain(path);
    let config = json!({
        "ociVersion": "1.0.2",
        "hostname": HOSTNAME,
        "root": { "path": place.root, "readonly": true },
        "process": {
            "args": spec.command(),
            "env": variables.collect::<Vec<_>>(),
            "cwd": WORKSPACE,
            "user": { "uid": uid, "gid": uid, "umask": 0o022 },
            "capabilities": {
                "bounding": last, "effective": last, "permitted": last, "inheritable": [], "ambient": [],
            },
            "noNewPrivileges": true,
            "oomScoreAdj": OOM_SCORE_ADJ,
            "rlimits": ULIMITS.map(|limit| rlimit(limit, place)),
        },
        "mounts": mounts(spec, place),
        "linux": {
            "namespaces": [
                { "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }, { "type": "cgroup" },
                // Made by the process that makes the sandbox, for it alone, with nothing but its loopback.
                { "type": "network", "path": OWN_NETWORK },
            ],
            "maskedPaths": MASKED,
            "readonlyPaths": READ_ONLY,
            "rootfsPropagation": "private",
        },
    });
    let mut config: Spec = serde_json::from_value(config).expect("what is written here is a spec");
    let linux = config.linux_mut().as_mut().expect("it has this part");
    // An empty one is where the process is already.
    linux.set_cgroups_path(Some(place.cgroup.clone().unwrap_or_default()));
    if place.cgroup.is_some() {
        let resources = serde_json::from_value(resources(spec, place.limits_sockets));
        linux.set_resources(Some(resources.expect("what is written here are limits")));
    }
    config
}

/// Its user, as the runtime knows it.
fn user(spec: &RunSpec, place: &Place) -> u32 {
    if place.is_rootless { 0 } else { spec.uid }
}

/// No more than whoever makes the sandbox has: only some may raise that.
fn rlimit((name, limit): (&str, u64), place: &Place) -> Value {
    let limit = if name == "nofile" { limit.min(place.max_files) } else { limit };
    json!({ "type": format!("RLIMIT_{}", name.to_uppercase()), "soft": limit, "hard": limit })
}

fn resources(spec: &RunSpec, limits_sockets: bool) -> Value {
    let limits = &spec.limits;
    // Memory and swap together: there is no swap.
    let mut memory = json!({ "limit": limits.max_memory, "swap": limits.max_memory });
    if limits_sockets {
        memory["kernelTCP"] = limits.max_memory.into();
    }
    json!({
        "memory": memory,
        "pids": { "limit": limits.pids },
        "cpu": { "quota": quota(limits.cpus), "period": CPU_PERIOD },
        "devices": [{ "allow": false, "access": "rwm" }],
    })
}

/// In the order in which they are made: what is shown below another comes after it.
fn mounts(spec: &RunSpec, place: &Place) -> Vec<Value> {
    let kernel = KERNEL.iter().map(|(target, kind, options)| mount(target, kind, options));
    let memory = spec.memory(user(spec, place));
    let memory =
        memory.iter().map(|Memory { target, options }| mount(target, "tmpfs", options)).collect();
    let programs = place.programs.iter().map(bind).collect();
    let own = spec.binds().iter().map(bind).collect();
    [programs, kernel.collect(), memory, own].into_iter().flat_map(Vec::into_iter).collect()
}

fn mount(target: &str, kind: &str, options: &str) -> Value {
    let options: Vec<_> = options.split(',').collect();
    json!({ "destination": target, "type": kind, "source": kind, "options": options })
}

/// What is mounted below it stays out: it was not asked for, and would be writable where this is not.
fn bind(Mount { source, target, access }: &Mount) -> Value {
    let access = if *access == Access::ReadOnly { "ro" } else { "rw" };
    json!({
        "destination": target,
        "type": "bind",
        "source": source,
        "options": ["bind", access, "nosuid", "nodev", "private"],
    })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a checked number of processors is at most 1024"
)]
fn quota(cpus: f64) -> i64 {
    (cpus * f64::from(CPU_PERIOD)).round() as i64
}

/// Whether `path` is one that a sandbox has of its own, whatever programs it is given.
pub fn is_own(path: &Path) -> bool {
    OWN.iter().any(|own| path == Path::new(own))
}

/// As the kernel names it for whoever reads it.
const OWN_NETWORK: &str = "/proc/self/ns/net";

/// Microseconds; the kernel's own default, and Docker's.
const CPU_PERIOD: u32 = 100_000;

/// Docker's own.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Mounted by us in every root.
const OWN: &[&str] =
    &["/cogni-init", "/dev", "/llm-sock", "/proc", "/run", "/sys", "/tmp", "/workspace"];

/// The kernel's own trees, as Docker mounts them; without its cgroups.
const KERNEL: &[(&str, &str, &str)] = &[
    ("/proc", "proc", "nosuid,noexec,nodev"),
    ("/dev", "tmpfs", "nosuid,noexec,strictatime,mode=755,size=64k"),
    ("/dev/pts", "devpts", "nosuid,noexec,newinstance,ptmxmode=0666,mode=0620,max=64"),
    ("/dev/shm", "tmpfs", "nosuid,noexec,nodev,mode=1777,size=64m"),
    ("/dev/mqueue", "mqueue", "nosuid,noexec,nodev"),
    ("/sys", "sysfs", "nosuid,noexec,nodev,ro"),
];
