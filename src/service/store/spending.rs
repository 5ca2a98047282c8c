//! The money of grants that have caps: the cost of their runs, and the money that unfinished runs may still cost.
//!
//! An accepted run reserves its limit of money. At the run's end, its charge replaces the reservation:
//!
//! ```text
//! left = cap − charged − reserved by runs that have not ended
//! ```
//!
//! Charges are stored as one sum for each grant and day (UTC), so that the sums outlive the rows of the runs.
//!
//! **Invariant:** the transaction that accepts a run writes its reservation, and the transaction that ends the run
//! writes its charge. Two runs that are accepted at once never exceed a cap together, and a crash loses no reservation.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OptionalExtension, Transaction, params};

use super::RunStore;
use crate::base::db::DatabaseError;
use crate::base::timestamp;
use crate::llm::budget::Nanodollars;

/// The money that all runs of one grant may cost together. `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpendingCaps {
    /// The cap for the grant's whole life.
    pub total: Option<Nanodollars>,
    /// The cap for the runs that are accepted on one day (UTC).
    pub per_day: Option<Nanodollars>,
}

/// The money of a grant's runs, charged and reserved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantSpending {
    pub charged: Nanodollars,
    /// The money reserved for unfinished runs.
    pub reserved: Nanodollars,
}

/// The money of a grant at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpendingStatus {
    pub total: GrantSpending,
    /// The money of the runs that were accepted on this day (UTC).
    pub today: GrantSpending,
    /// The end of the day.
    pub day_ends: Option<SystemTime>,
}

/// A cap that is used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExhaustedCap {
    pub cap: Nanodollars,
    pub spending: GrantSpending,
    /// The time from which the next day's cap applies; `None` for the total cap.
    pub opens: Option<SystemTime>,
}

/// A run's request for money.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpendingRequest<'a> {
    pub(super) run: &'a str,
    pub(super) grant: &'a str,
    pub(super) caps: SpendingCaps,
    /// The run's own limit.
    pub(super) limit: Option<Nanodollars>,
}

impl RunStore {
    /// Reserves the money for a higher limit of an unfinished run. Returns the money that the grant's caps leave if it is
    /// too little; then nothing has changed.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written.
    pub async fn raise_reserved_money(
        &self,
        (run, grant): (&str, &str),
        caps: SpendingCaps,
        limit: Nanodollars,
    ) -> Result<Option<Nanodollars>, DatabaseError> {
        let (run, grant) = (run.to_owned(), grant.to_owned());
        self.database
            .write_in_transaction(move |change| {
                raise_reservation(change, (&run, &grant), caps, limit)
            })
            .await
    }
}

impl SpendingCaps {
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the money that a further run may cost; `None` if no cap is set.
    ///
    /// # Errors
    /// Returns [`ExhaustedCap`] if a cap has no money left.
    pub fn remaining(
        &self,
        standing: &SpendingStatus,
    ) -> Result<Option<Nanodollars>, ExhaustedCap> {
        // Reserved money counts like charged money: a running call may still cost all of it.
        let left = |cap: Option<Nanodollars>, spending: GrantSpending, opens| {
            let Some(cap) = cap else { return Ok(None) };
            let left = cap.saturating_sub(spending.sum());
            if left.is_zero() { Err(ExhaustedCap { cap, spending, opens }) } else { Ok(Some(left)) }
        };
        let total = left(self.total, standing.total, None)?;
        let today = left(self.per_day, standing.today, standing.day_ends)?;
        Ok(total.into_iter().chain(today).min())
    }
}

impl GrantSpending {
    pub fn sum(&self) -> Nanodollars {
        self.charged + self.reserved
    }

    fn add(&mut self, other: Self) {
        self.charged = self.charged + other.charged;
        self.reserved = self.reserved + other.reserved;
    }
}

impl fmt::Display for ExhaustedCap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cap, spending: GrantSpending { charged, reserved }, opens } = self;
        let span = if opens.is_some() { "for one day (UTC)" } else { "in all" };
        write!(
            f,
            "the grant's budget of ${cap} {span} is exhausted: ${charged} are charged, and ${reserved} are reserved by \
             runs that have not ended; "
        )?;
        if !reserved.is_zero() {
            write!(f, "wait for one of these runs to end, or ")?;
        }
        match opens {
            Some(opens) => {
                write!(f, "ask again from {}", timestamp::format_rfc3339_seconds(*opens))
            }
            None => write!(f, "use another grant"),
        }
    }
}

