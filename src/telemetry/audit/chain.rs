//! The hash chain: writes a record as a line, and checks that a line is the next record.
//!
//! Both functions are in one file because each defines the format for the other:
//!
//! ```text
//! {"v":1,"seq":7,"time":"…","run":"…","event":"…", fields ,"prev":"<hash of 6>","hash":"<hash of 7>"}
//! └──────────────────────── content: what the hash is of ────────────────────┘└─── 75 bytes ────┘
//! ```
//!
//! The check works on raw bytes first and parses the fields only afterwards. A second spelling of a record (a space, an
//! upper-case digit, another order) therefore fails.

use std::fmt;

use ring::digest::{SHA256, digest};

use super::records::AuditRecord;

/// The end of a chain: the number of the next record, and the hash that the next record must contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainTip {
    next: u64,
    prev: RecordHash,
}

/// A SHA-256 hash in lower-case hexadecimal, as it is written in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHash([u8; 64]);

/// The reason why a line is not the next record of its log.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainBreakReason {
    #[error(
        "the line is cut short: a crash left it, which the next start repairs, or it is being written"
    )]
    Torn,
    #[error("the line is longer than 1 MiB")]
    TooLong,
    #[error("the line does not have the form of a record")]
    Malformed,
    #[error("the content does not match its hash")]
    HashMismatch,
    #[error("record {0} stands here, so one was removed, repeated or moved")]
    WrongSequence(u64),
    #[error("it builds on another record than the one before it")]
    WrongPredecessor,
    #[error("its fields cannot be read: {0}")]
    InvalidFields(String),
    #[error("it belongs to run `{0}`, unlike the records before it")]
    OtherRun(String),
    #[error("its signature was not made with the key it names")]
    InvalidSignature,
    #[error("more than {MAX_UNSETTLED_CALLS} admitted calls are not settled at this record")]
    TooManyUnsettled,
}

impl ChainTip {
    /// The chain before the first record.
    pub const START: Self = Self { next: 1, prev: RecordHash([b'0'; 64]) };

    /// Returns the number of the next record. Records count from 1, so this is also the number of its line.
    pub fn next_seq(&self) -> u64 {
        self.next
    }

    /// Returns the hash of the last record.
    pub fn last_hash(&self) -> &RecordHash {
        &self.prev
    }

    /// Appends `record` to `lines` as the next line of the chain.
    pub fn append_record<R: AuditRecord>(
        &mut self,
        lines: &mut Vec<u8>,
        head: RecordHeader<'_>,
        record: &R,
    ) {
        let start = lines.len();
        // 1. The fields that every record has.
        lines.extend_from_slice(SEQ_PREFIX);
        lines.extend_from_slice(itoa::Buffer::new().format(self.next).as_bytes());
        lines.extend_from_slice(TIME_PREFIX);
        lines.extend_from_slice(head.time);
        lines.extend_from_slice(b"\",\"run\":");
        lines.extend_from_slice(head.run.as_bytes());
        lines.extend_from_slice(b",\"event\":\"");
        lines.extend_from_slice(R::EVENT.as_bytes());
        lines.push(b'"');
        // 2. The record's own fields. They are written as an object, whose first brace becomes a comma and whose last
        // brace is removed.
        let fields = lines.len();
        record.append_json(lines);
        lines[fields] = b',';
        lines.pop();
        // 3. The hash of the record before. It belongs to the content, so each hash covers all earlier records.
        lines.extend_from_slice(PREV_PREFIX);
        lines.extend_from_slice(&self.prev.0);
        lines.push(b'"');
        self.prev = RecordHash::hash_content(&lines[start..]);
        self.next += 1;
        // 4. The hash of everything in the line up to here.
        lines.extend_from_slice(HASH_PREFIX);
        lines.extend_from_slice(&self.prev.0);
        lines.extend_from_slice(b"\"}\n");
    }

