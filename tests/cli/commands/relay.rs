//! Tests of `cogni-gateway relay`, which operators use.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use cogni_gateway::relay::delivery::outbox::{DeliveryOutbox, DeliveryRequest, StepOutcome};
use cogni_gateway::relay::delivery::statement::RunFacts;
use cogni_gateway::relay::repo::extract_commands::AnnouncedBranch;
use cogni_gateway::relay::repo::{ArtifactDir, BranchKey, BranchState, ObjectId, SandboxBranch};
use tempfile::TempDir;

use crate::support::repository::{commit_file, run_git};

/// L5, L7: Held work is listed with the command that applies it in a clone, and that command works.
#[test]
fn held_work_is_shown_and_applied() {
    let place = tempfile::tempdir().unwrap();
    let (state, id) = add_held_row(&place);
    let (code, said) = run_relay(&state, place.path(), &["status"]);
    assert_eq!(code, 1);
    let (said, kept) = said.split_once("kept: ").unwrap();
    assert!(
        kept.starts_with("1, with ") && kept.ends_with(" bytes, for 0 days at most\n"),
        "{kept}"
    );
    insta::assert_snapshot!(said.replace(&id, "ID").replace(&state.display().to_string(), "STATE"), @r"
    ID held: sandbox/task-1 of https://github.com/acme/site.git, from run run-1
        `.github/workflows/ci.yml`: it runs with the repository's secrets
        cogni-gateway relay apply ID --state-dir STATE
        cogni-gateway relay retry ID --state-dir STATE
        cogni-gateway relay retry --new-rules ID --state-dir STATE
        cogni-gateway relay discard ID --state-dir STATE
    ");

    let work = place.path().join("work");
    let (code, said) = run_relay(&state, &work, &["apply", &id]);
    let branch = format!("held/task-1-{}", &id[24..]);
    assert_eq!(
        (code, said),
        (0, format!("the work is in the branch `{branch}` of this repository\n"))
    );
    assert_eq!(run_git(&work, &["show", &format!("{branch}:made")]), "by an agent");
    let log = state.join("audit").join(format!("{id}.jsonl"));
    assert!(run_relay(&state, &work, &["status"]).1.contains(&log.display().to_string()));
    let report = cogni_gateway::telemetry::audit::verify::verify_file(&log, None).unwrap();
    assert!(report.finished && fs::read_to_string(&log).unwrap().contains("relay.applied"));
    let (_, line) = run_relay(&state, &work, &["apply", "--print", &id]);
    assert!(
        line.starts_with("git -c fetch.fsckObjects=true fetch '")
            && line.ends_with(&format!("refs/heads/{branch}'\n")),
        "{line}"
    );
}

/// L5: An agent has chosen the names of files, so no character of them is unseen.
#[test]
fn hidden_characters_are_shown_as_numbers() {
    let place = tempfile::tempdir().unwrap();
    let (state, _) = add_held_row_for(&place, "run-\u{200b}1", "`a\u{2060}\u{202e}b`: it is odd");
    let (_, said) = run_relay(&state, place.path(), &["status"]);
    assert!(
        said.contains("from run run-\\u{200b}1\n    `a\\u{2060}\\u{202e}b`: it is odd\n"),
        "{said}"
    );
}

/// L7: An empty or missing outbox is reported, and is no error.
#[test]
fn an_empty_outbox_is_no_error() {
    let place = tempfile::tempdir().unwrap();
    let state = place.path().join("state");
    let (code, said) = run_relay(&state, place.path(), &["status"]);
    assert_eq!((code, state.exists()), (2, false), "to look is not to make one");
    insta::assert_snapshot!(said.replace(&state.display().to_string(), "STATE"), @"error: no deliveries found: `STATE/outbox.sqlite` does not exist; see `--state-dir`");
    let (code, said) = run_relay(&state, place.path(), &["retry", "unknown"]);
    assert_eq!(code, 2);
    let status = run_relay(&state, place.path(), &["status"]);
    assert_eq!((status.0, status.1.as_str()), (0, "everything is delivered\n"));
    insta::assert_snapshot!(said, @r"error: no delivery `unknown` found; `cogni-gateway relay status` lists the deliveries");
    // New rules can be applied only to work that the operator has named.
    let (code, said) = run_relay(&state, place.path(), &["retry", "--due", "--new-rules"]);
    assert!(code == 2 && said.contains("cannot be used with"), "{said}");
}

/// L5: Held work can be discarded, and nothing else is removed.
#[test]
fn held_work_can_be_discarded() {
    let place = tempfile::tempdir().unwrap();
    let (state, id) = add_held_row(&place);
    let (code, said) = run_relay(&state, place.path(), &["discard", &id]);
    assert_eq!((code, said.as_str()), (0, "deleted\n"));
    assert!(!place.path().join("artifacts").exists());
    assert_eq!(run_relay(&state, place.path(), &["status"]).0, 0);
    assert_eq!(run_relay(&state, place.path(), &["discard", &id]).0, 2);
}

/// L6: A token is sent only to this machine or over TLS.
#[test]
fn an_api_without_tls_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let asked = |url: &str| {
        let flags = ["retry", "--due", "--github-api-url", url];
        run_relay(&place.path().join("state"), place.path(), &flags)
    };
    let (code, said) = asked("http://192.0.2.2/api/v3");
    assert_eq!(code, 2);
    insta::assert_snapshot!(said, @"error: `GITHUB_API_URL` would send a token over a network in the clear; give `https://`");
    for url in ["http://127.0.0.1:1/api/v3", "https://192.0.2.2/api/v3"] {
        assert_eq!(asked(url).0, 0);
    }
}

