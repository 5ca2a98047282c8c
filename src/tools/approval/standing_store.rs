//! The standing approvals in the store: each step is one transaction.

use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, Transaction, params};

use super::reach::reach_condition;
use super::standing::{
    ProposalOutcome, StandingApproval, StandingFilter, StandingGrant, StandingOutcome,
    StandingState,
};
use super::standing_rows::{
    COLUMNS, changed_row, expire_due, find_proposed, find_row, insert_row, is_full_for, read_row,
    write_grant,
};
use super::store::ApprovalStore;
use crate::base::db::DatabaseError;

impl ApprovalStore {
    /// Returns the salt of the digests of standing approvals.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn standing_salt(&self) -> Result<Arc<str>, DatabaseError> {
        let read = async {
            let salt = "SELECT salt FROM approval_salt";
            let read = |view: &Connection| view.query_row(salt, [], |row| row.get::<_, String>(0));
            self.database.read_committed(read).await.map(Arc::from)
        };
        self.salt.get_or_try_init(|| read).await.map(Arc::clone)
    }

    /// Returns the approvals in force that a call of a run finds by its key, the newest first, without arguments. One that
    /// who has started the run has granted is none of them.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn find_granted(
        &self,
        key: &str,
        run: &str,
    ) -> Result<Vec<StandingApproval>, DatabaseError> {
        let owner = (self.owner)(run.to_owned()).await;
        let (key, run, now) = (key.to_owned(), run.to_owned(), self.now_ms());
        let columns = COLUMNS.replace("arguments", "NULL AS arguments");
        // The number of approvals in force is bounded, and no newer one may hide an older one that fits.
        let query = format!(
            "SELECT {columns} FROM standing_approval WHERE call_key = ?1 AND state = 'granted'
             AND (scope = 'always' OR run = ?2) AND granted_by IS NOT ?3 ORDER BY created DESC, id DESC"
        );
        let read = move |view: &Connection| {
            let mut query = view.prepare_cached(&query)?;
            query.query_map(params![key, run, owner], read_row)?.collect::<Result<Vec<_>, _>>()
        };
        let mut found = self.database.read_committed(read).await?;
        self.close_overdue(&found, now).await?;
        found.retain(|row| row.state_at(now) == StandingState::Granted);
        Ok(found)
    }

    /// Returns the id of the open proposal that a call finds by its key.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn find_proposed(&self, key: &str) -> Result<Option<String>, DatabaseError> {
        let (key, now) = (key.to_owned(), self.now_ms());
        self.database.read_committed(move |view| find_proposed(view, &key, now)).await
    }

    /// Writes a proposal, or finds the open one about the same call.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written; then nothing is proposed.
    pub async fn propose(&self, row: StandingApproval) -> Result<ProposalOutcome, DatabaseError> {
        let owner = (self.owner)(row.run.clone()).await;
        let row = StandingApproval { owner, ..row };
        let (written, now) = (row.clone(), self.now_ms());
        let propose = move |change: &Transaction<'_>| {
            expire_due(change, now)?;
            if let Some(known) = find_proposed(change, &written.key, now)? {
                return Ok(ProposalOutcome::Known(known));
            }
            if is_full_for(change, &written)? {
                return Ok(ProposalOutcome::Full);
            }
            insert_row(change, &written)?;
            Ok(ProposalOutcome::New)
        };
        let outcome = self.database.write_in_transaction(propose).await?;
        if outcome == ProposalOutcome::New {
            (self.standing_observer)(&row.run, &row);
        }
        Ok(outcome)
    }

    /// Puts a proposal in force.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written; then the proposal is not in force.
    pub async fn grant_standing(
        &self,
        id: &str,
        grant: StandingGrant,
    ) -> Result<StandingOutcome, DatabaseError> {
        let (id, now) = (id.to_owned(), self.now_ms());
        let write = move |change: &Transaction<'_>| write_grant(change, &id, &grant, now);
        let outcome = self.database.write_in_transaction(write).await?;
        self.publish_outcome(&outcome);
        Ok(outcome)
    }

    /// Takes a proposal or an approval back. A call that has begun goes on.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written; then the approval stays in force.
    pub async fn revoke_standing(
        &self,
        id: &str,
        by: &str,
    ) -> Result<StandingOutcome, DatabaseError> {
        let (id, by, now) = (id.to_owned(), by.to_owned(), self.now_ms());
        let write = move |change: &Transaction<'_>| {
            expire_due(change, now)?;
            let Some(row) = find_row(change, &id)? else { return Ok(StandingOutcome::Unknown) };
            if !row.state.is_open() {
                return Ok(StandingOutcome::Closed(row.state));
            }
            let revoke = "UPDATE standing_approval SET state = 'revoked', arguments = NULL, revoked_by = ?2 WHERE id = ?1";
            change.execute(revoke, params![id, by])?;
            changed_row(change, &id)
        };
        let outcome = self.database.write_in_transaction(write).await?;
        self.publish_outcome(&outcome);
        Ok(outcome)
    }

    /// Uses an approval for one call of a run, and returns it if the call may begin. Each use counts once, and who has
    /// started a run has not allowed its calls.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written; then the call must not begin.
    pub async fn use_standing(
        &self,
        (id, digest): (&str, &str),
        run: &str,
    ) -> Result<Option<StandingApproval>, DatabaseError> {
        let owner = (self.owner)(run.to_owned()).await;
        let (id, digest, using) = (id.to_owned(), digest.to_owned(), run.to_owned());
        let now = self.now_ms();
        let consume = format!(
            "UPDATE standing_approval SET used = used + 1,
                 state = CASE WHEN used + 1 >= max_uses THEN 'spent' ELSE 'granted' END,
                 arguments = CASE WHEN used + 1 >= max_uses THEN NULL ELSE arguments END
             WHERE id = ?1 AND digest = ?2 AND state = 'granted' AND not_after > ?3 AND used < max_uses
             AND (scope = 'always' OR run = ?4) AND granted_by IS NOT ?5 RETURNING {COLUMNS}"
        );
        let used = self
            .database
            .write_in_transaction(move |change| {
                expire_due(change, now)?;
                let parameters = params![id, digest, now, using, owner];
                change.query_row(&consume, parameters, read_row).optional()
            })
            .await?;
        if let Some(row) = &used {
            (self.standing_observer)(run, row);
        }
        Ok(used)
    }

    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn find_standing(&self, id: &str) -> Result<Option<StandingApproval>, DatabaseError> {
        let (id, now) = (id.to_owned(), self.now_ms());
        let found = self.database.read_committed(move |view| find_row(view, &id)).await?;
        self.close_overdue(found.as_slice(), now).await?;
        Ok(found)
    }

    /// Returns a page of the standing approvals that match a filter, the newest first, without arguments.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn list_standing(
        &self,
        filter: StandingFilter,
    ) -> Result<Vec<StandingApproval>, DatabaseError> {
        let columns = COLUMNS.replace("arguments", "NULL AS arguments");
        // A row whose time is over is expired, whether a step has noticed it or not.
        let state = "CASE WHEN state IN ('proposed', 'granted') AND not_after <= ?7 THEN 'expired' ELSE state END";
        let reach = reach_condition();
        let query = format!(
            "SELECT {columns} FROM standing_approval WHERE (?1 IS NULL OR {state} = ?1) AND (?2 IS NULL OR run = ?2)
             AND (?3 IS NULL OR (created, id) < (SELECT created, id FROM standing_approval WHERE id = ?3))
             AND {reach} ORDER BY created DESC, id DESC LIMIT ?4"
        );
        let now = self.now_ms();
        let read = move |view: &Connection| {
            let StandingFilter { state, run, reach, after, limit } = filter;
            let [agents, accounts] = reach.parameters();
            let state = state.map(StandingState::as_str);
            view.prepare_cached(&query)?
                .query_map(params![state, run, after, limit, agents, accounts, now], read_row)?
                .collect::<Result<Vec<_>, _>>()
        };
        let found = self.database.read_committed(read).await?;
        self.close_overdue(&found, now).await?;
        Ok(found)
    }

    fn publish_outcome(&self, outcome: &StandingOutcome) {
        if let StandingOutcome::Changed(row) = outcome {
            (self.standing_observer)(&row.run, row);
        }
    }
}
