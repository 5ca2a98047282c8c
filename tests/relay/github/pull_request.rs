//! Tests of pull requests: a branch has one pull request, whatever fails.

use std::time::Duration;

use cogni_gateway::fakes::github_server::{FakePullRequest, GithubOperation, InjectedFailure};
use cogni_gateway::llm::budget::{BudgetAmount, Nanodollars, Tokens};
use cogni_gateway::relay::github::client::{GithubError, RetryPolicy};
use cogni_gateway::relay::github::pull_request::change_summary::{
    ChangeSize, ChangeSummary, CommitLine,
};
use cogni_gateway::relay::github::pull_request::{
    PublishedPullRequest, PullRequestSpec, convert_to_draft, publish_pull_request,
};
use cogni_gateway::relay::repo::repository::RepositoryUrl;
use cogni_gateway::relay::repo::review::{ReviewAction, ReviewReason};
use cogni_gateway::relay::repo::{BranchKey, ObjectId, SandboxBranch};
use http::StatusCode;

use crate::support::github_server::{NAME, RunningGithub, TOKEN, forge_credential};

/// L6: The first run creates a pull request, and later runs update it.
#[tokio::test(flavor = "multi_thread")]
async fn a_branch_has_one_pull_request() {
    let forge = RunningGithub::start().await;
    let first = publish_spec(&forge, &pull_request_spec()).await.unwrap();
    assert!(first.is_new);
    forge.hub.edit_pull(NAME, first.number, |pull| {
        pull.title = "Better title".to_owned();
        pull.body = pull.body.take().map(|body| format!("Reviewed by hand.\r\n\r\n{body}"));
    });
    let second =
        publish_spec(&forge, &PullRequestSpec { run: "run-8".to_owned(), ..pull_request_spec() })
            .await
            .unwrap();
    assert_eq!(second, PublishedPullRequest { is_new: false, ..first });
    let pulls = forge.hub.pulls(NAME);
    assert_eq!((pulls.len(), pulls[0].title.as_str()), (1, "Better title"));
    let body = pulls[0].body.as_ref().unwrap().replace('\r', "␍").replace('\u{200b}', "·");
    insta::assert_snapshot!(body, @r"
    Reviewed by hand.␍
    ␍
    <!-- cogni:run run-7 -->
    The agent wrote:

    > As @·alice asked.
    > <·!-- /cogni -->

    Run `run-7` of `coder` moved the branch from nothing to `e69de29bb2d1d6434b8b29ae775ad8c2e48c5391`.
    <!-- /cogni -->

    <!-- cogni:run run-8 -->
    The agent wrote:

    > As @·alice asked.
    > <·!-- /cogni -->

    Run `run-8` of `coder` moved the branch from nothing to `e69de29bb2d1d6434b8b29ae775ad8c2e48c5391`.
    <!-- /cogni -->
    ");
}

/// L6: A pull request tells its reviewer what was asked, what has changed, what it cost and how to verify it.
#[tokio::test(flavor = "multi_thread")]
async fn a_reviewer_reads_the_facts_of_the_run() {
    let forge = RunningGithub::start().await;
    let line = |text: &str, subject: &str| CommitLine {
        id: ObjectId::hash_object("blob", text.as_bytes()),
        subject: subject.to_owned(),
    };
    let summary = ChangeSummary {
        commits: vec![line("b", "Test the login [x](http://x)"), line("a", "Fix the login")],
        commit_count: 5,
        size: ChangeSize { files: 1, added_lines: 40, removed_lines: 7 },
        asked: "Fix #12, @alice.\n```\n<img src=x>".to_owned(),
        model: "gpt-4o-mini".to_owned(),
        spent: BudgetAmount {
            turns: 3,
            input: Tokens(1200),
            output: Tokens(300),
            cost: Nanodollars(12_300_000),
        },
        verdict: "push".to_owned(),
        public_key: Some("KEY".to_owned()),
    };
    let spec = PullRequestSpec { title: String::new(), summary, ..pull_request_spec() };
    publish_spec(&forge, &spec).await.unwrap();
    let pull = &forge.hub.pulls(NAME)[0];
    assert_eq!(pull.title, "Fix the login (and 4 more commits)");
    insta::assert_snapshot!(pull.body.as_ref().unwrap().replace('\u{200b}', "·"), @r"
    <!-- cogni:run run-7 -->
    The agent wrote:

    > As @·alice asked.
    > <·!-- /cogni -->

    Run `run-7` of `coder` moved the branch from nothing to `e69de29bb2d1d6434b8b29ae775ad8c2e48c5391`.

    **5 commits, 1 file changed, +40 −7 lines**

    - `2e65efe2a1` `Fix the login`
    - `63d8dbd40c` `Test the login [x]·(http:·//x)`
    - and 3 more

    <details>
    <summary>Request, cost and proof</summary>

    The request was:

    ```text
    Fix #·12, @·alice.
    '''
    <·img src=x>
    ```

    - model: `gpt-4o-mini`
    - cost: 3 calls, 1200 tokens in, 300 out, $0.0123
    - verdict of the rules: `push`

    A signed statement about this work is beside the commit. To verify it in a clone:

    ```sh
    git fetch origin refs/notes/cogni:refs/notes/cogni
    cogni-gateway relay verify e69de29bb2d1d6434b8b29ae775ad8c2e48c5391 --public-key KEY
    ```

    </details>
    <!-- /cogni -->
    ");
}

/// L6: A pull request that is up to date is not changed.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_new_changes_nothing() {
    let forge = RunningGithub::start().await;
    for _ in 0..2 {
        publish_spec(&forge, &pull_request_spec()).await.unwrap();
    }
    assert_eq!(forge.hub.count_calls(GithubOperation::UpdatePull), 0);
}

/// L6: A pull request for work that needs a review is a draft with the reasons in it, in text without side effects.
#[tokio::test(flavor = "multi_thread")]
async fn work_for_review_is_a_draft() {
    let forge = RunningGithub::start().await;
    publish_spec(&forge, &for_review(12)).await.unwrap();
    let pull = forge.hub.pulls(NAME).remove(0);
    assert!(pull.is_draft);
    let body = pull.body.unwrap().replace('\u{200b}', "·");
    let (_, notice) = body.split_once("<!-- cogni:review -->\n").unwrap();
    insta::assert_snapshot!(notice, @"
    **The changes of `run-7` touch what is protected: they need a review.**

    - `0/'@·alice' <·img>.md`: it tells agents what to do, as in #·12
    - `1/'@·alice' <·img>.md`: it tells agents what to do, as in #·12
    - `2/'@·alice' <·img>.md`: it tells agents what to do, as in #·12
    - `3/'@·alice' <·img>.md`: it tells agents what to do, as in #·12
    - `4/'@·alice' <·img>.md`: it tells agents what to do, as in #·12
    - `5/'@·alice' <·img>.md`: it tells agents what to do, as in #·12
    - `6/'@·alice' <·img>.md`: it tells agents what to do, as in #·12
    - `7/'@·alice' <·img>.md`: it tells agents what to do, as in #·12
    - `8/'@·alice' <·img>.md`: it tells agents what to do, as in #·12
    - `9/'@·alice' <·img>.md`: it tells agents what to do, as in #·12
    - and 2 more
    <!-- /cogni -->
    ");
}

/// L6: A ready pull request becomes a draft before work for review is pushed, whatever its base. If that is impossible,
/// the result says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_ready_pull_request_becomes_a_draft() {
    let forge = RunningGithub::start().await;
    publish_spec(&forge, &pull_request_spec()).await.unwrap();
    let is_draft = || forge.hub.pulls(NAME)[0].is_draft;
    assert!(!is_draft());
    let withdrawn = async || {
        let (api, branch) = (forge.api(), pull_request_spec().head);
        convert_to_draft(&api, &forge_credential(), &forge.hosted(), &branch).await
    };
    forge.hub.inject(GithubOperation::Withdraw, InjectedFailure::not_permitted(), 1);
    let error = withdrawn().await.unwrap_err();
    assert!(matches!(error, GithubError::Forbidden(_)) && !is_draft(), "{error}");
    let refused =
        InjectedFailure::graphql_error("FORBIDDEN", "Resource not accessible by integration");
    forge.hub.inject(GithubOperation::Withdraw, refused, 1);
    let error = withdrawn().await.unwrap_err();
    assert!(matches!(error, GithubError::Forbidden(_)) && !is_draft(), "{error}");
    forge.hub.inject(GithubOperation::Withdraw, InjectedFailure::LoseReply, 1);
    withdrawn().await.unwrap();
    assert!(is_draft());
    // A pull request that is a draft already is not changed.
    let before = forge.hub.count_calls(GithubOperation::Withdraw);
    withdrawn().await.unwrap();
    assert_eq!(forge.hub.count_calls(GithubOperation::Withdraw), before);
}

/// L6: The pull requests behind the first page of the list become drafts, too. A list without an end is left at a limit,
/// and the work is not pushed then.
#[tokio::test(flavor = "multi_thread")]
async fn the_pull_requests_of_all_pages_become_drafts() {
    let forge = RunningGithub::start().await;
    publish_spec(&forge, &pull_request_spec()).await.unwrap();
    let first = forge.hub.pulls(NAME).remove(0);
    let add = |numbers: std::ops::RangeInclusive<u64>, is_draft| {
        for number in numbers {
            let base = format!("base-{number}");
            forge.hub.add_pull(NAME, FakePullRequest { number, base, is_draft, ..first.clone() });
        }
    };
    add(2..=45, false);
    let withdrawn = async || {
        let (api, branch) = (forge.api(), pull_request_spec().head);
        convert_to_draft(&api, &forge_credential(), &forge.hosted(), &branch).await
    };
    withdrawn().await.unwrap();
    assert!(forge.hub.pulls(NAME).iter().all(|pull| pull.is_draft));
    assert_eq!(forge.hub.count_calls(GithubOperation::ListPulls), 1 + 3);
    add(46..=999, true);
    withdrawn().await.unwrap();
    add(1000..=1000, true);
    let error = withdrawn().await.unwrap_err();
    assert!(error.retry_after().is_none(), "{error}");
    insta::assert_snapshot!(error, @"GitHub lists 1000 open pull requests from the branch, or more; close the ones that are not needed, or choose another branch key");
}

/// L6: A repository without drafts has no pull request to convert, so the delivery continues.
#[tokio::test(flavor = "multi_thread")]
async fn a_repository_without_drafts_is_not_blocked() {
    let forge = RunningGithub::start().await;
    publish_spec(&forge, &pull_request_spec()).await.unwrap();
    let refused =
        InjectedFailure::graphql_error("UNPROCESSABLE", "Draft pull requests are not supported");
    forge.hub.inject(GithubOperation::Withdraw, refused, 1);
    convert_to_draft(&forge.api(), &forge_credential(), &forge.hosted(), &pull_request_spec().head)
        .await
        .unwrap();
}

/// L6: A fork's pull request from a branch of the same name is ignored, also if the fork was deleted.
#[tokio::test(flavor = "multi_thread")]
async fn a_pull_request_of_a_fork_is_ignored() {
    for fork in ["mallory/site", ""] {
        let forge = RunningGithub::start().await;
        let first = publish_spec(&forge, &pull_request_spec()).await.unwrap();
        forge.hub.edit_pull(NAME, first.number, |pull| pull.fork = Some(fork.to_owned()));
        let theirs = forge.hub.pulls(NAME).remove(0);
        convert_to_draft(
            &forge.api(),
            &forge_credential(),
            &forge.hosted(),
            &pull_request_spec().head,
        )
        .await
        .unwrap();
        let second = publish_spec(&forge, &for_review(1)).await.unwrap();
        assert!(second.is_new && second.number != first.number);
        assert_eq!(forge.hub.pulls(NAME).remove(0), theirs);
    }
}

/// L6: If the text has no room for the note that the work needs a review, the result is an error.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_text_that_cannot_ask_for_a_review_is_an_error() {
    let forge = RunningGithub::start().await;
    let first = publish_spec(&forge, &pull_request_spec()).await.unwrap();
    forge.hub.edit_pull(NAME, first.number, |pull| pull.body = Some("x".repeat(64_990)));
    let error = publish_spec(&forge, &for_review(1)).await.unwrap_err();
    assert!(
        matches!(error, GithubError::DescriptionFull(_)) && error.retry_after().is_none(),
        "{error}"
    );
    assert!(!publish_spec(&forge, &pull_request_spec()).await.unwrap().is_new);
}

