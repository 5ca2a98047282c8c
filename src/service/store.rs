//! The run store of a service's runs: a row for each run, and the events for its watchers. No accepted run is lost.
//!
//! ```text
//! queued → running → ended
//!    └────────────────┘
//! ```
//!
//! **Invariant:** a row moves along these arrows only. A run's end and its last events are written in one transaction.
//! Watchers receive the last events only after that transaction, so a crash never takes back an end that a watcher has
//! seen.
//!
//! The events of an unfinished run are in memory, too, where its watchers [follow](RunStore::follow_events) them. The
//! events reach the database a moment later. The memory of one run is bounded; see [`event_feed`].

mod answer_dedup;
mod clock_note;
pub mod event;
pub mod event_feed;
mod kept_records;
mod row;
mod schema;
mod spending;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::Stream;
use futures_util::stream::try_unfold;
use rusqlite::{OptionalExtension, Transaction, named_params, params};
use tokio::task::spawn_blocking;

use crate::base::db::{self, SqliteDatabase};
use crate::llm::budget::Nanodollars;
use crate::telemetry::audit::seal::AuditLogSeal;

pub use event::{RunEvent, RunEventKind};
pub use event_feed::EventFeed;
pub use row::{NewRunRow, RunEnd, RunFilter, RunPhase, RunRow};
pub use schema::SCHEMA;
pub use spending::{ExhaustedCap, GrantSpending, SpendingCaps, SpendingStatus};

/// The runs of one service. Clones share the same runs.
#[derive(Clone, Debug)]
pub struct RunStore {
    database: SqliteDatabase,
    live: Arc<Mutex<HashMap<String, EventFeed>>>,
}

/// The outcome of adding a run.
#[derive(Debug)]
pub enum AddRunOutcome {
    /// The run is new. The amount is the reserved money, if its grant has a cap.
    New(EventFeed, Option<Nanodollars>),
    /// An earlier request with the same key and the same content added the run.
    Known(Box<RunRow>),
    /// An earlier request used the key with other content.
    Conflict(Box<RunRow>),
    /// The grant has no money left.
    Exhausted(ExhaustedCap),
}

/// The outcome of the transaction that inserts a run.
enum InsertOutcome {
    /// The run is new. The amount is the reserved money.
    New(Option<Nanodollars>),
    Same(Box<RunRow>),
    Exhausted(ExhaustedCap),
}

impl RunStore {
    /// Creates the store on a database that has our [`SCHEMA`].
    pub fn new(database: SqliteDatabase) -> Self {
        Self { database, live: Arc::default() }
    }

    /// Adds a run to the run store, which makes the run accepted.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written; then the run is not accepted.
    pub async fn add_run(&self, new: NewRunRow) -> Result<AddRunOutcome, db::DatabaseError> {
        let (run, digest) = (new.id.clone(), new.digest.clone());
        // The feed exists before the row, so that a client that learns the run's id can follow the run at once.
        let feed = self.activate_feed(&run, 0);
        let now = now_millis();
        let added =
            self.database.write_in_transaction(move |change| insert_run(change, &new, now)).await;
        if !matches!(added, Ok(InsertOutcome::New(_))) {
            self.lock_live().remove(&run);
        }
        Ok(match added? {
            InsertOutcome::New(reserved) => AddRunOutcome::New(feed, reserved),
            InsertOutcome::Same(row) if row.digest == digest => AddRunOutcome::Known(row),
            InsertOutcome::Same(row) => AddRunOutcome::Conflict(row),
            InsertOutcome::Exhausted(exhausted) => AddRunOutcome::Exhausted(exhausted),
        })
    }

