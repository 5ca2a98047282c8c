//! T4: Tests of the list of questions: no run can hide the questions of another, or fill the list.

use std::time::{Duration, UNIX_EPOCH};

use cogni_gateway::tools::approval::open_questions::MAX_OPEN_QUESTIONS_PER_GRANT;
use cogni_gateway::tools::approval::reach::ApprovalReach;
use cogni_gateway::tools::approval::store::{ApprovalFilter, ApprovalStore};
use cogni_gateway::tools::approval::{ApprovalRow, ApprovalState};

use super::approvals::{decision, open_store, question};

/// Returns the ids of all pages of a list, two questions on each page.
async fn read_pages(store: &ApprovalStore, state: Option<ApprovalState>) -> Vec<String> {
    let mut ids: Vec<String> = vec![];
    loop {
        let filter = ApprovalFilter {
            state,
            after: ids.last().cloned(),
            limit: 2,
            ..ApprovalFilter::default()
        };
        let page = store.list(filter).await.unwrap();
        if page.is_empty() {
            return ids;
        }
        assert!(page.iter().all(|row| row.arguments.is_none()), "a list has no arguments");
        ids.extend(page.into_iter().map(|row| row.id));
    }
}

/// Every question is on a page. The oldest pending question is on the first one, however many come later.
#[tokio::test]
async fn a_list_has_pages_and_shows_the_oldest_pending_question_first() {
    let directory = tempfile::tempdir().unwrap();
    let store = open_store(directory.path());
    let mut watches = vec![];
    // Two questions of one moment, too, have a fixed order.
    for (number, requested_ms) in [(1, 10), (2, 20), (3, 20), (4, 30), (5, 40)] {
        let row = ApprovalRow { requested_ms, ..question(&format!("apr-{number}")) };
        watches.push(store.ask(row).await.unwrap().unwrap());
    }
    let now = UNIX_EPOCH + Duration::from_secs(1);
    store.decide("apr-4", decision(false, "d-1"), now).await.unwrap();
    let pending = read_pages(&store, Some(ApprovalState::Pending)).await;
    assert_eq!(pending, ["apr-1", "apr-2", "apr-3", "apr-5"]);
    let all = read_pages(&store, None).await;
    assert_eq!(all, ["apr-5", "apr-4", "apr-3", "apr-2", "apr-1"]);
    assert_eq!(read_pages(&store, Some(ApprovalState::Denied)).await, ["apr-4"]);
    assert!(store.find("apr-1").await.unwrap().unwrap().arguments.is_some());
}

/// A3: A reader of some agents and accounts has full pages of their questions, and no others. Only a `*` at the end of a name
/// stands for other names.
#[tokio::test]
async fn a_list_has_the_questions_of_named_agents_and_accounts() {
    let directory = tempfile::tempdir().unwrap();
    let store = open_store(directory.path());
    let mut watches = vec![];
    for (number, agent, account) in [
        (1, "team:a", "acct-1"),
        (2, "team:b", "acct-2"),
        (3, "other", "acct-1"),
        (4, "team%", "acct_1"),
        (5, "team:a", ""),
    ] {
        let row = question(&format!("apr-{number}"));
        let (agent, account) = (agent.to_owned(), account.to_owned());
        let row = ApprovalRow { agent, account, requested_ms: number, ..row };
        watches.push(store.ask(row).await.unwrap().unwrap());
    }
    for (agents, accounts, expected) in [
        (&[][..], &[][..], &["apr-5", "apr-4"][..]),
        (&["team:*"], &[], &["apr-5", "apr-2"]),
        (&["team:a"], &["acct-*"], &["apr-1"]),
        (&["team:b", "other"], &["acct-1", "acct-2"], &["apr-3", "apr-2"]),
        (&["*"], &["acct_*"], &["apr-4"]),
        (&["team"], &[], &[]),
        (&["TEAM:*"], &[], &[]),
        (&[], &["acct-12"], &[]),
    ] {
        let to_names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let reach = ApprovalReach { agents: to_names(agents), accounts: to_names(accounts) };
        let filter = ApprovalFilter { limit: 2, reach, ..ApprovalFilter::default() };
        let page = store.list(filter).await.unwrap();
        let ids: Vec<_> = page.iter().map(|row| row.id.as_str()).collect();
        assert_eq!(ids, expected, "{agents:?} {accounts:?}");
    }
}

/// The runs of one grant together have a bound of open questions, and the runs of another grant still ask.
#[tokio::test]
async fn the_open_questions_of_a_grant_are_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let store = open_store(directory.path()).with_owners(|run| {
        Box::pin(async move { Some(run.split('-').next().unwrap().to_owned()) })
    });
    let ask = async |id: &str, run: &str| {
        store.ask(ApprovalRow { run: run.to_owned(), ..question(id) }).await.unwrap()
    };
    let mut open = vec![];
    for number in 0..MAX_OPEN_QUESTIONS_PER_GRANT {
        open.push(ask(&format!("apr-{number}"), &format!("a-{}", number / 8)).await.unwrap());
    }
    assert!(ask("apr-more", "a-99").await.is_none());
    assert!(ask("apr-other", "b-1").await.is_some());
    open.pop();
    assert!(ask("apr-more", "a-99").await.is_some());
}
