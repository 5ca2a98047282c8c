//! Stores a run's end with the agent's answer in it only once.
//!
//! An agent's answer is on its standard output, in the result, and in the last events. The answer may be long, so it
//! has a column of its own, and an [`ANSWER_MARKER`] replaces it everywhere else:
//!
//! ```text
//! answer  forty-two, because …
//! result  {"agent":{"payloads":[{"text":"␁"}]},"ok":true}
//! stdout  {"payloads":[{"text":"␁"}]}
//! ```
//!
//! **Invariant:** a text reads back exactly as it was written, byte by byte.

use memchr::memmem::Finder;
use rusqlite::{OptionalExtension, Transaction, named_params, params};

use super::row::RunEnd;
use super::{RunEvent, kept_records, spending};
use crate::telemetry::audit::seal::AuditLogSeal;

/// A run's end as it is stored, with the answer replaced. The agent chooses the texts and their sizes, so the
/// replacement happens before the transaction, where no other writer waits for it.
#[derive(Debug)]
pub(super) struct StoredRunEnd {
    ended: RunEnd,
    answer: Option<String>,
    /// The events that are written with the end.
    events: Vec<RunEvent>,
    /// The new data of events that were stored before, by their numbers.
    replaced_events: Vec<(u64, String)>,
}

/// The number and the data of an event that was stored before the end.
pub(super) type StoredEvent = (u64, String);

impl StoredRunEnd {
    /// Replaces the answer in all texts of the end, and in the stored events `told`.
    pub(super) fn new(
        mut ended: RunEnd,
        mut events: Vec<RunEvent>,
        told: Vec<StoredEvent>,
    ) -> Self {
        let answer = find_answer(&ended).map(str::to_owned);
        let mut cut = vec![];
        if let Some(answer) = &answer {
            let answer = Finder::new(answer);
            let replace = |text: &mut String| {
                // Texts without the answer are left untouched.
                if let Some(cut) = replace_with_marker(&answer, text) {
                    *text = cut;
                }
            };
            // The result, the output and the events hold the answer in JSON; the search uses its escaped form, as the
            // result has it.
            ended.result.iter_mut().for_each(replace);
            replace(&mut ended.stdout);
            for event in &mut events {
                if let Some(data) = replace_with_marker(&answer, &event.data) {
                    event.data = data.into();
                }
            }
            let told = told.into_iter();
            cut = told
                .filter_map(|(seq, data)| Some((seq, replace_with_marker(&answer, &data)?)))
                .collect();
        }
        Self { ended, answer, events, replaced_events: cut }
    }
}

/// Writes an end and its events. Returns true if the run had not ended before.
pub(super) fn write_end(
    change: &Transaction<'_>,
    (run, now): (&str, i64),
    ending: &StoredRunEnd,
) -> rusqlite::Result<bool> {
    let StoredRunEnd { ended, answer, events, replaced_events } = ending;
    let log = ended.log.as_ref();
    // The retention time counts from the end. A clock that was set back for a moment must not make the run old, so the end
    // is neither before the run's other times nor before the last time at which a service trusted the clock.
    let moved = change.execute(
        "UPDATE run SET state = 'ended', ended = max(:now, created, coalesce(started, 0),
         coalesce((SELECT time FROM clock), 0)), error_code = :code, log_records = :records, log_head = :head,
         log_key = :key WHERE id = :run AND state <> 'ended'",
        named_params! {
            ":run": run,
            ":now": now,
            ":code": ended.error_code,
            ":records": log.map(|log| log.records.cast_signed()),
            ":head": log.map(|log| &log.head),
            ":key": log.map(|log| &log.public_key),
        },
    )?;
    // The run has ended already: the first end counts, and its charge and events are stored.
    if moved == 0 {
        return Ok(false);
    }
    spending::settle_reservation(change, run, ended.charged)?;
    change.execute(
        "INSERT INTO outcome (run, answer, result, stdout, stderr) VALUES (:run, :answer, :result, :stdout, :stderr)",
        named_params! {
            ":run": run,
            ":answer": answer,
            ":result": ended.result,
            ":stdout": ended.stdout,
            ":stderr": ended.stderr,
        },
    )?;
    let mut update =
        change.prepare_cached("UPDATE event SET data = ?3 WHERE run = ?1 AND seq = ?2")?;
    for (seq, data) in replaced_events {
        update.execute(params![run, seq.cast_signed(), data])?;
    }
    super::insert_events(change, run, events)?;
    kept_records::count_records(change, run)?;
    Ok(true)
}

