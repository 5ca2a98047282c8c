//! What the service remembers of its runs, so that nothing that was accepted is forgotten: a row for each, and the
//! events that its watchers were told.
//!
//! ```text
//! queued → running → ended
//!    └────────────────┘
//! ```
//!
//! **Invariant:** a row moves along these arrows only. Its last events are written with its end, or neither is; and
//! they are told only then, so that nobody is told of an end that a crash takes back.
//!
//! A run that is not over has its events in memory, too, where its watchers [follow](Journal::follow) them; they reach
//! the file a moment later. What a run may have there is bounded; see [`feed`].

pub mod event;
pub mod feed;
mod outcome;
mod row;
mod schema;
mod spending;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::Stream;
use futures_util::stream::try_unfold;
use rusqlite::{OptionalExtension, Transaction, named_params, params};
use tokio::task::spawn_blocking;

use crate::audit::seal::Seal;
use crate::base::db::{self, Database};
use crate::budget::Nanodollars;

pub use event::{Event, Kind};
pub use feed::Feed;
pub use row::{Ended, Filter, New, Row, State};
pub use schema::SCHEMA;
pub use spending::{Caps, Exhausted, Spending, Standing};

/// The runs of one service. Clones share them.
#[derive(Clone, Debug)]
pub struct Journal {
    database: Database,
    live: Arc<Mutex<HashMap<String, Feed>>>,
}

/// What became of a run that somebody asked for.
#[derive(Debug)]
pub enum Added {
    /// With the money that is reserved for it, where its grant has a cap.
    New(Feed, Option<Nanodollars>),
    /// It was asked for before, with the same key and in the same words.
    Known(Box<Row>),
    /// The key was used before, with other words.
    Conflict(Box<Row>),
    /// Its grant has as many runs as it may.
    Full,
    /// Its grant has no money left.
    Exhausted(Exhausted),
}

/// What an insertion comes to.
enum Inserted {
    /// With the money that is reserved.
    New(Option<Nanodollars>),
    Same(Box<Row>),
    Full,
    Exhausted(Exhausted),
}

impl Journal {
    /// On a database that has our [`SCHEMA`].
    pub fn new(database: Database) -> Self {
        Self { database, live: Arc::default() }
    }

    /// Writes a run down, which makes it accepted.
    ///
    /// # Errors
    /// It cannot be written; then it is not.
    pub async fn add(&self, new: New) -> Result<Added, db::Error> {
        let (run, digest) = (new.id.clone(), new.digest.clone());
        // Before anybody can be told its name.
        let feed = self.go_live(&run, 0);
        let now = now();
        let added = self.database.write(move |change| insert(change, &new, now)).await;
        if !matches!(added, Ok(Inserted::New(_))) {
            self.live().remove(&run);
        }
        Ok(match added? {
            Inserted::New(reserved) => Added::New(feed, reserved),
            Inserted::Same(row) if row.digest == digest => Added::Known(row),
            Inserted::Same(row) => Added::Conflict(row),
            Inserted::Full => Added::Full,
            Inserted::Exhausted(exhausted) => Added::Exhausted(exhausted),
        })
    }

