//! Other ways to run a program in a sandbox on this machine, by their command lines.

use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cogni_gateway::sandbox::SandboxSpec;
use cogni_gateway::sandbox::spec::oci::{self, OciHostSettings};
use cogni_gateway::sandbox::spec::{
    BindMount, HOSTS_FILE, HOSTS_TEXT, MountAccess, RootSource, SandboxLimits, SandboxTask,
    WorkspaceMount,
};
use serde_json::{Value, json};

use super::RunTimes;

/// An image with a shell and little else, built by `docker/from-host`.
pub(super) const IMAGE: &str = "cogni-gateway-test:host";

pub(super) const PROGRAM: [&str; 3] = ["sh", "-c", "echo up"];

/// A command line; `{}` stands for a name that no other run has.
pub(super) struct RuntimeBundle(Vec<String>);

impl RuntimeBundle {
    pub(super) fn run_once(&self) -> RunTimes {
        static RUN: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("cogni-bench-{}-{}", std::process::id(), RUN.fetch_add(1, Ordering::Relaxed));
        let line: Vec<_> = self.0.iter().map(|part| part.replace("{}", &name)).collect();
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).stdin(Stdio::null()).stdout(Stdio::piped());
        let begun = Instant::now();
        let mut child = command.spawn().unwrap();
        let (mut word, mut stdout) = ([0; 3], child.stdout.take().unwrap());
        stdout.read_exact(&mut word).expect("it says a word");
        let first = begun.elapsed();
        let status = child.wait().unwrap();
        let whole = begun.elapsed();
        assert!(status.success() && word == *b"up\n", "{line:?}: {status}");
        RunTimes { first, whole }
    }

    pub(super) fn run_many(&self, parallel: usize, runs: usize) {
        let left = AtomicUsize::new(runs);
        let take =
            || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        thread::scope(|scope| {
            for _ in 0..parallel {
                scope.spawn(|| {
                    while take().is_ok() {
                        self.run_once();
                    }
                });
            }
        });
    }
}

/// `docker run` with the flags of the gateway's own containers, as `create_body` has them.
pub(super) fn docker_run() -> Result<RuntimeBundle, String> {
    require_program("docker")?;
    let found = Command::new("docker").args(["image", "inspect", IMAGE]).output().unwrap();
    if !found.status.success() {
        return Err(format!(
            "there is no engine, or no image `{IMAGE}`; `tests/run image` makes it"
        ));
    }
    let seccomp = concat!("seccomp=", env!("CARGO_MANIFEST_DIR"), "/config/seccomp.json");
    let own = "uid=1001,gid=1001,mode=0700";
    let tmpfs = [
        "/tmp:rw,nosuid,nodev,noexec,size=64m,mode=1777".to_owned(),
        format!("/run:rw,nosuid,nodev,noexec,size=8m,{own}"),
        format!("/workspace:rw,exec,nosuid,nodev,size=256m,{own}"),
    ];
    let flags = "run --rm --name {} --network none --cap-drop ALL --security-opt no-new-privileges --read-only \
        --user 1001:1001 --workdir /workspace --hostname sandbox --memory 512m --memory-swap 512m --cpus 1 \
        --pids-limit 256 --ulimit nofile=4096 --ulimit core=0 --ulimit fsize=4294967296 --oom-score-adj 500 \
        --ipc private --cgroupns private --log-driver none --security-opt";
    let mut line: Vec<_> =
        ["docker"].into_iter().chain(flags.split_whitespace()).map(str::to_owned).collect();
    line.push(seccomp.to_owned());
    line.extend(tmpfs.into_iter().flat_map(|tmpfs| ["--tmpfs".to_owned(), tmpfs]));
    line.push(IMAGE.to_owned());
    line.extend(PROGRAM.map(str::to_owned));
    Ok(RuntimeBundle(line))
}

/// runc with the configuration that the embedded driver makes of the same specification.
pub(super) fn runc_bundle(path: &Path) -> Result<RuntimeBundle, String> {
    require_program("runc")?;
    let path = path.join("runc");
    let (root, sock) = (path.join("root"), path.join("sock"));
    for folder in [&root, &sock] {
        fs::create_dir_all(folder).unwrap();
    }
    fs::create_dir(root.join("etc")).unwrap();
    fs::write(sock.join(HOSTS_FILE), HOSTS_TEXT).unwrap();
    let programs = program_mounts(&root);
    let spec = SandboxSpec {
        run: "bench".to_owned(),
        root: RootSource::Host,
        argv: PROGRAM.map(str::to_owned).into(),
        uid: 1001,
        env: [].into(),
        limits: SandboxLimits::default(),
        grace: Duration::from_secs(1),
        workspace: WorkspaceMount::None,
        mounts: vec![],
        volumes: vec![],
        socket_dir: sock,
        init: None,
        has_tunnels: false,
        task: SandboxTask::Agent,
    };
    let place = OciHostSettings {
        max_files: u64::MAX,
        root,
        programs,
        cgroup: Some(PathBuf::from("/cogni-bench-runc")),
        limits_sockets: false,
        is_rootless: false,
    };
    let mut config = serde_json::to_value(oci::build_oci_spec(&spec, &place)).unwrap();
    // The embedded driver gives each sandbox its own network; here the runtime makes one.
    for namespace in config["linux"]["namespaces"].as_array_mut().unwrap() {
        if namespace["type"] == "network" {
            *namespace = json!({ "type": "network" });
        }
    }
    // Each container has its own control group, by its name.
    config["linux"].as_object_mut().unwrap().remove("cgroupsPath");
    config["process"]["terminal"] = Value::Bool(false);
    fs::write(path.join("config.json"), config.to_string()).unwrap();
    let line = [
        "runc",
        "--root",
        &path.join("state").display().to_string(),
        "run",
        "--bundle",
        &path.display().to_string(),
        "{}",
    ];
    Ok(RuntimeBundle(line.map(str::to_owned).into()))
}

/// The programs of this machine that the embedded driver mounts; links are made again.
fn program_mounts(root: &Path) -> Vec<BindMount> {
    let mut programs = vec![];
    for path in ["/usr", "/bin", "/sbin", "/lib", "/lib64"].map(Path::new) {
        let Ok(found) = fs::symlink_metadata(path) else { continue };
        if found.is_symlink() {
            symlink(fs::read_link(path).unwrap(), root.join(path.strip_prefix("/").unwrap()))
                .unwrap();
        } else {
            programs.push(BindMount {
                source: path.into(),
                target: path.into(),
                access: MountAccess::ReadOnly,
            });
        }
    }
    programs
}

pub(super) fn bwrap_bundle() -> Result<RuntimeBundle, String> {
    require_program("bwrap")?;
    let flags = "bwrap --unshare-all --die-with-parent --new-session --clearenv --setenv PATH /usr/bin:/bin \
        --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc \
        --dev /dev --tmpfs /tmp --tmpfs /workspace --chdir /workspace --uid 1001 --gid 1001 --cap-drop ALL";
    let line = flags.split_whitespace().chain(PROGRAM).map(str::to_owned);
    Ok(RuntimeBundle(line.collect()))
}

fn require_program(program: &str) -> Result<(), String> {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).status();
    found.map(drop).map_err(|_| format!("`{program}` is not installed"))
}