    /// Creates the feed of an earlier process's run. The numbers of its events continue above all numbers that were
    /// ever published.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn resume_run(&self, run: &RunRow) -> Result<EventFeed, db::DatabaseError> {
        let id = run.id.clone();
        let last = "SELECT max(seq) FROM event WHERE run = ?1";
        let last: Option<i64> = self
            .database
            .read_committed(move |view| view.query_row(last, [id], |row| row.get(0)))
            .await?;
        // The events of a queued run are not stored, so even a run without stored events may have published some.
        let first = event_feed::next_sequence_base(last.unwrap_or_default().cast_unsigned());
        Ok(self.activate_feed(&run.id, first))
    }

    /// Marks a run as running. `wanted` replaces the request, whose content is not needed any more.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn mark_running(&self, run: &str, wanted: String) -> Result<(), db::DatabaseError> {
        let (run, now) = (run.to_owned(), now_millis());
        let begin = "UPDATE run SET state = 'running', started = max(?2, created), wanted = ?3 WHERE id = ?1 AND state = 'queued'";
        self.database
            .write_in_transaction(move |change| change.execute(begin, params![run, now, wanted]))
            .await?;
        Ok(())
    }

    /// Records a client's request to cancel a run, so that the request outlives this process.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn mark_cancelled(&self, run: &str) -> Result<(), db::DatabaseError> {
        let (run, now) = (run.to_owned(), now_millis());
        let cancel = "UPDATE run SET cancelled = ?2 WHERE id = ?1 AND state <> 'ended' AND cancelled IS NULL";
        self.database
            .write_in_transaction(move |change| change.execute(cancel, params![run, now]))
            .await?;
        Ok(())
    }

    /// Writes a run's end and its unsaved events, and then publishes the last events.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written; the caller may retry.
    pub async fn finish_run(
        &self,
        feed: &EventFeed,
        ended: RunEnd,
    ) -> Result<(), db::DatabaseError> {
        let (run, now) = (feed.run_id().to_owned(), now_millis());
        let (mut events, last) = (feed.unsaved_events(), feed.prepare_final(&ended.last_events));
        events.extend(last.iter().cloned());
        let ending = Box::pin(self.prepare_end(run.clone(), ended, events)).await?;
        let ending =
            move |change: &Transaction<'_>| answer_dedup::write_end(change, (&run, now), &ending);
        let is_first = self.database.write_in_transaction(ending).await?;
        // If the run had ended before, that first end counts, and no second end is published.
        feed.close(if is_first { last } else { vec![] });
        self.lock_live().remove(feed.run_id());
        Ok(())
    }

    /// Replaces the answer in all texts that are written with an end. An event that is written at the same time stays
    /// whole, and reads the same.
    async fn prepare_end(
        &self,
        run: String,
        ended: RunEnd,
        events: Vec<RunEvent>,
    ) -> Result<answer_dedup::StoredRunEnd, db::DatabaseError> {
        let told = self
            .database
            .read_committed(move |view| answer_dedup::events_with_answer(view, &run))
            .await?;
        let cut = spawn_blocking(move || answer_dedup::StoredRunEnd::new(ended, events, told));
        cut.await.map_err(|_| db::DatabaseError::Closed)
    }

    /// Closes the feed of a run that another process will finish.
    pub fn detach_watchers(&self, feed: &EventFeed) {
        feed.close(vec![]);
        self.lock_live().remove(feed.run_id());
    }

    /// Writes a run's events in batches, until the feed is closed. After a failure, the interval doubles up to a
    /// maximum.
    pub async fn persist_events(&self, feed: &EventFeed) {
        let mut pause = event_feed::BATCH_INTERVAL;
        while feed.wait_for_unsaved().await {
            tokio::select! {
                () = feed.wait_closed() => return,
                () = tokio::time::sleep(pause) => (),
            }
            let (run, unsaved) = (feed.run_id().to_owned(), feed.unsaved_events());
            let last = unsaved.last().map(|event| event.seq);
            match self
                .database
                .write_in_transaction(move |change| insert_events(change, &run, &unsaved))
                .await
            {
                Ok(()) => {
                    feed.mark_saved(last);
                    pause = event_feed::BATCH_INTERVAL;
                }
                Err(error) => {
                    tracing::error!(run = feed.run_id(), %error, "cannot write events");
                    pause = (pause * 2).min(event_feed::MAX_BATCH_INTERVAL);
                }
            }
        }
    }

    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn find_run(&self, id: &str) -> Result<Option<RunRow>, db::DatabaseError> {
        let id = id.to_owned();
        let query = row::select_sql("id = ?1");
        let read = move |view: &rusqlite::Connection| {
            view.prepare_cached(&query)?.query_row([id], row::read_row).optional()
        };
        self.database.read_committed(read).await
    }

    /// Returns the stored request of a run; after the run has begun, the request without its content.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read, or there is no such run.
    pub async fn submission(&self, id: &str) -> Result<String, db::DatabaseError> {
        let id = id.to_owned();
        let query = "SELECT wanted FROM run WHERE id = ?1";
        self.database
            .read_committed(move |view| view.query_row(query, [id], |row| row.get(0)))
            .await
    }

    /// Returns a run's result as a JSON object, or `None` if the run has not ended.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn run_result(&self, id: &str) -> Result<Option<String>, db::DatabaseError> {
        let id = id.to_owned();
        self.database.read_committed(move |view| answer_dedup::read_result(view, &id)).await
    }

    /// Returns a run's standard output and standard error, or `None` if the run has not ended.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn run_output(
        &self,
        id: &str,
    ) -> Result<Option<(String, String)>, db::DatabaseError> {
        let id = id.to_owned();
        self.database.read_committed(move |view| answer_dedup::read_output(view, &id)).await
    }

    /// Returns the seal of a run's audit log, or `None` if no seal was recorded.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn log_seal(&self, id: &str) -> Result<Option<AuditLogSeal>, db::DatabaseError> {
        let id = id.to_owned();
        self.database.read_committed(move |view| answer_dedup::read_seal(view, &id)).await
    }

    /// Returns the ids that belong to runs of the run store.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn known_ids(&self, ids: Vec<String>) -> Result<HashSet<String>, db::DatabaseError> {
        let read = move |view: &rusqlite::Connection| {
            let mut find = view.prepare_cached("SELECT 1 FROM run WHERE id = ?1")?;
            let mut known = HashSet::new();
            for id in ids {
                if find.exists([&id])? {
                    known.insert(id);
                }
            }
            Ok(known)
        };
        self.database.read_committed(read).await
    }

    /// Returns the runs that match a filter, newest first.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn list_runs(&self, filter: RunFilter) -> Result<Vec<RunRow>, db::DatabaseError> {
        self.database.read_committed(move |view| filter.query_rows(view)).await
    }

    /// Returns the runs that have not ended, oldest first. After a start, these are the runs of an earlier process.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn unfinished_runs(&self) -> Result<Vec<RunRow>, db::DatabaseError> {
        let query = format!("{} ORDER BY created, id", row::select_sql("state <> 'ended'"));
        let read = move |view: &rusqlite::Connection| {
            view.prepare(&query)?.query_map([], row::read_row)?.collect()
        };
        self.database.read_committed(read).await
    }

    /// Returns true if a run of an agent has not ended.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn has_unfinished_run(&self, agent: &str) -> Result<bool, db::DatabaseError> {
        let agent = agent.to_owned();
        let find = "SELECT 1 FROM run WHERE state <> 'ended' AND agent = ?1";
        self.database.read_committed(move |view| view.prepare_cached(find)?.exists([agent])).await
    }

    /// Returns the ended runs whose audit logs have no seal, oldest first.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn unsealed_runs(&self) -> Result<Vec<String>, db::DatabaseError> {
        let query =
            "SELECT id FROM run WHERE state = 'ended' AND log_records IS NULL ORDER BY ended";
        let read = move |view: &rusqlite::Connection| {
            view.prepare(query)?.query_map([], |row| row.get(0))?.collect()
        };
        self.database.read_committed(read).await
    }

    /// Records the seal of an ended run's audit log, if the run has none.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn record_seal(
        &self,
        run: &str,
        seal: AuditLogSeal,
    ) -> Result<(), db::DatabaseError> {
        let run = run.to_owned();
        self.database
            .write_in_transaction(move |change| answer_dedup::record_seal(change, &run, &seal))
            .await
    }

    /// Returns the money that is reserved for an unfinished run; `None` if its grant has no caps.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn reserved_money(
        &self,
        run: &str,
    ) -> Result<Option<Nanodollars>, db::DatabaseError> {
        let run = run.to_owned();
        self.database.read_committed(move |view| spending::reserved_for_run(view, &run)).await
    }

    /// Returns the cost of the runs of a grant with caps, and the money reserved for its unfinished runs.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn spending_status(&self, grant: &str) -> Result<SpendingStatus, db::DatabaseError> {
        let (grant, now) = (grant.to_owned(), now_millis());
        self.database.read_committed(move |view| spending::read_status(view, &grant, now)).await
    }

    /// Returns the run that a grant requested with an idempotency key.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn find_by_idempotency_key(
        &self,
        grant: &str,
        key: &str,
    ) -> Result<Option<RunRow>, db::DatabaseError> {
        let given = [grant.to_owned(), key.to_owned()];
        let query = row::select_sql(BY_IDEMPOTENCY_KEY);
        self.database
            .read_committed(move |view| view.query_row(&query, given, row::read_row).optional())
            .await
    }

    /// Checks that the database can be written.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn check_writable(&self) -> Result<(), db::DatabaseError> {
        self.database
            .write_in_transaction(|change| change.execute("UPDATE run SET id = id WHERE 0", []))
            .await?;
        Ok(())
    }

    /// Deletes runs that ended before `ended_before`, frees their pages and returns their number. Each transaction
    /// deletes only a few runs, so that other writers wait only a moment.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn forget_ended_before(
        &self,
        ended_before: SystemTime,
    ) -> Result<usize, db::DatabaseError> {
        let before = to_millis(ended_before);
        let mut forgotten = 0;
        loop {
            match self
                .database
                .write_in_transaction(move |change| answer_dedup::forget_batch(change, before))
                .await?
            {
                0 => break,
                some => forgotten += some,
            }
        }
        if forgotten > 0 {
            self.database.release_free_pages().await?;
        }
        Ok(forgotten)
    }

    /// Returns a run's stored events of one kind. Only stored events survive this process.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn stored_events(
        &self,
        run: &str,
        kind: RunEventKind,
    ) -> Result<Vec<RunEvent>, db::DatabaseError> {
        let run = run.to_owned();
        let query = format!(
            "SELECT {} FROM event WHERE run = ?1 AND kind = ?2 ORDER BY seq",
            answer_dedup::EVENT_COLUMNS
        );
        let read = move |view: &rusqlite::Connection| {
            view.prepare_cached(&query)?
                .query_map([&*run, kind.as_str()], event::read_event)?
                .collect()
        };
        self.database.read_committed(read).await
    }

    /// Streams a run's events after the event number `after`, as they are published, up to the run's end. An unknown
    /// run has no events.
    pub fn follow_events(
        &self,
        run: &str,
        after: u64,
    ) -> impl Stream<Item = Result<RunEvent, db::DatabaseError>> + use<> {
        let feed = self.lock_live().get(run).cloned();
        let reader = RunEventReader {
            run_store: self.clone(),
            run: run.to_owned(),
            feed,
            after,
            page: vec![].into_iter(),
        };
        try_unfold(reader, |mut reader| async move {
            Ok(reader.next().await?.map(|event| (event, reader)))
        })
    }

    fn activate_feed(&self, run: &str, last: u64) -> EventFeed {
        let feed = EventFeed::new(run, last);
        self.lock_live().insert(run.to_owned(), feed.clone());
        feed
    }

    fn lock_live(&self) -> MutexGuard<'_, HashMap<String, EventFeed>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The position of one watcher in a run's events.
