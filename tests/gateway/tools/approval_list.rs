//! T4: Tests of the list of questions: no run can hide the questions of another, or fill the list.

use std::time::{Duration, UNIX_EPOCH};

use cogni_gateway::tools::approval::open_questions::MAX_OPEN_QUESTIONS_PER_GRANT;
use cogni_gateway::tools::approval::store::{ApprovalFilter, ApprovalStore};
use cogni_gateway::tools::approval::{ApprovalRow, ApprovalState};

use super::approvals::{decision, open_store, question};

/// Returns the ids of all pages of a list, two questions on each page.
async fn read_pages(store: &ApprovalStore, state: Option<ApprovalState>) -> Vec<String> {
    let mut ids: Vec<String> = vec![];
    loop {
        let filter = ApprovalFilter { state, after: ids.last().cloned(), limit: 2, run: None };
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
