//! L5, L7: Tests of recorded rules: work is reviewed by the rules that were in force when it was collected, whichever
//! process resumes it and whatever the host's files say then.

use std::fs;

use cogni_gateway::relay::delivery::outbox::{DeliveryJob, DeliveryOutbox, DeliveryStep};
use cogni_gateway::relay::delivery::rules::{AgentReviewRules, ReviewRules};
use cogni_gateway::relay::delivery::statement::ProvenanceStatement;
use cogni_gateway::relay::repo::review::RelayConfig;

use super::killed::{retry_command, run_retry, state_dir};
use super::run_job::{make_work, open_relay, signing_key};
use crate::support::github_server::RunningGithub;
use crate::support::repository::run_git;

/// L5, L7: A retry reviews by the rules of the run. It uses the host's current rules only if an operator asks for them.
#[tokio::test(flavor = "multi_thread")]
async fn work_is_reviewed_by_its_recorded_rules() {
    let github = RunningGithub::start().await;
    let strict = RelayConfig::parse("[policy]\nhold_files = 0\n").unwrap().policy;
    let first = add_work(&github, ReviewRules::new(&strict, None)).await;
    let (code, output) = run_retry(&github, &["--new-rules", &first.id]).await;
    let unheld = "error: cannot apply new rules: this delivery is still in progress; new rules are for work that is held or has failed\n";
    assert_eq!((code, output.as_str()), (Some(2), unheld));
    for _ in 0..2 {
        let (code, output) = run_retry(&github, &[&first.id]).await;
        assert!(code == Some(1) && output.contains("1 paths are changed"), "{output}");
    }
    let (code, output) = run_retry(&github, &["--new-rules", &first.id]).await;
    assert_eq!(code, Some(0), "{output}");
    let done = find_row(&github, &first.id);
    let (before, after) = (first.request.rules.unwrap(), done.request.rules.unwrap());
    let log = state_dir(&github).join("audit").join(format!("{}.jsonl", first.id));
    let log = fs::read_to_string(log).unwrap();
    let judged: Vec<_> = log.lines().filter(|line| line.contains("relay.judged")).collect();
    let by =
        |rules: &ReviewRules| judged.iter().filter(|line| line.contains(&rules.digest())).count();
    assert_eq!((by(&before), by(&after)), (2, 1), "{log}");

    let head = done.head.unwrap().to_string();
    let note = run_git(&github.bare(), &["notes", "--ref=cogni", "show", &head]);
    let statement = ProvenanceStatement::verify(&note, signing_key().public_key()).unwrap();
    assert_eq!(statement.rules, after.digest());
    let shown = tokio::task::block_in_place(|| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
        command.args(["relay", "rules", &first.id]).env("COGNI_STATE_DIR", state_dir(&github));
        command.output().unwrap()
    });
    assert_eq!(String::from_utf8(shown.stdout).unwrap(), after.as_str());
    let (code, output) = run_retry(&github, &["--new-rules", &first.id]).await;
    assert_eq!(
        (code, output.as_str()),
        (Some(2), "error: a delivery cannot go from state `done` to `judged`\n")
    );
}

/// A1, L5: An agent's own rules stay with its work, also if the host's current rules are used.
#[tokio::test(flavor = "multi_thread")]
async fn an_agents_own_rules_stay_with_its_work() {
    let github = RunningGithub::start().await;
    let own: AgentReviewRules = toml::from_str(
        "[[policy.paths]]\nwhy = 'people make it'\nverdict = 'hold'\nmatch = ['made-by-*']\n",
    )
    .unwrap();
    let job = add_work(&github, ReviewRules::new(&RelayConfig::default().policy, Some(&own))).await;
    for words in [&[&*job.id][..], &["--new-rules", &job.id]] {
        let (code, output) = run_retry(&github, words).await;
        assert!(code == Some(1) && output.contains("people make it"), "{output}");
    }
    assert_eq!(find_row(&github, &job.id).step, DeliveryStep::Held);
}

/// L7: A row of an earlier version has no rules, and is reviewed by the current rules.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_without_rules_is_reviewed_by_the_current_rules() {
    let github = RunningGithub::start().await;
    let id = super::killed::add_work(&github, "task-9").await;
    let strict = github.place.path().join("relay.toml");
    fs::write(&strict, "[policy]\nhold_files = 0\n").unwrap();
    let mut held = retry_command(&github, &[&id]);
    let held = tokio::task::block_in_place(|| held.env("COGNI_RELAY_CONFIG", strict).output());
    assert_eq!(held.unwrap().status.code(), Some(1));
    assert_eq!(run_retry(&github, &[&id]).await.0, Some(0));
}

/// Adds a run's work to the outbox.
async fn add_work(github: &RunningGithub, rules: ReviewRules) -> DeliveryJob {
    let relay = open_relay(github);
    let (mut request, begun) = make_work(github, &relay, "task-9", "run-1").await;
    drop(begun);
    request.rules = Some(rules);
    relay.outbox().add_job(&request).unwrap()
}

fn find_row(github: &RunningGithub, id: &str) -> DeliveryJob {
    DeliveryOutbox::open(&state_dir(github).join("outbox.sqlite")).unwrap().get(id).unwrap()
}
