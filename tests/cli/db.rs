//! A5: Tests of the SQLite file: many tasks write it, and processes of other versions open it.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use cogni_gateway::base::db::{DatabaseError, DatabaseSchema, SqliteDatabase};
use tempfile::tempdir;

const FIRST: DatabaseSchema = DatabaseSchema {
    module: "cellar",
    migrations: &["CREATE TABLE wine (name TEXT PRIMARY KEY) STRICT"],
};

const SECOND: DatabaseSchema = DatabaseSchema {
    module: "cellar",
    migrations: &[
        "CREATE TABLE wine (name TEXT PRIMARY KEY) STRICT",
        "ALTER TABLE wine ADD COLUMN year INTEGER NOT NULL DEFAULT 1989",
    ],
};

async fn add_row(database: &SqliteDatabase, name: &str) -> Result<usize, DatabaseError> {
    let name = name.to_owned();
    database
        .write_in_transaction(move |change| {
            change.execute("INSERT INTO wine (name) VALUES (?1)", [name])
        })
        .await
}

async fn count_rows(database: &SqliteDatabase) -> u32 {
    let count = "SELECT count(*) FROM wine";
    database.read_committed(|view| view.query_row(count, [], |row| row.get(0))).await.unwrap()
}

fn open_database(path: &Path, schema: DatabaseSchema) -> Result<SqliteDatabase, DatabaseError> {
    SqliteDatabase::open_database(path, &[schema])
}

#[tokio::test]
async fn a_failed_write_rolls_back_no_other_write_of_its_batch() {
    let directory = tempdir().unwrap();
    let database = open_database(&directory.path().join("state.db"), FIRST).unwrap();
    let names: Vec<_> = (0..200).map(|number| format!("wine {}", number % 100)).collect();
    let done =
        futures_util::future::join_all(names.iter().map(|name| add_row(&database, name))).await;
    assert_eq!(done.iter().filter(|done| done.is_ok()).count(), 100);
    assert_eq!(count_rows(&database).await, 100);
}

#[tokio::test]
async fn work_that_fails_half_way_leaves_nothing() {
    let directory = tempdir().unwrap();
    let database = open_database(&directory.path().join("state.db"), FIRST).unwrap();
    let work = |change: &rusqlite::Transaction<'_>| {
        change.execute("INSERT INTO wine (name) VALUES ('half')", [])?;
        change.execute("INSERT INTO beer (name) VALUES ('none')", [])
    };
    insta::assert_snapshot!(
        database.write_in_transaction(work).await.unwrap_err(),
        @"the database cannot be read or written: no such table: beer"
    );
    assert_eq!(count_rows(&database).await, 0);
}

/// A full disk rolls back the whole transaction including the savepoint. Later writes of the batch are not written
/// either, because their callers get the error.
#[tokio::test]
async fn a_lost_transaction_writes_nothing_of_its_batch() {
    let directory = tempdir().unwrap();
    let database = open_database(&directory.path().join("state.db"), FIRST).unwrap();
    let few = |change: &rusqlite::Transaction<'_>| {
        let pages: u32 = change.pragma_query_value(None, "page_count", |row| row.get(0))?;
        change.pragma_update_and_check(None, "max_page_count", pages + 8, |_| Ok(()))
    };
    database.write_in_transaction(few).await.unwrap();
    let (held, release) = hold_writer(&database).await;
    let (large, small) = ("x".repeat(1 << 20), "small".to_owned());
    let (before, large, small, held, ()) = tokio::join!(
        add_row(&database, "before"),
        add_row(&database, &large),
        add_row(&database, &small),
        held,
        async move { release.send(()).unwrap() },
    );
    held.unwrap();
    let said = [before, large, small].map(|done| done.unwrap_err().to_string());
    insta::assert_snapshot!(said.join("\n"), @"
    the database cannot be read or written: database or disk is full
    the database cannot be read or written: database or disk is full
    the database cannot be read or written: database or disk is full
    ");
    assert_eq!(count_rows(&database).await, 0, "a reader was told that the row does not exist");
    add_row(&database, "after").await.unwrap();
    assert_eq!(count_rows(&database).await, 1);
}

/// Another process holds the database longer than the writer waits. The writer's own timeout is shortened for this
/// test.
#[tokio::test]
async fn a_failed_write_says_why() {
    let directory = tempdir().unwrap();
    let path = directory.path().join("state.db");
    let database = open_database(&path, FIRST).unwrap();
    database
        .write_in_transaction(|change| change.busy_timeout(Duration::from_millis(20)))
        .await
        .unwrap();
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    insta::assert_snapshot!(
        add_row(&database, "mine").await.unwrap_err(),
        @"the database cannot be read or written: database is locked"
    );
    other.execute_batch("ROLLBACK").unwrap();
    add_row(&database, "mine").await.unwrap();
    assert_eq!(count_rows(&database).await, 1);
}

/// Holds the writer, so that writes from now on form one batch until it is released.
async fn hold_writer(
    database: &SqliteDatabase,
) -> (impl Future<Output = Result<(), DatabaseError>> + use<>, mpsc::Sender<()>) {
    let ((begun, begins), (release, released)) = (tokio::sync::oneshot::channel(), mpsc::channel());
    let work = move |_: &rusqlite::Transaction<'_>| {
        let _ = begun.send(());
        let _released = released.recv_timeout(TEST_TIMEOUT);
        Ok(())
    };
    let writer = database.clone();
    let held = tokio::spawn(async move { writer.write_in_transaction(work).await });
    begins.await.unwrap();
    (async move { held.await.unwrap() }, release)
}

