//! The grants of a service, in its database.
//!
//! The command line mints and revokes grants in the same database while a service runs. The service caches a grant for
//! half a second at most.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OptionalExtension, Row, params};
use uuid::Uuid;

use super::{AccessDeniedError, AccessGrant, GrantTerms, GrantTermsError, token};
use crate::base::db::{self, DatabaseSchema, SqliteDatabase};
use crate::base::hidden_characters::is_hidden;
use crate::base::secret::SecretString;

/// The tables of this module.
pub const GRANT_SCHEMA: DatabaseSchema = DatabaseSchema {
    module: "grant",
    migrations: &[
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
        // True if the revocation cancels the grant's runs, too.
        "ALTER TABLE grants ADD COLUMN cancels_runs INTEGER NOT NULL DEFAULT 0",
    ],
};

/// The grants of one database. Clones share the cache.
#[derive(Clone, Debug)]
pub struct GrantStore {
    database: SqliteDatabase,
    known: Arc<Mutex<HashMap<String, CachedGrant>>>,
}

/// A grant in the cache, with the time until which the entry may be used.
#[derive(Debug)]
struct CachedGrant {
    grant: Arc<AccessGrant>,
    until: Instant,
}

/// An error of reading or changing grants.
#[derive(Debug, thiserror::Error)]
pub enum GrantStoreError {
    #[error(transparent)]
    Denied(#[from] AccessDeniedError),
    #[error(transparent)]
    Invalid(#[from] GrantTermsError),
    #[error("there is no grant `{0}`; `cogni-gateway grant list` shows them")]
    NoSuchGrant(String),
    #[error("the kernel returned no random bytes")]
    NoRandom,
    #[error(transparent)]
    Database(#[from] db::DatabaseError),
}

impl GrantStore {
    pub fn new(database: SqliteDatabase) -> Self {
        Self { database, known: Arc::default() }
    }

    /// Returns the valid grant of a token.
    ///
    /// # Errors
    /// Returns [`GrantStoreError::Denied`] if the token has no grant, or its grant is not valid now.
    pub async fn check_token(&self, token: &str) -> Result<Arc<AccessGrant>, GrantStoreError> {
        let hash = token::hash_token(token).ok_or(AccessDeniedError::UnknownToken)?;
        let now = SystemTime::now();
        let grant = match self.find_cached(&hash) {
            Some(grant) => grant,
            None => self.load_by_hash(hash, now).await?,
        };
        grant.check_valid_at(now)?;
        Ok(grant)
    }

    /// Checks the grant of a run or a watcher, as the grant was at most half a second ago. A grant that is not in the
    /// database passes: the service then requires no grants, or the grant belongs to an earlier database.
    ///
    /// # Errors
    /// Returns [`GrantStoreError::Denied`] if the grant is revoked or expired.
    pub async fn check_id(&self, id: &str) -> Result<(), GrantStoreError> {
        let now = SystemTime::now();
        if let Some(grant) = self.find_cached(id) {
            return Ok(grant.check_valid_at(now)?);
        }
        // The lifetime starts before the read, so that a revocation during the read is seen in time.
        let (until, wanted) = (Instant::now() + CACHE_TTL, id.to_owned());
        let found = self.database.read_priority(move |view| {
            view.prepare_cached(&select_sql("id = ?1"))?.query_row([wanted], read_row).optional()
        });
        // `read_priority` has a connection of its own, so that this check never waits behind a long read.
        let Some(grant) = found.await?.map(Arc::new) else { return Ok(()) };
        self.cache_grant(id.to_owned(), CachedGrant { grant: Arc::clone(&grant), until });
        Ok(grant.check_valid_at(now)?)
    }

    /// Creates a grant, and returns the grant with its token, which is never shown again.
    ///
    /// # Errors
    /// Returns an error if the name or the terms are not valid, or the grant cannot be stored.
    pub async fn mint_grant(
        &self,
        name: &str,
        terms: GrantTerms,
        expires: Option<SystemTime>,
    ) -> Result<(AccessGrant, SecretString), GrantStoreError> {
        terms.validate()?;
        if !is_valid_name(name) {
            return Err(GrantTermsError::InvalidName.into());
        }
        let token = token::mint_token().map_err(|_| GrantStoreError::NoRandom)?;
        let hash = token::hash_token(token.expose_secret()).expect("it was just made so");
        // Times are rounded to the database's milliseconds, so that the returned grant equals the stored one.
        let created = from_unix_millis(to_unix_millis(SystemTime::now()));
        let expires = expires.map(to_unix_millis).map(from_unix_millis);
        // Only the hash goes into the database. The token leaves this function once and is not stored.
        let id = format!("grant-{}", Uuid::now_v7());
        let grant = AccessGrant {
            id,
            name: name.to_owned(),
            terms,
            created,
            expires,
            revoked: None,
            used: None,
        };
        let row = grant.clone();
        self.database.write_in_transaction(move |change| insert_grant(change, &row, &hash)).await?;
        Ok((grant, token))
    }

    /// Returns every grant, oldest first.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn list_grants(&self) -> Result<Vec<AccessGrant>, GrantStoreError> {
        let all = |view: &Connection| {
            let mut rows = view.prepare_cached(&select_sql("1 ORDER BY created, id"))?;
            rows.query_map([], read_row)?.collect()
        };
        Ok(self.database.read_committed(all).await?)
    }

    /// # Errors
    /// Returns an error if there is no such grant, or the database cannot be read.
    pub async fn find_grant(&self, id: &str) -> Result<AccessGrant, GrantStoreError> {
        let wanted = id.to_owned();
        let found = self.database.read_committed(move |view| {
            view.query_row(&select_sql("id = ?1"), [wanted], read_row).optional()
        });
        found.await?.ok_or_else(|| no_such_grant(id))
    }

    /// Returns true if a grant names one account and no pattern. A grant that cannot be read may name more, so the
    /// answer is false.
    pub async fn has_one_account(&self, id: &str) -> bool {
        self.find_grant(id).await.is_ok_and(|grant| match &grant.terms.accounts[..] {
            [only] => only.exact_text().is_some(),
            _ => false,
        })
    }

    /// Revokes a grant, at once for this process and within half a second for other processes. A second revocation
    /// changes nothing.
    ///
    /// # Errors
    /// Returns an error if there is no such grant, or the database cannot be written.
    pub async fn revoke_grant(&self, id: &str) -> Result<AccessGrant, GrantStoreError> {
        let (wanted, now) = (id.to_owned(), to_unix_millis(SystemTime::now()));
        let revoked = self.database.write_in_transaction(move |change| {
            // `coalesce` keeps the time of the first revocation.
            let revoke = "UPDATE grants SET revoked = coalesce(revoked, ?2) WHERE id = ?1";
            change.execute(revoke, params![wanted, now])
        });
        let revoked = revoked.await?;
        // The whole cache, because the entries are keyed by hash and by id.
        self.lock_cache().clear();
        if revoked == 0 {
            return Err(no_such_grant(id));
        }
        self.find_grant(id).await
    }

    /// Revokes a grant as [`revoke`](Self::revoke_grant) does, and makes the service cancel the grant's runs.
    ///
    /// # Errors
    /// Returns an error if there is no such grant, or the database cannot be written.
    pub async fn revoke_and_cancel_runs(&self, id: &str) -> Result<AccessGrant, GrantStoreError> {
        let wanted = id.to_owned();
        // The mark is written before the revocation. If the process dies in between, the mark has no effect yet,
        // because the service cancels only runs of grants that have both.
        let mark = "UPDATE grants SET cancels_runs = 1 WHERE id = ?1";
        self.database.write_in_transaction(move |change| change.execute(mark, [wanted])).await?;
        self.revoke_grant(id).await
    }

    /// Returns the ids of the revoked grants whose runs must be cancelled.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn ids_with_cancelled_runs(&self) -> Result<HashSet<String>, GrantStoreError> {
        let all = |view: &Connection| {
            let mut rows = view.prepare_cached(
                "SELECT id FROM grants WHERE cancels_runs AND revoked IS NOT NULL",
            )?;
            rows.query_map([], |row| row.get(0))?.collect()
        };
        Ok(self.database.read_priority(all).await?)
    }

    fn find_cached(&self, hash: &str) -> Option<Arc<AccessGrant>> {
        let known = self.lock_cache();
        let CachedGrant { grant, until } = known.get(hash)?;
        (Instant::now() < *until).then(|| Arc::clone(grant))
    }

    async fn load_by_hash(
        &self,
        hash: String,
        now: SystemTime,
    ) -> Result<Arc<AccessGrant>, GrantStoreError> {
        // The time is taken before the read. A revocation during the read is then not cached for longer than the limit.
        let until = Instant::now() + CACHE_TTL;
        let wanted = hash.clone();
        let found = self.database.read_priority(move |view| {
            view.prepare_cached(&select_sql("hash = ?1"))?.query_row([wanted], read_row).optional()
        });
        let grant = Arc::new(found.await?.ok_or(AccessDeniedError::UnknownToken)?);
        grant.check_valid_at(now)?;
        // Unknown tokens are never cached, so that a flood of made-up tokens cannot fill the cache.
        self.cache_grant(hash, CachedGrant { grant: Arc::clone(&grant), until });
        self.record_use(&grant, now).await;
        Ok(grant)
    }

    fn cache_grant(&self, hash: String, grant: CachedGrant) {
        let mut known = self.lock_cache();
        // Clearing everything is simple and rare; the next requests read their grants again.
        if known.len() >= MAX_CACHED_GRANTS {
            known.clear();
        }
        known.insert(hash, grant);
    }

    /// Records the use of a grant, once a minute at most. A failure is only logged, because the grant is still valid.
    async fn record_use(&self, grant: &AccessGrant, now: SystemTime) {
        // A write per request would make every read of the API wait for the disk.
        let is_recent =
            |used| now.duration_since(used).is_ok_and(|since| since < RECORD_USE_INTERVAL);
        if grant.used.is_some_and(is_recent) {
            return;
        }
        let (id, now) = (grant.id.clone(), to_unix_millis(now));
        let note = "UPDATE grants SET used = ?2 WHERE id = ?1";
        let noted = self
            .database
            .write_in_transaction(move |change| change.execute(note, params![id, now]))
            .await;
        if let Err(error) = noted {
            tracing::warn!(grant = grant.id, %error, "cannot record the use of a grant");
        }
    }

    fn lock_cache(&self) -> MutexGuard<'_, HashMap<String, CachedGrant>> {
        // A panic under the lock cannot leave the map inconsistent, so a poisoned lock is still usable.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn insert_grant(change: &Connection, grant: &AccessGrant, hash: &str) -> rusqlite::Result<usize> {
    let AccessGrant { id, name, terms, created, expires, .. } = grant;
    let terms = serde_json::to_string(terms).expect("terms have string keys");
    change.execute(
        "INSERT INTO grants (id, hash, name, terms, created, expires) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        params![id, hash, name, terms, to_unix_millis(*created), expires.map(to_unix_millis)],
    )
}

fn select_sql(what: &str) -> String {
    format!("SELECT id, name, terms, created, expires, revoked, used FROM grants WHERE {what}")
}

fn read_row(row: &Row<'_>) -> rusqlite::Result<AccessGrant> {
    let terms: String = row.get(2)?;
    // A row that cannot be parsed is an error, never a grant with default terms.
    let terms = serde_json::from_str(&terms).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(2, rusqlite::types::Type::Text, error.into())
    })?;
    let time =
        |column| Ok::<_, rusqlite::Error>(row.get::<_, Option<i64>>(column)?.map(from_unix_millis));
    Ok(AccessGrant {
        id: row.get(0)?,
        name: row.get(1)?,
        terms,
        created: from_unix_millis(row.get(3)?),
        expires: time(4)?,
        revoked: time(5)?,
        used: time(6)?,
    })
}

fn no_such_grant(id: &str) -> GrantStoreError {
    GrantStoreError::NoSuchGrant(id.chars().take(80).collect())
}

fn is_valid_name(name: &str) -> bool {
    (1..=128).contains(&name.chars().count()) && !name.chars().any(is_hidden)
}

fn to_unix_millis(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn from_unix_millis(millis: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(millis.try_into().unwrap_or_default())
}

/// The lifetime of a cache entry, and so the maximum delay of another process's revocation. Our choice.
const CACHE_TTL: Duration = Duration::from_millis(500);

/// The maximum number of cached grants. Our choice: more programs than that do not share one service.
const MAX_CACHED_GRANTS: usize = 4096;

/// The minimum time between two records of a grant's use. Our choice.
const RECORD_USE_INTERVAL: Duration = Duration::from_mins(1);
