//! R6, R7: Tests of the workspace store: stored workspaces are bounded in size and age, and a workspace in use is never
//! removed.

use std::fs;
use std::process::{Command, Output};
use std::time::Duration;

use cogni_gateway::base::digest::sha256_hex;
use cogni_gateway::runner::long_running::workspace_store::{PruneOutcome, WorkspaceOwner};
use cogni_gateway::runner::long_running::{
    LongRunningClaimError, LongRunningPoolLimits, SandboxKey, SandboxKeyScope,
};
use cogni_gateway::runner::{PreparedRun, RunInputs, RunPlan};
use cogni_gateway::sandbox::SandboxSpec;
use cogni_gateway::sandbox::spec::{SandboxLimits, WorkspaceMount};

use super::{LIMITS, LongRunningPoolFixture, claim_sandbox, sandbox_key, workspace_store};
use crate::docker_driver::driver::shell_argv;
use crate::support::installation::{TestInstallation, both_installations, run};
use crate::support::process::wait_until;

/// R7: A workspace that was not used for the retention time is removed; a younger one, or one in use, stays.
#[tokio::test(flavor = "multi_thread")]
async fn an_unused_workspace_is_removed() {
    let installation = TestInstallation::embedded();
    let (store, never_in_use) = (workspace_store(&installation), |_: &_| false);
    let write = shell_argv("cat state 2>/dev/null; echo mine > state");
    let pool = LongRunningPoolFixture::new(&installation, LIMITS);
    run(pool.claim(installation.run_plan("run-1", &write)).await).await;

    let [one] = &store.list().unwrap()[..] else { panic!("{:?}", store.list()) };
    let tenant = WorkspaceOwner {
        agent: "agent".to_owned(),
        branch: "branch".to_owned(),
        grant: None,
        account: None,
        repository: None,
        kind: None,
        line: None,
    };
    assert_eq!(one.owner, Some(tenant));
    // Its sandbox still exists.
    assert_eq!(store.prune_decision(one, Duration::ZERO, never_in_use), PruneOutcome::InUse);
    assert_eq!(store.prune(one, Duration::ZERO, never_in_use), PruneOutcome::InUse);
    pool.stop().await;

    assert_eq!(store.prune(one, Duration::from_hours(1), never_in_use), PruneOutcome::RecentlyUsed);
    assert_eq!(store.prune_expired(Duration::from_hours(1), never_in_use).unwrap(), []);
    assert_eq!(store.prune_decision(one, Duration::ZERO, never_in_use), PruneOutcome::Unused);
    let pool = LongRunningPoolFixture::new(&installation, LIMITS);
    let second = run(pool.claim(installation.run_plan("run-2", &write)).await).await;
    assert_eq!(second["stdout"], "mine\n", "{second}");
    pool.stop().await;
    // The workspace has changed since the decision.
    assert_eq!(store.prune(one, Duration::ZERO, never_in_use), PruneOutcome::RecentlyUsed);

    let swept = store.prune_expired(Duration::ZERO, never_in_use).unwrap();
    assert_eq!(
        swept.into_iter().map(|(_, fate)| fate).collect::<Vec<_>>(),
        [PruneOutcome::Removed]
    );
    assert_eq!(fs::read_dir(installation.path().join("state/workspaces")).unwrap().count(), 0);
    let pool = LongRunningPoolFixture::new(&installation, LIMITS);
    let third = run(pool.claim(installation.run_plan("run-3", &write)).await).await;
    assert_eq!(third["stdout"], "", "{third}");
    pool.stop().await;
}