    /// A run that this process had not before: its events go on after all that were ever told.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn resume(&self, run: &Row) -> Result<Feed, db::Error> {
        let id = run.id.clone();
        let last = "SELECT max(seq) FROM event WHERE run = ?1";
        let last: Option<i64> =
            self.database.read(move |view| view.query_row(last, [id], |row| row.get(0))).await?;
        // Of a run that has not begun nobody was told anything.
        let first = match (last, run.state) {
            (None, State::Queued) => 0,
            (last, _) => feed::begin_after(last.unwrap_or_default().cast_unsigned()),
        };
        Ok(self.go_live(&run.id, first))
    }

    /// Writes down that a run begins. What it was asked is needed no more, and forgotten: `wanted` takes its place.
    ///
    /// # Errors
    /// It cannot be written.
    pub async fn begin(&self, run: &str, wanted: String) -> Result<(), db::Error> {
        let (run, now) = (run.to_owned(), now());
        let begin = "UPDATE run SET state = 'running', started = ?2, wanted = ?3 WHERE id = ?1 AND state = 'queued'";
        self.database.write(move |change| change.execute(begin, params![run, now, wanted])).await?;
        Ok(())
    }

    /// Writes down how a run has ended, with all that its watchers were told, and tells them the last of it.
    ///
    /// # Errors
    /// It cannot be written; it may be tried again.
    pub async fn end(&self, feed: &Feed, ended: Ended) -> Result<(), db::Error> {
        let (run, now) = (feed.run().to_owned(), now());
        let (mut events, last) = (feed.unsaved(), feed.last(&ended.words));
        events.extend(last.iter().cloned());
        let ending = Box::pin(self.ending(run.clone(), ended, events)).await?;
        let ending = move |change: &Transaction<'_>| outcome::write(change, (&run, now), &ending);
        let is_first = self.database.write(ending).await?;
        feed.end(if is_first { last } else { vec![] });
        self.live().remove(feed.run());
        Ok(())
    }

    /// Cuts the answer out of all that is written with an end. An event that is written meanwhile stays whole, and is read
    /// alike.
    async fn ending(
        &self,
        run: String,
        ended: Ended,
        events: Vec<Event>,
    ) -> Result<outcome::Ending, db::Error> {
        let told = self.database.read(move |view| outcome::told(view, &run)).await?;
        let cut = spawn_blocking(move || outcome::Ending::new(ended, events, told));
        cut.await.map_err(|_| db::Error::Closed)
    }

    /// Sends the watchers of a run away that is left as it is, for another process.
    pub fn part(&self, feed: &Feed) {
        feed.end(vec![]);
        self.live().remove(feed.run());
    }

    /// Writes a run's events as they come, until it is over. What cannot be written is tried again, less and less often.
    pub async fn keep(&self, feed: &Feed) {
        let mut pause = feed::GATHER;
        while feed.has_unsaved().await {
            tokio::select! {
                () = feed.over() => return,
                () = tokio::time::sleep(pause) => (),
            }
            let (run, unsaved) = (feed.run().to_owned(), feed.unsaved());
            let last = unsaved.last().map(|event| event.seq);
            match self.database.write(move |change| save(change, &run, &unsaved)).await {
                Ok(()) => {
                    feed.saved(last);
                    pause = feed::GATHER;
                }
                Err(error) => {
                    tracing::error!(run = feed.run(), %error, "cannot write events");
                    pause = (pause * 2).min(feed::LONGEST);
                }
            }
        }
    }

    /// # Errors
    /// The file cannot be read.
    pub async fn run(&self, id: &str) -> Result<Option<Row>, db::Error> {
        let id = id.to_owned();
        let query = row::select("id = ?1");
        let read = move |view: &rusqlite::Connection| {
            view.prepare_cached(&query)?.query_row([id], row::read).optional()
        };
        self.database.read(read).await
    }

    /// What was asked, as long as the run has not begun; then, what took its place.
    ///
    /// # Errors
    /// The file cannot be read, or there is no such run.
    pub async fn wanted(&self, id: &str) -> Result<String, db::Error> {
        let id = id.to_owned();
        let query = "SELECT wanted FROM run WHERE id = ?1";
        self.database.read(move |view| view.query_row(query, [id], |row| row.get(0))).await
    }

    /// What came of a run, a JSON object; none where it has not ended.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn result(&self, id: &str) -> Result<Option<String>, db::Error> {
        let id = id.to_owned();
        self.database.read(move |view| outcome::result(view, &id)).await
    }

    /// What a run has printed, once it has ended: standard output and standard error.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn output(&self, id: &str) -> Result<Option<(String, String)>, db::Error> {
        let id = id.to_owned();
        self.database.read(move |view| outcome::output(view, &id)).await
    }

    /// What a run's audit log was when the run had ended; none where nothing was written down about it.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn seal(&self, id: &str) -> Result<Option<Seal>, db::Error> {
        let id = id.to_owned();
        self.database.read(move |view| outcome::seal(view, &id)).await
    }

    /// Returns those of some runs that are remembered.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn known(&self, ids: Vec<String>) -> Result<HashSet<String>, db::Error> {
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
        self.database.read(read).await
    }

    /// Newest first.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn list(&self, filter: Filter) -> Result<Vec<Row>, db::Error> {
        self.database.read(move |view| filter.query(view)).await
    }

    /// Runs that have not ended, oldest first: after a start, what another process has left.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn open_rows(&self) -> Result<Vec<Row>, db::Error> {
        let query = format!("{} ORDER BY created, id", row::select("state <> 'ended'"));
        let read = move |view: &rusqlite::Connection| {
            view.prepare(&query)?.query_map([], row::read)?.collect()
        };
        self.database.read(read).await
    }

    /// Runs that have ended, and nothing is known of whose audit logs, oldest first.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn unsealed(&self) -> Result<Vec<String>, db::Error> {
        let query =
            "SELECT id FROM run WHERE state = 'ended' AND log_records IS NULL ORDER BY ended";
        let read = move |view: &rusqlite::Connection| {
            view.prepare(query)?.query_map([], |row| row.get(0))?.collect()
        };
        self.database.read(read).await
    }

    /// Writes down what the audit log of a run is that has ended, where nothing is known of it.
    ///
    /// # Errors
    /// It cannot be written.
    pub async fn seal_ended(&self, run: &str, seal: Seal) -> Result<(), db::Error> {
        let run = run.to_owned();
        self.database.write(move |change| outcome::seal_ended(change, &run, &seal)).await
    }

    /// Returns the money that is reserved for a run that has not ended; `None` where its grant has no caps.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn reserved(&self, run: &str) -> Result<Option<Nanodollars>, db::Error> {
        let run = run.to_owned();
        self.database.read(move |view| spending::reserved(view, &run)).await
    }

    /// Returns what the runs of a grant with caps have cost, and what is reserved for those that have not ended.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn standing(&self, grant: &str) -> Result<Standing, db::Error> {
        let (grant, now) = (grant.to_owned(), now());
        self.database.read(move |view| spending::standing(view, &grant, now)).await
    }

    /// The run that a grant has asked for with a key.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn keyed(&self, grant: &str, key: &str) -> Result<Option<Row>, db::Error> {
        let given = [grant.to_owned(), key.to_owned()];
        let query = row::select(KEYED);
        self.database.read(move |view| view.query_row(&query, given, row::read).optional()).await
    }

    /// Says whether anything can be written.
    ///
    /// # Errors
    /// Why not.
    pub async fn probe(&self) -> Result<(), db::Error> {
        self.database.write(|change| change.execute("UPDATE run SET id = id WHERE 0", [])).await?;
        Ok(())
    }

    /// Writes down the time, which the caller trusts.
    ///
    /// # Errors
    /// The file cannot be written.
    pub async fn note_time(&self, now: SystemTime) -> Result<(), db::Error> {
        let (note, now) = ("INSERT OR REPLACE INTO clock (one, time) VALUES (1, ?1)", millis(now));
        self.database.write(move |change| change.execute(note, [now])).await?;
        Ok(())
    }

    /// Returns the time that was written down last.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn noted_time(&self) -> Result<Option<SystemTime>, db::Error> {
        let read = |view: &rusqlite::Connection| {
            view.query_row("SELECT time FROM clock", [], |row| row.get::<_, i64>(0)).optional()
        };
        let noted = self.database.read(read).await?;
        Ok(noted.map(|time| UNIX_EPOCH + Duration::from_millis(time.max(0).cast_unsigned())))
    }

    /// Forgets runs that ended before, and gives their room back; returns how many. It takes a moment of the writer's
    /// time for every few of them.
    ///
    /// # Errors
    /// The file cannot be written.
    pub async fn forget(&self, ended_before: SystemTime) -> Result<usize, db::Error> {
        let before = millis(ended_before);
        let mut forgotten = 0;
        loop {
            match self.database.write(move |change| outcome::forget_some(change, before)).await? {
                0 => break,
                some => forgotten += some,
            }
        }
        if forgotten > 0 {
            self.database.shrink().await?;
        }
        Ok(forgotten)
    }

    /// What of a kind is in the file: all that outlives this process.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn saved(&self, run: &str, kind: Kind) -> Result<Vec<Event>, db::Error> {
        let run = run.to_owned();
        let query = format!(
            "SELECT {} FROM event WHERE run = ?1 AND kind = ?2 ORDER BY seq",
            outcome::EVENT
        );
        let read = move |view: &rusqlite::Connection| {
            view.prepare_cached(&query)?.query_map([&*run, kind.as_str()], event::read)?.collect()
        };
        self.database.read(read).await
    }

    /// A run's events after one of them, to its end and as they come. A run that is not known has none.
    pub fn follow(
        &self,
        run: &str,
        after: u64,
    ) -> impl Stream<Item = Result<Event, db::Error>> + use<> {
        let feed = self.live().get(run).cloned();
        let reader = Reader {
            journal: self.clone(),
            run: run.to_owned(),
            feed,
            after,
            page: vec![].into_iter(),
        };
        try_unfold(reader, |mut reader| async move {
            Ok(reader.next().await?.map(|event| (event, reader)))
        })
    }

    fn go_live(&self, run: &str, last: u64) -> Feed {
        let feed = Feed::new(run, last);
        self.live().insert(run.to_owned(), feed.clone());
        feed
    }

    fn live(&self) -> MutexGuard<'_, HashMap<String, Feed>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody who watches a run.
