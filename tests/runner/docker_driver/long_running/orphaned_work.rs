//! L3, L7, R7: Tests of work that runs leave beside their branch in a workspace that later runs use.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use cogni_gateway::relay::delivery::DeliveryService;
use cogni_gateway::relay::delivery::outbox::WorkspaceRow;
use cogni_gateway::relay::repo::BranchKey;
use cogni_gateway::runner::branch_delivery::{BranchRequest, DeliveryTarget};
use cogni_gateway::runner::long_running::SandboxKey;
use cogni_gateway::runner::{RunInputs, RunPlan};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{LIMITS, LongRunningPoolFixture};
use crate::docker_driver::driver::shell_argv;
use crate::support::delivery::open_relay;
use crate::support::github_server::{RunningGithub, TOKEN};
use crate::support::installation::{TestInstallation, run};
use crate::support::run_command::list_entries;

/// L3: Work beside the branch is copied, so that the next run keeps the shared workspace. If names are too long to
/// copy, the workspace is moved instead; the branch is free all the same, and the work on it is delivered.
#[tokio::test(flavor = "multi_thread")]
async fn work_beside_a_branch_is_kept() {
    for (key, deep, next) in [("copied", "", "mine"), ("moved", DEEP, "")] {
        let shared_branch = SharedBranch::new().await;
        let pool = LongRunningPoolFixture::new(&shared_branch.place, LIMITS);
        let first =
            shared_branch.run(&pool, key, &format!("echo mine > .state; {deep} {BOTH}")).await;
        assert_eq!(delivery_of(&first), json!(["done", true]), "{key}: {first}");
        let mut left = shared_branch.left();
        let own = |path: &str| left.workspace.join(path).exists();
        assert!(left.is_exclusive() && own(".git/refs/heads/other") && own(".state"), "{left:?}");
        assert_eq!(left.left.as_deref(), Some(ELSEWHERE));
        // Git can read the copy, whichever user has written it.
        for root in [false, true] {
            if root {
                chown(&left.workspace, Some(0), Some(0)).unwrap();
                fs::set_permissions(&left.workspace, Permissions::from_mode(0o700)).unwrap();
            }
            let again = shared_branch.retry(&left.id);
            assert_eq!(again["step"], "done", "{key}: {again}");
            left = shared_branch.left();
            assert_eq!(left.left.as_deref(), Some(ELSEWHERE), "{key}");
            assert_eq!(
                file_owner(&left.workspace),
                file_owner(&left.workspace.join(".git")),
                "{key}"
            );
            assert_ne!(file_owner(&left.workspace), 0, "{key}");
        }

        let second = shared_branch.run(&pool, key, "cat one .state").await;
        assert_eq!(second["stdout"], format!("one\n{next}").trim_end().to_owned() + "\n", "{key}");
        assert_eq!(shared_branch.left(), left);
        shared_branch.relay.outbox().discard_item(&left.id).unwrap();
        assert_eq!(list_entries(&shared_branch.state().join("work")), [""; 0]);
        pool.stop().await;
    }
}

/// L7: A process was killed after the work was in the outbox and before its workspace was archived. The next run on the
/// branch archives it, and no sweep removes it before.
#[tokio::test(flavor = "multi_thread")]
async fn the_next_process_archives_what_a_killed_process_has_not() {
    let shared_branch = SharedBranch::new().await;
    let pool = LongRunningPoolFixture::new(&shared_branch.place, LIMITS);
    let first = shared_branch.run(&pool, "cut", &format!("echo mine > .state; {BOTH}")).await;
    assert_eq!(delivery_of(&first), json!(["done", true]), "{first}");
    let (left, outbox) = (shared_branch.left(), shared_branch.relay.outbox());
    let [home] = &shared_branch.homes()[..] else { panic!("{:?}", shared_branch.homes()) };
    // Two cases: only the row was written, and the workspace was being moved.
    for has_begun in [false, true] {
        if has_begun {
            fs::create_dir(home.join("more")).unwrap();
        } else {
            fs::remove_dir_all(&left.workspace).unwrap();
        }
        let cut = outbox.retain_workspace(&left, home, ELSEWHERE).unwrap();
        assert!(cut.needs_collection() && !cut.is_exclusive());
        drop(shared_branch.target("cut").await);
        assert_eq!(shared_branch.left(), left);
        assert!(left.workspace.join(".git/refs/heads/other").exists());
        assert_eq!(
            (home.join("more").exists(), left.workspace.join("more").exists()),
            (false, has_begun)
        );
    }
    let second = shared_branch.run(&pool, "cut", "cat one").await;
    assert_eq!(second["stdout"], "one\n", "{second}");
    pool.stop().await;
}