/// R7: A workspace of an earlier version has no lock file. A removal that a process did not finish is finished by the
/// next.
#[test]
fn workspaces_of_earlier_processes_are_removed_too() {
    let installation = TestInstallation::embedded();
    let (store, below) =
        (workspace_store(&installation), installation.path().join("state/workspaces"));
    let home = below.join("0123456789abcdef0123456789abcdef");
    for path in [home.join("workspace"), below.join(".forgotten-x/workspace"), below.join("other")]
    {
        fs::create_dir_all(path).unwrap();
    }
    let [one] = &store.list().unwrap()[..] else { panic!("{:?}", store.list()) };
    assert_eq!(
        (&one.owner, store.prune_decision(one, Duration::ZERO, |_| false)),
        (&None, PruneOutcome::Unused)
    );
    assert!(!home.join("label.json").exists(), "to look is not to touch");
    store.prune_expired(Duration::from_hours(1), |_| false).unwrap();
    assert!(home.exists() && !below.join(".forgotten-x").exists());
    assert_eq!(store.prune(one, Duration::ZERO, |_| false), PruneOutcome::Removed);
    assert!(!home.exists() && below.join("other").exists());
}

/// R6, R7: A workspace beyond its limit ends its run, and blocks further runs until it is removed.
#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_that_is_full_ends_its_run_and_lets_no_other_begin() {
    let greedy = shell_argv("dd if=/dev/zero of=full bs=1M count=32 2>/dev/null; sleep 1000");
    for installation in both_installations() {
        let pool = LongRunningPoolFixture::new(&installation, LIMITS);
        let small =
            |run: &str, argv: &[&str]| bound_workspace(installation.run_plan(run, argv), 16 << 20);
        let full = run(pool.claim(small("run-fill", &greedy)).await).await;
        assert_eq!(full["error_code"], "workspace_full", "{full}");
        insta::allow_duplicates!(
            insta::assert_snapshot!(full["error"].as_str().unwrap(), @"the workspace holds more than 16 MiB, which is as much as it may (`max_workspace` of the limits)")
        );

        let (key, plan) = (sandbox_key(), small("run-next", &["true"]));
        let refused = Box::pin(claim_sandbox(&pool.pool, &key, plan)).await;
        let refused = refused.err().unwrap();
        assert!(matches!(refused, LongRunningClaimError::WorkspaceFull { .. }), "{refused}");
        let [one] = &workspace_store(&installation).list().unwrap()[..] else {
            panic!("there is another")
        };
        let message = refused.to_string().replace(&one.id, "ID");
        insta::allow_duplicates!(
            insta::assert_snapshot!(message, @"the workspace holds more than 16 MiB, which is as much as it may (`max_workspace` of the limits), including the files of earlier runs of `agent on branch`; an operator can delete the workspace with `cogni-gateway forget ID --apply`")
        );
        // Another key's workspace is not affected, and a larger limit helps as well.
        let other = SandboxKey::new("agent", "other");
        let other = run(pool.claim_for(other, small("run-other", &["true"])).await).await;
        assert_eq!(other["ok"], true, "{other}");
        let larger = bound_workspace(installation.run_plan("run-larger", &["ls"]), 64 << 20);
        let larger = run(pool.claim(larger).await).await;
        assert_eq!(larger["stdout"], "full\n", "{larger}");
        pool.stop().await;
    }
}

/// R6: The limit also holds for a workspace that is made for one run.
#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_of_one_run_is_bounded_too() {
    let greedy = shell_argv(
        "mkdir -p a/b; for n in 1 2 3; do dd if=/dev/zero of=a/b/$n bs=1M count=8 2>/dev/null; done; sleep 1000",
    );
    for installation in both_installations() {
        let mut plan = bound_workspace(installation.run_plan("run-fill", &greedy), 16 << 20);
        plan.spec.workspace = WorkspaceMount::Fresh;
        let full = run(PreparedRun::new(plan, RunInputs::default()).unwrap()).await;
        assert_eq!(full["error_code"], "workspace_full", "{full}");
        assert_eq!(installation.left(), "");
    }
}

