//! R3, R6: Tests of host users: each sandbox has its own user on this machine, and its own share of what the kernel
//! counts per user.

use std::fs::{self, Metadata};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use cogni_gateway::runner::long_running::workspace_store::WorkspaceStore;
use cogni_gateway::runner::long_running::{LongRunningPool, LongRunningPoolLimits, SandboxKey};
use cogni_gateway::runner::{PreparedRun, RunInputs, RunPlan};
use cogni_gateway::sandbox::spec::WorkspaceMount;
use cogni_gateway::sandbox::{SandboxSpec, UserRange};
use serde_json::Value;
use tokio::time::{Duration, sleep};

use crate::docker_driver::long_running::claim_sandbox;
use crate::support::installation::{TestInstallation, run};
use crate::support::process::TEST_TIMEOUT;
use crate::support::run_command::shell_argv;

/// A run whose workspace is a directory that the host can see.
fn run_plan(installation: &TestInstallation, name: &str, script: &str) -> RunPlan {
    let plan = installation.run_plan(name, &shell_argv(script));
    RunPlan { spec: SandboxSpec { workspace: WorkspaceMount::Fresh, ..plan.spec.clone() }, ..plan }
}

fn result_stdout(result: &Value) -> &str {
    assert_eq!(result["ok"], true, "{result}");
    result["stdout"].as_str().unwrap().trim()
}

