//! A sandbox in the words of Docker Engine. Pure: what is enforced can be read, and tested, without an engine.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use bollard::models::{
    ContainerCreateBody, HostConfig, HostConfigCgroupnsModeEnum, HostConfigLogConfig,
    Mount as BodyMount, MountBindOptions, MountBindOptionsPropagationEnum, MountType,
    ResourcesUlimits, RestartPolicy, RestartPolicyNameEnum,
};

use super::{Access, GID, HOSTS, RunSpec, SOCKET_DIR, Stamp, UID, WORKSPACE, Workspace};
use crate::base::hex;

/// What Docker Engine is asked to create, of an image that it has.
pub fn create_body(spec: &RunSpec, image: &str, stamp: &Stamp) -> ContainerCreateBody {
    let mut body = ContainerCreateBody {
        image: Some(image.to_owned()),
        // With an entrypoint of ours, nothing of the image's own command remains.
        entrypoint: Some(command(spec)),
        env: Some(environment(spec)),
        user: Some(format!("{UID}:{GID}")),
        working_dir: Some(WORKSPACE.to_owned()),
        hostname: Some("sandbox".to_owned()),
        network_disabled: Some(true),
        stop_signal: Some("SIGTERM".to_owned()),
        host_config: Some(host_config(spec)),
        ..ContainerCreateBody::default()
    };
    let digest = digest(&body);
    body.labels = Some(labels(spec, stamp, digest));
    body
}

/// The sandbox's first process, and all that it starts with.
fn command(spec: &RunSpec) -> Vec<String> {
    let mut command = vec![];
    if spec.init.is_some() {
        // It ends the agent by itself when its runner cannot, and so a little later than its runner would.
        let watchdog = (spec.limits.max_runtime + WATCHDOG_DELAY).as_secs();
        command.extend([
            INIT.to_owned(),
            "--max-runtime".to_owned(),
            format!("{watchdog}s"),
            "--".to_owned(),
        ]);
    }
    command.extend_from_slice(&spec.argv);
    command
}

fn environment(spec: &RunSpec) -> Vec<String> {
    let given = AGENT_ENV.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let mut environment: BTreeMap<_, _> = given.collect();
    environment.insert("RUN_ID".to_owned(), spec.run.clone());
    environment.extend(spec.env.clone());
    environment.into_iter().map(|(name, value)| format!("{name}={value}")).collect()
}

fn host_config(spec: &RunSpec) -> HostConfig {
    let limits = &spec.limits;
    let memory = i64::try_from(limits.max_memory).unwrap_or(i64::MAX);
    HostConfig {
        network_mode: Some("none".to_owned()),
        cap_drop: Some(vec!["ALL".to_owned()]),
        security_opt: Some(vec!["no-new-privileges".to_owned(), format!("seccomp={SECCOMP}")]),
        privileged: Some(false),
        readonly_rootfs: Some(true),
        tmpfs: Some(tmpfs(spec)),
        mounts: Some(mounts(spec)),
        pids_limit: Some(limits.pids.into()),
        memory: Some(memory),
        // Memory and swap together: there is no swap.
        memory_swap: Some(memory),
        nano_cpus: Some(nano_cpus(limits.cpus)),
        ulimits: Some(ULIMITS.map(ulimit).into()),
        // Where the whole machine is short of memory, a sandbox goes before its host.
        oom_score_adj: Some(500),
        ipc_mode: Some("private".to_owned()),
        cgroupns_mode: Some(HostConfigCgroupnsModeEnum::PRIVATE),
        // cogni-init reaps; where there is none, the engine's own init does.
        init: Some(spec.init.is_none()),
        // We are attached; on the engine's side nothing piles up.
        log_config: Some(HostConfigLogConfig { typ: Some("none".to_owned()), config: None }),
        restart_policy: Some(RestartPolicy {
            name: Some(RestartPolicyNameEnum::NO),
            maximum_retry_count: None,
        }),
        auto_remove: Some(false),
        ..HostConfig::default()
    }
}

fn tmpfs(spec: &RunSpec) -> HashMap<String, String> {
    let mut tmpfs = HashMap::from(
        [
            ("/tmp", "rw,nosuid,nodev,noexec,size=64m,mode=1777"),
            ("/run", "rw,nosuid,nodev,noexec,size=8m,uid=1001,gid=1001,mode=0700"),
        ]
        .map(|(target, options)| (target.to_owned(), options.to_owned())),
    );
    if spec.workspace == Workspace::None {
        // Where agents write programs and run them.
        let options = "rw,exec,nosuid,nodev,size=256m,uid=1001,gid=1001,mode=0700";
        tmpfs.insert(WORKSPACE.to_owned(), options.to_owned());
    }
    tmpfs
}