/// Reads the stored events of a run that are long enough to hold its answer.
pub(super) fn events_with_answer(
    view: &rusqlite::Connection,
    run: &str,
) -> rusqlite::Result<Vec<StoredEvent>> {
    let query = "SELECT seq, data FROM event WHERE run = ?1 AND octet_length(data) >= ?2";
    let read = |row: &rusqlite::Row<'_>| Ok((row.get::<_, i64>(0)?.cast_unsigned(), row.get(1)?));
    view.prepare_cached(query)?
        .query_map(params![run, MIN_DEDUP_BYTES.cast_signed()], read)?
        .collect()
}

/// Returns a run's result; `None` if the run has not ended.
pub(super) fn read_result(
    view: &rusqlite::Connection,
    run: &str,
) -> rusqlite::Result<Option<String>> {
    let query =
        "SELECT coalesce(replace(result, char(1), answer), result) FROM outcome WHERE run = ?1";
    let found = view.prepare_cached(query)?.query_row([run], |row| row.get(0)).optional()?;
    Ok(found.flatten())
}

/// Returns a run's standard output and standard error; `None` if the run has not ended.
pub(super) fn read_output(
    view: &rusqlite::Connection,
    run: &str,
) -> rusqlite::Result<Option<(String, String)>> {
    let query = "SELECT coalesce(replace(stdout, char(1), answer), stdout), stderr FROM outcome WHERE run = ?1";
    let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
    view.prepare_cached(query)?.query_row([run], read).optional()
}

/// Returns the seal of a run's audit log.
pub(super) fn read_seal(
    view: &rusqlite::Connection,
    run: &str,
) -> rusqlite::Result<Option<AuditLogSeal>> {
    let query =
        "SELECT log_records, log_head, log_key FROM run WHERE id = ?1 AND log_records IS NOT NULL";
    let read = |row: &rusqlite::Row<'_>| {
        let records = row.get::<_, i64>(0)?.cast_unsigned();
        Ok(AuditLogSeal { records, head: row.get(1)?, public_key: row.get(2)? })
    };
    view.prepare_cached(query)?.query_row([run], read).optional()
}

/// Records the seal of an ended run's audit log, if the run has none.
pub(super) fn record_seal(
    change: &Transaction<'_>,
    run: &str,
    seal: &AuditLogSeal,
) -> rusqlite::Result<()> {
    let update = "UPDATE run SET log_records = ?2, log_head = ?3, log_key = ?4
         WHERE id = ?1 AND state = 'ended' AND log_records IS NULL";
    let given = params![run, seal.records.cast_signed(), seal.head, seal.public_key];
    change.execute(update, given)?;
    Ok(())
}

/// Deletes the oldest runs that ended before `before`, up to a number of rows. Returns the number of deleted runs.
pub(super) fn forget_batch(change: &Transaction<'_>, before: i64) -> rusqlite::Result<usize> {
    let old = "SELECT id FROM run WHERE state = 'ended' AND ended < ?1 ORDER BY ended LIMIT ?2";
    let mut old = change.prepare_cached(old)?;
    // The ids are collected first: the statements below change the table that the query reads.
    let old = old.query_map([before, MAX_RUNS_PER_TX], |row| row.get::<_, String>(0))?;
    let (mut runs, mut rows) = (0, 0);
    for run in old.collect::<Result<Vec<_>, _>>()? {
        // The events are deleted explicitly, not by the cascade, so that their number is known.
        rows += change.prepare_cached("DELETE FROM event WHERE run = ?1")?.execute([&run])?;
        change.prepare_cached("DELETE FROM run WHERE id = ?1")?.execute([&run])?;
        runs += 1;
        if rows >= MAX_EVENTS_PER_TX {
            break;
        }
    }
    Ok(runs)
}

