//! A SQLite file that many tasks of this process, and other processes, write to.
//!
//! The file is opened with access for its owner only and migrated to the tables of this version. One thread writes, and
//! commits waiting jobs together. A few connections read. One more connection is reserved for short reads that many
//! tasks wait for.
//!
//! **Invariant:** if a call returns without an error, the data that it has written survives a power cut.

mod reader_pool;
mod vacuum;

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
use reader_pool::ReaderPool;

/// A handle to an open file. Clones share the connections.
#[derive(Clone, Debug)]
pub struct SqliteDatabase {
    writer: mpsc::Sender<WriteJob>,
    readers: Arc<ReaderPool>,
    /// The connection of [`read_priority`](Self::read_priority).
    priority_readers: Arc<ReaderPool>,
}

/// The tables of one module. Each migration changes the tables from the version that is its index to the next version.
/// A published migration never changes.
#[derive(Clone, Copy, Debug)]
pub struct DatabaseSchema {
    pub module: &'static str,
    pub migrations: &'static [&'static str],
}

/// An error of reading or writing the file.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DatabaseError {
    #[error("cannot use `{}`", path.display())]
    File { path: PathBuf, source: Arc<io::Error> },
    #[error("the database cannot be read or written: {0}")]
    Sqlite(Arc<rusqlite::Error>),
    #[error(
        "the tables of `{module}` are of a later version ({found}; this program knows {supported}); use a newer program"
    )]
    NewerSchema { module: &'static str, found: usize, supported: usize },
    #[error("the database is closed: its thread has ended")]
    Closed,
}

