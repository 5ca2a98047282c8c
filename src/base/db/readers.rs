//! The connections that are read with: a few, so that one long answer does not hold up the others.
//!
//! **Invariant:** whoever waits for a connection holds no thread.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rusqlite::Connection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Error, connect};

/// So many connections, each lent to one reader at a time.
#[derive(Debug)]
pub(super) struct Readers {
    idle: Mutex<Vec<Connection>>,
    free: Arc<Semaphore>,
}

/// A connection that comes back, also where its reader has panicked.
struct Lent {
    connection: Option<Connection>,
    readers: Arc<Readers>,
    _permit: OwnedSemaphorePermit,
}

impl Readers {
    pub(super) fn open(path: &Path, count: usize) -> Result<Arc<Self>, Error> {
        let open = || {
            let connection = connect(path)?;
            connection.pragma_update(None, "query_only", "ON")?;
            Ok::<_, Error>(connection)
        };
        let idle = (0..count).map(|_| open()).collect::<Result<_, _>>()?;
        let free = Arc::new(Semaphore::new(count));
        Ok(Arc::new(Self { idle: Mutex::new(idle), free }))
    }

    pub(super) async fn read<T, F>(self: &Arc<Self>, work: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    {
        let permit = Arc::clone(&self.free).acquire_owned().await.map_err(|_| Error::Closed)?;
        let lent =
            Lent { connection: self.idle().pop(), readers: Arc::clone(self), _permit: permit };
        let read = tokio::task::spawn_blocking(move || {
            let connection = lent.connection.as_ref().expect("there is one for each permit");
            Ok(work(connection)?)
        });
        read.await.map_err(|_| Error::Closed)?
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lent {
    /// The connection is back before the permit is.
    fn drop(&mut self) {
        let connection = self.connection.take();
        self.readers.idle().extend(connection);
    }
}
