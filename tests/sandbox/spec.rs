//! R3, R5: Tests of the sandbox's specification, without an engine.

mod docker;
mod oci;
mod seccomp;

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use cogni_gateway::sandbox::spec::docker::container_body;
use cogni_gateway::sandbox::spec::{
    BindMount, MountAccess, OwnerLabels, RootSource, SECCOMP_PROFILE, SandboxLimits, SandboxTask,
    VolumeMount, WorkspaceMount,
};
use cogni_gateway::sandbox::{OwnerProcess, SandboxSpec, sandbox_name};
use serde_json::{Value, json};

/// R3: The snapshot has every flag of the hardening, so that no flag depends on tests with an engine.
#[test]
fn a_sandbox_is_hardened_whatever_is_requested() {
    insta::assert_json_snapshot!(docker_request(&example_spec()));
}

/// R3, R4, R6: Requested options are added, and remove no hardening.
#[test]
fn a_sandbox_gets_requested_options_and_keeps_its_hardening() {
    insta::assert_json_snapshot!(docker_request(&full_spec()));
}

/// R3: The profile denies more than Docker's defaults, and no other line allows a call that is denied by name.
#[test]
fn the_system_calls_that_open_the_kernel_are_denied() {
    let profile: Value = serde_json::from_str(SECCOMP_PROFILE).unwrap();
    assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
    let rules = profile["syscalls"].as_array().unwrap();
    let names =
        |rule: &Value| -> Vec<String> { serde_json::from_value(rule["names"].clone()).unwrap() };
    let allowed = rules.iter().filter(|rule| rule["action"] == "SCMP_ACT_ALLOW");
    let freely: Vec<_> = allowed.filter(|rule| rule["args"].is_null()).flat_map(names).collect();
    for call in [
        "add_key",
        "bpf",
        "clone",
        "clone3",
        "execveat",
        "init_module",
        "io_setup",
        "io_submit",
        "io_uring_setup",
        "keyctl",
        "mount",
        "move_mount",
        "open_by_handle_at",
        "perf_event_open",
        "personality",
        "pidfd_getfd",
        "pivot_root",
        "process_vm_readv",
        "ptrace",
        "setns",
        "socket",
        "umount2",
        "unshare",
        "userfaultfd",
    ] {
        assert!(!freely.iter().any(|allowed| allowed == call), "`{call}` is allowed");
    }
    assert!(freely.iter().any(|allowed| allowed == "execve"));
}