/// A job for the writer. The job receives the transaction, or the error if there is no transaction.
type WriteJob = Box<dyn FnOnce(Result<&Transaction<'_>, DatabaseError>) -> WriteJobOutcome + Send>;

/// A job that has run. Its caller receives the result when the commit has succeeded or failed.
struct WriteJobOutcome {
    error: Option<DatabaseError>,
    report: Box<dyn FnOnce(Result<(), DatabaseError>) + Send>,
}

impl SqliteDatabase {
    /// Opens the file, and creates it if it does not exist. Blocks.
    ///
    /// # Errors
    /// Returns an error if the file cannot be used, or a later version of the program has written it.
    pub fn open_database(path: &Path, schemas: &[DatabaseSchema]) -> Result<Self, DatabaseError> {
        Self::open_with_commit_observer(path, schemas, |_, _| ())
    }

    /// Opens the file like [`open_database`](Self::open_database). `observer` receives the duration of each commit, and
    /// true if the commit is on disk.
    ///
    /// # Errors
    /// Returns the errors of [`open_database`](Self::open_database).
    pub fn open_with_commit_observer(
        path: &Path,
        schemas: &[DatabaseSchema],
        observer: impl FnMut(Duration, bool) + Send + 'static,
    ) -> Result<Self, DatabaseError> {
        create_private_file(path).map_err(|source| DatabaseError::File {
            path: path.to_owned(),
            source: source.into(),
        })?;
        let mut connection = open_connection(path)?;
        for schema in schemas {
            apply_migrations(&mut connection, schema)?;
        }
        vacuum::enable_incremental_vacuum(&connection);
        let (readers, priority_readers) =
            (ReaderPool::open_pool(path, READER_CONNECTIONS)?, ReaderPool::open_pool(path, 1)?);
        let (writer, jobs) = mpsc::channel(MAX_QUEUED_JOBS);
        let thread = thread::Builder::new().name("database".to_owned());
        thread.spawn(move || run_writer_loop(connection, jobs, observer)).map_err(|source| {
            DatabaseError::File { path: path.to_owned(), source: source.into() }
        })?;
        Ok(Self { writer, readers, priority_readers })
    }

    /// Runs `work` in a transaction, and returns when the data is on disk. If `work` fails, none of its data is
    /// written.
    ///
    /// # Errors
    /// Returns the error of `work`, or the error of the disk.
    pub async fn write_in_transaction<T, F>(&self, work: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
    {
        let (job, answer) = new_write_job(work);
        self.writer.send(job).await.map_err(|_| DatabaseError::Closed)?;
        answer.await.map_err(|_| DatabaseError::Closed)?
    }

    /// Runs `work` like [`write_in_transaction`](Self::write_in_transaction), and blocks the calling thread, which
    /// needs no runtime.
    ///
    /// # Errors
    /// Returns the errors of [`write_in_transaction`](Self::write_in_transaction).
    pub fn write_in_transaction_blocking<T, F>(&self, work: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
    {
        let (job, answer) = new_write_job(work);
        self.writer.blocking_send(job).map_err(|_| DatabaseError::Closed)?;
        answer.blocking_recv().map_err(|_| DatabaseError::Closed)?
    }

    /// Runs `work` on committed data, when one of a few connections is free. All statements of `work` see the same
    /// state.
    ///
    /// # Errors
    /// Returns the error of `work`.
    pub async fn read_committed<T, F>(&self, work: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    {
        self.readers.read_pooled(|view| read_snapshot(view, work)).await
    }

    /// Runs a short read on a connection of its own, so that the read never waits behind a long read.
    ///
    /// # Errors
    /// Returns the errors of [`read_committed`](Self::read_committed).
    pub async fn read_priority<T, F>(&self, work: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    {
        self.priority_readers.read_pooled(|view| read_snapshot(view, work)).await
    }
}

impl SqliteDatabase {
    /// Returns unused pages to the file system in small steps, so that other writers wait only for a moment.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub async fn release_free_pages(&self) -> Result<(), DatabaseError> {
        while self.write_in_transaction(vacuum::vacuum_step).await? {}
        // A checkpoint is not possible within a transaction.
        self.readers.read_pooled(vacuum::checkpoint_wal).await
    }
}

impl DatabaseError {
    /// Returns SQLite's error, if this error came from SQLite.
    pub fn as_sqlite_error(&self) -> Option<&rusqlite::Error> {
        match self {
            Self::Sqlite(error) => Some(error),
            _ => None,
        }
    }
}

impl From<rusqlite::Error> for DatabaseError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(Arc::new(error))
    }
}

/// Runs `work` in a transaction, so that all its statements see the same state of the file.
fn read_snapshot<T>(
    view: &Connection,
    work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
) -> rusqlite::Result<T> {
    let snapshot = view.unchecked_transaction()?;
    work(&snapshot)
}

/// Creates a job for the writer, and the receiver of its result. The result is sent after the commit, and is an error
/// if the job or the commit failed.
fn new_write_job<T: Send + 'static>(
    work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
) -> (WriteJob, oneshot::Receiver<Result<T, DatabaseError>>) {
    let (sender, receiver) = oneshot::channel();
    let job = move |batch: Result<&Transaction<'_>, DatabaseError>| {
        let done = batch.and_then(|batch| run_in_savepoint(batch, work));
        let error = done.as_ref().err().cloned();
        let report = Box::new(move |committed: Result<(), DatabaseError>| {
            let _nobody_waits = sender.send(done.and_then(|done| committed.map(|()| done)));
        });
        WriteJobOutcome { error, report }
    };
    (Box::new(job), receiver)
}

/// Runs one job of a batch in a savepoint, so that a failed job takes back its own changes only. If the savepoint
/// cannot be ended, the whole transaction is rolled back: the changes of this job cannot be separated from those of the
/// other jobs.
fn run_in_savepoint<T>(
    batch: &Transaction<'_>,
    work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>,
) -> Result<T, DatabaseError> {
    batch.execute_batch("SAVEPOINT job")?;
    // 1. Run the job, then keep its changes or take them back.
    let done = work(batch);
    let end = if done.is_ok() { "RELEASE job" } else { "ROLLBACK TO job; RELEASE job" };
    let ended = batch.execute_batch(end);
    // 2. The savepoint is still there, so a commit would contain half of the job. `commit_batch` finds the end of the
    // transaction.
    if ended.is_err() && !batch.is_autocommit() {
        batch.execute_batch("ROLLBACK")?;
    }
    // 3. If both have failed, the job's own error is the cause.
    let done = done?;
    ended?;
    Ok(done)
}

