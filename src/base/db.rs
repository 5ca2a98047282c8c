//! A SQLite file that many tasks of one process write to, and other processes too: opened for us alone, brought to
//! this version's tables, and written by one thread, which commits together what has come together. It is read with a few
//! connections, and with one more for what everybody waits for.
//!
//! **Invariant:** what a call has written is there after a power cut, or the call says that it failed.

mod readers;
mod room;

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use tokio::sync::{mpsc, oneshot};

use super::private_dir;
use readers::Readers;

/// A handle to an open file. Clones share the connections.
#[derive(Clone, Debug)]
pub struct Database {
    writer: mpsc::Sender<Job>,
    readers: Arc<Readers>,
    /// For [`read_quick`](Self::read_quick) alone.
    quick: Arc<Readers>,
}

/// The tables of one room. Each step brings them from the version that is its index to the next; what was published
/// never changes.
#[derive(Clone, Copy, Debug)]
pub struct Schema {
    pub room: &'static str,
    pub steps: &'static [&'static str],
}

/// Why a file cannot be read or written.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use `{}`", path.display())]
    File { path: PathBuf, source: Arc<io::Error> },
    #[error("the database cannot be read or written: {0}")]
    Sqlite(Arc<rusqlite::Error>),
    #[error(
        "the tables of `{room}` are of a later version ({found}; this program knows {known}); use a newer program"
    )]
    Later { room: &'static str, found: usize, known: usize },
    #[error("the database is closed: its thread has ended")]
    Closed,
}