struct Reader {
    journal: Journal,
    run: String,
    feed: Option<Feed>,
    after: u64,
    page: std::vec::IntoIter<Event>,
}

impl Reader {
    async fn next(&mut self) -> Result<Option<Event>, db::Error> {
        loop {
            if let Some(event) = self.page.next() {
                self.after = event.seq;
                return Ok(Some(event));
            }
            let page = match &self.feed {
                // What was told before this process began is in the file only.
                Some(feed) if self.after >= feed.first() => match feed.page(self.after).await {
                    Some(page) => page,
                    None => return Ok(None),
                },
                _ => self.saved().await?,
            };
            match (page.is_empty(), &self.feed) {
                (false, _) => self.page = page.into_iter(),
                (true, Some(feed)) if self.after < feed.first() => self.after = feed.first(),
                (true, _) => return Ok(None),
            }
        }
    }

    async fn saved(&self) -> Result<Vec<Event>, db::Error> {
        let (run, after) = (self.run.clone(), self.after.cast_signed());
        let query = format!(
            "SELECT {} FROM event WHERE run = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3",
            outcome::EVENT
        );
        let read = move |view: &rusqlite::Connection| {
            view.prepare_cached(&query)?
                .query_map(params![run, after, feed::PAGE], event::read)?
                .collect()
        };
        self.journal.database.read(read).await
    }
}

