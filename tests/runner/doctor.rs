//! R2, R8: Tests of `cogni-gateway doctor`: what a machine can enforce, and the report about it.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use cogni_gateway::cli::doctor::print_report;
use cogni_gateway::sandbox::InitBinary;
use cogni_gateway::sandbox::probe::{
    CgroupSupport, DoctorReport, EngineInfo, EngineProbe, HostFacts, machine,
};
use serde_json::Value;

fn controller_set<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}

/// A machine with every feature.
fn good_machine() -> HostFacts {
    HostFacts {
        kernel: "6.18.0".to_owned(),
        is_root: true,
        cgroups: CgroupSupport {
            version: 2,
            controllers: controller_set(["cpu", "io", "memory", "pids"]),
        },
        user_namespaces: 96_000,
        has_seccomp: true,
        landlock: Some(7),
        docker: EngineProbe::Answers(EngineInfo {
            version: "29.1.0".to_owned(),
            api: "1.52".to_owned(),
            runtime: Some(("runc".to_owned(), "1.3.3".to_owned())),
            has_runsc: true,
            has_seccomp: true,
            has_userns_remap: false,
            is_rootless: false,
            shares_cgroup_namespace: false,
            no_limits: vec![],
        }),
        podman: Some("/run/podman/podman.sock".into()),
        git: Some("2.47.3".to_owned()),
        init: InitBinary::Configured("/usr/lib/cogni-init".into()),
        run_dir: "/run/cogni".into(),
        inotify_instances: Some(8192),
        user_limits: [("fs.epoll.max_user_watches", 5_000_000), ("RLIMIT_NPROC", u64::MAX)].into(),
        core_pattern: Some("core".to_owned()),
        limits_sockets: false,
        free: Some(8 << 30),
    }
}

fn render_report(facts: &HostFacts) -> String {
    let mut text = vec![];
    print_report(&DoctorReport::from_facts(facts), &mut text).unwrap();
    String::from_utf8(text).unwrap()
}

/// Returns the lines of a report that differ from the report of a machine with every feature.
fn changed_lines(change: impl FnOnce(&mut HostFacts)) -> String {
    let mut facts = good_machine();
    change(&mut facts);
    let (good, now) = (render_report(&good_machine()), render_report(&facts));
    let known: Vec<_> = good.lines().collect();
    now.lines().filter(|line| !known.contains(line)).collect::<Vec<_>>().join("\n")
}

fn engine_info(facts: &mut HostFacts) -> &mut EngineInfo {
    match &mut facts.docker {
        EngineProbe::Answers(answers) => answers,
        EngineProbe::Absent | EngineProbe::Unresponsive(_) => panic!("there is an engine"),
    }
}

