//! A4, A5: Tests of the store: the runs that a service remembers, and the events that watchers receive.

use std::time::{Duration, SystemTime};

use cogni_gateway::base::db::{DatabaseSchema, SqliteDatabase};
use cogni_gateway::llm::budget::Nanodollars;
use cogni_gateway::service::store::{
    AddRunOutcome, EventFeed, NewRunRow, RunEnd, RunEvent, RunEventKind, RunFilter, RunPhase,
    RunStore, SCHEMA, SpendingCaps, event_feed,
};
use futures_util::{StreamExt, TryStreamExt};
use serde_json::json;
use tempfile::TempDir;

struct StoreFixture {
    journal: RunStore,
    directory: TempDir,
}

impl StoreFixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { journal: open_store(&directory), directory }
    }

    /// Opens the store again, as after a crash.
    fn again(&self) -> RunStore {
        open_store(&self.directory)
    }

    async fn add(&self, id: &str) -> EventFeed {
        match self.journal.add_run(new(id, None, "one")).await.unwrap() {
            AddRunOutcome::New(feed, _) => feed,
            other => panic!("{other:?}"),
        }
    }
}

fn open_store(directory: &TempDir) -> RunStore {
    RunStore::new(
        SqliteDatabase::open_database(&directory.path().join("state.db"), &[SCHEMA]).unwrap(),
    )
}

fn new(id: &str, key: Option<&str>, digest: &str) -> NewRunRow {
    NewRunRow {
        id: id.to_owned(),
        grant: "g1".to_owned(),
        idempotency_key: key.map(str::to_owned),
        caps: SpendingCaps::default(),
        max_cost_usd: None,
        digest: digest.to_owned(),
        agent: "sandbox:agent".to_owned(),
        account: "acct-1".to_owned(),
        model: "fake".to_owned(),
        submission: "{\"secret\":\"prompt\"}".to_owned(),
    }
}

async fn events_after(journal: &RunStore, run: &str, after: u64) -> Vec<RunEvent> {
    journal.follow_events(run, after).try_collect().await.unwrap()
}

/// An idempotency key belongs to one run; a different request with the same key is refused.
#[tokio::test]
async fn repeating_a_request_starts_one_run() {
    let fixture = StoreFixture::new();
    assert!(matches!(
        fixture.journal.add_run(new("r1", Some("k"), "one")).await,
        Ok(AddRunOutcome::New(..))
    ));
    match fixture.journal.add_run(new("r2", Some("k"), "one")).await.unwrap() {
        AddRunOutcome::Known(row) => assert_eq!(row.id, "r1"),
        other => panic!("{other:?}"),
    }
    match fixture.again().add_run(new("r3", Some("k"), "two")).await.unwrap() {
        AddRunOutcome::Conflict(row) => assert_eq!(row.id, "r1"),
        other => panic!("{other:?}"),
    }
    let mut other = new("r4", Some("k"), "one");
    "g2".clone_into(&mut other.grant);
    assert!(matches!(fixture.journal.add_run(other).await, Ok(AddRunOutcome::New(..))));
    assert_eq!(fixture.journal.find_by_idempotency_key("g1", "k").await.unwrap().unwrap().id, "r1");
}

#[tokio::test]
async fn asking_a_hundred_times_at_once_is_asking_once() {
    let fixture = StoreFixture::new();
    let asked = (0..100)
        .map(|number| fixture.journal.add_run(new(&format!("r{number}"), Some("k"), "one")));
    let added = futures_util::future::join_all(asked).await;
    let is_new = |added: &&Result<AddRunOutcome, _>| matches!(added, Ok(AddRunOutcome::New(..)));
    assert_eq!(added.iter().filter(is_new).count(), 1);
}

