//! R3: Tests of an agent's escape attempts, in a sandbox of each driver.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::process;

use serde_json::Value;

use super::driver::TestedRunner;

/// Sockets and a process of this machine that no sandbox may reach.
pub(super) struct HostTargets {
    /// The arguments that tell the program about them.
    pub(super) facts: [String; 4],
    _abstract: UnixListener,
    _port: TcpListener,
}

impl HostTargets {
    pub(super) fn listen() -> Self {
        let name = format!("cogni-escape-{}", uuid::Uuid::now_v7());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        let facts = [
            format!("abstract={name}"),
            format!("port={}", port.local_addr().unwrap().port()),
            format!("host-pid={}", process::id()),
            format!("pids={PIDS}"),
        ];
        Self { facts, _abstract: UnixListener::bind_addr(&address).unwrap(), _port: port }
    }
}

/// R3: Each attempt of `tests/escape` is refused, in a sandbox of Docker Engine and of the embedded driver. The table
/// is written to `target/tmp/escape.txt`.
#[test]
fn nothing_gets_out_of_either_driver() {
    let runner = TestedRunner::new();
    let targets = HostTargets::listen();
    let mut table = BTreeMap::<_, Vec<_>>::new();
    for driver in DRIVERS {
        for (number, line) in run_attempts(&runner, driver, &targets.facts).lines().enumerate() {
            let words: Vec<_> = line.split('\t').map(str::to_owned).collect();
            let [area, what, word, why] = words.try_into().unwrap();
            let row = table.entry((number, area, what)).or_default();
            row.push(format!("{word}: {why}"));
        }
    }
    let text = format_table(&table);
    fs::write(Path::new(env!("CARGO_TARGET_TMPDIR")).join("escape.txt"), &text).unwrap();
    let is_held = |row: &Vec<String>| {
        row.len() == DRIVERS.len() && row.iter().all(|cell| cell.starts_with("held: "))
    };
    assert!(table.len() > 70 && table.values().all(is_held), "{text}");
}

/// R3: Connections that no process accepts take memory that no control group counts, so they end the sandbox.
#[test]
fn connections_that_no_process_accepts_end_the_sandbox() {
    let runner = TestedRunner::new();
    for driver in DRIVERS {
        let result = run(&runner, driver, &["fill=accept-queues".to_owned()]);
        assert_eq!((&result["ok"], &result["exit_code"]), (&false.into(), &137.into()), "{result}");
        let stderr = result["stderr"].as_str().unwrap();
        assert!(stderr.contains("wait for a process to accept them"), "{driver}: {stderr}");
    }
}

/// Returns the program's output in a sandbox whose workspace has only the program.
fn run_attempts(runner: &TestedRunner, driver: &str, facts: &[String]) -> String {
    run(runner, driver, facts)["stdout"].as_str().unwrap().to_owned()
}

/// Returns the result of a run of the program.
fn run(runner: &TestedRunner, driver: &str, facts: &[String]) -> Value {
    let workspace = runner.path().join(driver);
    fs::create_dir(&workspace).unwrap();
    fs::set_permissions(&workspace, fs::Permissions::from_mode(0o755)).unwrap();
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join(PROGRAM);
    fs::copy(&program, workspace.join("escape"))
        .unwrap_or_else(|error| panic!("{error}: make {PROGRAM} with `tests/run image`"));
    let (workspace, root) = (format!("{}:ro", workspace.display()), runner.path());
    let pids = PIDS.to_string();
    let root = root.to_str().unwrap();
    let flags = ["--driver", driver, "--workspace", &workspace, "--root", root, "--pids", &pids];
    let argv: Vec<_> = ["./escape"].into_iter().chain(facts.iter().map(String::as_str)).collect();
    let mut command = runner.prepare(&flags, &argv);
    if driver == "embedded" {
        command.env_remove("COGNI_IMAGE");
    }
    let output = command.output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

fn format_table(table: &BTreeMap<(usize, String, String), Vec<String>>) -> String {
    let mut text = format!("{:<11}{:<42}{:<52}{}\n", "", "", DRIVERS[0], DRIVERS[1]);
    for ((_, area, what), row) in table {
        writeln!(text, "{area:<11}{what:<42}{:<52}{}", row[0], row.get(1).map_or("", |cell| cell))
            .unwrap();
    }
    text
}

const DRIVERS: [&str; 2] = ["docker", "embedded"];

/// The program is static, so that it runs in any image.
pub(super) const PROGRAM: &str = "target/docker/escape";

/// The process limit; a fork bomb of this size ends soon.
pub(super) const PIDS: u32 = 64;