fn insert(change: &Transaction<'_>, new: &New, now: i64) -> rusqlite::Result<Inserted> {
    if let Some(key) = &new.idempotency_key {
        let found = change.query_row(&row::select(KEYED), [&new.grant, key], row::read);
        if let Some(row) = found.optional()? {
            return Ok(Inserted::Same(Box::new(row)));
        }
    }
    if let Some(most) = new.most {
        let open = "SELECT count(*) FROM run WHERE grant_id = ?1 AND state <> 'ended'";
        let open: u32 = change.query_row(open, [&new.grant], |row| row.get(0))?;
        if open >= most {
            return Ok(Inserted::Full);
        }
    }
    let New { id: run, grant, caps, max_cost_usd: limit, .. } = new;
    let ask = spending::Ask { run, grant, caps: *caps, limit: *limit };
    let reserved = match spending::reserve(change, ask, now)? {
        Ok(reserved) => reserved,
        Err(exhausted) => return Ok(Inserted::Exhausted(exhausted)),
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
            ":wanted": new.wanted,
            ":now": now,
        },
    )?;
    Ok(Inserted::New(reserved))
}

/// There is one at most.
const KEYED: &str = "grant_id = ?1 AND idempotency_key = ?2";

fn save(change: &Transaction<'_>, run: &str, events: &[Event]) -> rusqlite::Result<()> {
    let insert = "INSERT INTO event (run, seq, at, kind, data) VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT DO NOTHING";
    let mut insert = change.prepare_cached(insert)?;
    for Event { seq, at_ms, kind, data } in events {
        insert.execute(params![run, seq.cast_signed(), at_ms, kind.as_str(), &**data])?;
    }
    Ok(())
}

fn now() -> i64 {
    millis(SystemTime::now())
}

fn millis(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