struct RunEventReader {
    run_store: RunStore,
    run: String,
    feed: Option<EventFeed>,
    after: u64,
    page: std::vec::IntoIter<RunEvent>,
}

impl RunEventReader {
    async fn next(&mut self) -> Result<Option<RunEvent>, db::DatabaseError> {
        loop {
            if let Some(event) = self.page.next() {
                self.after = event.seq;
                return Ok(Some(event));
            }
            let page = match &self.feed {
                // Events of an earlier process are in the database only.
                Some(feed) if self.after >= feed.first_sequence() => {
                    match feed.next_page(self.after).await {
                        Some(page) => page,
                        None => return Ok(None),
                    }
                }
                _ => self.next_stored_page().await?,
            };
            match (page.is_empty(), &self.feed) {
                (false, _) => self.page = page.into_iter(),
                (true, Some(feed)) if self.after < feed.first_sequence() => {
                    // The stored events are exhausted; the next ones are in the feed.
                    self.after = feed.first_sequence();
                }
                (true, _) => return Ok(None),
            }
        }
    }

    async fn next_stored_page(&self) -> Result<Vec<RunEvent>, db::DatabaseError> {
        let (run, after) = (self.run.clone(), self.after.cast_signed());
        let query = format!(
            "SELECT {} FROM event WHERE run = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3",
            answer_dedup::EVENT_COLUMNS
        );
        let read = move |view: &rusqlite::Connection| {
            view.prepare_cached(&query)?
                .query_map(params![run, after, event_feed::PAGE_SIZE], event::read_event)?
                .collect()
        };
        self.run_store.database.read_committed(read).await
    }
}