/// A database of an earlier version keeps its rows; a database of a later version is not touched.
#[tokio::test]
async fn a_database_is_upgraded_and_never_downgraded() {
    let directory = tempdir().unwrap();
    let path = directory.path().join("deep/state.db");
    add_row(&open_database(&path, FIRST).unwrap(), "old").await.unwrap();
    let database = open_database(&path, SECOND).unwrap();
    let year = database.read_committed(|view| {
        view.query_row("SELECT year FROM wine", [], |row| row.get::<_, u32>(0))
    });
    assert_eq!(year.await.unwrap(), 1989);
    insta::assert_snapshot!(
        open_database(&path, FIRST).unwrap_err(),
        @"the tables of `cellar` are of a later version (2; this program knows 1); use a newer program"
    );
}

#[tokio::test]
async fn the_file_is_for_its_owner_only() {
    let directory = tempdir().unwrap();
    let path = directory.path().join("state.db");
    let database = open_database(&path, FIRST).unwrap();
    add_row(&database, "mine").await.unwrap();
    for name in ["state.db", "state.db-wal", "state.db-shm"] {
        let mode = directory.path().join(name).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

/// G12: An observer gets each commit with its duration and its outcome.
#[tokio::test]
async fn commits_are_observed() {
    let place = tempdir().unwrap();
    let (told, heard) = mpsc::channel();
    let watch = move |took: Duration, is_kept| told.send((took, is_kept)).unwrap();
    let path = place.path().join("state.db");
    let database = SqliteDatabase::open_with_commit_observer(&path, &[], watch).unwrap();
    database
        .write_in_transaction(|change| change.execute_batch("CREATE TABLE t (x)"))
        .await
        .unwrap();
    database.write_in_transaction(|change| change.execute_batch("ROLLBACK")).await.unwrap_err();
    let told: Vec<_> = (0..2).map(|_| heard.recv().unwrap().1).collect();
    assert_eq!(told, [true, false]);
}

/// The readers wait for each other, as a reader on a slow disk waits for a page.
#[tokio::test]
async fn a_long_read_does_not_block_another() {
    let place = tempdir().unwrap();
    let database = open_database(&place.path().join("state.db"), FIRST).unwrap();
    let (tell, told) = mpsc::channel();
    let long = database.read_committed(move |_| Ok(told.recv_timeout(TEST_TIMEOUT)));
    let short = database.read_committed(move |_| Ok(tell.send(())));
    let (long, short) = tokio::join!(long, short);
    assert_eq!((long.unwrap(), short.unwrap()), (Ok(()), Ok(())));
}

/// However many readers wait for a connection, a short read completes, and no thread is blocked that other tasks need.
#[test]
fn waiting_readers_block_no_other_task() {
    let place = tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .max_blocking_threads(MOST_THREADS)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let database = open_database(&place.path().join("state.db"), FIRST).unwrap();
        let (release, released) = mpsc::channel::<()>();
        let released = std::sync::Arc::new(std::sync::Mutex::new(released));
        let long = (0..100).map(|_| {
            let (database, released) = (database.clone(), released.clone());
            tokio::spawn(async move {
                let wait = move |_: &rusqlite::Connection| {
                    let _released = released.lock().unwrap().recv_timeout(TEST_TIMEOUT);
                    Ok(())
                };
                database.read_committed(wait).await
            })
        });
        let long: Vec<_> = long.collect();
        let quick = database.read_priority(|view| view.query_row("SELECT 1", [], |row| row.get(0)));
        let other = tokio::task::spawn_blocking(|| ());
        let quick: u32 = tokio::time::timeout(TEST_TIMEOUT / 2, quick).await.unwrap().unwrap();
        tokio::time::timeout(TEST_TIMEOUT / 2, other).await.unwrap().unwrap();
        assert_eq!(quick, 1);
        drop(release);
        for one in long {
            one.await.unwrap().unwrap();
        }
    });
}

/// The statements of one reader see the same state, also if another task writes between them.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_of_several_statements_sees_one_moment() {
    let place = tempdir().unwrap();
    let database = open_database(&place.path().join("state.db"), FIRST).unwrap();
    add_row(&database, "one").await.unwrap();
    let (writer, runtime) = (database.clone(), tokio::runtime::Handle::current());
    let read = move |view: &rusqlite::Connection| {
        let count = || view.query_row("SELECT count(*) FROM wine", [], |row| row.get::<_, u32>(0));
        let before = count()?;
        runtime.block_on(add_row(&writer, "two")).unwrap();
        Ok((before, count()?))
    };
    assert_eq!(database.read_committed(read).await.unwrap(), (1, 1));
    assert_eq!(count_rows(&database).await, 2);
}

/// A reader that fails or panics returns its connection.
#[tokio::test]
async fn a_reader_that_panics_takes_no_connection_with_it() {
    let place = tempdir().unwrap();
    let database = open_database(&place.path().join("state.db"), FIRST).unwrap();
    for _ in 0..20 {
        let read = database.read_committed(|_| -> rusqlite::Result<()> { panic!("on purpose") });
        assert!(matches!(read.await, Err(DatabaseError::Closed)));
    }
    assert_eq!(count_rows(&database).await, 0);
}

/// Far longer than any step of these tests takes.
const TEST_TIMEOUT: Duration = Duration::from_mins(4);

/// More than the number of connections, fewer than the number of readers.
const MOST_THREADS: usize = 8;