/// R6: The last writes of a program are measured after it has ended, even if no check happened in between.
#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_is_measured_when_its_program_has_ended() {
    let installation = TestInstallation::embedded();
    let quick = shell_argv("dd if=/dev/zero of=full bs=1M count=32 2>/dev/null");
    let mut plan = bound_workspace(installation.run_plan("run-quick", &quick), 16 << 20);
    let pool = LongRunningPoolFixture::new(&installation, LIMITS);
    let long_running = run(pool.claim(plan.clone()).await).await;
    pool.stop().await;
    plan.spec.workspace = WorkspaceMount::Fresh;
    let own = run(PreparedRun::new(plan, RunInputs::default()).unwrap()).await;
    for full in [long_running, own] {
        assert_eq!(full["error_code"], "workspace_full", "{full}");
    }
}

/// R7: An operator removes workspaces by hand beside a running service: the command lists them first, and removes them
/// on request.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_lists_and_removes_workspaces() {
    let installation = TestInstallation::embedded();
    let pool = LongRunningPoolFixture::new(
        &installation,
        LongRunningPoolLimits { max_idle: Duration::ZERO, ..LIMITS },
    );
    let old = SandboxKey::new("agent", "talk")
        .scoped_to(key_scope("branch_key", "https://github.com/acme/x"));
    run(pool.claim_for(old, installation.run_plan("run-1", &shell_argv("echo > state"))).await)
        .await;
    wait_until(|| pool.pool.count() == 0, || "it does not go".to_owned());
    let held = SandboxKey::new("agent", "now").scoped_to(key_scope("state_key", ""));
    let held = pool.claim_for(held, installation.run_plan("run-2", &["true"])).await;

    let ids: Vec<_> = workspace_store(&installation)
        .list()
        .unwrap()
        .into_iter()
        .map(|workspace| workspace.id)
        .collect();
    let forget = |flags: &[&str]| {
        let output: Output = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
            .env_clear()
            .args(["forget", "--state-dir"])
            .arg(installation.path().join("state"))
            .args(flags)
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        let mut text = String::from_utf8(text).unwrap();
        for (id, name) in ids.iter().zip(["ONE", "TWO"]) {
            text = text.replace(id, name);
        }
        text = text.replace(installation.path().to_str().unwrap(), "PLACE");
        let ago = |line: &str| match (line.find(", used "), line.find(" ago: ")) {
            (Some(from), Some(to)) => format!("{}, used AGO{}", &line[..from], &line[to + 4..]),
            _ => line.to_owned(),
        };
        let lines: Vec<_> = text.lines().map(ago).collect();
        format!("{}\nstatus {}", lines.join("\n"), output.status.code().unwrap())
    };
    let messages = [
        forget(&[]),
        forget(&["--apply"]),
        forget(&["--older-than", "1h", "--apply"]),
        forget(&["--agent", "agent"]),
        forget(&["unknown", "--apply"]),
        forget(&["--agent", "agent", "--apply"]),
    ];
    insta::assert_snapshot!(messages.join("\n\n"), @r"
    ONE agent on talk of https://github.com/acme/x, grant g1, account a1, by branch_key, 12 KiB, used AGO: not in use
    TWO agent on now, grant g1, account a1, by state_key, 8 KiB, used AGO: in use
    1 can be forgotten; name them, and `--apply`
    status 0

    error: `--apply` alone would delete every workspace; give ids, `--agent` or `--older-than`
    status 2

    nothing of that is kept in `PLACE/state`
    status 0

    ONE agent on talk of https://github.com/acme/x, grant g1, account a1, by branch_key, 12 KiB, used AGO: not in use
    TWO agent on now, grant g1, account a1, by state_key, 8 KiB, used AGO: in use
    1 can be forgotten; `--apply` does it
    status 0

    error: no workspace has the id `unknown`; without an id, all workspaces are shown
    status 2

    ONE agent on talk of https://github.com/acme/x, grant g1, account a1, by branch_key, 12 KiB, used AGO: forgotten
    TWO agent on now, grant g1, account a1, by state_key, 8 KiB, used AGO: in use
    1 forgotten
    status 0
    ");
    let held = run(held).await;
    assert_eq!(held["ok"], true, "{held}");
    pool.stop().await;
}

