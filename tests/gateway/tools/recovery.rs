//! Tests of a run's tools after a crash: the next process settles what was open, and no budget begins anew.

use std::collections::BTreeMap;
use std::io::BufReader;
use std::sync::Arc;

use cogni_gateway::llm::budget::{
    BudgetAmount, BudgetError, BudgetLedger, BudgetLimits, Nanodollars, PriorUsage,
    ToolBudgetError, ToolBudgetLimits, ToolReservation, ToolReserveRequest, ToolSpending,
};
use cogni_gateway::telemetry::audit::records::RunStartedRecord;
use cogni_gateway::telemetry::audit::tool_records::{
    ToolAdmittedRecord, ToolOutcome, ToolSettledRecord,
};
use cogni_gateway::telemetry::audit::{AuditConfig, AuditLog, verify};

/// T5: an admission without its settlement is charged in full by the next process, and counts in the tool's budget.
#[tokio::test]
async fn a_crash_charges_an_open_tool_call() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("audit.jsonl");
    let config = AuditConfig { path: Some(path.clone()), ..AuditConfig::default() };
    let cost = BudgetAmount { cost: Nanodollars(5), ..BudgetAmount::default() };
    let admitted = |call| ToolAdmittedRecord {
        call,
        tool: "clock",
        definition: "f",
        rules: &[],
        arguments: "d",
        argument_bytes: 2,
        evidence: const { &BTreeMap::new() },
        approval: None,
        pid: None,
        reserved: cost,
    };
    let settled = ToolSettledRecord {
        call: "tc-1",
        tool: "clock",
        outcome: ToolOutcome::Completed,
        code: None,
        result: None,
        result_bytes: 0,
        charged: cost,
        duration_ms: 1,
    };
    let (log, _) = AuditLog::open_log(&config, &started_record()).unwrap();
    log.record_tool_admission(&admitted("tc-1")).await.unwrap();
    log.record_tool_settlement(&settled);
    log.record_tool_admission(&admitted("tc-2")).await.unwrap();
    // A dropped log writes its buffer, like a process that is killed after its last write.
    drop(log);

    let (log, recovered) = AuditLog::open_log(&config, &started_record()).unwrap();
    let spending = ToolSpending { calls: 2, cost: Nanodollars(10) };
    assert_eq!((recovered.crashed, recovered.spent.cost), (1, Nanodollars(10)));
    assert_eq!(recovered.tools, BTreeMap::from([("clock".to_owned(), spending)]));
    drop(log);
    let file = BufReader::new(std::fs::File::open(&path).unwrap());
    let report = verify::verify_log(file, None).unwrap();
    assert_eq!((report.open, report.unmatched), (0, 0));
    assert_eq!((report.crashed, report.tools_crashed), (0, 1));
    assert_eq!((report.spent.cost, report.tools["clock"]), (Nanodollars(10), spending));

    let past = PriorUsage { spent: recovered.spent, ..PriorUsage::default() };
    let ledger = Arc::new(BudgetLedger::new(BudgetLimits::default(), past));
    ledger.restore_tool_spending(recovered.tools);
    let request = ToolReserveRequest {
        tool: &Arc::from("clock"),
        price: Nanodollars(5),
        limits: ToolBudgetLimits { calls: Some(2), ..ToolBudgetLimits::default() },
    };
    let refused = ledger.reserve_tool_call(&request).unwrap_err();
    assert_eq!(refused, ToolBudgetError::Calls { spent: 2, limit: 2 });

    // The calls of the last minute count in the tool's minute, and only there.
    assert_eq!(recovered.recent_tools, BTreeMap::from([("clock".to_owned(), 2)]));
    ledger.restore_tool_rates(recovered.recent_tools);
    let per_minute = |count| ToolBudgetLimits { per_minute: Some(count), ..Default::default() };
    let reserve = |tool: &str, limits| {
        let request = ToolReserveRequest { tool: &Arc::from(tool), price: Nanodollars(0), limits };
        ledger.reserve_tool_call(&request).map(ToolReservation::release_unspent)
    };
    let refused = reserve("clock", per_minute(2)).unwrap_err();
    assert!(
        matches!(refused, ToolBudgetError::Run(BudgetError::Rate { limit: 2, .. })),
        "{refused:?}"
    );
    reserve("other", per_minute(2)).unwrap();
}

fn started_record() -> RunStartedRecord {
    RunStartedRecord {
        run: "run-1".to_owned(),
        attempt: "0".to_owned(),
        account: "acct-1".to_owned(),
        version: "1".to_owned(),
        policy: "p".to_owned(),
        prices: "p".to_owned(),
        trace: None,
        upstream: "litellm",
    }
}