/// Reserves the money of a run that is being accepted: the run's own limit, or the rest of the caps if that is less or
/// the run has no limit. Returns the reserved amount; `None` for a grant without caps.
pub(super) fn reserve_money(
    change: &Transaction<'_>,
    ask: SpendingRequest<'_>,
    now: i64,
) -> rusqlite::Result<Result<Option<Nanodollars>, ExhaustedCap>> {
    let SpendingRequest { run, grant, caps, limit } = ask;
    if caps.is_none() {
        return Ok(Ok(None));
    }
    // The sums are read inside the transaction that inserts the reservation, so that two runs never get the same money.
    let left = match caps.remaining(&read_status(change, grant, now)?) {
        Ok(left) => left,
        Err(exhausted) => return Ok(Err(exhausted)),
    };
    // `left` is present here, since a grant without caps has returned above. The smaller of both is reserved.
    let reserved = left.into_iter().chain(limit).min().unwrap_or_default().min(MAX_COLUMN_AMOUNT);
    change
        .prepare_cached(
            "INSERT INTO grant_reservation (run, grant_id, day, reserved) VALUES (?1, ?2, ?3, ?4)",
        )?
        .execute(params![run, grant, day_number(now), to_column(reserved)])?;
    Ok(Ok(Some(reserved)))
}

/// Raises the reservation of a run to a higher limit. Returns the money that is left if it is too little; then nothing has
/// changed.
pub(super) fn raise_reservation(
    change: &Transaction<'_>,
    (run, grant): (&str, &str),
    caps: SpendingCaps,
    limit: Nanodollars,
) -> rusqlite::Result<Option<Nanodollars>> {
    let find = "SELECT day, reserved FROM grant_reservation WHERE run = ?1";
    let found = change
        .prepare_cached(find)?
        .query_row([run], |row| Ok((row.get::<_, i64>(0)?, from_column(row.get(1)?))));
    // No reservation: the grant had no caps when the run was accepted.
    let Some((day, reserved)) = found.optional()? else { return Ok(None) };
    let more = limit.saturating_sub(reserved);
    // The money belongs to the day of the acceptance.
    let standing = read_status(change, grant, day.saturating_mul(DAY_MS))?;
    let left = match caps.remaining(&standing) {
        Ok(left) => left.unwrap_or(more),
        Err(_) => Nanodollars::ZERO,
    };
    if more > left {
        return Ok(Some(left));
    }
    let raised = to_column(reserved + more);
    let update = "UPDATE grant_reservation SET reserved = ?2 WHERE run = ?1";
    change.prepare_cached(update)?.execute(params![run, raised])?;
    Ok(None)
}

/// Replaces the reservation of an ending run with its charge. If the charge is unknown, the whole reservation is
/// charged.
pub(super) fn settle_reservation(
    change: &Transaction<'_>,
    run: &str,
    charged: Option<Nanodollars>,
) -> rusqlite::Result<()> {
    let take = "DELETE FROM grant_reservation WHERE run = ?1 RETURNING grant_id, day, reserved";
    let taken = change.prepare_cached(take)?.query_row([run], |row| {
        Ok((row.get::<_, String>(0)?, row.get::<_, i64>(1)?, from_column(row.get(2)?)))
    });
    // No reservation: the grant has no caps, or an earlier attempt has settled the run. A repeated end charges nothing.
    let Some((grant, day, reserved)) = taken.optional()? else { return Ok(()) };
    // The charge belongs to the day of the acceptance, like the reservation. The sum is built here, so that it stays
    // within the column's range.
    let before = "SELECT charged FROM grant_charge WHERE grant_id = ?1 AND day = ?2";
    let before = change
        .prepare_cached(before)?
        .query_row(params![grant, day], |row| row.get(0).map(from_column))
        .optional()?;
    let sum = before.unwrap_or_default() + charged.unwrap_or(reserved);
    change
        .prepare_cached(
            "INSERT INTO grant_charge (grant_id, day, charged) VALUES (?1, ?2, ?3)
             ON CONFLICT (grant_id, day) DO UPDATE SET charged = excluded.charged",
        )?
        .execute(params![grant, day, to_column(sum)])?;
    Ok(())
}