/// A watcher receives the same events, whether from the beginning, from the middle, live or later.
#[tokio::test]
async fn a_watcher_gets_every_event_once() {
    let fixture = StoreFixture::new();
    let feed = fixture.add("r1").await;
    let journal = fixture.journal.clone();
    let live = tokio::spawn(async move { events_after(&journal, "r1", 0).await });
    let run = async {
        fixture.journal.mark_running("r1", "{}".to_owned()).await.unwrap();
        for number in 0..1000 {
            feed.publish(RunEventKind::TextDelta, &json!({"text": number.to_string()}));
            if number % 100 == 0 {
                tokio::time::sleep(feed_pause()).await;
            }
        }
        let last_events = vec![(RunEventKind::Final, json!({"ok": true}))];
        fixture
            .journal
            .finish_run(&feed, RunEnd { last_events, ..RunEnd::default() })
            .await
            .unwrap();
    };
    tokio::join!(fixture.journal.persist_events(&feed), run);
    let live = live.await.unwrap();
    assert_eq!(live.len(), 1001);
    assert!(live.iter().zip(1..).all(|(event, seq)| event.seq == seq));
    assert_eq!(events_after(&fixture.journal, "r1", 0).await, live);
    assert_eq!(events_after(&fixture.again(), "r1", 600).await, live[600..]);
    assert_eq!(events_after(&fixture.journal, "unknown", 0).await, []);
}