/// The columns of an event, for a statement whose first parameter is the run.
pub(super) const EVENT_COLUMNS: &str = "seq, at, kind, coalesce(
    replace(data, char(1), (SELECT answer FROM outcome WHERE run = ?1)), data)";

/// Returns the longest text of a result, if it is long enough to replace. A program's own output may contain the
/// marker; then nothing is replaced.
fn find_answer(ended: &RunEnd) -> Option<&str> {
    let text = ended.result.as_deref().map(longest_text).unwrap_or_default();
    (text.len() >= MIN_DEDUP_BYTES && !ended.stdout.contains(ANSWER_MARKER)).then_some(text)
}

/// Returns the text with a marker in place of each answer; `None` if the answer is not in the text.
fn replace_with_marker(answer: &Finder<'_>, text: &str) -> Option<String> {
    let length = answer.needle().len();
    let (mut cut, mut from) = (String::new(), 0);
    // The matches do not overlap, so the pieces between them and the markers rebuild the text exactly.
    for at in answer.find_iter(text.as_bytes()) {
        cut.push_str(&text[from..at]);
        cut.push_str(ANSWER_MARKER);
        from = at + length;
    }
    (from > 0).then(|| cut + &text[from..])
}

/// Returns the longest string of a JSON document, in its escaped form.
fn longest_text(json: &str) -> &str {
    // A scan for quotes instead of a JSON parser: the text is cut out in its escaped form, and a wrong cut would cost
    // only space.
    let (mut longest, mut at) = ("", 0);
    while let Some(quote) = find_byte(json, at, |byte| byte == b'"') {
        let begin = quote + 1;
        // Find the closing quote: skip each backslash together with the byte that it escapes.
        let mut end = begin;
        while let Some(escape) = find_byte(json, end, |byte| byte == b'"' || byte == b'\\')
            && json.as_bytes()[escape] == b'\\'
        {
            end = escape + 2;
        }
        // `end` may lie beyond the document after a trailing backslash; then no quote is found. Every cut is at an
        // ASCII byte, so the slices are valid UTF-8.
        let Some(close) = find_byte(json, end, |byte| byte == b'"') else { break };
        if close - begin > longest.len() {
            longest = &json[begin..close];
        }
        at = close + 1;
    }
    longest
}

fn find_byte(text: &str, from: usize, is_it: impl Fn(u8) -> bool) -> Option<usize> {
    Some(from + text.as_bytes().get(from..)?.iter().position(|byte| is_it(*byte))?)
}

/// The marker in place of an answer. No JSON document contains it unescaped, because JSON escapes control characters.
const ANSWER_MARKER: &str = "\u{1}";

/// The maximum number of runs that one transaction deletes. Our choice.
const MAX_RUNS_PER_TX: i64 = 64;

/// The number of deleted events after which a transaction deletes no further run. Our choice.
const MAX_EVENTS_PER_TX: usize = 2000;

/// The minimum size of an answer that is replaced, in bytes. Our choice.
const MIN_DEDUP_BYTES: usize = 1024;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    proptest! {
        #[test]
        fn the_longest_text_is_found_whatever_is_in_it(texts in prop::collection::vec(".{0,40}", 1..6)) {
            let document = json!(texts).to_string();
            let longest = longest_text(&document);
            let read: Value = serde_json::from_str(&format!("\"{longest}\"")).unwrap();
            prop_assert!(texts.iter().any(|text| read == **text));
            let escaped = texts.iter().map(|text| json!(text).to_string().len() - 2);
            prop_assert_eq!(Some(longest.len()), escaped.max());
        }
    }

    #[test]
    fn what_is_no_json_has_some_text_or_none() {
        for text in ["", "\"", "\"\\", "\"\\\"", "{\"a\":\"b", "\\\"\""] {
            assert!(longest_text(text).len() <= 1, "{text}");
        }
    }
}