    /// Checks that `line` (without its line feed) is the next record, and moves the chain behind it.
    pub fn verify_next(&mut self, line: &[u8]) -> Result<(), ChainBreakReason> {
        // 1. Cut both hashes off the end of the line. Only the exact bytes that `append_record` writes are accepted.
        let (content, hash) =
            split_at_hash(line, HASH_PREFIX, b"\"}").ok_or(ChainBreakReason::Malformed)?;
        let (fields, prev) =
            split_at_hash(content, PREV_PREFIX, b"\"").ok_or(ChainBreakReason::Malformed)?;
        // 2. Check the content first: if it has changed, its number and predecessor mean nothing.
        let actual = RecordHash::hash_content(content);
        if hash != actual.0 {
            return Err(ChainBreakReason::HashMismatch);
        }
        // 3. Check that the record follows the last one.
        let seq = parse_seq(fields).ok_or(ChainBreakReason::Malformed)?;
        if seq != self.next {
            return Err(ChainBreakReason::WrongSequence(seq));
        }
        if prev != self.prev.0 {
            return Err(ChainBreakReason::WrongPredecessor);
        }
        *self = Self { next: seq + 1, prev: actual };
        Ok(())
    }

    /// Returns true if `bytes` could be the beginning of the next record.
    pub fn could_begin_with(&self, bytes: &[u8]) -> bool {
        let shared = bytes.len().min(SEQ_PREFIX.len());
        bytes[..shared] == SEQ_PREFIX[..shared]
    }
}

/// The fields that begin every line, apart from the record's number.
#[derive(Clone, Copy)]
pub struct RecordHeader<'a> {
    /// The time of the record as RFC 3339 in UTC.
    pub time: &'a [u8],
    /// The run's id as a JSON string, quotes included.
    pub run: &'a str,
}

impl RecordHash {
    fn hash_content(content: &[u8]) -> Self {
        let digest = digest(&SHA256, content);
        let bytes: &[u8; 32] = digest.as_ref().try_into().expect("SHA-256 has 32 bytes");
        let mut text = [0; 64];
        // The loop has no branch, so the compiler converts many bytes at a time.
        for (digits, byte) in text.as_chunks_mut().0.iter_mut().zip(bytes) {
            *digits = [hex_digit(byte >> 4), hex_digit(byte & 15)];
        }
        Self(text)
    }

    pub fn as_bytes(&self) -> &[u8; 64] {
        &self.0
    }
}

impl fmt::Display for RecordHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(str::from_utf8(&self.0).expect("digits are ASCII"))
    }
}

/// Returns the lower-case digit of a number below 16.
fn hex_digit(number: u8) -> u8 {
    number + if number < 10 { b'0' } else { b'a' - 10 }
}

/// Splits `…<key><64 digits><end>` into the part before the key and the digits.
fn split_at_hash<'a>(line: &'a [u8], key: &[u8], end: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let (rest, digits) = line.strip_suffix(end)?.split_last_chunk::<64>()?;
    Some((rest.strip_suffix(key)?, digits))
}

/// Returns the number of the record, if its line begins like every line of a log.
fn parse_seq(fields: &[u8]) -> Option<u64> {
    let rest = fields.strip_prefix(SEQ_PREFIX)?;
    let (digits, rest) = rest.split_at(rest.iter().position(|byte| !byte.is_ascii_digit())?);
    str::from_utf8(digits).ok().filter(|_| rest.starts_with(TIME_PREFIX))?.parse().ok()
}

/// The largest number of admissions that wait for their settlement at the same time. It limits the buffer of the log
/// while the disk is full, and the memory of a reader. Our choice: sixteen times the thousand streams that one run is
/// built for.
pub const MAX_UNSETTLED_CALLS: usize = 16_384;

const SEQ_PREFIX: &[u8] = b"{\"v\":1,\"seq\":";
const TIME_PREFIX: &[u8] = b",\"time\":\"";
const PREV_PREFIX: &[u8] = b",\"prev\":\"";
const HASH_PREFIX: &[u8] = b",\"hash\":\"";