/// After a crash, new events follow all events that watchers received, written or not, and no number is used twice.
#[tokio::test]
async fn events_after_a_crash_follow_the_events_before_it() {
    let fixture = StoreFixture::new();
    let feed = fixture.add("r1").await;
    for number in 0..300 {
        feed.publish(RunEventKind::TextDelta, &json!({"text": number}));
    }
    {
        let mut persisted = std::pin::pin!(fixture.journal.persist_events(&feed));
        let saved = async {
            while told_in_file(&fixture).await < 300 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! { () = &mut persisted => (), () = saved => () }
    }
    let after = fixture.again();
    let rows = after.unfinished_runs().await.unwrap();
    assert_eq!(
        rows.iter().map(|row| (&*row.id, row.state)).collect::<Vec<_>>(),
        [("r1", RunPhase::Queued)]
    );
    let feed = after.resume_run(&rows[0]).await.unwrap();
    let mut watcher = Box::pin(after.follow_events("r1", 290));
    assert_eq!(watcher.next().await.unwrap().unwrap().seq, 291);
    // A watcher may have received more events than were written.
    let ahead = after.follow_events("r1", 305);
    let code = Some("interrupted".into());
    let last_events = vec![(RunEventKind::Final, json!({"ok": false}))];
    after
        .finish_run(&feed, RunEnd { error_code: code, last_events, ..RunEnd::default() })
        .await
        .unwrap();
    let rest: Vec<_> = watcher.try_collect().await.unwrap();
    assert_eq!(
        rest.last().map(|event| (event.seq, event.kind)),
        Some((100_001, RunEventKind::Final))
    );
    assert_eq!(events_after(&after, "r1", 0).await.len(), 301);
    let ahead: Vec<_> = ahead.try_collect().await.unwrap();
    assert_eq!(ahead, rest[rest.len() - 1..]);
    let again = fixture.again();
    assert_eq!(events_after(&again, "r1", 305).await, ahead);
}

async fn told_in_file(fixture: &StoreFixture) -> usize {
    events_after(&fixture.again(), "r1", 0).await.len()
}

/// The conversation is removed as soon as it is not needed. Details never displace how a run ended.
#[tokio::test]
async fn stored_data_is_bounded() {
    let fixture = StoreFixture::new();
    let feed = fixture.add("r1").await;
    fixture.journal.mark_running("r1", "{\"messages\":0}".to_owned()).await.unwrap();
    assert_eq!(fixture.journal.submission("r1").await.unwrap(), "{\"messages\":0}");
    for _ in 0..event_feed::MAX_EVENTS + 10 {
        feed.publish(RunEventKind::ToolCall, &json!({}));
    }
    feed.publish(RunEventKind::Final, &json!({}));
    assert_eq!(feed.dropped_count(), 10);
    fixture.journal.finish_run(&feed, RunEnd::default()).await.unwrap();
    let events = events_after(&fixture.again(), "r1", event_feed::MAX_EVENTS as u64 - 1).await;
    assert_eq!(
        events.iter().map(|event| event.kind).collect::<Vec<_>>(),
        [RunEventKind::ToolCall, RunEventKind::Final]
    );
}

/// The end of a run never changes.
#[tokio::test]
async fn an_end_is_definite() {
    let fixture = StoreFixture::new();
    let feed = fixture.add("r1").await;
    fixture
        .journal
        .finish_run(&feed, RunEnd { error_code: Some("cancelled".into()), ..RunEnd::default() })
        .await
        .unwrap();
    let row = fixture.journal.find_run("r1").await.unwrap().unwrap();
    let again = fixture.journal.resume_run(&row).await.unwrap();
    let last_events = vec![(RunEventKind::Final, json!({"ok": true}))];
    fixture.journal.finish_run(&again, RunEnd { last_events, ..RunEnd::default() }).await.unwrap();
    assert_eq!(events_after(&fixture.journal, "r1", 0).await, [], "it had ended without a word");
    fixture.journal.mark_running("r1", String::new()).await.unwrap();
    let row = fixture.journal.find_run("r1").await.unwrap().unwrap();
    assert_eq!((row.state, row.error_code.as_deref()), (RunPhase::Ended, Some("cancelled")));
}

/// A run that ends while the clock is set back is not old: its end is neither before its own earlier times nor before the
/// last time at which a service trusted the clock.
#[tokio::test]
async fn a_clock_that_is_set_back_makes_no_run_old() {
    let fixture = StoreFixture::new();
    let days = Duration::from_hours(24 * 40);
    // The present clock is 40 days behind the clock that the service trusted, and behind the acceptance of `r2`.
    let trusted = SystemTime::now() + days;
    let accepted = trusted + Duration::from_hours(1);
    let millis = |time: SystemTime| {
        i64::try_from(time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis()).unwrap()
    };
    fixture.journal.note_time(trusted).await.unwrap();
    let feeds = [fixture.add("r1").await, fixture.add("r2").await];
    let file = rusqlite::Connection::open(fixture.directory.path().join("state.db")).unwrap();
    file.execute("UPDATE run SET created = ?1 WHERE id = 'r2'", [millis(accepted)]).unwrap();
    for feed in &feeds {
        fixture.journal.mark_running(feed.run_id(), String::new()).await.unwrap();
        fixture.journal.finish_run(feed, RunEnd::default()).await.unwrap();
    }
    let times = |id: &str| {
        let times = "SELECT started, ended FROM run WHERE id = ?1";
        let read = |row: &rusqlite::Row<'_>| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?));
        file.query_row(times, [id], read).unwrap()
    };
    assert_eq!(times("r1").1, millis(trusted));
    assert_eq!(times("r2"), (millis(accepted), millis(accepted)));
    assert_eq!(fixture.journal.forget_ended_before(trusted).await.unwrap(), 0);
}

#[tokio::test]
async fn lists_are_newest_first_and_paged() {
    let fixture = StoreFixture::new();
    for id in ["r1", "r2", "r3"] {
        fixture.add(id).await;
    }
    let ids = async |filter: RunFilter| -> Vec<String> {
        fixture.journal.list_runs(filter).await.unwrap().into_iter().map(|row| row.id).collect()
    };
    let grant = Some("g1".to_owned());
    assert_eq!(
        ids(RunFilter { grant: grant.clone(), limit: 2, ..RunFilter::default() }).await,
        ["r3", "r2"]
    );
    let before = Some("r2".to_owned());
    assert_eq!(ids(RunFilter { grant, before, limit: 2, ..RunFilter::default() }).await, ["r1"]);
    let state = Some(RunPhase::Running);
    assert!(ids(RunFilter { state, limit: 2, ..RunFilter::default() }).await.is_empty());
}

/// A long answer appears on standard output, in the result and in the last events, but is stored once.
#[tokio::test]
async fn an_answer_is_stored_once() {
    let fixture = StoreFixture::new();
    let feed = fixture.add("r1").await;
    let text = "It's \"forty-two\", says the\nbook. ".repeat(40_000);
    let ended = ended_with(&text);
    feed.publish(RunEventKind::TextDelta, &json!({"text": text[..100_000]}));
    feed.publish(
        RunEventKind::AssistantFinal,
        &json!({"text": text, "payloads": [{"text": text}]}),
    );
    {
        let mut persist = std::pin::pin!(fixture.journal.persist_events(&feed));
        let saved = async {
            while told_in_file(&fixture).await < 2 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! { () = &mut persist => (), () = saved => () }
    }
    fixture.journal.finish_run(&feed, ended.clone()).await.unwrap();

    let persist = kept_bytes(&fixture).await;
    assert!(persist < text.len() * 5 / 4, "{persist} bytes of an answer of {}", text.len());
    let again = fixture.again();
    assert_eq!(again.run_result("r1").await.unwrap(), ended.result);
    assert_eq!(again.run_output("r1").await.unwrap(), Some((ended.stdout, ended.stderr)));
    assert_eq!(events_after(&again, "r1", 0).await, events_after(&fixture.journal, "r1", 0).await);
    let last = events_after(&again, "r1", 2).await.remove(0);
    assert_eq!((last.kind, Some(&*last.data)), (RunEventKind::Final, ended.result.as_deref()));
}

/// Removed runs give their disk space back, whichever version made the file, and the other runs are unchanged.
#[tokio::test]
async fn a_file_shrinks_when_runs_are_removed() {
    for made_before in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.db");
        if made_before {
            let old = rusqlite::Connection::open(&path).unwrap();
            old.execute_batch(
                "PRAGMA journal_mode = WAL; CREATE TABLE other (x); DROP TABLE other",
            )
            .unwrap();
        }
        let fixture = StoreFixture { journal: open_store(&directory), directory };
        let size = || path.metadata().unwrap().len();
        let answer = |number: usize| format!("{number} ").repeat(100_000);
        for number in 0..60 {
            let feed = fixture.add(&format!("r{number}")).await;
            (0..100)
                .for_each(|detail| feed.publish(RunEventKind::TextDelta, &json!({"text": detail})));
            fixture.journal.finish_run(&feed, ended_with(&answer(number))).await.unwrap();
        }
        let (large, mark) = (size(), SystemTime::now() + Duration::from_secs(1));
        assert!(large > 12 << 20, "{large} bytes");
        let open = fixture.add("open").await;
        assert_eq!(fixture.journal.forget_ended_before(mark).await.unwrap(), 60);
        assert!(size() < 6 << 20, "{} bytes of {large}", size());
        let rows = fixture
            .journal
            .list_runs(RunFilter { limit: 10, ..RunFilter::default() })
            .await
            .unwrap();
        assert_eq!(rows.iter().map(|row| &*row.id).collect::<Vec<_>>(), ["open"]);
        assert_eq!(events_after(&fixture.journal, "r7", 0).await, []);
        fixture.journal.finish_run(&open, ended_with(&answer(7))).await.unwrap();
        assert_eq!(
            fixture.again().run_result("open").await.unwrap(),
            ended_with(&answer(7)).result
        );
    }
}

/// The records of a grant's ended runs are bounded: the oldest runs lose their outputs, results and events, and nothing
/// else. The money and other grants do not change. A file of an earlier version is counted when it is opened.
#[tokio::test]
async fn what_the_ended_runs_of_a_grant_keep_is_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let older = DatabaseSchema { migrations: &SCHEMA.migrations[..6], ..SCHEMA };
    let path = directory.path().join("state.db");
    drop(SqliteDatabase::open_database(&path, &[older]).unwrap());
    let fill = "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 3)
        INSERT INTO run (id, grant_id, digest, agent, account, model, wanted, state, created, ended)
        SELECT 'old' || n, 'g1', '', 'a', 'a', 'm', '{}', 'ended', n, n FROM n;
        INSERT INTO outcome (run, result, stdout, stderr) SELECT id, '{}', printf('%.100000c', 'x'), '' FROM run;
        INSERT INTO event SELECT id, 1, 1, 'final', '{}' FROM run";
    rusqlite::Connection::open(&path).unwrap().execute_batch(fill).unwrap();
    let fixture = StoreFixture { journal: open_store(&directory), directory };
    let cap = SpendingCaps { total: Some(Nanodollars(100)), per_day: None };
    for (run, grant) in [("r1", "g1"), ("r2", "g1"), ("r3", "g1"), ("other", "g2")] {
        let run = NewRunRow { caps: cap, grant: grant.to_owned(), ..new(run, None, "one") };
        let AddRunOutcome::New(feed, _) = fixture.journal.add_run(run).await.unwrap() else {
            panic!("not new")
        };
        let details = "y".repeat(50_000);
        feed.publish(RunEventKind::TextDelta, &json!({"text": details}));
        let ended = RunEnd { charged: Some(Nanodollars(7)), ..ended_with(&"z".repeat(50_000)) };
        fixture.journal.finish_run(&feed, ended).await.unwrap();
    }
    let records = async |run: &str| {
        let (result, output) = (fixture.journal.run_result(run), fixture.journal.run_output(run));
        let events = events_after(&fixture.journal, run, 0).await.len();
        (result.await.unwrap().is_some(), output.await.unwrap().is_some(), events)
    };
    // About 100 KB each: three of the six of this grant fit.
    assert_eq!(fixture.journal.remove_records_beyond(10 << 20).await.unwrap(), 0);
    assert_eq!(fixture.journal.remove_records_beyond(350_000).await.unwrap(), 3);
    for gone in ["old1", "old2", "old3"] {
        assert_eq!(records(gone).await, (false, false, 0));
        assert!(fixture.journal.has_lost_records(gone).await.unwrap());
        assert_eq!(fixture.journal.find_run(gone).await.unwrap().unwrap().state, RunPhase::Ended);
    }
    for run_id in ["r1", "r2", "r3", "other"] {
        assert_eq!(records(run_id).await, (true, true, 2));
        assert!(!fixture.journal.has_lost_records(run_id).await.unwrap());
    }
    assert!(kept_bytes(&fixture).await < 4 * 110_000);
    // The newest run keeps its records in any case.
    assert_eq!(fixture.again().remove_records_beyond(1).await.unwrap(), 2);
    assert_eq!(records("r3").await, (true, true, 2));
    assert_eq!(records("other").await, (true, true, 2));
    let spent = fixture.journal.spending_status("g1").await.unwrap().total;
    assert_eq!((spent.charged, spent.reserved), (Nanodollars(21), Nanodollars(0)));
    // A forgotten run does not count any more.
    let all = SystemTime::now() + Duration::from_mins(1);
    assert_eq!(fixture.journal.forget_ended_before(all).await.unwrap(), 7);
    let left = fixture.again();
    let feed = fixture.add("r9").await;
    fixture.journal.finish_run(&feed, ended_with("a")).await.unwrap();
    assert_eq!(left.remove_records_beyond(10_000).await.unwrap(), 0);
}