/// L4: A sweep never removes held work, whatever its age.
#[test]
fn a_sweep_removes_nothing_that_is_held() {
    let place = tempfile::tempdir().unwrap();
    let (state, id) = add_held_row(&place);
    let (code, said) = run_relay(&state, place.path(), &["sweep", "--older-than", "0s"]);
    assert_eq!((code, said.as_str()), (0, "removed: 0 delivered, 0 directories, 0 mirrors\n"));
    let work = place.path().join("work");
    assert_eq!(run_relay(&state, &work, &["apply", &id]).0, 0);
}

/// L5: If a rules file limits the age of kept work, a sweep removes older work.
#[test]
fn a_sweep_removes_work_beyond_its_maximum_age() {
    let place = tempfile::tempdir().unwrap();
    let (state, id) = add_held_row(&place);
    let rules = place.path().join("relay.toml");
    let sweep = |age: &str| {
        fs::write(&rules, format!("[kept]\nage = \"{age}\"\n")).unwrap();
        run_relay(&state, place.path(), &["sweep", "--relay-config", &rules.display().to_string()])
            .1
    };
    let removed = "removed: 0 delivered, 0 directories, 0 mirrors\n";
    let deleted = "held or failed deliveries and kept workspaces";
    // The first sweep of a machine cannot compare the clock, so that no work counts as old.
    assert!(sweep("0s").starts_with("deleted: nothing that is held"));
    // An earlier sweep has found the clock trustworthy.
    let path = state.join("sweep-clock.json");
    let note = fs::read_to_string(&path).unwrap();
    fs::write(&path, note.replace("\"is_trusted\":false", "\"is_trusted\":true")).unwrap();
    assert_eq!(sweep("1h"), format!("deleted: 0 {deleted}\n{removed}"));
    assert_eq!(sweep("0s"), format!("deleted: 1 {deleted}\n{removed}"));
    assert_eq!(run_relay(&state, place.path(), &["discard", &id]).0, 2);
}

