//! L1–L7: Tests of a run's commits on their way to a branch and a pull request, from a sandbox of either driver.

use std::fs;
use std::process::Command;

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::fakes::github_server::{GithubOperation, InjectedFailure};
use cogni_gateway::relay::delivery::statement::ProvenanceStatement;
use cogni_gateway::telemetry::audit::AuditSigningKey;
use serde_json::{Value, json};

use super::driver::{TestedRunner, shell_argv};
use crate::support::github_server::{self, NAME, TOKEN};
use crate::support::process::{ChildProcess, wait_until};
use crate::support::repository::run_git;
use crate::support::run_command::{Result, list_entries};

/// L1, L2, L6: One run's commits are pushed and get a pull request, and the next run starts from them.
#[tokio::test(flavor = "multi_thread")]
async fn a_runs_commits_reach_a_pull_request() {
    let setup = DeliverySetup::new().await;
    let flags = ["--branch-key", "task-9", "--pull-request"];
    let first = setup.run(&flags, "echo one > one && git add one && git commit -qm 'Add one'");
    assert_eq!(first.facts(), json!([true, 0, null]), "{}", first.json);
    let relay = &first.json["relay"];
    assert_eq!(
        json!([relay["branch"], relay["verdict"], relay["step"]]),
        json!(["sandbox/task-9", "push", "done"])
    );
    let pull = setup.forge.hub.pulls(NAME).remove(0);
    assert_eq!((pull.head.as_str(), pull.base.as_str()), ("sandbox/task-9", "main"));
    assert_eq!(relay["pull_request_url"], format!("{}/{NAME}/pull/1", setup.forge.hub.url()));

    let second =
        setup.run(&flags, "cat one && echo two > two && git add two && git commit -qm 'Add two'");
    assert_eq!(second.json["stdout"], "one\n", "{}", second.json);
    assert_eq!(setup.forge.hub.pulls(NAME).len(), 1, "the second run has asked again");
    let log = run_git(&setup.forge.bare(), &["log", "--format=%s", "sandbox/task-9"]);
    assert_eq!(log, "Add two\nAdd one\nchange README");
    assert_eq!(
        second.json["relay"]["head"],
        run_git(&setup.forge.bare(), &["rev-parse", "sandbox/task-9"])
    );
    assert_no_token([&first, &second]);
}

/// L5: Work that a rule forbids is kept here complete, and the printed command applies it in a clone.
#[tokio::test(flavor = "multi_thread")]
async fn work_that_is_held_is_kept() {
    let setup = DeliverySetup::new().await;
    let workflow = "mkdir -p .github/workflows && echo on: > .github/workflows/x.yml && git add . && git commit -qm x";
    let result = setup.run(&["--branch-key", "held"], workflow);
    let relay = &result.json["relay"];
    assert_eq!(json!([relay["step"], relay["is_pushed"]]), json!(["held", false]), "{relay}");
    assert_eq!((result.json["ok"].clone(), result.status), (json!(true), 3));
    let line = relay["apply"].as_str().unwrap();
    let clone = setup.runner.path().join("clone");
    run_git(
        &setup.runner.path(),
        &["clone", "--quiet", &setup.forge.bare().display().to_string(), "clone"],
    );
    let words: Vec<_> =
        line.strip_prefix("git ").unwrap().split(' ').map(|word| word.trim_matches('\'')).collect();
    run_git(&clone, &words);
    let branch = line.trim_end_matches('\'').rsplit(':').next().unwrap();
    assert!(branch.starts_with("refs/heads/held/held-"), "{line}");
    let files = run_git(&clone, &["ls-tree", "-r", "--name-only", branch]);
    assert_eq!(files, ".github/workflows/x.yml\nREADME");
}

/// L1: A run without a branch key is no error, and a run without commits delivers nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_may_have_nothing_to_deliver() {
    let setup = DeliverySetup::new().await;
    // The workspace would be empty, and the agent would be paid for working in it.
    for flags in [&[][..], &["--state-key", "memory"]] {
        let refused = setup.prepare(flags, &["true"]).output().unwrap();
        let output = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(2), "{output}");
        assert!(output.contains("`--branch-key KEY`"), "{output}");
    }
    let root = setup.runner.path();
    let files = root.join("files");
    fs::create_dir(&files).unwrap();
    let own = ["--root", root.to_str().unwrap(), "--workspace", files.to_str().unwrap()];
    let without = setup.run(&own, "ls -A");
    assert_eq!(json!([without.json["ok"], without.json["stdout"]]), json!([true, ""]));
    assert_eq!(
        without.json["relay"]["why"],
        "the run has no branch: give `--branch-key` or `--work-item`, or `--branch-by-state`"
    );
    let unasked = setup.run(&[&own[..], &["--state-key", "memory"]].concat(), "true");
    assert_eq!(unasked.json["relay"], without.json["relay"]);
    let run = setup.run(&["--state-key", "memory", "--branch-by-state"], "true");
    assert_eq!(run.json["relay"]["branch"], "sandbox/memory");
    let idle = setup.run(&["--work-item", "idle"], "git log --format=%s");
    assert_eq!(idle.json["stdout"], "change README\n", "{}", idle.json);
    assert_eq!(
        idle.json["relay"],
        json!({"branch": "sandbox/idle", "why": "nothing was committed"})
    );
    assert_eq!(list_entries(&setup.runner.path().join("state/work")), [""; 0]);
}

