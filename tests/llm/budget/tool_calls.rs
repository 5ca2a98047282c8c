//! Tests of tool calls in the ledger, mixed with calls to models.

use std::sync::Arc;

use cogni_gateway::llm::budget::price::{ModelPrice, PriceConfig, PriceTable};
use cogni_gateway::llm::budget::{
    BudgetLedger, BudgetLimits, BudgetReservation, Nanodollars, PriorUsage, ReserveRequest,
    TokenUsage, Tokens, ToolBudgetLimits, ToolReservation, ToolReserveRequest,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// One event in the life of a run's budget.
#[derive(Clone, Debug)]
enum MixedStep {
    ReserveModel {
        input: u64,
        output: u64,
    },
    ReserveTool {
        tool: usize,
        price: u64,
    },
    /// Settles the open model call of this number, at this percentage of its grant.
    SettleModel(usize, u64),
    SettleTool(usize),
    ReleaseTool(usize),
    /// Drops a reservation without settling it, as a task that crashed does.
    DropTool(usize),
}

fn any_mixed_step() -> impl Strategy<Value = MixedStep> {
    prop_oneof![
        (0..5_000_u64, 1..2_000_u64)
            .prop_map(|(input, output)| MixedStep::ReserveModel { input, output }),
        (0..2_usize, 0..40_000_000_u64)
            .prop_map(|(tool, price)| MixedStep::ReserveTool { tool, price }),
        (any::<usize>(), 0..=100_u64).prop_map(|(at, part)| MixedStep::SettleModel(at, part)),
        any::<usize>().prop_map(MixedStep::SettleTool),
        any::<usize>().prop_map(MixedStep::ReleaseTool),
        any::<usize>().prop_map(MixedStep::DropTool),
    ]
}

proptest! {
    /// T5: calls to models and to tools together never spend more than the run's budget, and no tool more than its own,
    /// in any order of reservations and settlements.
    #[test]
    fn no_interleaving_of_models_and_tools_spends_more_than_the_budget(
        limit in 0..100_000_000_u64,
        tool_limit in (0..60_000_000_u64, 1..6_u64),
        steps in vec(any_mixed_step(), 0..80),
    ) {
        let limits =
            BudgetLimits { max_cost_usd: Some(Nanodollars(limit)), ..BudgetLimits::default() };
        let ledger = Arc::new(BudgetLedger::new(limits, PriorUsage::default()));
        let price = model_price();
        let names: [Arc<str>; 2] = ["one".into(), "two".into()];
        let own = ToolBudgetLimits {
            calls: Some(tool_limit.1),
            cost_usd: Some(Nanodollars(tool_limit.0)),
            per_minute: None,
        };
        let (mut models, mut tools): (Vec<BudgetReservation>, Vec<ToolReservation>) = (vec![], vec![]);
        for step in steps {
            match step {
                MixedStep::ReserveModel { input, output } => {
                    let request = ReserveRequest {
                        is_turn: true,
                        input: Tokens(input),
                        output: Some(Tokens(output)),
                        price: Some(Arc::clone(&price)),
                        ..ReserveRequest::default()
                    };
                    models.extend(ledger.reserve_call(&request));
                }
                MixedStep::ReserveTool { tool, price } => {
                    let request = ToolReserveRequest {
                        tool: &names[tool],
                        price: Nanodollars(price),
                        limits: own,
                    };
                    tools.extend(ledger.reserve_tool_call(&request));
                }
                MixedStep::SettleModel(at, part) if !models.is_empty() => {
                    let call = models.swap_remove(at % models.len());
                    let granted = call.granted_amount();
                    let usage = TokenUsage {
                        input: Tokens(granted.input.0 * part / 100),
                        output: Tokens(granted.output.0 * part / 100),
                        ..TokenUsage::default()
                    };
                    let _ = call.settle_usage(&usage);
                }
                MixedStep::SettleTool(at) if !tools.is_empty() => {
                    let call = tools.swap_remove(at % tools.len());
                    let granted = call.granted_amount();
                    prop_assert_eq!(call.settle_call(), granted);
                }
                MixedStep::ReleaseTool(at) if !tools.is_empty() => {
                    tools.swap_remove(at % tools.len()).release_unspent();
                }
                MixedStep::DropTool(at) if !tools.is_empty() => {
                    drop(tools.swap_remove(at % tools.len()));
                }
                _ => {}
            }
            let status = ledger.budget_status();
            prop_assert!(status.spent.cost + status.reserved.cost <= Nanodollars(limit), "{:?}", status);
            for spent in ledger.tool_spending().values() {
                prop_assert!(spent.calls <= tool_limit.1 && spent.cost <= Nanodollars(tool_limit.0));
            }
        }
        drop((models, tools));
        let status = ledger.budget_status();
        prop_assert!(status.spent.cost <= Nanodollars(limit));
        prop_assert!(status.reserved.cost.is_zero() && status.open_calls == 0);
    }
}

/// T5: a released call costs nothing and leaves the tool's budget as it was; a dropped one is charged in full.
#[test]
fn a_tool_call_is_charged_unless_it_was_released() {
    let ledger = Arc::new(BudgetLedger::new(BudgetLimits::default(), PriorUsage::default()));
    let tool: Arc<str> = "one".into();
    let limits = ToolBudgetLimits { calls: Some(1), ..ToolBudgetLimits::default() };
    let request = ToolReserveRequest { tool: &tool, price: Nanodollars(7), limits };
    ledger.reserve_tool_call(&request).unwrap().release_unspent();
    assert!(ledger.spent_amount().cost.is_zero());
    drop(ledger.reserve_tool_call(&request).unwrap());
    assert_eq!(ledger.spent_amount().cost, Nanodollars(7));
    assert_eq!(
        ledger.reserve_tool_call(&request).unwrap_err().code(),
        "tool_call_budget_exhausted"
    );
}

/// T5: the rate of a tool is its own.
#[test]
fn a_tool_has_a_rate_of_its_own() {
    let ledger = Arc::new(BudgetLedger::new(BudgetLimits::default(), PriorUsage::default()));
    let limits = ToolBudgetLimits { per_minute: Some(1), ..ToolBudgetLimits::default() };
    let (one, two): (Arc<str>, Arc<str>) = ("one".into(), "two".into());
    let request = |tool| ToolReserveRequest { tool, price: Nanodollars::ZERO, limits };
    let _ = ledger.reserve_tool_call(&request(&one)).unwrap().settle_call();
    assert_eq!(ledger.reserve_tool_call(&request(&one)).unwrap_err().code(), "rate_limited");
    let _ = ledger.reserve_tool_call(&request(&two)).unwrap().settle_call();
}

fn model_price() -> Arc<ModelPrice> {
    let prices = PriceTable::load_table(&PriceConfig::default()).unwrap();
    prices.price_for("claude-opus-4-5", || true).unwrap().unwrap()
}