#[test]
fn a_machine_with_every_feature_is_reported() {
    insta::assert_snapshot!(render_report(&good_machine()), @r"
    ok       kernel             6.18.0
    ok       cgroups            version 2: cpu, io, memory, pids
    ok       user namespaces    96000 for a user
    ok       seccomp            the kernel takes filters of system calls
    ok       landlock           version 7: keeps agents to their files and signals
    ok       inotify            8192 instances for a sandbox
    ok       limits of a user   enough for a sandbox
    ok       core dumps         files, of which a sandbox writes none
    ok       driver embedded    enforces everything
    ok       driver docker      enforces everything, with engine 29.1.0, API 1.52
    ok       container runtime  runc 1.3.3
    ok       runsc              installed; used if it is the engine's default runtime
    ok       podman             answers at /run/podman/podman.sock; name it with `--docker-socket`
    ok       cogni-init         /usr/lib/cogni-init
    ok       git                2.47.3
    ok       space              8192 MiB free at /run/cogni
    both drivers enforce everything
    ");
}

#[test]
fn a_machine_without_features_gets_remedies() {
    insta::assert_snapshot!(render_report(&HostFacts::default()), @r"
    ok       kernel             
    missing  cgroups            none are mounted
                                mount them: an init system does, or cgroupfs-mount
    warn     user namespaces    no user may have any
                                only root can use the driver `embedded` here; `sysctl user.max_user_namespaces=10000` lets other users
    missing  seccomp            the kernel takes no filters
                                use a kernel with CONFIG_SECCOMP_FILTER
    warn     landlock           the kernel has none
                                a kernel of 5.19 or newer with `lsm=landlock,…` keeps agents to their files twice; without it, mounts and modes do
    missing  driver embedded    there is no filter of system calls
                                use a kernel with CONFIG_SECCOMP_FILTER
    missing  driver docker      there is no engine
                                install Docker Engine, or name its socket with `--docker-socket`
    warn     cogni-init         none
                                images need a bridge of their own
    missing  git                not there
                                the relay needs 2.39 or newer; install it
    no driver enforces everything
    ");
}

/// An engine without root is not reported as one with remapped users, and the embedded driver needs root or a user
/// namespace.
#[test]
fn what_runs_without_root_is_reported_as_such() {
    insta::assert_snapshot!(changed_lines(|facts| engine_info(facts).is_rootless = true), @r"
    warn     rootless engine    the engine runs without root
                                a sandbox's user has another number outside of the engine's user namespace, and cannot open the run's socket; use an engine that runs as root
    ");
    insta::assert_snapshot!(changed_lines(|facts| (facts.is_root, facts.user_namespaces) = (false, 0)), @r"
    warn     user namespaces    no user may have any
                                only root can use the driver `embedded` here; `sysctl user.max_user_namespaces=10000` lets other users
    missing  driver embedded    this process does not run as root, and no user may have a user namespace
                                run it as root, or use Docker
    the driver `docker` enforces everything
    ");
}

#[test]
fn each_weakness_has_its_remedy() {
    insta::assert_snapshot!(changed_lines(|facts| facts.landlock = Some(1)), @r"
    warn     landlock           version 1, which is not used: it would keep agents from moving files
                                a kernel of 5.19 or newer keeps agents to their files twice; without it, mounts and modes do
    ");
    insta::assert_snapshot!(changed_lines(|facts| facts.landlock = Some(5)), @"ok       landlock           version 5: keeps agents to their files");
    insta::assert_snapshot!(changed_lines(|facts| facts.is_root = false), @r"
    warn     driver embedded    works without limits only: this process does not run as root
                                run it as root, or use Docker, or run without limits with `--allow-unlimited`
    the driver `docker` enforces everything
    ");
    let older = |limits_sockets| {
        changed_lines(|facts| (facts.cgroups.version, facts.limits_sockets) = (1, limits_sockets))
    };
    assert!(older(true).contains("buffers of sockets") && older(true).contains("a second limit"));
    assert!(older(false).contains("no limit for them except the machine's"), "{}", older(false));
    insta::assert_snapshot!(changed_lines(|facts| facts.cgroups.controllers = controller_set(["cpu", "memory"])), @r"
    ok       cgroups            version 2: cpu, memory
    warn     driver embedded    works without limits only: there are none on pids
                                mount the cgroup controllers, or run without limits with `--allow-unlimited`
    the driver `docker` enforces everything
    ");
    insta::assert_snapshot!(changed_lines(|facts| facts.docker = EngineProbe::Unresponsive("refused".to_owned())), @r"
    missing  driver docker      the engine does not answer: refused
                                start it, or look into its log
    the driver `embedded` enforces everything
    ");
    insta::assert_snapshot!(changed_lines(|facts| engine_info(facts).no_limits = vec!["swap", "pids"]), @r"
    missing  driver docker      the engine sets no limits on swap, pids
                                let the kernel have the cgroup controllers; for swap, boot with `swapaccount=1`
    the driver `embedded` enforces everything
    ");
    insta::assert_snapshot!(changed_lines(|facts| engine_info(facts).has_seccomp = false), @r"
    missing  driver docker      the engine sets no filter of system calls
                                use a kernel with CONFIG_SECCOMP_FILTER
    the driver `embedded` enforces everything
    ");
    insta::assert_snapshot!(changed_lines(|facts| engine_info(facts).shares_cgroup_namespace = true), @r"
    missing  driver docker      the engine is Podman without cgroup v2, and gives sandboxes the machine's cgroup namespace
                                boot this machine with cgroup v2, or use Docker Engine
    the driver `embedded` enforces everything
    ");
    insta::assert_snapshot!(changed_lines(|facts| engine_info(facts).has_userns_remap = true), @r"
    warn     userns-remap       on
                                a sandbox's user has another number outside of the engine's user namespace, and cannot open the run's socket; use an engine without it
    ");
    insta::assert_snapshot!(changed_lines(|facts| facts.inotify_instances = Some(64)), @r"
    warn     inotify            64 instances for a sandbox
                                `sysctl fs.inotify.max_user_instances=8192`: agents that watch files need some; with one user for all sandboxes, one of them may take all
    ");
    insta::assert_snapshot!(changed_lines(|facts| facts.user_limits = [("fs.epoll.max_user_watches", 100), ("RLIMIT_NPROC", 64), ("kernel.keys.maxkeys", 200)].into()), @r"
    warn     limits of a user   RLIMIT_NPROC is 64, below 512, fs.epoll.max_user_watches is 100, below 16384
                                raise them with `sysctl`, and processes with `ulimit -u` or `LimitNPROC=`: a sandbox may not start, or its programs fail
    ");
    insta::assert_snapshot!(changed_lines(|facts| facts.core_pattern = Some("|/usr/lib/systemd/systemd-coredump %P".to_owned())), @r"
    warn     core dumps         are piped to `/usr/lib/systemd/systemd-coredump %P`
                                `sysctl kernel.core_pattern=core`: the kernel starts that program as root for each crash in a sandbox, outside of its limits, and it reads what the sandbox chose
    ");
    insta::assert_snapshot!(changed_lines(|facts| engine_info(facts).has_runsc = false), @r"
    warn     runsc              not there
                                optional: gVisor keeps agents away from the kernel
    ");
    insta::assert_snapshot!(changed_lines(|facts| facts.git = Some("2.38.1 (Apple Git-140)".to_owned())), @r"
    missing  git                2.38.1 (Apple Git-140)
                                the relay needs 2.39 or newer; install it
    ");
    insta::assert_snapshot!(changed_lines(|facts| facts.free = Some(1 << 20)), @r"
    warn     space              1 MiB free at /run/cogni
                                workspaces of agents are there; make room, or choose another with `--run-dir`
    ");
}

/// CVE-2025-31133 and two others are fixed in 1.2.8 and in 1.3.3.
#[test]
fn a_runtime_with_known_vulnerabilities_is_reported() {
    let is_told = |name: &str, version: &str| {
        let runtime = Some((name.to_owned(), version.to_owned()));
        changed_lines(|facts| engine_info(facts).runtime = runtime).contains("CVE-2025-31133")
    };
    for version in ["1.1.5+ds1", "1.2.7", "1.3.0", "1.3.2", "1.0.0-rc95"] {
        assert!(is_told("runc", version), "{version}");
    }
    for version in ["1.2.8", "1.2.9", "1.3.3", "1.4.0-rc.3", "2.0.0", "unknown"] {
        assert!(!is_told("runc", version), "{version}");
    }
    assert!(!is_told("crun", "1.8.1"));
}

#[test]
fn the_cgroup_version_is_read_from_the_mounts() {
    let v1 = "cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu,cpuacct 0 0\n\
              cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n";
    let v2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nsdelegate 0 0\n";
    let both = format!("{v1}cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n");
    let found = |mounts: &str, lists: &str| {
        let CgroupSupport { version, controllers } =
            machine::probe_cgroups(mounts, |_: &Path| lists.to_owned());
        format!("{version} {}", controllers.into_iter().collect::<Vec<_>>().join(" "))
    };
    assert_eq!(found("proc /proc proc rw 0 0\n", ""), "0 ");
    assert_eq!(found(v1, ""), "1 cpu cpuacct memory");
    assert_eq!(found(v2, "cpuset cpu io memory pids\n"), "2 cpu cpuset io memory pids");
    assert_eq!(found(&both, ""), "1 cpu cpuacct memory");
    assert_eq!(found(&format!("{v2}{v1}"), "hugetlb\n"), "1 cpu cpuacct hugetlb memory");
    assert_eq!(found(&both, "hugetlb\n"), "1 cpu cpuacct hugetlb memory");
}

/// Each check has its line on any machine, and the exit status tells whether the drivers work.
#[test]
fn this_machine_is_checked() {
    let doctor = |flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
        let output = command.arg("doctor").args(flags).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    };
    let nowhere = ["--docker-socket", "/nowhere/docker.sock"];
    let (status, json) = doctor(&[&nowhere[..], &["--json"]].concat());
    let report: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(status == 0, report["ok"] == true);
    assert_eq!(report["drivers"]["docker"], false);
    let names =
        report["findings"].as_array().unwrap().iter().map(|finding| finding["name"].as_str());
    let names: Vec<_> = names
        .map(Option::unwrap)
        .filter(|name| !["podman", "buffers of sockets"].contains(name))
        .collect();
    insta::assert_snapshot!(names.join(", "), @"kernel, cgroups, user namespaces, seccomp, landlock, inotify, limits of a user, core dumps, driver embedded, driver docker, cogni-init, git, space, state directory, upstream, forge");
    let (again, text) = doctor(&nowhere);
    assert_eq!(again, status);
    let (first, kernel) = (text.lines().next().unwrap(), &report["findings"][0]["found"]);
    assert_eq!(first, format!("ok       kernel             {}", kernel.as_str().unwrap()));
}