/// L3, R5: A delivery starts one sandbox if there are only commits, and two sandboxes at most whatever the workspace
/// holds.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_starts_two_sandboxes_at_most() {
    let setup = DeliverySetup::new().await;
    let commit = "echo one > one && git add one && git commit -qm 'Add one'";
    let beside = format!("{commit} && git checkout -qb x && git commit -q --allow-empty -m 2");
    for (key, script, expected) in [
        ("commit", commit, 1),
        ("detached", &*format!("{commit} && git checkout -q --detach"), 1),
        ("nothing", "true", 2),
        ("files", "echo one > one", 2),
        ("elsewhere", &*format!("git checkout -qb x && {commit}"), 2),
        ("beside", &*beside, 2),
        ("unreadable", "rm -rf .git", 2),
    ] {
        let result = setup.run(&["--branch-key", key], script);
        // The agent's own sandbox is one of them.
        let started = result.shown.matches("the sandbox runs").count();
        assert_eq!(started, 1 + expected, "{key}: {}\n{}", result.json, result.shown);
    }
}

/// R5, L7: A second interrupt ends the wait for a remote that hangs; the delivery continues later from the outbox.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_interrupt_detaches_a_delivery() {
    let setup = DeliverySetup::new().await;
    setup.forge.hub.inject(GithubOperation::Push, InjectedFailure::HoldBefore, 1);
    let work = shell_argv("echo work > work && git add work && git commit -qm work");
    let mut process = ChildProcess::start(&mut setup.prepare(&["--branch-key", "left"], &work), "");
    setup.forge.hub.response_gate().wait_for_waiting(1).await;
    let is_over = || {
        process.signal("INT");
        process.has_ended()
    };
    wait_until(is_over, || "it waits for the remote".to_owned());
    assert_eq!(process.wait().code(), Some(3), "{}", process.output());
    setup.forge.hub.response_gate().allow_answers(1);
    let (_, output) = setup.relay(&["retry", "--due"]);
    let branches = run_git(&setup.forge.bare(), &["branch", "--list", "sandbox/left"]);
    assert_eq!(branches.trim(), "sandbox/left", "{output}");
}

/// L6: The key that signs the run's log also signs its statement, and must not be in the work, however the key is
/// configured.
#[tokio::test(flavor = "multi_thread")]
async fn the_key_of_a_runs_log_signs_its_statement() {
    let setup = DeliverySetup::new().await;
    let (seed, file) = ("5".repeat(64), setup.runner.path().join("seed"));
    fs::write(&file, &seed).unwrap();
    let key = ["--audit-signing-key-file", file.to_str().unwrap()];
    let flags = |branch| [&["--branch-key", branch][..], &key].concat();
    let result = setup.run(&flags("signed"), "echo 1 > one && git add one && git commit -qm one");
    let head = result.json["relay"]["head"].as_str().unwrap();
    let note = run_git(&setup.forge.bare(), &["notes", "--ref=cogni", "show", head]);
    let public =
        *AuditSigningKey::new(Some(&SecretString::new(seed.clone()))).unwrap().public_key();
    assert!(ProvenanceStatement::verify(&note, &public).is_ok(), "{note}");
    let script = format!("echo {seed} > one && git add one && git commit -qm one");
    let result = setup.run(&flags("told"), &script);
    assert_eq!(result.json["relay"]["verdict"], "hold", "{}", result.json);
}

/// L3: If an agent deletes its repository, the rest of its work is kept.
#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_that_cannot_be_read_is_kept() {
    let setup = DeliverySetup::new().await;
    let result = setup.run(&["--branch-key", "gone"], "echo work > work && rm -rf .git");
    let why = result.json["relay"]["why"].as_str().unwrap();
    let workspace = why.rsplit('`').nth(1).unwrap();
    assert_eq!(fs::read_to_string(format!("{workspace}/work")).unwrap(), "work\n", "{why}");
    // The workspace is in its own directory, and there is no other.
    let works = setup.runner.path().join("state/work");
    let [id] = &list_entries(&works)[..] else { panic!("{:?}", list_entries(&works)) };
    assert_eq!(list_entries(&works.join(id)), ["workspace"]);
}

