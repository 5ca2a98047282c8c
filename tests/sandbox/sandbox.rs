//! R3, R5: what a sandbox is asked to be, what is kept of its words, and whose it is. Without an engine.

mod engine;
mod host_path;
mod left;
mod oci;
mod output;
mod owner;
mod seccomp;

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use cogni_gateway::sandbox::spec::docker::create_body;
use cogni_gateway::sandbox::spec::{
    Access, Limits, Mount, Root, SECCOMP, Stamp, Volume, Workspace,
};
use cogni_gateway::sandbox::{Owner, RunSpec, name_of};
use serde_json::{Value, json};

/// R3: every flag of the hardening stands here, and in no test that needs an engine only.
#[test]
fn a_sandbox_is_hardened_whatever_is_asked_for() {
    insta::assert_json_snapshot!(asked(&spec()));
}

/// R3, R4, R6: what is asked for is added, and takes nothing away.
#[test]
fn a_sandbox_gets_what_it_asks_for_and_keeps_its_hardening() {
    insta::assert_json_snapshot!(asked(&everything()));
}

/// R3: Docker's own defaults end where ours begin; what is denied by name is not allowed by another line.
#[test]
fn the_system_calls_that_open_the_kernel_are_denied() {
    let profile: Value = serde_json::from_str(SECCOMP).unwrap();
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

/// R5: the first process ends the agent when the runner cannot, and never before the runner would have.
#[test]
fn the_first_process_waits_for_the_runners_grace() {
    let limits = Limits { max_runtime: Duration::from_mins(1), ..Limits::default() };
    let spec = RunSpec { grace: Duration::from_mins(5), limits, ..everything() };
    let entrypoint = asked(&spec)["Entrypoint"].to_string();
    assert!(entrypoint.contains(r#""--max-runtime","390s""#), "{entrypoint}");
    assert!(String::from_utf8_lossy(&spec.claim()).contains("--max-runtime\x00390s\0"));
}

/// R1: what cannot be said is refused before anything is made.
#[test]
fn a_spec_that_makes_no_sense_is_refused_with_what_would() {
    let volume =
        |name: &str| Volume { name: name.into(), target: "/v".into(), access: Access::ReadOnly };
    let mount = |target: &str| Mount {
        source: "/srv".into(),
        target: target.into(),
        access: Access::ReadOnly,
    };
    let limits = |change: fn(&mut Limits)| {
        let mut limits = Limits::default();
        change(&mut limits);
        RunSpec { limits, ..spec() }
    };
    let wrong = [
        RunSpec { argv: vec![], ..spec() },
        RunSpec { root: Root::Image(String::new()), ..spec() },
        RunSpec { argv: vec!["a\0b".into()], ..spec() },
        RunSpec { env: [("A=B", "c")].map(pair).into(), ..spec() },
        RunSpec { volumes: vec![volume("/var/run")], ..spec() },
        RunSpec { mounts: vec![mount("/llm-sock/x")], ..spec() },
        RunSpec { mounts: vec![mount("/")], ..spec() },
        RunSpec { mounts: vec![mount("/opt/../proc")], ..spec() },
        RunSpec { mounts: vec![mount("opt")], ..spec() },
        limits(|limits| limits.max_memory = 1),
        limits(|limits| limits.pids = 1),
        limits(|limits| limits.cpus = f64::NAN),
        limits(|limits| limits.max_runtime = Duration::ZERO),
        RunSpec { grace: Duration::MAX, ..spec() },
    ];
    let told = wrong.map(|spec| spec.check().unwrap_err().to_string());
    insta::assert_snapshot!(told.join("\n"));
    spec().check().unwrap();
}

#[test]
fn a_run_has_the_same_name_each_time_and_no_other_run_has_it() {
    assert_eq!(name_of("run-1"), name_of("run-1"));
    assert_ne!(name_of("run-1"), name_of("run-2"));
    assert_eq!(name_of("a/b:c@d").len(), "cogni-".len() + 16);
}

/// What Docker Engine is asked for, the seccomp profile left out where it is ours.
fn asked(spec: &RunSpec) -> Value {
    let owner = Owner::parse("0123456789abcdef:42:4242:4026531836").unwrap();
    let stamp = Stamp {
        owner,
        run_dir: PathBuf::from("/run/cogni"),
        deadline: UNIX_EPOCH + Duration::from_secs(1_800_000_001),
    };
    let mut body = serde_json::to_value(create_body(spec, "sha256:0123", &stamp)).unwrap();
    let profile = &mut body["HostConfig"]["SecurityOpt"][1];
    assert_eq!(*profile, json!(format!("seccomp={SECCOMP}")));
    *profile = json!("seccomp=(config/seccomp.json)");
    // A hash of all the rest, the profile too.
    assert_eq!(body["Labels"]["cogni.spec"].as_str().unwrap().len(), 64);
    body["Labels"]["cogni.spec"] = json!("(sha256)");
    body
}

/// With something of all that can be asked for.
fn everything() -> RunSpec {
    RunSpec {
        env: [("HOME", "/data"), ("COGNI_MODEL", "m")].map(pair).into(),
        limits: Limits { max_memory: 1 << 30, pids: 99, cpus: 0.5, ..Limits::default() },
        workspace: Workspace::Directory { path: "/srv/task".into(), access: Access::ReadWrite },
        mounts: vec![Mount {
            source: "/srv/tools".into(),
            target: "/opt/tools".into(),
            access: Access::ReadOnly,
        }],
        volumes: vec![Volume {
            name: "cache".into(),
            target: "/var/cache/agent".into(),
            access: Access::ReadWrite,
        }],
        init: Some("/usr/lib/cogni-init".into()),
        ..spec()
    }
}

fn spec() -> RunSpec {
    RunSpec {
        run: "run-1".into(),
        root: Root::Image("sha256:0123".into()),
        argv: ["sh", "-c", "echo $HOME; true"].map(str::to_owned).into(),
        uid: 1001,
        env: [].into(),
        limits: Limits::default(),
        grace: Duration::from_secs(10),
        workspace: Workspace::None,
        mounts: vec![],
        volumes: vec![],
        socket_dir: PathBuf::from("/run/cogni/run-1/sock"),
        init: None,
        has_gateway: true,
    }
}

fn pair((name, value): (&str, &str)) -> (String, String) {
    (name.to_owned(), value.to_owned())
}
