//! The grants of a service, in its database.
//!
//! The command line mints and revokes in the same file while a service runs: what a service remembers of a grant, it
//! forgets within half a second.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OptionalExtension, Row, params};
use uuid::Uuid;

use super::{Denied, Grant, Invalid, Terms, token};
use crate::base::db::{self, Database, Schema};
use crate::base::secret::Secret;

/// The tables of this room.
pub const SCHEMA: Schema = Schema {
    room: "grant",
    steps: &[
        "CREATE TABLE grants (
             id TEXT PRIMARY KEY,
             hash TEXT NOT NULL UNIQUE,
             name TEXT NOT NULL,
             terms TEXT NOT NULL,
             created INTEGER NOT NULL,
             expires INTEGER,
             revoked INTEGER,
             used INTEGER
         ) STRICT",
        // Whether a revocation ends the grant's runs, too.
        "ALTER TABLE grants ADD COLUMN cancels_runs INTEGER NOT NULL DEFAULT 0",
    ],
};

/// The grants of one database. Clones share what is remembered.
#[derive(Clone, Debug)]
pub struct Grants {
    database: Database,
    known: Arc<Mutex<HashMap<String, Known>>>,
}

/// A grant as it was a moment ago.
#[derive(Debug)]
struct Known {
    grant: Arc<Grant>,
    until: Instant,
}

/// Why grants cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Denied(#[from] Denied),
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error("there is no grant `{0}`; `cogni-gateway grant list` shows them")]
    NoSuchGrant(String),
    #[error("the kernel gives no random bytes")]
    NoRandom,
    #[error(transparent)]
    Database(#[from] db::Error),
}

impl Grants {
    pub fn new(database: Database) -> Self {
        Self { database, known: Arc::default() }
    }

    /// The grant that a token stands for.
    ///
    /// # Errors
    /// [`Error::Denied`] where it stands for none that is good now.
    pub async fn check(&self, token: &str) -> Result<Arc<Grant>, Error> {
        let hash = token::hash(token).ok_or(Denied::Unknown)?;
        let now = SystemTime::now();
        let grant = match self.remembered(&hash) {
            Some(grant) => grant,
            None => self.look_up(hash, now).await?,
        };
        grant.check_at(now)?;
        Ok(grant)
    }

    /// Checks the grant that a run or a watcher has, as it was half a second ago at most. A grant that is not in the
    /// database is that of a service which asks for none, or of an earlier file: nothing can be said against it.
    ///
    /// # Errors
    /// [`Error::Denied`] where the grant is revoked or expired.
    pub async fn check_id(&self, id: &str) -> Result<(), Error> {
        let now = SystemTime::now();
        if let Some(grant) = self.remembered(id) {
            return Ok(grant.check_at(now)?);
        }
        let (until, wanted) = (Instant::now() + MEMORY, id.to_owned());
        let found = self.database.read_quick(move |view| {
            view.prepare_cached(&select("id = ?1"))?.query_row([wanted], read).optional()
        });
        let Some(grant) = found.await?.map(Arc::new) else { return Ok(()) };
        self.remember(id.to_owned(), Known { grant: Arc::clone(&grant), until });
        Ok(grant.check_at(now)?)
    }

    /// Makes a grant, and returns it with its token, which nobody can see again.
    ///
    /// # Errors
    /// Its terms make no sense, or it cannot be stored.
    pub async fn mint(
        &self,
        name: &str,
        terms: Terms,
        expires: Option<SystemTime>,
    ) -> Result<(Grant, Secret), Error> {
        terms.check()?;
        if !is_name(name) {
            return Err(Invalid::Name.into());
        }
        let token = token::mint().map_err(|_| Error::NoRandom)?;
        let hash = token::hash(token.expose()).expect("it was just made so");
        let created = from_millis(millis(SystemTime::now()));
        let expires = expires.map(millis).map(from_millis);
        let id = format!("grant-{}", Uuid::now_v7());
        let grant =
            Grant { id, name: name.to_owned(), terms, created, expires, revoked: None, used: None };
        let row = grant.clone();
        self.database.write(move |change| insert(change, &row, &hash)).await?;
        Ok((grant, token))
    }

    /// All grants, oldest first.
    ///
    /// # Errors
    /// They cannot be read.
    pub async fn list(&self) -> Result<Vec<Grant>, Error> {
        let all = |view: &Connection| {
            let mut rows = view.prepare_cached(&select("1 ORDER BY created, id"))?;
            rows.query_map([], read)?.collect()
        };
        Ok(self.database.read(all).await?)
    }

    /// # Errors
    /// There is no such grant, or it cannot be read.
    pub async fn show(&self, id: &str) -> Result<Grant, Error> {
        let wanted = id.to_owned();
        let found = self
            .database
            .read(move |view| view.query_row(&select("id = ?1"), [wanted], read).optional());
        found.await?.ok_or_else(|| no_such_grant(id))
    }

    /// Returns whether a grant names one account and no pattern. A grant that cannot be read may name more.
    pub async fn has_one_account(&self, id: &str) -> bool {
        self.show(id).await.is_ok_and(|grant| match &grant.terms.accounts[..] {
            [only] => only.exact().is_some(),
            _ => false,
        })
    }