/// A long-running sandbox's branch in its own GitHub stand-in; its runs share a workspace.
struct SharedBranch {
    place: TestInstallation,
    forge: RunningGithub,
    relay: Arc<DeliveryService>,
}

impl SharedBranch {
    async fn new() -> Self {
        let github = RunningGithub::start().await;
        let relay = open_relay(&github);
        Self { place: TestInstallation::embedded(), forge: github, relay }
    }

    async fn target(&self, key: &str) -> DeliveryTarget {
        let (relay, branch) = (Arc::clone(&self.relay), self.branch(key));
        Box::pin(DeliveryTarget::acquire(
            relay,
            branch,
            None,
            Duration::ZERO,
            &CancellationToken::new(),
        ))
        .await
        .unwrap()
    }

    fn branch(&self, key: &str) -> BranchRequest {
        let (repository, key) = (self.forge.clone_url().parse().unwrap(), BranchKey::parse(key));
        BranchRequest {
            repository,
            key: key.unwrap(),
            base: None,
            pull_request: false,
            title: None,
            asked: String::new(),
            grant: None,
        }
    }

    async fn run(
        &self,
        pool_fixture: &LongRunningPoolFixture<'_>,
        key: &str,
        script: &str,
    ) -> Value {
        let target = Some(Box::pin(self.target(key)).await);
        // The runs' shared files are not part of any run's work.
        let script = format!("mkdir -p .git/info; echo .state >> .git/info/exclude; {script}");
        let branch = Some(self.branch(key));
        let key = SandboxKey::new("agent", key).preserving([".state"]);
        let (pool, cancel) = (&pool_fixture.pool, CancellationToken::new());
        let entered = pool.lock_key(&cancel, &key).await.unwrap();
        let plan = RunPlan { branch, ..self.place.run_plan("run", &shell_argv(&script)) };
        let begun = (plan, RunInputs { target, ..RunInputs::default() });
        run(Box::pin(pool.claim(&cancel, entered, &key, begun)).await.unwrap()).await
    }

    /// Retries in a separate process, because the test's process is not a program that makes sandboxes.
    fn retry(&self, id: &str) -> Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
        let output = command
            .env_clear()
            .args(["relay", "retry", id])
            .env("COGNI_STATE_DIR", self.state())
            .env("GITHUB_API_URL", self.forge.hub.url())
            .env("GITHUB_TOKEN", TOKEN)
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {printed}"))
    }

    fn left(&self) -> WorkspaceRow {
        let [left] = &self.relay.outbox().workspaces().unwrap()[..] else { panic!("it is one") };
        left.clone()
    }

    fn state(&self) -> PathBuf {
        self.forge.place.path().join("state")
    }

    fn homes(&self) -> Vec<PathBuf> {
        let homes = self.place.path().join("state/workspaces");
        list_entries(&homes).into_iter().map(|home| homes.join(home).join("workspace")).collect()
    }
}

fn file_owner(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().uid()
}

fn delivery_of(result: &Value) -> Value {
    json!([result["relay"]["step"], result["relay"]["is_pushed"]])
}

const ELSEWHERE: &str = "there are commits that are on other branches than the run's";

/// Makes one commit for the branch, and one beside it.
const BOTH: &str = "for name in one two; do
    echo $name > $name && git add $name && git commit -qm $name && git checkout -qB other || exit 1
done";

/// Makes the longest path that the agent can express; it is longer as seen from this machine.
const DEEP: &str = "name=$(printf %0200d 0); path=$name
for level in 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do path=$path/$name; done
mkdir -p $path/$(printf %060d 0) || exit 1;";