/// Runs the jobs of the writer's thread. The loop ends when all senders are dropped.
fn run_writer_loop(
    mut connection: Connection,
    mut jobs: mpsc::Receiver<WriteJob>,
    mut observer: impl FnMut(Duration, bool),
) {
    let mut batch = Vec::with_capacity(MAX_QUEUED_JOBS);
    while jobs.blocking_recv_many(&mut batch, MAX_QUEUED_JOBS) > 0 {
        let begun = Instant::now();
        let (finished, committed) = commit_batch(&mut connection, &mut batch);
        observer(begun.elapsed(), committed.is_ok());
        for outcome in finished {
            (outcome.report)(committed.clone());
        }
    }
}

/// Runs the jobs in one transaction and commits it. If a job has ended the transaction, as a full disk does, all jobs
/// of the batch fail, and no later job begins: its changes would be committed at once, and its caller would receive an
/// error although the data is there.
fn commit_batch(
    connection: &mut Connection,
    batch: &mut Vec<WriteJob>,
) -> (Vec<WriteJobOutcome>, Result<(), DatabaseError>) {
    let mut jobs = batch.drain(..);
    let mut finished = Vec::with_capacity(jobs.len());
    let mut commit = || {
        // A batch takes the write lock at its beginning, so that no other process can write between two jobs.
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for job in jobs.by_ref() {
            let outcome = job(Ok(&transaction));
            let failed = outcome.error.clone();
            finished.push(outcome);
            // SQLite has rolled the transaction back. The error of the job is the error of the whole batch.
            if transaction.is_autocommit() {
                failed.map_or(Ok(()), Err)?;
                break;
            }
        }
        Ok(transaction.commit()?)
    };
    let committed: Result<(), DatabaseError> = commit();
    // The jobs that have not begun receive the error, too.
    if let Err(error) = &committed {
        finished.extend(jobs.map(|job| job(Err(error.clone()))));
    }
    (finished, committed)
}

/// Creates the file with access for its owner only. SQLite gives its other files the same mode.
fn create_private_file(path: &Path) -> io::Result<File> {
    if let Some(parent) = path.parent() {
        private_dir::make(parent, 0o700).map_err(io::Error::other)?;
    }
    File::options().write(true).create(true).truncate(false).mode(0o600).open(path)
}

fn open_connection(path: &Path) -> Result<Connection, DatabaseError> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    // With a write-ahead log, readers and the writer do not wait for each other.
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "journal_size_limit", MAX_WAL_BYTES)?;
    // Each commit syncs the log, so that it survives a power cut.
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", "ON")?;
    // A manipulated schema must not call functions with side effects.
    connection.pragma_update(None, "trusted_schema", "OFF")?;
    connection.set_prepared_statement_cache_capacity(STATEMENT_CACHE_SIZE);
    Ok(connection)
}

/// Applies the migrations that the file does not have yet, all in one transaction. Fails if the file's tables are of a
/// later version.
fn apply_migrations(
    connection: &mut Connection,
    schema: &DatabaseSchema,
) -> Result<(), DatabaseError> {
    let DatabaseSchema { module, migrations } = schema;
    let change = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    change.execute_batch(
        "CREATE TABLE IF NOT EXISTS schema (room TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT",
    )?;
    let found = "SELECT version FROM schema WHERE room = ?1";
    let found: Option<u32> = change.query_row(found, [module], |row| row.get(0)).optional()?;
    let found = found.unwrap_or_default() as usize;
    let Some(missing) = migrations.get(found..) else {
        return Err(DatabaseError::NewerSchema { module, found, supported: migrations.len() });
    };
    for step in missing {
        change.execute_batch(step)?;
    }
    change.execute(
        "INSERT INTO schema VALUES (?1, ?2) ON CONFLICT (room) DO UPDATE SET version = excluded.version",
        params![module, migrations.len().cast_signed()],
    )?;
    Ok(change.commit()?)
}

/// The largest number of jobs that wait for the writer. The sender of a further job waits for room. Our choice.
const MAX_QUEUED_JOBS: usize = 1024;

/// The longest wait for another process's transaction to end. Our choice.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// The size to which SQLite cuts a longer write-ahead log, in bytes. Our choice.
const MAX_WAL_BYTES: u32 = 16 << 20;

/// The largest number of long reads at the same time. Our choice: each read has a page cache and a thread until it
/// ends.
const READER_CONNECTIONS: usize = 4;

/// The largest number of prepared statements that a connection keeps. Our choice.
const STATEMENT_CACHE_SIZE: usize = 128;