/// Returns when the sandbox has made the file.
async fn wait_for_metadata(path: &Path) -> Metadata {
    let wait = async {
        loop {
            match fs::metadata(path) {
                Ok(found) => return found,
                Err(_) => sleep(Duration::from_millis(10)).await,
            }
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, wait)
        .await
        .unwrap_or_else(|_| panic!("no {}", path.display()))
}

/// R3: Files, socket and processes of a sandbox belong to one user, and no other sandbox has that user.
#[tokio::test]
async fn two_sandboxes_are_two_users_of_this_machine() {
    let installation = TestInstallation::embedded();
    let script = "umask 077; id -u; echo secret > secret; while [ ! -e go ]; do sleep 0.05; done";
    let runs = ["run-one", "run-two"].map(|name| {
        PreparedRun::new(run_plan(&installation, name, script), RunInputs::default()).unwrap()
    });
    let homes = runs.each_ref().map(|run| run.workspace_path().unwrap().to_owned());
    let look = async {
        let mut users = vec![];
        for home in &homes {
            let uid = wait_for_metadata(&home.join("secret")).await.uid();
            let socket = fs::metadata(home.parent().unwrap().join("sock/llm.sock")).unwrap();
            let own = fs::metadata(home).unwrap();
            assert_eq!([own.uid(), own.gid(), socket.uid()], [uid; 3]);
            let modes = [&own, &socket].map(|found| found.permissions().mode() & 0o777);
            assert_eq!(modes, [0o700, 0o600]);
            users.push(uid.to_string());
        }
        for home in &homes {
            fs::write(home.join("go"), "").unwrap();
        }
        users
    };
    let [one, two] = runs.map(run);
    let (one, two, users) = tokio::join!(one, two, look);
    assert_eq!([result_stdout(&one), result_stdout(&two)], users[..]);
    assert_ne!(users[0], users[1]);
    assert!(
        users.iter().all(|uid| UserRange::DEFAULT_RANGE.contains(uid.parse().unwrap())),
        "{users:?}"
    );
}

/// R3: A sandbox that uses up its user's share leaves other sandboxes theirs; under one shared user, it would not.
#[tokio::test]
async fn a_sandbox_that_uses_up_its_users_share_leaves_others_theirs() {
    let installation = TestInstallation::embedded();
    let take = format!("while (syscall({}, 0) >= 0) {{ $n++ }}", libc::SYS_inotify_init1);
    // Enough processes to hold more inotify instances than one user may have.
    let greedy = format!(
        "for i in 1 2 3 4 5 6 7 8 9; do perl -e '{take} sleep 600' & done; sleep 0.5; \
         perl -e '{take} exit($n > 0)' && touch full; while [ ! -e go ]; do sleep 0.05; done; kill $(jobs -p)"
    );
    let modest = format!("perl -e '{take} print $n > 0 ? \"some\" : \"none\"'");
    let greedy =
        PreparedRun::new(run_plan(&installation, "run-greedy", &greedy), RunInputs::default())
            .unwrap();
    let home = greedy.workspace_path().unwrap().to_owned();
    let look = async {
        wait_for_metadata(&home.join("full")).await;
        let uid = fs::metadata(&home).unwrap().uid();
        let other = run(PreparedRun::new(
            run_plan(&installation, "run-other", &modest),
            RunInputs::default(),
        )
        .unwrap())
        .await;
        let shared = UserRange::single_user(uid);
        let same = RunPlan { uids: shared, ..run_plan(&installation, "run-same", &modest) };
        let same = run(PreparedRun::new(same, RunInputs::default()).unwrap()).await;
        fs::write(home.join("go"), "").unwrap();
        [other, same]
    };
    let (_, [other, same]) = tokio::join!(run(greedy), look);
    assert_eq!([result_stdout(&other), result_stdout(&same)], ["some", "none"]);
}

/// R6: An operator can give all sandboxes one user, for images that need it.
#[tokio::test]
async fn an_operator_may_give_all_sandboxes_one_user() {
    let installation = TestInstallation::embedded();
    let fixed = RunPlan {
        uids: "1001".parse().unwrap(),
        ..run_plan(&installation, "run-fixed", "id -u; id -g")
    };
    assert_eq!(
        result_stdout(&run(PreparedRun::new(fixed, RunInputs::default()).unwrap()).await),
        "1001\n1001"
    );
}

/// R6, R7: A stored workspace belongs to its next sandbox, whatever user that sandbox has; targets of links do not.
#[tokio::test]
async fn a_stored_workspace_belongs_to_its_next_user() {
    let installation = TestInstallation::embedded();
    let outside = installation.path().join("outside");
    fs::write(&outside, "mine").unwrap();
    let store = WorkspaceStore::in_state_dir(&installation.path());
    let uses = |name: &'static str, uids: &str, script: &str| {
        let plan = run_plan(&installation, name, script);
        let plan = RunPlan { uids: uids.parse().unwrap(), ..plan };
        let pool = LongRunningPool::new(&store, TERMS);
        async move {
            let key = SandboxKey::new("agent", "branch");
            let prepared = Box::pin(claim_sandbox(&pool, &key, plan)).await.unwrap();
            let home = prepared.workspace_path().unwrap().to_owned();
            let result = run(prepared).await;
            (result_stdout(&result).to_owned(), home)
        }
    };
    // The range depends on this process, because the locks are shared by the whole machine.
    let first = 1_950_000_000 + 8 * std::process::id();
    let ranges = [0, 4].map(|offset| format!("{}-{}", first + offset, first + offset + 3));
    let [before, after] = ranges.each_ref();
    let fill = "umask 077; mkdir -p deep/er; echo one > deep/er/file; id -u";
    let (first, home) = Box::pin(uses("run-one", before, fill)).await;
    symlink(&outside, home.join("link")).unwrap();
    let change = "umask 077; cat deep/er/file; echo two >> deep/er/file; rm link; ln deep/er/file other; id -u";
    let (second, _) = Box::pin(uses("run-two", after, change)).await;
    let (text, second) = second.split_once('\n').unwrap();
    assert_eq!(text, "one");
    assert_ne!(first, second);
    assert_eq!(fs::metadata(home.join("deep/er/file")).unwrap().uid().to_string(), second);
    assert_eq!(fs::metadata(&outside).unwrap().uid(), 0);
    // The range is the same: the user is free again, so no owner changes.
    let (third, _) = Box::pin(uses("run-three", after, "id -u")).await;
    assert_eq!(third, second);
}

const TERMS: LongRunningPoolLimits = LongRunningPoolLimits {
    max_sandboxes: 1,
    max_runs: 1,
    max_age: Duration::from_hours(1),
    max_idle: Duration::from_hours(1),
    wait: Duration::from_secs(20),
};
