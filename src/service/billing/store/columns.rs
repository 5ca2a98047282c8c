//! Converts between values and database columns.

use std::time::{Duration, SystemTime};

use rusqlite::types::Type;
use rusqlite::{Connection, Params};
use serde::de::DeserializeOwned;
use serde::de::value::{Error, StrDeserializer};

use crate::llm::budget::{Nanodollars, TokenUsage, Tokens};
use crate::llm::response::MAX_REPORTED_TOKENS;
use crate::service::billing::notice::MAX_AMOUNT;
use crate::service::billing::store::UnreceiptedCall;
use crate::service::billing::{CallUsage, ChargeReceipt};

/// A value that is read from a database row.
pub(super) trait FromRow: Sized {
    fn from_row(row: &rusqlite::Row<'_>) -> rusqlite::Result<Self>;

    fn query_all(view: &Connection, find: &str, given: impl Params) -> rusqlite::Result<Vec<Self>> {
        view.prepare_cached(find)?.query_map(given, Self::from_row)?.collect()
    }
}

impl FromRow for CallUsage {
    fn from_row(row: &rusqlite::Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            call_id: row.get("call_id")?,
            run: row.get("run")?,
            attempt: row.get("attempt")?,
            account: row.get("account")?,
            upstream: row.get("upstream")?,
            route: row.get("route")?,
            model: row.get("model")?,
            stream: row.get("stream")?,
            outcome: enum_column(row, "outcome")?,
            status: row.get("status")?,
            usage: TokenUsage {
                input: token_column(row, "input")?,
                output: token_column(row, "output")?,
                cache_read: token_column(row, "cache_read")?,
                cache_write: token_column(row, "cache_write")?,
                cache_write_1h: token_column(row, "cache_write_1h")?,
                reasoning: token_column(row, "reasoning")?,
                source: enum_column(row, "source")?,
                ..TokenUsage::default()
            },
            cost: money_column(row, "cost")?,
            reported_cost: row
                .get::<_, Option<i64>>("reported_cost")?
                .map(|cost| Nanodollars(cost.cast_unsigned())),
            started: from_millis(row.get("started")?),
            settled: from_millis(row.get("settled")?),
        })
    }
}

impl FromRow for ChargeReceipt {
    fn from_row(row: &rusqlite::Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            source_reference: row.get("source_reference")?,
            call_id: row.get("call_id")?,
            run: row.get("run")?,
            attempt: row.get("attempt")?,
            account: row.get("account")?,
            model: row.get("model")?,
            amount: money_column(row, "amount")?,
            source: enum_column(row, "source")?,
            input: token_column(row, "input")?,
            output: token_column(row, "output")?,
            ended: from_millis(row.get("ended")?),
            received: from_millis(row.get("received")?),
        })
    }
}

impl FromRow for UnreceiptedCall {
    fn from_row(row: &rusqlite::Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            call_id: row.get("call_id")?,
            started: from_millis(row.get("started")?),
            settled: from_millis(row.get("settled")?),
        })
    }
}

/// Reads an enum from its name in a text column.
pub(super) fn enum_column<T: DeserializeOwned>(
    row: &rusqlite::Row<'_>,
    name: &str,
) -> rusqlite::Result<T> {
    let text: String = row.get(name)?;
    // The column holds serde's name of the variant, which `as_str` writes.
    T::deserialize(StrDeserializer::<Error>::new(&text))
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(0, Type::Text, error.into()))
}

pub(super) fn token_column(row: &rusqlite::Row<'_>, name: &str) -> rusqlite::Result<Tokens> {
    Ok(Tokens(row.get::<_, i64>(name)?.cast_unsigned()))
}

pub(super) fn money_column(row: &rusqlite::Row<'_>, name: &str) -> rusqlite::Result<Nanodollars> {
    Ok(Nanodollars(row.get::<_, i64>(name)?.cast_unsigned()))
}

/// Converts an amount to a column, at most [`MAX_AMOUNT`], so that sums cannot overflow SQLite's integers.
pub(super) fn to_db_amount(amount: Nanodollars) -> i64 {
    amount.min(MAX_AMOUNT).0.cast_signed()
}

pub(super) fn to_db_tokens(tokens: Tokens) -> i64 {
    tokens.min(MAX_REPORTED_TOKENS).0.cast_signed()
}

pub(super) fn to_millis(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

pub(super) fn from_millis(millis: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(millis.max(0).cast_unsigned())
}