    /// Makes a grant worthless, at once for this process and within half a second for others. Once more changes
    /// nothing.
    ///
    /// # Errors
    /// There is no such grant, or it cannot be written.
    pub async fn revoke(&self, id: &str) -> Result<Grant, Error> {
        let (wanted, now) = (id.to_owned(), millis(SystemTime::now()));
        let revoked = self.database.write(move |change| {
            let revoke = "UPDATE grants SET revoked = coalesce(revoked, ?2) WHERE id = ?1";
            change.execute(revoke, params![wanted, now])
        });
        let revoked = revoked.await?;
        self.known().clear();
        if revoked == 0 {
            return Err(no_such_grant(id));
        }
        self.show(id).await
    }

    /// Revokes a grant as [`revoke`](Self::revoke) does, and has its runs cancelled by the service.
    ///
    /// # Errors
    /// There is no such grant, or it cannot be written.
    pub async fn revoke_with_runs(&self, id: &str) -> Result<Grant, Error> {
        let wanted = id.to_owned();
        let mark = "UPDATE grants SET cancels_runs = 1 WHERE id = ?1";
        self.database.write(move |change| change.execute(mark, [wanted])).await?;
        self.revoke(id).await
    }

    /// The ids of revoked grants whose runs are to be cancelled.
    ///
    /// # Errors
    /// They cannot be read.
    pub async fn cancelled_ids(&self) -> Result<HashSet<String>, Error> {
        let all = |view: &Connection| {
            let mut rows = view.prepare_cached(
                "SELECT id FROM grants WHERE cancels_runs AND revoked IS NOT NULL",
            )?;
            rows.query_map([], |row| row.get(0))?.collect()
        };
        Ok(self.database.read_quick(all).await?)
    }

    fn remembered(&self, hash: &str) -> Option<Arc<Grant>> {
        let known = self.known();
        let Known { grant, until } = known.get(hash)?;
        (Instant::now() < *until).then(|| Arc::clone(grant))
    }

    async fn look_up(&self, hash: String, now: SystemTime) -> Result<Arc<Grant>, Error> {
        // Before the look, so that a revocation meanwhile is not remembered for longer than it may.
        let until = Instant::now() + MEMORY;
        let wanted = hash.clone();
        let found = self.database.read_quick(move |view| {
            view.prepare_cached(&select("hash = ?1"))?.query_row([wanted], read).optional()
        });
        let grant = Arc::new(found.await?.ok_or(Denied::Unknown)?);
        grant.check_at(now)?;
        self.remember(hash, Known { grant: Arc::clone(&grant), until });
        self.note_use(&grant, now).await;
        Ok(grant)
    }

    fn remember(&self, hash: String, grant: Known) {
        let mut known = self.known();
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(hash, grant);
    }

    /// Whoever cannot write it down still has a good grant.
    async fn note_use(&self, grant: &Grant, now: SystemTime) {
        let is_recent = |used| now.duration_since(used).is_ok_and(|since| since < USE_EVERY);
        if grant.used.is_some_and(is_recent) {
            return;
        }
        let (id, now) = (grant.id.clone(), millis(now));
        let note = "UPDATE grants SET used = ?2 WHERE id = ?1";
        let noted = self.database.write(move |change| change.execute(note, params![id, now])).await;
        if let Err(error) = noted {
            tracing::warn!(grant = grant.id, %error, "the use of a grant cannot be written down");
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn insert(change: &Connection, grant: &Grant, hash: &str) -> rusqlite::Result<usize> {
    let Grant { id, name, terms, created, expires, .. } = grant;
    let terms = serde_json::to_string(terms).expect("terms have string keys");
    change.execute(
        "INSERT INTO grants (id, hash, name, terms, created, expires) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        params![id, hash, name, terms, millis(*created), expires.map(millis)],
    )
}

fn select(what: &str) -> String {
    format!("SELECT id, name, terms, created, expires, revoked, used FROM grants WHERE {what}")
}

fn read(row: &Row<'_>) -> rusqlite::Result<Grant> {
    let terms: String = row.get(2)?;
    let terms = serde_json::from_str(&terms).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(2, rusqlite::types::Type::Text, error.into())
    })?;
    let time =
        |column| Ok::<_, rusqlite::Error>(row.get::<_, Option<i64>>(column)?.map(from_millis));
    Ok(Grant {
        id: row.get(0)?,
        name: row.get(1)?,
        terms,
        created: from_millis(row.get(3)?),
        expires: time(4)?,
        revoked: time(5)?,
        used: time(6)?,
    })
}

fn no_such_grant(id: &str) -> Error {
    Error::NoSuchGrant(id.chars().take(80).collect())
}

fn is_name(name: &str) -> bool {
    (1..=128).contains(&name.chars().count()) && !name.chars().any(char::is_control)
}

fn millis(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn from_millis(millis: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(millis.try_into().unwrap_or_default())
}

/// How long a revocation by another process may take.
const MEMORY: Duration = Duration::from_millis(500);

/// Grants that are remembered. Ours: more programs than that do not share one service.
const REMEMBERED: usize = 4096;

/// How often a grant's use is written down.
const USE_EVERY: Duration = Duration::from_mins(1);