/// Returns the money reserved for an unfinished run; `None` if its grant has no caps.
pub(super) fn reserved_for_run(
    view: &Connection,
    run: &str,
) -> rusqlite::Result<Option<Nanodollars>> {
    let find = "SELECT reserved FROM grant_reservation WHERE run = ?1";
    view.prepare_cached(find)?.query_row([run], |row| row.get(0).map(from_column)).optional()
}

/// Returns the money of a grant at the time `now`.
pub(super) fn read_status(
    view: &Connection,
    grant: &str,
    now: i64,
) -> rusqlite::Result<SpendingStatus> {
    let (today, mut standing) = (day_number(now), SpendingStatus::default());
    // Both tables are read by an index on the grant: a row for each day of charges, a row for each unfinished run.
    let find = "SELECT day, charged, 0 FROM grant_charge WHERE grant_id = ?1
                UNION ALL SELECT day, 0, reserved FROM grant_reservation WHERE grant_id = ?1";
    let mut find = view.prepare_cached(find)?;
    let mut rows = find.query([grant])?;
    while let Some(row) = rows.next()? {
        let (charged, reserved) = (from_column(row.get(1)?), from_column(row.get(2)?));
        let spending = GrantSpending { charged, reserved };
        standing.total.add(spending);
        if row.get::<_, i64>(0)? == today {
            standing.today.add(spending);
        }
    }
    // The first millisecond of the next day.
    let ends = Duration::from_millis((today + 1).saturating_mul(DAY_MS).max(0).cast_unsigned());
    standing.day_ends = UNIX_EPOCH.checked_add(ends);
    Ok(standing)
}

/// Returns the number of days since 1970, in UTC.
fn day_number(now: i64) -> i64 {
    now.div_euclid(DAY_MS)
}

fn from_column(column: i64) -> Nanodollars {
    Nanodollars(column.max(0).cast_unsigned())
}

fn to_column(money: Nanodollars) -> i64 {
    money.min(MAX_COLUMN_AMOUNT).0.cast_signed()
}

/// The length of a day, in milliseconds.
const DAY_MS: i64 = 24 * 60 * 60 * 1000;

