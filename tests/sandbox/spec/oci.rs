//! R2, R3: Tests of the embedded driver's specification, and that it equals Docker Engine's.

use std::collections::BTreeMap;

use cogni_gateway::sandbox::SandboxSpec;
use cogni_gateway::sandbox::spec::oci::{OciHostSettings, build_oci_spec};
use cogni_gateway::sandbox::spec::{BindMount, MountAccess, RootSource};
use serde_json::{Value, json};

use super::{docker_request, example_spec, full_spec};

/// R3: The snapshot has every flag of the hardening.
#[test]
fn an_embedded_sandbox_is_hardened_whatever_is_requested() {
    insta::assert_json_snapshot!(oci_document(&example_spec()));
}

/// R3, R4, R6: Requested options are added, and remove no hardening.
#[test]
fn an_embedded_sandbox_gets_requested_options_and_keeps_its_hardening() {
    insta::assert_json_snapshot!(oci_document(&SandboxSpec { volumes: vec![], ..full_spec() }));
}

/// R2: Both drivers enforce the same, flag by flag.
#[test]
fn both_drivers_enforce_the_same() {
    for spec in [example_spec(), SandboxSpec { volumes: vec![], ..full_spec() }] {
        let (docker, oci) = (docker_facts(&docker_request(&spec)), oci_facts(&oci_document(&spec)));
        assert_eq!(docker.keys().collect::<Vec<_>>(), oci.keys().collect::<Vec<_>>());
        for (fact, value) in &docker {
            assert_eq!(value, &oci[fact], "{fact}");
        }
    }
}

/// R2: Without a control group, only the limits are missing.
#[test]
fn a_container_without_a_group_has_all_but_its_limits() {
    let (with, without) = (
        oci_document(&example_spec()),
        made_at(&example_spec(), &OciHostSettings { cgroup: None, ..host_settings() }),
    );
    let mut with = with;
    let linux = with["linux"].as_object_mut().unwrap();
    assert!(linux.remove("resources").is_some());
    linux.insert("cgroupsPath".into(), "".into());
    assert_eq!(with, without);
}

/// R3: If no control group limits the buffers of sockets, they have their own limit; otherwise there is none.
#[test]
fn a_containers_sockets_have_a_limit_where_there_is_one() {
    let memory = |limits_sockets| {
        made_at(&example_spec(), &OciHostSettings { limits_sockets, ..host_settings() })["linux"]["resources"]["memory"]
            .clone()
    };
    assert_eq!(memory(true)["kernelTCP"], memory(true)["limit"]);
    assert_eq!(memory(false)["kernelTCP"], Value::Null);
}

/// R2: A process can give a container no more open files than it has itself.
#[test]
fn an_embedded_sandbox_has_no_more_open_files_than_its_maker() {
    let few = made_at(&example_spec(), &OciHostSettings { max_files: 512, ..host_settings() });
    let limit = json!({ "type": "RLIMIT_NOFILE", "soft": 512, "hard": 512 });
    assert_eq!(few["process"]["rlimits"][0], limit);
}

/// R2: The sandbox of a user who is not root maps only that user; everything else is the same.
#[test]
fn a_container_of_another_user_has_that_user_only() {
    let (mut with, without) = (
        oci_document(&example_spec()),
        made_at(&example_spec(), &OciHostSettings { is_rootless: true, ..host_settings() }),
    );
    with["process"]["user"]["uid"] = json!(0);
    with["process"]["user"]["gid"] = json!(0);
    for set in ["bounding", "effective", "permitted"] {
        with["process"]["capabilities"][set] = json!(["CAP_SETFCAP"]);
    }
    let text = with.to_string().replace("uid=1001", "uid=0").replace("gid=1001", "gid=0");
    assert_eq!(text, without.to_string());
}

fn docker_facts(body: &Value) -> BTreeMap<&'static str, Value> {
    let host = &body["HostConfig"];
    let memory = host["Tmpfs"].as_object().unwrap().iter();
    let memory = memory.map(|(target, options)| json!([target, options]));
    let binds = host["Mounts"].as_array().unwrap().iter().map(|mount| {
        let options = &mount["BindOptions"];
        assert_eq!(*options, json!({ "NonRecursive": true, "Propagation": "rprivate" }));
        json!([mount["Source"], mount["Target"], mount["ReadOnly"]])
    });
    let limits = host["Ulimits"].as_array().unwrap().iter();
    let limits = limits.map(|limit| json!([limit["Name"], limit["Soft"], limit["Hard"]]));
    BTreeMap::from([
        ("argv", body["Entrypoint"].clone()),
        ("binds", binds.collect()),
        ("capabilities", json!(host["CapDrop"] == json!(["ALL"]) && host["CapAdd"].is_null())),
        ("cpus in billionths", host["NanoCpus"].clone()),
        ("directory", body["WorkingDir"].clone()),
        ("environment", body["Env"].clone()),
        ("group of processes of its own", json!(host["CgroupnsMode"] == "private")),
        ("host name", body["Hostname"].clone()),
        ("ipc of its own", json!(host["IpcMode"] == "private")),
        ("hidden", host["MaskedPaths"].clone()),
        ("hidden from writing", host["ReadonlyPaths"].clone()),
        ("limits of a process", limits.collect()),
        ("memory", host["Memory"].clone()),
        ("memory and swap", host["MemorySwap"].clone()),
        ("network with nothing in it", json!(host["NetworkMode"] == "none")),
        ("no new privileges", json!(host["SecurityOpt"][0] == "no-new-privileges")),
        ("oom score", host["OomScoreAdj"].clone()),
        ("processes", host["PidsLimit"].clone()),
        ("read-only root", host["ReadonlyRootfs"].clone()),
        ("tmpfs", sort_values(memory.collect())),
        ("user", body["User"].clone()),
    ])
}