/// L6: If an answer is lost after GitHub has acted, no second pull request is made.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_not_a_second_pull_request() {
    let forge = RunningGithub::start().await;
    forge.hub.inject(GithubOperation::CreatePull, InjectedFailure::LoseReply, 1);
    publish_spec(&forge, &pull_request_spec()).await.unwrap();
    assert_eq!(
        (forge.hub.pulls(NAME).len(), forge.hub.count_calls(GithubOperation::CreatePull)),
        (1, 1)
    );

    forge.hub.inject(GithubOperation::ListPulls, InjectedFailure::LoseReply, 1);
    forge.hub.inject(GithubOperation::UpdatePull, InjectedFailure::LoseReply, 1);
    publish_spec(&forge, &PullRequestSpec { run: "run-8".to_owned(), ..pull_request_spec() })
        .await
        .unwrap();
    assert_eq!(forge.hub.pulls(NAME).len(), 1);
}

/// L6: If two relays create a pull request at the same time, the second one uses the first one's.
#[tokio::test(flavor = "multi_thread")]
async fn two_at_once_make_one_pull_request() {
    let forge = RunningGithub::start().await;
    forge.hub.inject(GithubOperation::CreatePull, InjectedFailure::HoldBefore, 2);
    let (first, second) =
        (pull_request_spec(), PullRequestSpec { run: "run-8".to_owned(), ..pull_request_spec() });
    let both = async { tokio::join!(publish_spec(&forge, &first), publish_spec(&forge, &second)) };
    let opened = async {
        forge.hub.response_gate().wait_for_waiting(2).await;
        forge.hub.response_gate().allow_answers(2);
    };
    let ((first, second), ()) = tokio::join!(both, opened);
    let (first, second) = (first.unwrap(), second.unwrap());
    assert!(first.number == second.number && first.is_new != second.is_new);
    let body = forge.hub.pulls(NAME).remove(0).body.unwrap();
    assert!(body.contains("cogni:run run-7 ") && body.contains("cogni:run run-8 "));
}