/// R5: The first process ends the agent if the runner cannot, and never earlier than the runner would.
#[test]
fn the_first_process_waits_for_the_runners_grace() {
    let limits = SandboxLimits { max_runtime: Duration::from_mins(1), ..SandboxLimits::default() };
    let spec = SandboxSpec { grace: Duration::from_mins(5), limits, ..full_spec() };
    let entrypoint = docker_request(&spec)["Entrypoint"].to_string();
    assert!(entrypoint.contains(r#""--max-runtime","390s""#), "{entrypoint}");
    assert!(String::from_utf8_lossy(&spec.encode_claim()).contains("--max-runtime\x00390s\0"));
}

/// T6: The first process of a run with tunnels is told so, in every form of its start.
#[test]
fn the_first_process_knows_of_tunnels() {
    let spec = SandboxSpec { has_tunnels: true, ..full_spec() };
    assert!(docker_request(&spec)["Entrypoint"].to_string().contains(r#""--tunnels""#));
    assert!(String::from_utf8_lossy(&spec.encode_claim()).contains("--tunnels\0"));
    let claim = String::from_utf8_lossy(&full_spec().encode_claim()).into_owned();
    assert!(!claim.contains("--tunnels"), "{claim}");
}

/// R1: A specification that makes no sense is refused before anything is made.
#[test]
fn a_wrong_spec_is_refused_with_a_remedy() {
    let volume = |name: &str| VolumeMount {
        name: name.into(),
        target: "/v".into(),
        access: MountAccess::ReadOnly,
    };
    let mount = |target: &str| BindMount {
        source: "/srv".into(),
        target: target.into(),
        access: MountAccess::ReadOnly,
    };
    let limits = |change: fn(&mut SandboxLimits)| {
        let mut limits = SandboxLimits::default();
        change(&mut limits);
        SandboxSpec { limits, ..example_spec() }
    };
    let wrong = [
        SandboxSpec { argv: vec![], ..example_spec() },
        SandboxSpec { root: RootSource::Image(String::new()), ..example_spec() },
        SandboxSpec { argv: vec!["a\0b".into()], ..example_spec() },
        SandboxSpec { env: [("A=B", "c")].map(string_pair).into(), ..example_spec() },
        SandboxSpec { volumes: vec![volume("/var/run")], ..example_spec() },
        SandboxSpec { mounts: vec![mount("/llm-sock/x")], ..example_spec() },
        SandboxSpec { mounts: vec![mount("/")], ..example_spec() },
        SandboxSpec { mounts: vec![mount("/opt/../proc")], ..example_spec() },
        SandboxSpec { mounts: vec![mount("opt")], ..example_spec() },
        limits(|limits| limits.max_memory = 1),
        limits(|limits| limits.pids = 1),
        limits(|limits| limits.cpus = f64::NAN),
        limits(|limits| limits.max_runtime = Duration::ZERO),
        SandboxSpec { grace: Duration::MAX, ..example_spec() },
    ];
    let messages = wrong.map(|spec| spec.check().unwrap_err().to_string());
    insta::assert_snapshot!(messages.join("\n"));
    example_spec().check().unwrap();
}

#[test]
fn a_run_has_the_same_name_each_time_and_no_other_run_has_it() {
    assert_eq!(sandbox_name("run-1"), sandbox_name("run-1"));
    assert_ne!(sandbox_name("run-1"), sandbox_name("run-2"));
    assert_eq!(sandbox_name("a/b:c@d").len(), "cogni-".len() + 16);
}

/// Returns the request to Docker Engine, without the default seccomp profile.
fn docker_request(spec: &SandboxSpec) -> Value {
    let owner = OwnerProcess::parse("0123456789abcdef:42:4242:4026531836").unwrap();
    let stamp = OwnerLabels {
        owner,
        run_dir: PathBuf::from("/run/cogni"),
        deadline: UNIX_EPOCH + Duration::from_secs(1_800_000_001),
    };
    let mut body = serde_json::to_value(container_body(spec, "sha256:0123", &stamp)).unwrap();
    let profile = &mut body["HostConfig"]["SecurityOpt"][1];
    assert_eq!(*profile, json!(format!("seccomp={SECCOMP_PROFILE}")));
    *profile = json!("seccomp=(config/seccomp.json)");
    // The hash covers everything else, including the profile.
    assert_eq!(body["Labels"]["cogni.spec"].as_str().unwrap().len(), 64);
    body["Labels"]["cogni.spec"] = json!("(sha256)");
    body
}

/// A specification with every option.
fn full_spec() -> SandboxSpec {
    SandboxSpec {
        env: [("HOME", "/data"), ("COGNI_MODEL", "m")].map(string_pair).into(),
        limits: SandboxLimits {
            max_memory: 1 << 30,
            pids: 99,
            cpus: 0.5,
            ..SandboxLimits::default()
        },
        workspace: WorkspaceMount::Directory {
            path: "/srv/task".into(),
            access: MountAccess::ReadWrite,
        },
        mounts: vec![BindMount {
            source: "/srv/tools".into(),
            target: "/opt/tools".into(),
            access: MountAccess::ReadOnly,
        }],
        volumes: vec![VolumeMount {
            name: "cache".into(),
            target: "/var/cache/agent".into(),
            access: MountAccess::ReadWrite,
        }],
        init: Some("/usr/lib/cogni-init".into()),
        ..example_spec()
    }
}

pub(crate) fn example_spec() -> SandboxSpec {
    SandboxSpec {
        run: "run-1".into(),
        root: RootSource::Image("sha256:0123".into()),
        argv: ["sh", "-c", "echo $HOME; true"].map(str::to_owned).into(),
        uid: 1001,
        env: [].into(),
        limits: SandboxLimits::default(),
        grace: Duration::from_secs(10),
        workspace: WorkspaceMount::None,
        mounts: vec![],
        volumes: vec![],
        socket_dir: PathBuf::from("/run/cogni/run-1/sock"),
        init: None,
        has_tunnels: false,
        task: SandboxTask::Agent,
    }
}

fn string_pair((name, value): (&str, &str)) -> (String, String) {
    (name.to_owned(), value.to_owned())
}
