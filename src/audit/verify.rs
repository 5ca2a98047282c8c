//! Proving a log, and telling what it says.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use super::Error;
use super::chain::{Hash, MAX_UNSETTLED, Why};
use super::key::PublicKey;
use super::read::{self, Broken, Checkpoint, Entry, Event, Reader, Settlement};
use super::record::Outcome;
use crate::budget::Amount;

/// What a proved log says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub run: String,
    /// Of the last start, as the account.
    pub attempt: String,
    pub account: String,
    /// How often a process started to write it; more than one means it was resumed.
    pub starts: u64,
    pub records: u64,
    /// The times of the first and the last record.
    pub first: String,
    pub last: String,
    pub admitted: u64,
    pub settled: u64,
    /// Of the settled ones, those whose real settlement a crash lost.
    pub crashed: u64,
    /// Admissions without a settlement: calls in flight, unless the process is gone.
    pub open: u64,
    /// Settlements without an admission: a fault of the gateway, not of the file.
    pub unmatched: u64,
    pub refused: u64,
    pub spent: Amount,
    /// Whether the last thing that happened was the run's orderly end.
    pub finished: bool,
    /// The hash of the last record, where there is one.
    pub head: Option<Hash>,
    pub signatures: Signatures,
}

/// Who vouches for a log, and for how much of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Signatures {
    /// Checkpoints that count: with a pinned key, those it made.
    pub checkpoints: u64,
    /// Checkpoints by other keys than the pinned one. They are intact and prove nothing.
    pub foreign: u64,
    /// The record of the last one that counts; it vouches for every record before it.
    pub last: Option<u64>,
    /// The key that made it.
    pub key: Option<PublicKey>,
}

/// The part of a log that the last counting checkpoint covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// The whole log, which ends with the run's end.
    Complete,
    /// A log that does not end with the run's end. Records may be missing, and those after the checkpoint are unsigned.
    Open,
    /// A log that ends with the run's end, but not that end.
    UnsignedEnd,
}

/// Proves the log at `path` and reports what it says.
///
/// With a pinned key, at least one checkpoint must have been made by it, and [`Report::coverage`] tells how much of the
/// log it covers: anybody can append records that no checkpoint signs. Without a pinned key, signatures are checked
/// against the keys that the file itself names: that finds damage, not a forger.
pub fn verify(path: &Path, pinned: Option<&PublicKey>) -> Result<Report, Error> {
    let failed = |source| Error::File { path: path.into(), source };
    let file = File::open(path).map_err(failed)?;
    let report = check(BufReader::new(file), pinned).map_err(|error| Error::read(path, error))?;
    match pinned {
        Some(key) if report.signatures.last.is_none() => Err(Error::Unsigned { key: *key }),
        _ => Ok(report),
    }
}

/// Proves a log that comes from anywhere.
pub fn check(log: impl BufRead, pinned: Option<&PublicKey>) -> Result<Report, read::Error> {
    let mut reader = Reader::new(log);
    let mut tally = Tally::new(pinned);
    while let Some(entry) = reader.entry()? {
        tally.add(&entry)?;
    }
    let head = Some(*reader.position().chain.prev()).filter(|_| tally.report.records > 0);
    Ok(Report { head, ..tally.report() })
}

impl Report {
    /// Returns how much of the log the last counting checkpoint covers.
    pub fn coverage(&self) -> Coverage {
        match (self.finished, self.unsigned()) {
            (false, _) => Coverage::Open,
            (true, 0) => Coverage::Complete,
            (true, _) => Coverage::UnsignedEnd,
        }
    }

    /// Returns the number of records that a counting checkpoint covers, that checkpoint included.
    pub fn signed(&self) -> u64 {
        self.signatures.last.unwrap_or(0)
    }

    /// Returns the number of records after the last counting checkpoint.
    pub fn unsigned(&self) -> u64 {
        self.records - self.signed()
    }
}