/// L6: Temporary failures are retried: a bad gateway, a rate limit with a short wait, a branch that GitHub does not
/// know yet.
#[tokio::test(flavor = "multi_thread")]
async fn temporary_failures_are_retried() {
    for trouble in [
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        InjectedFailure::secondary_limit(0),
        InjectedFailure::unknown_head(),
    ] {
        let forge = RunningGithub::start().await;
        forge.hub.inject(GithubOperation::CreatePull, trouble, 2);
        assert!(publish_spec(&forge, &pull_request_spec()).await.unwrap().is_new);
    }
}

/// L6: A permanent failure says what to do, and whether a retry makes sense; the token is in none of the texts.
#[tokio::test(flavor = "multi_thread")]
async fn every_refusal_says_what_to_do() {
    let mut told = vec![];
    for (operation, trouble) in [
        (
            GithubOperation::ListPulls,
            InjectedFailure::error_status(StatusCode::SERVICE_UNAVAILABLE),
        ),
        (GithubOperation::ListPulls, InjectedFailure::LoseReply),
        (GithubOperation::CreatePull, InjectedFailure::secondary_limit(600)),
        (GithubOperation::ListPulls, InjectedFailure::primary_limit(u64::MAX / 4)),
        (GithubOperation::CreatePull, InjectedFailure::not_permitted()),
        (GithubOperation::ListPulls, InjectedFailure::error_status(StatusCode::UNAUTHORIZED)),
        (GithubOperation::ListPulls, InjectedFailure::error_status(StatusCode::NOT_FOUND)),
        (GithubOperation::ListPulls, InjectedFailure::error_status(StatusCode::IM_A_TEAPOT)),
        (GithubOperation::CreatePull, InjectedFailure::unknown_head()),
    ] {
        let forge = RunningGithub::start().await;
        forge.hub.inject(operation, trouble, 9);
        let error = publish_spec(&forge, &pull_request_spec()).await.unwrap_err();
        assert!(!format!("{error} {error:?}").contains(TOKEN));
        let later = error.retry_after().map_or("no".to_owned(), |after| match after.as_secs() {
            0 => "soon".to_owned(),
            seconds if seconds > 3600 => "much later".to_owned(),
            seconds => format!("in {seconds} s"),
        });
        let told_by = error.to_string();
        let clean = told_by.split(" seconds:").last().unwrap();
        told.push(format!("{clean} | again: {later}"));
    }
    insta::assert_snapshot!(told.join("\n"), @r"
    GitHub has a temporary failure (503 Service Unavailable) | again: soon
    GitHub did not answer: connection closed before message completed | again: soon
     You have exceeded a secondary rate limit. Please wait a few minutes before you try again. | again: in 600 s
     API rate limit exceeded for installation ID 1. | again: much later
    the token may not do this: Resource not accessible by integration; it needs `contents: write` and `pull_requests: write` for this repository | again: no
    GitHub does not accept the token: Unauthorized; give a valid one in `GITHUB_TOKEN`, or check `GITHUB_APP_ID` and `GITHUB_APP_KEY_FILE` | again: no
    GitHub has no such repository, or the token has no access to it; check the URL and the token's repositories | again: no
    GitHub answers 418 I'm a teapot: I'm a teapot | again: no
    GitHub refuses this: `head` is invalid | again: soon
    ");
}

/// L6: A renamed repository is not followed, because the old name may belong to another owner tomorrow.
#[tokio::test(flavor = "multi_thread")]
async fn a_renamed_repository_is_not_followed() {
    let forge = RunningGithub::start().await;
    forge.hub.rename_repository(NAME, "acme/shop");
    let error = publish_spec(&forge, &pull_request_spec()).await.unwrap_err();
    assert!(
        matches!(&error, GithubError::RepositoryMoved(to) if to.ends_with("/repositories/100")),
        "{error}"
    );
    assert!(error.retry_after().is_none());
}

/// L6: If a rate limit asks for a longer wait than allowed, the delivery is rescheduled.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_rate_limit_reschedules_the_delivery() {
    let forge = RunningGithub::start().await;
    forge.hub.inject(GithubOperation::ListPulls, InjectedFailure::secondary_limit(60), 1);
    let patience = RetryPolicy {
        attempts: 3,
        initial_delay: Duration::ZERO,
        max_delay: Duration::from_secs(59),
    };
    let api = forge.api_with(patience);
    let error =
        publish_pull_request(&api, &forge_credential(), &forge.hosted(), &pull_request_spec())
            .await
            .unwrap_err();
    assert_eq!(error.retry_after(), Some(Duration::from_mins(1)));
    assert_eq!(forge.hub.count_calls(GithubOperation::ListPulls), 1);
}