/// The largest amount that a column holds.
const MAX_COLUMN_AMOUNT: Nanodollars = Nanodollars(i64::MAX.cast_unsigned());

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use rusqlite::Connection;

    use super::*;
    use crate::service::store::SCHEMA;

    /// One step of a service. A crash rolls its transaction back.
    #[derive(Clone, Debug)]
    enum Step {
        Accept { limit: Option<u64> },
        End { run: prop::sample::Index, charged: Option<u64> },
        Raise { run: prop::sample::Index, by: u64 },
        NextDay,
    }

    fn steps() -> impl Strategy<Value = Vec<(Step, bool)>> {
        let step = prop_oneof![
            prop::option::of(0..30_u64).prop_map(|limit| Step::Accept { limit }),
            (any::<prop::sample::Index>(), prop::option::of(0..30_u64))
                .prop_map(|(run, charged)| Step::End { run, charged }),
            (any::<prop::sample::Index>(), 1..40_u64).prop_map(|(run, by)| Step::Raise { run, by }),
            Just(Step::NextDay),
        ];
        prop::collection::vec((step, prop::bool::weighted(0.2)), 1..60)
    }

    fn file() -> Connection {
        let file = Connection::open_in_memory().unwrap();
        SCHEMA.migrations.iter().for_each(|step| file.execute_batch(step).unwrap());
        file
    }

    fn ask(run: &str, caps: SpendingCaps, limit: Option<u64>) -> SpendingRequest<'_> {
        SpendingRequest { run, grant: "g", caps, limit: limit.map(Nanodollars) }
    }

    proptest! {
        /// Charges and reservations stay within the caps, whichever runs are accepted, ended and rolled back by a
        /// crash.
        #[test]
        fn the_runs_of_a_grant_never_cost_more_than_its_caps(steps in steps(), total in 1..100_u64, day in 1..60_u64) {
            let caps = SpendingCaps { total: Some(Nanodollars(total)), per_day: Some(Nanodollars(day)) };
            let (mut file, mut now) = (file(), 0);
            let mut open: BTreeMap<String, u64> = BTreeMap::new();
            let mut charges = 0;
            for (number, (step, is_crash)) in steps.into_iter().enumerate() {
                let before = read_status(&file, "g", now).unwrap();
                let change = file.transaction().unwrap();
                let (mut open_then, mut charges_then) = (open.clone(), charges);
                match step {
                    Step::NextDay => now += DAY_MS,
                    Step::Raise { run, by } if !open.is_empty() => {
                        let run = open.keys().nth(run.index(open.len())).unwrap();
                        let limit = Nanodollars(open[run] + by);
                        if raise_reservation(&change, (run, "g"), caps, limit).unwrap().is_none() {
                            open_then.insert(run.clone(), limit.0);
                        }
                    }
                    Step::Accept { limit } => {
                        let run = format!("r{number}");
                        let left = (total - before.total.sum().0).min(day - before.today.sum().0);
                        if let Ok(reserved) = reserve_money(&change, ask(&run, caps, limit), now).unwrap() {
                            let reserved = reserved.unwrap().0;
                            prop_assert_eq!(reserved, limit.unwrap_or(left).min(left));
                            open_then.insert(run, reserved);
                        } else {
                            prop_assert_eq!(left, 0);
                        }
                    }
                    Step::End { run, charged } if !open.is_empty() => {
                        let run = open.keys().nth(run.index(open.len())).unwrap();
                        let reserved = open_then.remove(run).unwrap();
                        let charged = charged.map(|charged| charged.min(reserved));
                        settle_reservation(&change, run, charged.map(Nanodollars)).unwrap();
                        // An end that is written once more charges nothing more.
                        settle_reservation(&change, run, Some(Nanodollars(99))).unwrap();
                        charges_then += charged.unwrap_or(reserved);
                    }
                    Step::Raise { .. } | Step::End { .. } => (),
                }
                if is_crash {
                    drop(change);
                } else {
                    change.commit().unwrap();
                    (open, charges) = (open_then, charges_then);
                }
                let standing = read_status(&file, "g", now).unwrap();
                prop_assert!(standing.total.sum().0 <= total && standing.today.sum().0 <= day);
                prop_assert_eq!(standing.total.charged.0, charges);
                prop_assert_eq!(standing.total.reserved.0, open.values().sum::<u64>());
            }
        }

        /// A run may be charged more than it reserved, by the error of an estimate. Then the rest of the cap is zero,
        /// never negative.
        #[test]
        fn what_is_left_is_never_below_nothing(charged in any::<u64>(), cap in 1..=u64::MAX) {
            let caps = SpendingCaps { total: Some(Nanodollars(cap)), per_day: None };
            let mut file = file();
            let change = file.transaction().unwrap();
            reserve_money(&change, ask("r1", caps, Some(1)), 0).unwrap().unwrap();
            settle_reservation(&change, "r1", Some(Nanodollars(charged))).unwrap();
            let charged = Nanodollars(charged).min(MAX_COLUMN_AMOUNT);
            let left = caps.remaining(&read_status(&change, "g", 0).unwrap());
            match left {
                Ok(left) => prop_assert_eq!(left, Some(Nanodollars(cap - charged.0))),
                Err(exhausted) => prop_assert!(charged.0 >= cap && exhausted.spending.charged == charged),
            }
        }
    }

    #[test]
    fn a_refusal_says_when_the_grant_has_money_again() {
        let spending =
            GrantSpending { charged: Nanodollars(4_200_000_000), reserved: Nanodollars::ZERO };
        let exhausted = ExhaustedCap { cap: Nanodollars(4_000_000_000), spending, opens: None };
        insta::assert_snapshot!(exhausted, @"the grant's budget of $4 in all is exhausted: $4.2 are charged, and $0 are reserved by runs that have not ended; use another grant");
        let reserved = GrantSpending { reserved: Nanodollars(500_000_000), ..spending };
        let opens = Some(UNIX_EPOCH + Duration::from_hours(24 * 20_000));
        let exhausted = ExhaustedCap { spending: reserved, opens, ..exhausted };
        insta::assert_snapshot!(exhausted, @"the grant's budget of $4 for one day (UTC) is exhausted: $4.2 are charged, and $0.5 are reserved by runs that have not ended; wait for one of these runs to end, or ask again from 2024-10-04T00:00:00Z");
    }
}
