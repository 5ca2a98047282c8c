//! The audit log of a gateway that is another process, read as it grows.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Deserialize;

use crate::llm::budget::BudgetAmount;
use crate::runner::gateway_signals::CallSummary;

/// The part of the audit log that the gateway's container has written since this run began.
#[derive(Debug)]
pub(super) struct GatewayAuditTail {
    path: PathBuf,
    log: BufReader<File>,
    /// A line whose end is not written yet.
    begun: String,
    is_started: bool,
    is_exhausted: bool,
    calls: CallSummary,
}

/// The fields of an audit record that the runner uses. This reader does not check the log's hash chain; the audit log's
/// own reader does.
#[derive(Deserialize)]
struct GatewayAuditLine {
    event: String,
    #[serde(default)]
    exhausted: bool,
    code: Option<String>,
    charged: Option<BudgetAmount>,
    spent: Option<BudgetAmount>,
    admitted: Option<u64>,
    refused: Option<u64>,
}

impl GatewayAuditTail {
    /// Opens the log, and starts reading behind the complete lines of an earlier process.
    pub(super) fn open_at_end(path: PathBuf) -> anyhow::Result<Self> {
        let open = || -> std::io::Result<BufReader<File>> {
            let mut file = File::open(&path)?;
            let length = complete_lines_len(&mut file)?;
            file.seek(SeekFrom::Start(length))?;
            Ok(BufReader::new(file))
        };
        let log = open().with_context(|| read_error(&path))?;
        let calls = CallSummary::default();
        let partial_line = String::new();
        Ok(Self { path, log, begun: partial_line, is_started: false, is_exhausted: false, calls })
    }

    /// Reads the lines that were added since the last call.
    pub(super) fn read_new(&mut self) -> anyhow::Result<()> {
        while self.log.read_line(&mut self.begun).with_context(|| read_error(&self.path))? > 0 {
            // Without a line end, `begun` keeps the partial line, and the next call appends the rest.
            if self.begun.ends_with('\n') {
                let line =
                    serde_json::from_str(&self.begun).with_context(|| read_error(&self.path))?;
                self.begun.clear();
                self.apply_line(line);
            }
        }
        Ok(())
    }

    pub(super) fn is_started(&self) -> bool {
        self.is_started
    }

    pub(super) fn is_exhausted(&self) -> bool {
        self.is_exhausted
    }

    pub(super) fn calls(&self) -> CallSummary {
        self.calls
    }

    fn apply_line(&mut self, line: GatewayAuditLine) {
        let GatewayAuditLine { event, exhausted, code, charged, spent, admitted, refused } = line;
        let is_denied = code.is_some_and(|code| code.ends_with("_budget_exhausted"));
        match event.as_str() {
            "run.started" => self.is_started = true,
            // `is_denied` describes the last call only, so an admitted call resets it.
            "request.admitted" => {
                self.calls.admitted += 1;
                self.calls.is_denied = false;
            }
            "request.settled" => self.calls.spent = self.calls.spent + charged.unwrap_or_default(),
            "request.refused" => {
                self.calls.refused += 1;
                self.calls.is_denied = is_denied;
                self.is_exhausted |= exhausted;
            }
            // The gateway's own totals replace the sums, because an earlier process may have spent a part of the
            // budget.
            "run.finished" => {
                self.calls = CallSummary {
                    spent: spent.unwrap_or(self.calls.spent),
                    admitted: admitted.unwrap_or(self.calls.admitted),
                    refused: refused.unwrap_or(self.calls.refused),
                    ..self.calls
                }
            }
            _ => (),
        }
    }
}

/// Returns the length of a log's complete lines. The next writer of the log removes a torn last line.
fn complete_lines_len(file: &mut File) -> std::io::Result<u64> {
    let (mut length, mut complete) = (0, 0);
    let mut reader = BufReader::new(file.take(u64::MAX));
    let mut line = vec![];
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(complete);
        }
        length += read as u64;
        if line.ends_with(b"\n") {
            complete = length;
        }
    }
}

fn read_error(path: &Path) -> String {
    format!("the audit log `{}` cannot be read", path.display())
}
