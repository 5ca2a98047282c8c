//! L5, L6: Tests of a branch's earlier commits: they are reviewed before a pull request asks people to merge the whole
//! branch.

use std::fs;

use cogni_gateway::fakes::github_server::GithubOperation;
use cogni_gateway::relay::delivery::outbox::DeliveryRequest;
use cogni_gateway::relay::delivery::rules::{AgentReviewRules, ReviewRules};
use cogni_gateway::relay::github::pull_request;
use cogni_gateway::relay::repo::review::RelayConfig;
use cogni_gateway::relay::repo::{BranchKey, ObjectId, SandboxBranch};

use super::run_job::{deliver_work, make_work, open_relay};
use crate::support::github_server::{NAME, RunningGithub, forge_credential};
use crate::support::repository::run_git;

/// An earlier run left work for review without a pull request, and a later run's work may be pushed with one. That pull
/// request is a draft and says why, also if another machine makes it and if the relay has no record of the branch.
#[tokio::test(flavor = "multi_thread")]
async fn a_pull_request_mentions_earlier_work_for_review() {
    for keeps_state in [true, false] {
        let github = RunningGithub::start().await;
        run(&github, "AGENTS.md", (None, false)).await;
        assert!(github.hub.pulls(NAME).is_empty());
        if !keeps_state {
            fs::remove_dir_all(github.place.path().join("state")).unwrap();
        }
        run(&github, "run-2", (None, true)).await;
        let pull = github.hub.pulls(NAME).remove(0);
        assert!(pull.is_draft);
        let body = pull.body.unwrap().replace('\u{200b}', "·");
        let (_, notice) = body.split_once("<!-- cogni:review -->\n").unwrap();
        insta::allow_duplicates! { insta::assert_snapshot!(notice, @r"
        **Beside the changes of `run-2`, the branch has what needs a review.**

        - `made-by-AGENTS.md`: it is ours
        <!-- /cogni -->
        ") };
    }
}

/// A ready pull request that a person made becomes a draft when it gets a notice about earlier work. It is ready again
/// when the person marks it ready.
#[tokio::test(flavor = "multi_thread")]
async fn a_ready_pull_request_becomes_a_draft_before_it_mentions_earlier_work() {
    let github = RunningGithub::start().await;
    run(&github, "AGENTS.md", (None, false)).await;
    let by_hand = pull_request::PullRequestSpec {
        head: SandboxBranch::from_key(BranchKey::parse("task-9").unwrap()),
        base: None,
        run: "none".to_owned(),
        agent: String::new(),
        title: "Mine".to_owned(),
        body: String::new(),
        commit_range: (ObjectId::NONE, ObjectId::NONE),
        summary: pull_request::change_summary::ChangeSummary::default(),
        needs_review: false,
        reasons: vec![],
        earlier_reasons: vec![],
    };
    let (api, hosted) = (github.api(), github.hosted());
    pull_request::publish_pull_request(&api, &forge_credential(), &hosted, &by_hand).await.unwrap();
    assert!(!github.hub.pulls(NAME)[0].is_draft);
    run(&github, "run-2", (None, true)).await;
    let pull = github.hub.pulls(NAME).remove(0);
    assert!(pull.is_draft && pull.body.unwrap().contains("- `made-by-AGENTS.md`: it is ours"));
    let calls: Vec<_> =
        github.hub.recorded_calls().into_iter().map(|call| call.operation).collect();
    let at = |wanted| calls.iter().rposition(|operation| *operation == wanted);
    assert!(at(GithubOperation::Withdraw) < at(GithubOperation::UpdatePull), "{calls:?}");
    github.hub.edit_pull(NAME, 1, |pull| pull.is_draft = false);
    run(&github, "run-3", (None, true)).await;
    assert!(!github.hub.pulls(NAME)[0].is_draft);
}

/// The notice is given once. After a person has marked the pull request ready, it stays ready until there is another
/// notice.
#[tokio::test(flavor = "multi_thread")]
async fn earlier_work_is_mentioned_once() {
    let github = RunningGithub::start().await;
    run(&github, "AGENTS.md", (None, false)).await;
    run(&github, "run-2", (None, true)).await;
    github.hub.edit_pull(NAME, 1, |pull| pull.is_draft = false);
    run(&github, "run-3", (None, true)).await;
    let pull = github.hub.pulls(NAME).remove(0);
    let body = pull.body.unwrap();
    assert!(!pull.is_draft && body.contains("run-3"));
    assert_eq!(body.matches("<!-- cogni:review -->").count(), 1, "{body}");
    github.hub.edit_pull(NAME, 1, |pull| pull.is_open = false);
    run(&github, "run-4", (None, true)).await;
    assert!(github.hub.pulls(NAME)[1].is_draft);
}

/// The verdict of another agent's own rules about earlier work counts as well.
#[tokio::test(flavor = "multi_thread")]
async fn another_agents_rules_count_for_its_work() {
    let github = RunningGithub::start().await;
    let own: AgentReviewRules = toml::from_str(
        "[[policy.paths]]\nwhy = 'people read it'\nverdict = 'review'\nmatch = ['made-by-run-1']\n",
    )
    .unwrap();
    let rules = ReviewRules::new(&RelayConfig::default().policy, Some(&own));
    run(&github, "run-1", (Some(rules), false)).await;
    run(&github, "run-2", (None, true)).await;
    let pull = github.hub.pulls(NAME).remove(0);
    assert!(pull.is_draft && pull.body.unwrap().contains("- `made-by-run-1`: people read it"));
}

/// Merged work causes no notice.
#[tokio::test(flavor = "multi_thread")]
async fn merged_work_is_not_mentioned() {
    let github = RunningGithub::start().await;
    run(&github, "AGENTS.md", (None, false)).await;
    run_git(&github.bare(), &["update-ref", "refs/heads/main", "refs/heads/sandbox/task-9"]);
    run(&github, "run-2", (None, true)).await;
    let pull = github.hub.pulls(NAME).remove(0);
    assert!(!pull.is_draft && !pull.body.unwrap().contains("review"));
}

/// Makes one run, from its begin to its delivery.
async fn run(github: &RunningGithub, name: &str, (rules, asks): (Option<ReviewRules>, bool)) {
    let relay = open_relay(github);
    let (request, begun) = Box::pin(make_work(github, &relay, "task-9", name)).await;
    let pull_request = request.pull_request.clone().filter(|_| asks);
    let delivered =
        deliver_work(&relay, DeliveryRequest { rules, pull_request, ..request }, &begun).await;
    assert_eq!((delivered.step, delivered.is_pushed), ("done", true), "{:?}", delivered.why);
}