/// A1, L3: Files that the agent gets with its task are not part of its work, and the repository's own instructions
/// stay.
#[tokio::test(flavor = "multi_thread")]
async fn files_given_to_an_agent_are_not_its_work() {
    let setup = DeliverySetup::new().await;
    let agents = setup.runner.path().join("agents");
    fs::create_dir(&agents).unwrap();
    let script = "cat README >&2; echo work > work; git add -A && git commit -qm work; echo '{\"payloads\":[],\"meta\":{}}'";
    let entry = format!(
        "name = 'claw'\ndescription = 'as OpenClaw'\nversion = 1\nsetup = 'openclaw'\nargv = ['sh', '-c', '''{script}''']\n\
         [files]\n'AGENTS.md' = 'ours'\nREADME = 'ours, too'\n"
    );
    fs::write(agents.join("claw.toml"), entry).unwrap();
    let agents = agents.to_str().unwrap();
    let agent = ["--agents-dir", agents, "--agent", "claw", "--message", "x", "--model", "m"];
    let result = setup.run_argv(&[&["--branch-key", "given"], &agent[..]].concat(), &[]);
    assert_eq!(result.facts(), json!([true, 0, null]), "{}", result.json);
    let files = run_git(&setup.forge.bare(), &["ls-tree", "-r", "--name-only", "sandbox/given"]);
    assert_eq!(files, "README\nwork");
    assert_ne!(result.json["stderr"], "ours, too", "a file of the repository is replaced");
}

/// A1, L5: Work that the agent's entry forbids is held, although the host's rules would push it. Changes outside the
/// agent's rules are reviewed as usual.
#[tokio::test(flavor = "multi_thread")]
async fn an_agents_own_rules_judge_its_work() {
    let setup = DeliverySetup::new().await;
    let agents = setup.runner.path().join("agents");
    fs::create_dir(&agents).unwrap();
    let script = "mkdir docs; echo x > docs/x; git add -A && git commit -qm work; echo '{\"payloads\":[],\"meta\":{}}'";
    let rule =
        "[[relay.policy.paths]]\nwhy = 'people write it'\nverdict = 'hold'\nmatch = ['docs/**']\n";
    for (name, rules) in [("plain", ""), ("strict", rule)] {
        let entry = format!(
            "name = '{name}'\ndescription = 'd'\nversion = 1\nargv = ['sh', '-c', '''{script}''']\n{rules}"
        );
        fs::write(agents.join(format!("{name}.toml")), entry).unwrap();
    }
    let agents = agents.to_str().unwrap();
    let relayed = |name: &str| {
        let agent = ["--agents-dir", agents, "--agent", name, "--message", "x", "--model", "m"];
        let result = setup.run_argv(&[&["--branch-key", name], &agent[..]].concat(), &[]);
        let relay = &result.json["relay"];
        json!([relay["step"], relay["verdict"], relay["why"]])
    };
    assert_eq!(relayed("plain"), json!(["done", "push", null]));
    assert_eq!(relayed("strict"), json!(["held", "hold", "`docs/x`: people write it"]));
}

pub(super) struct DeliverySetup {
    pub(super) runner: TestedRunner,
    pub(super) forge: github_server::RunningGithub,
}

impl DeliverySetup {
    pub(super) async fn new() -> Self {
        Self { runner: TestedRunner::new(), forge: github_server::RunningGithub::start().await }
    }

    pub(super) fn run(&self, flags: &[&str], script: &str) -> Result {
        self.run_argv(flags, &shell_argv(script))
    }

    pub(super) fn prepare(&self, flags: &[&str], argv: &[&str]) -> Command {
        let url = self.forge.clone_url();
        let flags = [&["--repo", &url], flags].concat();
        self.reaching(self.runner.prepare(&flags, argv))
    }

    /// Runs `cogni-gateway relay` with all its settings, to its end.
    pub(super) fn relay(&self, words: &[&str]) -> (i32, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
        command.env_clear().arg("relay").args(words);
        let output = self.reaching(command).output().unwrap();
        let printed = [output.stdout, output.stderr].concat();
        (output.status.code().unwrap(), String::from_utf8(printed).unwrap())
    }

    fn reaching(&self, mut command: Command) -> Command {
        command
            .env("COGNI_STATE_DIR", self.runner.path().join("state"))
            .env("GITHUB_API_URL", self.forge.hub.url())
            .env("GITHUB_TOKEN", TOKEN);
        command
    }

    fn run_argv(&self, flags: &[&str], argv: &[&str]) -> Result {
        let mut command = self.prepare(flags, argv);
        let output = command.output().unwrap();
        let shown = String::from_utf8_lossy(&output.stderr).into_owned();
        let json: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{shown}"));
        self.runner.assert_nothing_is_left(json["run_id"].as_str().unwrap());
        Result { status: output.status.code().unwrap(), json, shown }
    }
}

/// L6: Asserts that the token is in no output.
fn assert_no_token<'a>(results: impl IntoIterator<Item = &'a Result>) {
    for Result { json, shown, .. } in results {
        assert!(!json.to_string().contains(TOKEN) && !shown.contains(TOKEN), "{json}\n{shown}");
    }
}