/// Text that only looks like the marker for deduplicated output is kept, too.
#[tokio::test]
async fn output_is_stored_to_the_byte() {
    let fixture = StoreFixture::new();
    let long = "x".repeat(2000);
    let printed = [
        String::new(),
        "\u{1}".to_owned(),
        format!("{long}\u{1}{long}"),
        format!("\0{long}\0\u{1f600}{long}"),
        format!("{{\"text\":\"{long}\"}}\n"),
    ];
    for (number, stdout) in printed.into_iter().enumerate() {
        let run = format!("r{number}");
        let feed = fixture.add(&run).await;
        let stderr = format!("{stdout}\u{1}{stdout}");
        let ended = RunEnd { stdout: stdout.clone(), stderr: stderr.clone(), ..ended_with(&long) };
        fixture.journal.finish_run(&feed, ended.clone()).await.unwrap();
        assert_eq!(fixture.journal.run_output(&run).await.unwrap(), Some((stdout, stderr)));
        assert_eq!(fixture.journal.run_result(&run).await.unwrap(), ended.result);
    }
}

/// The end of a run, as the service writes it.
fn ended_with(answer: &str) -> RunEnd {
    let envelope = json!({"payloads": [{"text": answer}], "meta": {}});
    let result = json!({"ok": true, "agent": envelope});
    RunEnd {
        result: Some(result.to_string()),
        stdout: format!("{envelope}\n"),
        last_events: vec![(RunEventKind::Final, result)],
        ..RunEnd::default()
    }
}