fn key_scope(kind: &'static str, repository: &str) -> SandboxKeyScope {
    let (grant, account) = ("g1".to_owned(), "a1".to_owned());
    SandboxKeyScope { grant, account, repository: repository.to_owned(), kind }
}

/// R7: Two accounts, or two kinds of key, with the same key text share nothing.
#[tokio::test(flavor = "multi_thread")]
async fn accounts_and_kinds_of_key_have_workspaces_of_their_own() {
    let installation = TestInstallation::embedded();
    let pool = LongRunningPoolFixture::new(&installation, LIMITS);
    let write = shell_argv("cat state 2>/dev/null; echo $RUN_ID >> state");
    let of = |account: &str, kind| SandboxKeyScope {
        account: account.to_owned(),
        ..key_scope(kind, "")
    };
    let mut seen = vec![];
    for (number, scope) in [
        of("acme", "state_key"),
        of("globex", "state_key"),
        of("acme", "work_item"),
        of("acme", "branch_key"),
        of("acme", "state_key"),
    ]
    .into_iter()
    .enumerate()
    {
        let plan = installation.run_plan(&format!("run-{number}"), &write);
        let result =
            run(pool.claim_for(SandboxKey::new("agent", "42").scoped_to(scope), plan).await).await;
        seen.push(result["stdout"].as_str().unwrap().to_owned());
    }
    assert_eq!(seen, ["", "", "", "", "run-0\n"]);
    pool.stop().await;
}

/// R7: A workspace that an earlier version stored under a key text goes, once, to the first key that may have it and
/// has the same branch.
#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_of_an_earlier_version_is_moved_once() {
    let installation = TestInstallation::embedded();
    // The name that the earlier version gave it.
    let old = sha256_hex(b"agent\0g1\n\n42")[..32].to_owned();
    let home = installation.path().join("state/workspaces").join(&old);
    let earlier = |line: &str| {
        fs::create_dir_all(home.join("workspace")).unwrap();
        fs::write(home.join("workspace/state"), "from before\n").unwrap();
        let label = format!(
            "{{\"agent\":\"agent\",\"branch\":\"42\",\"grant\":\"g1\",\"repository\":\"\"{line}}}"
        );
        fs::write(home.join("label.json"), label).unwrap();
    };
    let read = shell_argv("cat state 2>/dev/null");
    let pool = LongRunningPoolFixture::new(&installation, LIMITS);
    let claim = async |kind, number: u32, inherits: bool| {
        let key = SandboxKey::new("agent", "42").scoped_to(key_scope(kind, ""));
        let key = if inherits { key.with_inheritance() } else { key };
        let plan = installation.run_plan(&format!("run-{number}"), &read);
        run(pool.claim_for(key, plan).await).await["stdout"].as_str().unwrap().to_owned()
    };
    earlier(",\"line\":{\"repository\":\"r\",\"branch_key\":\"42\"}");
    assert_eq!(
        claim("branch_key", 0, true).await,
        "",
        "it was for a branch, and this run is for none"
    );
    earlier("");
    assert_eq!(claim("state_key", 1, false).await, "", "no record says that it is this account's");
    assert!(home.exists());
    assert_eq!(claim("work_item", 2, true).await, "from before\n");
    assert!(!home.exists());
    pool.stop().await;
    let pool = LongRunningPoolFixture::new(&installation, LIMITS);
    let key =
        SandboxKey::new("agent", "42").scoped_to(key_scope("work_item", "")).with_inheritance();
    let again = run(pool.claim_for(key, installation.run_plan("run-3", &read)).await).await;
    assert_eq!(again["stdout"], "from before\n", "it stays");
    pool.stop().await;
}

fn bound_workspace(plan: RunPlan, max_workspace: u64) -> RunPlan {
    let limits = SandboxLimits { max_workspace, ..SandboxLimits::default() };
    RunPlan { spec: SandboxSpec { limits, ..plan.spec.clone() }, ..plan }
}