/// L5: A run of the command line also reports how much work is kept, and does not begin if that is over the limit.
#[test]
fn a_run_with_a_branch_does_not_begin_if_too_much_work_is_kept() {
    let place = tempfile::tempdir().unwrap();
    let (state, id) = add_held_row(&place);
    let rules = place.path().join("relay.toml");
    let run = |works: u32| {
        fs::write(&rules, format!("[kept]\nworks = {works}\n")).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
            .args(["run", "--repo", "file:///nowhere", "--branch-key", "task-2"])
            .args(["--billing-account-id", "acct-1", "--relay-config"])
            .arg(&rules)
            .args(["--", "true"])
            .env("COGNI_STATE_DIR", &state)
            .env("COGNI_RUN_DIR", place.path())
            .env("LITELLM_MASTER_KEY", "sk-real")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let said = run(1);
    let count = regex::Regex::new("with [0-9]+ bytes").unwrap();
    let said = said.replace(&state.display().to_string(), "STATE");
    insta::assert_snapshot!(count.replace(&said, "with N bytes"), @"error: no run with a branch can begin: this host keeps 1 works that are held, have failed or are left over, with N bytes; 1 and 137438953472 are allowed; `cogni-gateway relay status --state-dir STATE` lists them, and `cogni-gateway relay discard ID --state-dir STATE` or `cogni-gateway relay sweep --kept-older-than AGE --state-dir STATE` makes room");
    let said = run(2);
    assert!(said.contains("work of earlier runs is kept") && said.contains("works=1"), "{said}");
    assert!(!said.contains("no run with a branch can begin"), "{said}");
    assert_eq!(run_relay(&state, place.path(), &["discard", &id]).0, 0);
}

/// L6: A credential that is given twice or incompletely is refused before anything is done.
#[test]
fn a_credential_is_given_once_and_whole() {
    let place = tempfile::tempdir().unwrap();
    let state = place.path().join("state");
    let told = [
        &["--github-app-id", "Iv1.x"][..],
        &["--github-token-file", "/dev/null"],
        &["--relay-committer", "no address"],
    ]
    .map(|flags| run_relay(&state, place.path(), &[&["retry", "--due"], flags].concat()).1);
    insta::assert_snapshot!(told.concat(), @r"
    error: both a token and an app are given; give one of them
    error: both `GITHUB_TOKEN` and its file are given; give one of them
    error: `--relay-committer` is `no address`; give `Name <email>`
    ");
}

/// Adds a held row with a bundle that git has made.
fn add_held_row(place: &TempDir) -> (std::path::PathBuf, String) {
    add_held_row_for(
        place,
        "run-1",
        "`.github/workflows/ci.yml`: it runs with the repository's secrets",
    )
}

fn add_held_row_for(place: &TempDir, run: &str, why: &str) -> (std::path::PathBuf, String) {
    let work = place.path().join("work");
    run_git(place.path(), &["init", "--quiet", "--initial-branch=main", "work"]);
    commit_file(&work, "README", "hello\n");
    let start: ObjectId = run_git(&work, &["rev-parse", "HEAD"]).parse().unwrap();
    run_git(&work, &["checkout", "--quiet", "-b", "sandbox/task-1"]);
    commit_file(&work, "made", "by an agent\n");
    let tip: ObjectId = run_git(&work, &["rev-parse", "HEAD"]).parse().unwrap();
    let tree: ObjectId = run_git(&work, &["rev-parse", "HEAD^{tree}"]).parse().unwrap();
    let artifacts = ArtifactDir::create(&place.path().join("artifacts")).unwrap();
    let bundle = artifacts.bundle_path().display().to_string();
    run_git(&work, &["bundle", "create", "--quiet", &bundle, "main..sandbox/task-1"]);
    run_git(&work, &["checkout", "--quiet", "main"]);
    run_git(&work, &["branch", "--quiet", "-D", "sandbox/task-1"]);

    let state = place.path().join("state");
    let outbox = DeliveryOutbox::open(&state.join("outbox.sqlite")).unwrap();
    let branch = SandboxBranch::from_key(BranchKey::parse("task-1").unwrap());
    let order = DeliveryRequest {
        repository: "https://github.com/acme/site".parse().unwrap(),
        state: BranchState { branch, exists: false, start, base: "main".into(), base_tip: start },
        announced: AnnouncedBranch { tip, tree, commits: 1, merges: 0, head: None },
        facts: RunFacts { run: run.to_owned(), ..RunFacts::default() },
        rules: None,
        host: None,
        artifacts: artifacts.directory().to_owned(),
        pull_request: None,
    };
    let job = outbox.add_job(&order).unwrap();
    let why = why.to_owned();
    (state, outbox.advance_job(&job, StepOutcome::Held { code: "policy", why }).unwrap().id)
}

/// L7: The relay's state directory must have a name that is text.
#[test]
fn a_state_directory_has_a_name_that_is_text() {
    let place = tempfile::tempdir().unwrap();
    let state = place.path().join(OsStr::from_bytes(b"state-\xff"));
    let (code, said) = run_relay(&state, place.path(), &["retry", "--due"]);
    assert_eq!(code, 2);
    let said = said.replace(&place.path().display().to_string(), "PLACE");
    insta::assert_snapshot!(said, @"error: `PLACE/state-�` is not UTF-8; choose another `--state-dir`");
}

fn run_relay(state: &Path, directory: &Path, arguments: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
        .arg("relay")
        .args(arguments)
        .current_dir(directory)
        .env("COGNI_STATE_DIR", state)
        .env("GITHUB_TOKEN", "ghp_given")
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(said).unwrap())
}
