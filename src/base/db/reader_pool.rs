//! The connections for reads. There are a few, so that one long read does not block other reads.
//!
//! **Invariant:** a task that waits for a connection holds no thread.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rusqlite::Connection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{DatabaseError, open_connection};

/// A fixed number of connections, each of which is lent to one reader at a time.
#[derive(Debug)]
pub(super) struct ReaderPool {
    idle: Mutex<Vec<Connection>>,
    free: Arc<Semaphore>,
}

/// A lent connection. It returns to the pool when it is dropped, even if its reader has panicked.
struct PooledReader {
    connection: Option<Connection>,
    readers: Arc<ReaderPool>,
    _permit: OwnedSemaphorePermit,
}

impl ReaderPool {
    pub(super) fn open_pool(path: &Path, count: usize) -> Result<Arc<Self>, DatabaseError> {
        let open = || {
            let connection = open_connection(path)?;
            connection.pragma_update(None, "query_only", "ON")?;
            Ok::<_, DatabaseError>(connection)
        };
        let idle = (0..count).map(|_| open()).collect::<Result<_, _>>()?;
        let free = Arc::new(Semaphore::new(count));
        Ok(Arc::new(Self { idle: Mutex::new(idle), free }))
    }

    pub(super) async fn read_pooled<T, F>(self: &Arc<Self>, work: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    {
        let permit =
            Arc::clone(&self.free).acquire_owned().await.map_err(|_| DatabaseError::Closed)?;
        let lent = PooledReader {
            connection: self.lock_idle().pop(),
            readers: Arc::clone(self),
            _permit: permit,
        };
        let read = tokio::task::spawn_blocking(move || {
            let connection = lent.connection.as_ref().expect("there is one for each permit");
            Ok(work(connection)?)
        });
        read.await.map_err(|_| DatabaseError::Closed)?
    }

    fn lock_idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PooledReader {
    /// Returns the connection. The permit is returned after this function, so there is always a connection for a
    /// permit.
    fn drop(&mut self) {
        let connection = self.connection.take();
        self.readers.lock_idle().extend(connection);
    }
}