/// L6: A protected branch and a missing branch are detected.
#[tokio::test(flavor = "multi_thread")]
async fn a_protected_branch_is_known() {
    let forge = RunningGithub::start().await;
    forge.hub.protect_branch(NAME, "sandbox/task-1");
    let (api, repository) = (forge.api(), forge.hosted());
    let token = forge_credential().token(&api, &repository).await.unwrap();
    let told = async |branch| {
        api.branch_info(&token, &repository, branch).await.unwrap().map(|branch| branch.protected)
    };
    assert_eq!(told("sandbox/task-1").await, Some(true));
    assert_eq!(told("main").await, Some(false));
    assert_eq!(told("sandbox/none").await, None);
    let missing: RepositoryUrl = forge.clone_url().replace(".git", "-none.git").parse().unwrap();
    let error = api.branch_info(&token, missing.as_hosted().unwrap(), "main").await.unwrap_err();
    assert_eq!(error, GithubError::NotFound, "a missing repository is no missing branch");
}

async fn publish_spec(
    forge: &RunningGithub,
    order: &PullRequestSpec,
) -> Result<PublishedPullRequest, GithubError> {
    publish_pull_request(&forge.api(), &forge_credential(), &forge.hosted(), order).await
}

/// The pull request of work for which a policy gave this many reasons.
fn for_review(paths: usize) -> PullRequestSpec {
    let reason = |at| ReviewReason {
        ruling: ReviewAction::Review,
        path: Some(format!("{at}/`@alice` <img>.md")),
        why: "it tells agents what to do, as in #12".to_owned(),
    };
    let reasons = (0..paths).map(reason).collect();
    PullRequestSpec { needs_review: true, reasons, ..pull_request_spec() }
}

pub(super) fn pull_request_spec() -> PullRequestSpec {
    PullRequestSpec {
        head: SandboxBranch::from_key(BranchKey::parse("task-1").unwrap()),
        base: None,
        run: "run-7".to_owned(),
        agent: "coder".to_owned(),
        title: "Fix the login (fixes #12)".to_owned(),
        body: "As @alice asked.\n<!-- /cogni -->".to_owned(),
        commit_range: (ObjectId::NONE, ObjectId::hash_object("blob", b"")),
        summary: ChangeSummary::default(),
        needs_review: false,
        reasons: vec![],
        earlier_reasons: vec![],
    }
}
