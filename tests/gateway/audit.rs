//! G11: Tests of the audit log: it proves itself, survives crashes and full disks, and refuses calls that it cannot
//! record.

mod chain;
mod command;
mod concurrent_writes;
mod fields;
mod full_disk;
mod recover;
mod truncated_log;

use std::fs;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::LazyLock;
use std::task::{Context, Poll, Waker};

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::llm::budget::{BudgetAmount, TokenUsage, Tokens, UsageSource};
use cogni_gateway::telemetry::audit::read::{
    AuditEntry, AuditReadError, AuditReader, ChainBreakError,
};
use cogni_gateway::telemetry::audit::records::{
    CallAdmittedRecord, CallOutcome, CallRefusedRecord, CallSettledRecord, RunFinishedRecord,
    RunStartedRecord,
};
use cogni_gateway::telemetry::audit::verify::{self, AuditVerifyReport};
use cogni_gateway::telemetry::audit::{AuditConfig, AuditLog, RecoveredRun};
use tempfile::TempDir;

/// A directory with one log.
struct LogDir {
    folder: TempDir,
}

impl LogDir {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("audit.jsonl")
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(self.log()).unwrap()
    }

    fn open(&self) -> (AuditLog, RecoveredRun) {
        AuditLog::open_log(&audit_config(&self.log()), &started_record()).unwrap()
    }

    fn verify(&self) -> AuditVerifyReport {
        verify::verify_file(&self.log(), None).unwrap()
    }

    /// Returns every record, after the chain has been verified.
    fn entries(&self) -> Vec<AuditEntry> {
        let bytes = self.bytes();
        let mut reader = AuditReader::new(&*bytes);
        std::iter::from_fn(|| reader.next_entry().unwrap()).collect()
    }
}

/// Writes eight records: start, call, refusal, second call, end, and signature.
fn whole_run() -> LogDir {
    let log_dir = LogDir::new();
    let (log, _) = log_dir.open();
    at_once(log.record_admission(&admitted_record("call-1"))).unwrap();
    log.record_settlement(&settled_record("call-1"));
    log.record_refusal(&refused_record("call-2", "route_not_served"));
    at_once(log.record_admission(&admitted_record("call-3"))).unwrap();
    log.record_settlement(&CallSettledRecord {
        outcome: CallOutcome::ClientGone,
        status: 0,
        ..settled_record("call-3")
    });
    log.finish_log(&RunFinishedRecord {
        spent: budget_amount(2, 236, 88),
        admitted: 2,
        refused: 1,
    })
    .unwrap();
    log_dir
}

/// The bytes of one [`whole_run`], for tests that read them many times.
static WHOLE_RUN: LazyLock<Vec<u8>> = LazyLock::new(|| whole_run().bytes());

fn audit_config(path: &Path) -> AuditConfig {
    AuditConfig {
        path: Some(path.into()),
        signing_key: Some(SecretString::new("11".repeat(32))),
        ..AuditConfig::default()
    }
}

fn started_record() -> RunStartedRecord {
    RunStartedRecord {
        run: "run-1".into(),
        attempt: "2".into(),
        account: "acct-1".into(),
        version: "0.1.0".into(),
        policy: "9f86d081".into(),
        prices: "8d969eef".into(),
        trace: None,
        upstream: "litellm",
    }
}

fn admitted_record(request: &str) -> CallAdmittedRecord<'_> {
    CallAdmittedRecord {
        request,
        route: "chat_completions",
        model: Some("gpt-4o"),
        rules: &[],
        stream: true,
        request_bytes: 2048,
        pid: None,
        reserved: budget_amount(1, 600, 4096),
    }
}

fn settled_record(request: &str) -> CallSettledRecord<'_> {
    CallSettledRecord {
        request,
        outcome: CallOutcome::Completed,
        status: 200,
        code: None,
        usage: TokenUsage {
            input: Tokens(118),
            output: Tokens(44),
            source: UsageSource::Provider,
            ..TokenUsage::default()
        },
        charged: budget_amount(1, 118, 44),
        response_bytes: 9000,
        frames: 45,
        litellm_call_id: Some(request),
        litellm_response_cost: Some("0.00074"),
        reported_cost_usd: None,
        first_byte_ms: Some(311.001_234),
        duration_ms: 812.25,
    }
}

fn refused_record<'a>(request: &'a str, code: &'static str) -> CallRefusedRecord<'a> {
    CallRefusedRecord {
        request,
        code,
        status: 404,
        method: "POST",
        route: "-",
        model: None,
        rules: &[],
        request_bytes: 17,
        exhausted: false,
        pid: None,
    }
}

fn budget_amount(turns: u64, input: u64, output: u64) -> BudgetAmount {
    BudgetAmount { turns, input: Tokens(input), output: Tokens(output), ..BudgetAmount::default() }
}

/// Polls a future once. Only [`Durability::Fsync`](cogni_gateway::telemetry::audit::Durability) ever waits.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("it waits"),
    }
}

fn verify_log(log: &[u8]) -> Result<AuditVerifyReport, ChainBreakError> {
    match verify::verify_log(log, None) {
        Ok(report) => Ok(report),
        Err(AuditReadError::Broken(broken)) => Err(broken),
        Err(AuditReadError::Io(error)) => panic!("memory cannot fail: {error}"),
    }
}

/// Returns the offset of each line of `log`.
fn line_starts(log: &[u8]) -> Vec<usize> {
    let ends = log.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1);
    let mut starts: Vec<_> = std::iter::once(0).chain(ends).collect();
    starts.pop();
    starts
}