/// Adds up what the records of one log say, and checks what only their meaning can tell.
#[derive(Debug, Default)]
pub(super) struct Tally {
    report: Report,
    pinned: Option<PublicKey>,
    open: HashMap<String, Open>,
}

/// An admission without its settlement.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Open {
    pub(super) seq: u64,
    pub(super) reserved: Amount,
}

impl Tally {
    pub(super) fn new(pinned: Option<&PublicKey>) -> Self {
        Self { pinned: pinned.copied(), ..Self::default() }
    }

    pub(super) fn add(&mut self, entry: &Entry) -> Result<(), Broken> {
        self.note(entry).map_err(|why| entry.broken(why))
    }

    pub(super) fn report(self) -> Report {
        Report { open: self.open.len() as u64, ..self.report }
    }

    pub(super) fn run(&self) -> &str {
        &self.report.run
    }

    /// The time of the first record.
    pub(super) fn began(&self) -> &str {
        &self.report.first
    }

    /// What has been spent, and what is still reserved, in the order of admission.
    pub(super) fn settle(self) -> (Amount, Vec<(String, Amount)>) {
        let mut open: Vec<_> = self.open.into_iter().collect();
        open.sort_unstable_by_key(|(_, open)| open.seq);
        let reserved = open.into_iter().map(|(request, open)| (request, open.reserved)).collect();
        (self.report.spent, reserved)
    }

    fn note(&mut self, entry: &Entry) -> Result<(), Why> {
        let report = &mut self.report;
        if report.records == 0 {
            report.run.clone_from(&entry.run);
            report.first.clone_from(&entry.time);
        } else if report.run != entry.run {
            return Err(Why::Run(entry.run.clone()));
        }
        report.records = entry.seq;
        report.last.clone_from(&entry.time);
        // A checkpoint after the end only signs it.
        report.finished &= matches!(entry.event, Event::Checkpoint(_));
        match &entry.event {
            Event::Started(session) => {
                report.starts += 1;
                report.attempt.clone_from(&session.attempt);
                report.account.clone_from(&session.account);
            }
            Event::Admitted(admission) => {
                report.admitted += 1;
                let open = self.open.entry(admission.request.clone()).or_default();
                open.seq = entry.seq;
                // An id admitted twice is a fault of the gateway; it must not come out cheaper.
                open.reserved = open.reserved + admission.reserved;
                if self.open.len() > MAX_UNSETTLED {
                    return Err(Why::Unsettled);
                }
            }
            Event::Settled(settlement) => self.settled(settlement),
            Event::Refused(refusal) => {
                report.refused = report.refused.saturating_add(refusal.repeats);
            }
            Event::Finished(_) => report.finished = true,
            Event::Checkpoint(checkpoint) => return self.checkpoint(entry, checkpoint),
            Event::Opened(_) | Event::Repaired(_) | Event::Other => (),
        }
        Ok(())
    }

    fn settled(&mut self, settlement: &Settlement) {
        let report = &mut self.report;
        report.settled += 1;
        report.crashed += u64::from(settlement.outcome == Outcome::Crashed);
        report.unmatched += u64::from(self.open.remove(&settlement.request).is_none());
        report.spent = report.spent + settlement.charged;
    }

    fn checkpoint(&mut self, entry: &Entry, checkpoint: &Checkpoint) -> Result<(), Why> {
        let key = PublicKey::parse(&checkpoint.public_key).map_err(|_| Why::Signature)?;
        if !key.verifies(&entry.prev, &checkpoint.signature) {
            return Err(Why::Signature);
        }
        let signatures = &mut self.report.signatures;
        if self.pinned.is_some_and(|pinned| pinned != key) {
            signatures.foreign += 1;
        } else {
            signatures.checkpoints += 1;
            signatures.last = Some(entry.seq);
            signatures.key = Some(key);
        }
        Ok(())
    }
}