fn insert_run(
    change: &Transaction<'_>,
    new: &NewRunRow,
    now: i64,
) -> rusqlite::Result<InsertOutcome> {
    if let Some(key) = &new.idempotency_key {
        let found = change.query_row(
            &row::select_sql(BY_IDEMPOTENCY_KEY),
            [&new.grant, key],
            row::read_row,
        );
        if let Some(row) = found.optional()? {
            return Ok(InsertOutcome::Same(Box::new(row)));
        }
    }
    let NewRunRow { id: run, grant, caps, max_cost_usd: limit, .. } = new;
    let ask = spending::SpendingRequest { run, grant, caps: *caps, limit: *limit };
    let reserved = match spending::reserve_money(change, ask, now)? {
        Ok(reserved) => reserved,
        Err(exhausted) => return Ok(InsertOutcome::Exhausted(exhausted)),
    };
    change.execute(
        "INSERT INTO run (id, grant_id, idempotency_key, digest, agent, account, model, wanted, state, created)
         VALUES (:id, :grant, :key, :digest, :agent, :account, :model, :wanted, 'queued', :now)",
        named_params! {
            ":id": new.id,
            ":grant": new.grant,
            ":key": new.idempotency_key,
            ":digest": new.digest,
            ":agent": new.agent,
            ":account": new.account,
            ":model": new.model,
            ":wanted": new.submission,
            ":now": now,
        },
    )?;
    Ok(InsertOutcome::New(reserved))
}

/// The condition for the run of an idempotency key, at most one run.
const BY_IDEMPOTENCY_KEY: &str = "grant_id = ?1 AND idempotency_key = ?2";

fn insert_events(change: &Transaction<'_>, run: &str, events: &[RunEvent]) -> rusqlite::Result<()> {
    let insert = "INSERT INTO event (run, seq, at, kind, data) VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT DO NOTHING";
    let mut insert = change.prepare_cached(insert)?;
    for RunEvent { seq, at_ms, kind, data } in events {
        insert.execute(params![run, seq.cast_signed(), at_ms, kind.as_str(), &**data])?;
    }
    Ok(())
}

fn now_millis() -> i64 {
    to_millis(SystemTime::now())
}

fn to_millis(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