fn mounts(spec: &RunSpec) -> Vec<BodyMount> {
    let socket = bind(&spec.socket_dir, Path::new(SOCKET_DIR), Access::ReadOnly);
    let hosts = bind(&spec.socket_dir.join(HOSTS), Path::new("/etc/hosts"), Access::ReadOnly);
    let init = spec.init.iter().map(|path| bind(path, Path::new(INIT), Access::ReadOnly));
    let workspace = match &spec.workspace {
        Workspace::None => None,
        Workspace::Directory { path, access } => Some(bind(path, Path::new(WORKSPACE), *access)),
    };
    let mounts = spec.mounts.iter().map(|mount| bind(&mount.source, &mount.target, mount.access));
    let volumes = spec.volumes.iter().map(|volume| BodyMount {
        typ: Some(MountType::VOLUME),
        source: Some(volume.name.clone()),
        ..mount(&volume.target, volume.access)
    });
    [socket, hosts].into_iter().chain(init).chain(workspace).chain(mounts).chain(volumes).collect()
}

fn bind(source: &Path, target: &Path, access: Access) -> BodyMount {
    BodyMount {
        typ: Some(MountType::BIND),
        source: Some(source.display().to_string()),
        bind_options: Some(MountBindOptions {
            propagation: Some(MountBindOptionsPropagationEnum::RPRIVATE),
            // What is mounted below it stays out: it was not asked for, and would be writable where this is not.
            non_recursive: Some(true),
            ..MountBindOptions::default()
        }),
        ..mount(target, access)
    }
}

fn mount(target: &Path, access: Access) -> BodyMount {
    BodyMount {
        target: Some(target.display().to_string()),
        read_only: Some(access == Access::ReadOnly),
        ..BodyMount::default()
    }
}

fn ulimit((name, limit): (&str, i64)) -> ResourcesUlimits {
    ResourcesUlimits { name: Some(name.to_owned()), soft: Some(limit), hard: Some(limit) }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a checked number of processors is at most 1024"
)]
fn nano_cpus(cpus: f64) -> i64 {
    (cpus * 1e9).round() as i64
}

fn labels(spec: &RunSpec, stamp: &Stamp, digest: String) -> HashMap<String, String> {
    let deadline = stamp.deadline.duration_since(UNIX_EPOCH).unwrap_or_default();
    HashMap::from([
        (OWNER_LABEL.to_owned(), stamp.owner.to_string()),
        (RUN_LABEL.to_owned(), spec.run.clone()),
        (DIR_LABEL.to_owned(), stamp.run_dir.display().to_string()),
        (DEADLINE_LABEL.to_owned(), deadline.as_secs().to_string()),
        (SPEC_LABEL.to_owned(), digest),
    ])
}

/// Of everything but the labels. By way of a value, whose keys are sorted: the engine's maps have no order.
fn digest(body: &ContainerCreateBody) -> String {
    let body = serde_json::to_value(body).expect("a body of texts and numbers is JSON");
    hex::sha256(body.to_string().as_bytes())
}

pub const OWNER_LABEL: &str = "cogni.owner";
pub const RUN_LABEL: &str = "cogni.run";
/// The directory of all its installation's runs, without symlinks.
pub const DIR_LABEL: &str = "cogni.dir";
/// Seconds since 1970.
pub const DEADLINE_LABEL: &str = "cogni.deadline";
/// SHA-256 of what was asked of the engine.
pub const SPEC_LABEL: &str = "cogni.spec";

/// What an agent may call the kernel for.
pub const SECCOMP: &str = include_str!("../../../config/seccomp.json");

const INIT: &str = "/cogni-init";

/// After the runner's own deadline and all the time that it gives for an end.
const WATCHDOG_DELAY: Duration = Duration::from_secs(30);

/// Open files; no core dumps; 4 GiB for a file.
const ULIMITS: [(&str, i64); 3] = [("nofile", 4096), ("core", 0), ("fsize", 4 << 30)];

/// Where every client finds the gateway. The keys are placeholders that clients insist on; the real one stays outside.
const AGENT_ENV: &[(&str, &str)] = &[
    ("ANTHROPIC_API_KEY", "placeholder"),
    ("ANTHROPIC_BASE_URL", "http://localhost:8080"),
    ("HOME", WORKSPACE),
    ("OPENAI_API_BASE", "http://localhost:8080/v1"),
    ("OPENAI_API_KEY", "placeholder"),
    ("OPENAI_BASE_URL", "http://localhost:8080/v1"),
];