fn oci_facts(config: &Value) -> BTreeMap<&'static str, Value> {
    let (process, linux) = (&config["process"], &config["linux"]);
    let mounts = || config["mounts"].as_array().unwrap().iter();
    let options = |mount: &Value| -> Vec<String> {
        serde_json::from_value(mount["options"].clone()).unwrap()
    };
    let of_ours = |mount: &&Value| !mount["source"].as_str().unwrap().starts_with("/programs");
    let binds = mounts().filter(|mount| mount["type"] == "bind").filter(of_ours).map(|mount| {
        let options = options(mount);
        assert!(
            ["bind", "nosuid", "nodev", "private"]
                .iter()
                .all(|of| options.iter().any(|is| is == of))
        );
        json!([mount["source"], mount["destination"], options.iter().any(|option| option == "ro")])
    });
    let memory = mounts().filter(|mount| mount["type"] == "tmpfs");
    let memory = memory.filter(|mount| !mount["destination"].as_str().unwrap().starts_with("/dev"));
    let memory = memory.map(|mount| json!([mount["destination"], options(mount).join(",")]));
    let limits = process["rlimits"].as_array().unwrap().iter().map(|limit| {
        let name = limit["type"].as_str().unwrap().trim_start_matches("RLIMIT_").to_lowercase();
        json!([name, limit["soft"], limit["hard"]])
    });
    let sets = ["bounding", "effective", "inheritable", "permitted", "ambient"];
    let own = |kind: &str| {
        let namespaces = linux["namespaces"].as_array().unwrap();
        json!(namespaces.iter().any(|namespace| *namespace == json!({ "type": kind })))
    };
    let cpu = &linux["resources"]["cpu"];
    let cpus = cpu["quota"].as_i64().unwrap() * 1_000_000_000 / cpu["period"].as_i64().unwrap();
    let network = json!({ "type": "network", "path": "/proc/self/ns/net" });
    for kind in ["pid", "uts", "mount"] {
        assert_eq!(own(kind), true, "{kind}");
    }
    BTreeMap::from([
        ("argv", process["args"].clone()),
        ("binds", binds.collect()),
        ("capabilities", json!(sets.iter().all(|set| process["capabilities"][set] == json!([])))),
        ("cpus in billionths", json!(cpus)),
        ("directory", process["cwd"].clone()),
        // An image has its own `PATH`.
        (
            "environment",
            process["env"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|variable| !variable.as_str().unwrap().starts_with("PATH="))
                .cloned()
                .collect(),
        ),
        ("group of processes of its own", own("cgroup")),
        ("host name", config["hostname"].clone()),
        ("ipc of its own", own("ipc")),
        ("hidden", linux["maskedPaths"].clone()),
        ("hidden from writing", linux["readonlyPaths"].clone()),
        ("limits of a process", limits.collect()),
        ("memory", linux["resources"]["memory"]["limit"].clone()),
        ("memory and swap", linux["resources"]["memory"]["swap"].clone()),
        (
            "network with nothing in it",
            json!(linux["namespaces"].as_array().unwrap().contains(&network)),
        ),
        ("no new privileges", process["noNewPrivileges"].clone()),
        ("oom score", process["oomScoreAdj"].clone()),
        ("processes", linux["resources"]["pids"]["limit"].clone()),
        ("read-only root", config["root"]["readonly"].clone()),
        ("tmpfs", sort_values(memory.collect())),
        ("user", json!(format!("{}:{}", process["user"]["uid"], process["user"]["gid"]))),
    ])
}

fn sort_values(mut values: Vec<Value>) -> Value {
    values.sort_by_key(ToString::to_string);
    values.into()
}

fn oci_document(spec: &SandboxSpec) -> Value {
    made_at(spec, &host_settings())
}

fn made_at(spec: &SandboxSpec, settings: &OciHostSettings) -> Value {
    let spec = SandboxSpec { root: RootSource::Host, ..spec.clone() };
    serde_json::to_value(build_oci_spec(&spec, settings)).unwrap()
}

fn host_settings() -> OciHostSettings {
    let programs = BindMount {
        source: "/programs/usr".into(),
        target: "/usr".into(),
        access: MountAccess::ReadOnly,
    };
    OciHostSettings {
        root: "/run/cogni/run-1/root".into(),
        programs: vec![programs],
        max_files: 1 << 20,
        cgroup: Some("/cogni-0123".into()),
        limits_sockets: true,
        is_rootless: false,
    }
}