/// Returns the stored size of all runs, without the overhead of the tables.
async fn kept_bytes(fixture: &StoreFixture) -> usize {
    let path = fixture.directory.path().join("state.db");
    let sum = "SELECT (SELECT sum(octet_length(data)) FROM event)
        + (SELECT sum(octet_length(concat(answer, result, stdout, stderr))) FROM outcome)";
    let database = SqliteDatabase::open_database(&path, &[SCHEMA]).unwrap();
    let sum =
        database.read_committed(move |view| view.query_row(sum, [], |row| row.get::<_, i64>(0)));
    usize::try_from(sum.await.unwrap()).unwrap()
}

fn feed_pause() -> Duration {
    Duration::from_millis(3)
}

/// Two runs that are accepted at once stay within a grant's cap together, and their reservations survive a crash.
#[tokio::test]
async fn runs_that_are_accepted_at_once_stay_within_the_grants_cap() {
    let fixture = StoreFixture::new();
    let capped = |id: &str| {
        let caps = SpendingCaps { total: Some(Nanodollars(10)), per_day: None };
        NewRunRow { caps, max_cost_usd: Some(Nanodollars(2)), ..new(id, None, "one") }
    };
    let asked = (0..50).map(|number| fixture.journal.add_run(capped(&format!("r{number}"))));
    let added = futures_util::future::join_all(asked).await;
    let is_new = |added: &&Result<AddRunOutcome, _>| matches!(added, Ok(AddRunOutcome::New(_, reserved)) if *reserved == Some(Nanodollars(2)));
    assert_eq!(added.iter().filter(is_new).count(), 5);
    let accepted = added.into_iter().filter_map(|added| match added.unwrap() {
        AddRunOutcome::New(feed, _) => Some(feed),
        AddRunOutcome::Exhausted(_) => None,
        other => panic!("{other:?}"),
    });
    let accepted: Vec<_> = accepted.collect();
    let after_crash = fixture.again();
    assert!(matches!(
        after_crash.add_run(capped("next")).await.unwrap(),
        AddRunOutcome::Exhausted(_)
    ));
    assert_eq!(
        after_crash.reserved_money(accepted[0].run_id()).await.unwrap(),
        Some(Nanodollars(2))
    );

    let ended = RunEnd { charged: Some(Nanodollars(1)), ..RunEnd::default() };
    fixture.journal.finish_run(&accepted[0], ended.clone()).await.unwrap();
    // The cost of this run is unknown.
    fixture.journal.finish_run(&accepted[1], RunEnd::default()).await.unwrap();
    let forgotten = fixture
        .journal
        .forget_ended_before(SystemTime::now() + Duration::from_mins(1))
        .await
        .unwrap();
    assert_eq!(forgotten, 2);
    let standing = fixture.journal.spending_status("g1").await.unwrap();
    assert_eq!(
        (standing.total.charged, standing.total.reserved),
        (Nanodollars(3), Nanodollars(6)),
        "the money of a forgotten run is not forgotten"
    );
    match fixture.journal.add_run(capped("last")).await.unwrap() {
        AddRunOutcome::New(_, reserved) => {
            assert_eq!(reserved, Some(Nanodollars(1)), "what is left");
        }
        other => panic!("{other:?}"),
    }
}