/// What is done in a transaction, or is not where there is none.
type Job = Box<dyn FnOnce(Result<&Transaction<'_>, Error>) -> Done + Send>;

/// A job that is over, whose caller is told when it is known whether it is on disk.
struct Done {
    failed: Option<Error>,
    tell: Box<dyn FnOnce(Result<(), Error>) + Send>,
}

impl Database {
    /// Opens a file, or makes it. Blocks.
    ///
    /// # Errors
    /// The file cannot be used, or a later version has written it.
    pub fn open(path: &Path, schemas: &[Schema]) -> Result<Self, Error> {
        Self::open_watched(path, schemas, |_, _| ())
    }

    /// As [`open`](Self::open); `watch` is told of each commit how long it took, and whether it is on disk.
    ///
    /// # Errors
    /// As there.
    pub fn open_watched(
        path: &Path,
        schemas: &[Schema],
        watch: impl FnMut(Duration, bool) + Send + 'static,
    ) -> Result<Self, Error> {
        create(path)
            .map_err(|source| Error::File { path: path.to_owned(), source: source.into() })?;
        let mut connection = connect(path)?;
        for schema in schemas {
            migrate(&mut connection, schema)?;
        }
        room::make_returnable(&connection);
        let (readers, quick) = (Readers::open(path, READERS)?, Readers::open(path, 1)?);
        let (writer, jobs) = mpsc::channel(QUEUE);
        let thread = thread::Builder::new().name("database".to_owned());
        thread
            .spawn(move || write_all(connection, jobs, watch))
            .map_err(|source| Error::File { path: path.to_owned(), source: source.into() })?;
        Ok(Self { writer, readers, quick })
    }

    /// Writes, and returns when that is on disk. Where `work` fails, nothing of it is.
    ///
    /// # Errors
    /// What went wrong in `work`, or with the disk.
    pub async fn write<T, F>(&self, work: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
    {
        let (job, answer) = job(work);
        self.writer.send(job).await.map_err(|_| Error::Closed)?;
        answer.await.map_err(|_| Error::Closed)?
    }

    /// As [`write`](Self::write), for a thread that may wait and has no runtime.
    ///
    /// # Errors
    /// As there.
    pub fn write_blocking<T, F>(&self, work: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
    {
        let (job, answer) = job(work);
        self.writer.blocking_send(job).map_err(|_| Error::Closed)?;
        answer.blocking_recv().map_err(|_| Error::Closed)?
    }

    /// Reads what is committed, when one of a few connections is free.
    ///
    /// # Errors
    /// What went wrong in `work`.
    pub async fn read<T, F>(&self, work: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    {
        self.readers.read(work).await
    }

    /// As [`read`](Self::read), for what takes a moment and is waited for by everybody: it is never behind a long read.
    ///
    /// # Errors
    /// As there.
    pub async fn read_quick<T, F>(&self, work: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    {
        self.quick.read(work).await
    }
}

impl Database {
    /// Gives room that nothing uses any more back to the disk, a little at a time, so that whoever writes meanwhile
    /// waits no longer than a moment.
    ///
    /// # Errors
    /// The file cannot be written.
    pub async fn shrink(&self) -> Result<(), Error> {
        while self.write(room::give_some_back).await? {}
        self.read(room::settle).await
    }
}

impl Error {
    /// SQLite's own, where it comes from there.
    pub fn sqlite(&self) -> Option<&rusqlite::Error> {
        match self {
            Self::Sqlite(error) => Some(error),
            _ => None,
        }
    }
}

impl From<rusqlite::Error> for Error {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(Arc::new(error))
    }
}

fn job<T: Send + 'static>(
    work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
) -> (Job, oneshot::Receiver<Result<T, Error>>) {
    let (sender, receiver) = oneshot::channel();
    let job = move |batch: Result<&Transaction<'_>, Error>| {
        let done = batch.and_then(|batch| apart(batch, work));
        let failed = done.as_ref().err().cloned();
        let tell = Box::new(move |committed: Result<(), Error>| {
            let _nobody_waits = sender.send(done.and_then(|done| committed.map(|()| done)));
        });
        Done { failed, tell }
    };
    (Box::new(job), receiver)
}

/// One job of a batch, which takes nothing of the others back when it fails. Where it cannot be told from them any more,
/// there is no transaction left.
fn apart<T>(
    batch: &Transaction<'_>,
    work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>,
) -> Result<T, Error> {
    batch.execute_batch("SAVEPOINT job")?;
    let done = work(batch);
    let end = if done.is_ok() { "RELEASE job" } else { "ROLLBACK TO job; RELEASE job" };
    let ended = batch.execute_batch(end);
    if ended.is_err() && !batch.is_autocommit() {
        batch.execute_batch("ROLLBACK")?;
    }
    // What it says itself is why the savepoint is gone, where both have failed.
    let done = done?;
    ended?;
    Ok(done)
}

/// The writer's thread: it ends when nobody can give it anything any more.
fn write_all(
    mut connection: Connection,
    mut jobs: mpsc::Receiver<Job>,
    mut watch: impl FnMut(Duration, bool),
) {
    let mut batch = Vec::with_capacity(QUEUE);
    while jobs.blocking_recv_many(&mut batch, QUEUE) > 0 {
        let begun = Instant::now();
        let (over, committed) = commit(&mut connection, &mut batch);
        watch(begun.elapsed(), committed.is_ok());
        for done in over {
            (done.tell)(committed.clone());
        }
    }
}

/// Does jobs until one of them has cost all of them their transaction, as a full disk does. Those after it are not begun:
/// what they write would be committed by itself, and their callers told that it is not there.
fn commit(connection: &mut Connection, batch: &mut Vec<Job>) -> (Vec<Done>, Result<(), Error>) {
    let mut jobs = batch.drain(..);
    let mut over = Vec::with_capacity(jobs.len());
    let mut commit = || {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for job in jobs.by_ref() {
            let done = job(Ok(&transaction));
            let failed = done.failed.clone();
            over.push(done);
            if transaction.is_autocommit() {
                failed.map_or(Ok(()), Err)?;
                break;
            }
        }
        Ok(transaction.commit()?)
    };
    let committed: Result<(), Error> = commit();
    if let Err(why) = &committed {
        over.extend(jobs.map(|job| job(Err(why.clone()))));
    }
    (over, committed)
}

/// SQLite gives its other files the mode of this one.
fn create(path: &Path) -> io::Result<File> {
    if let Some(parent) = path.parent() {
        private_dir::make(parent, 0o700).map_err(io::Error::other)?;
    }
    File::options().write(true).create(true).truncate(false).mode(0o600).open(path)
}

fn connect(path: &Path) -> Result<Connection, Error> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY)?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "journal_size_limit", MAX_WAL)?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", "ON")?;
    connection.pragma_update(None, "trusted_schema", "OFF")?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    Ok(connection)
}

fn migrate(connection: &mut Connection, schema: &Schema) -> Result<(), Error> {
    let Schema { room, steps } = schema;
    let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    change.execute_batch(
        "CREATE TABLE IF NOT EXISTS schema (room TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT",
    )?;
    let found = "SELECT version FROM schema WHERE room = ?1";
    let found: Option<u32> = change.query_row(found, [room], |row| row.get(0)).optional()?;
    let found = found.unwrap_or_default() as usize;
    let Some(missing) = steps.get(found..) else {
        return Err(Error::Later { room, found, known: steps.len() });
    };
    for step in missing {
        change.execute_batch(step)?;
    }
    change.execute(
        "INSERT INTO schema VALUES (?1, ?2) ON CONFLICT (room) DO UPDATE SET version = excluded.version",
        params![room, steps.len().cast_signed()],
    )?;
    Ok(change.commit()?)
}

/// Jobs that wait for the disk; whoever has another waits before.
const QUEUE: usize = 1024;

/// For another process to finish its transaction.
const BUSY: Duration = Duration::from_secs(10);

/// Bytes that are kept of a write-ahead log that was longer.
const MAX_WAL: u32 = 16 << 20;

/// Long reads at the same time; each has a page cache and a thread while it lasts.
const READERS: usize = 4;

const STATEMENTS: usize = 128;
