//! T5, T6: Tests of requests over connections in the ledger, mixed with calls to models and to tools.

use std::sync::Arc;

use cogni_gateway::llm::budget::price::{PriceConfig, PriceTable};
use cogni_gateway::llm::budget::{
    BudgetLedger, BudgetLimits, BudgetReservation, ByteDirection, ConnectionLimits,
    ConnectionReservation, ConnectionReserveRequest, ConnectionSpending, Nanodollars, PriorUsage,
    ReserveRequest, TokenUsage, Tokens, ToolBudgetLimits, ToolReservation, ToolReserveRequest,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// One event in the life of a run's budget.
#[derive(Clone, Debug)]
enum LedgerStep {
    ReserveModel {
        input: u64,
        output: u64,
    },
    ReserveTool(u64),
    ReserveConnection {
        connection: usize,
        price: u64,
        announced: u64,
    },
    SettleModel(usize),
    SettleTool(usize),
    /// The open request of this number passes bytes.
    PassOut(usize, u64),
    PassIn(usize, u64),
    SettleConnection(usize),
    ReleaseConnection(usize),
    /// Drops a reservation without settling it, as a task that crashed does.
    DropConnection(usize),
}

fn any_step() -> impl Strategy<Value = LedgerStep> {
    prop_oneof![
        (0..5_000_u64, 1..2_000_u64)
            .prop_map(|(input, output)| LedgerStep::ReserveModel { input, output }),
        (0..40_000_000_u64).prop_map(LedgerStep::ReserveTool),
        (0..2_usize, 0..40_000_000_u64, 0..600_u64).prop_map(|(connection, price, announced)| {
            LedgerStep::ReserveConnection { connection, price, announced }
        }),
        any::<usize>().prop_map(LedgerStep::SettleModel),
        any::<usize>().prop_map(LedgerStep::SettleTool),
        (any::<usize>(), 0..600_u64).prop_map(|(at, count)| LedgerStep::PassOut(at, count)),
        (any::<usize>(), 0..600_u64).prop_map(|(at, count)| LedgerStep::PassIn(at, count)),
        any::<usize>().prop_map(LedgerStep::SettleConnection),
        any::<usize>().prop_map(LedgerStep::ReleaseConnection),
        any::<usize>().prop_map(LedgerStep::DropConnection),
    ]
}

proptest! {
    /// T5, T6: models, tools and connections together never spend more than the run's money, and no connection more
    /// requests, bytes or money than its own limits, in any order of reservations, bytes and settlements.
    #[test]
    fn no_interleaving_spends_more_than_the_budget(
        limit in 0..100_000_000_u64,
        own in (0..60_000_000_u64, 1..6_u64, 0..1500_u64, 1..1500_u64),
        steps in vec(any_step(), 0..100),
    ) {
        let limits =
            BudgetLimits { max_cost_usd: Some(Nanodollars(limit)), ..BudgetLimits::default() };
        let ledger = Arc::new(BudgetLedger::new(limits, PriorUsage::default()));
        let price_table = PriceTable::load_table(&PriceConfig::default()).unwrap();
        let model_price = price_table.price_for("claude-opus-4-5", || true).unwrap().unwrap();
        let names: [Arc<str>; 2] = ["one".into(), "two".into()];
        let (cost, requests, bytes_out, bytes_in) = own;
        let own = ConnectionLimits {
            requests: Some(requests),
            per_minute: None,
            bytes_out: Some(bytes_out),
            bytes_in: Some(bytes_in),
            cost_usd: Some(Nanodollars(cost)),
        };
        let (mut models, mut tools, mut open): (
            Vec<BudgetReservation>,
            Vec<ToolReservation>,
            Vec<ConnectionReservation>,
        ) = (vec![], vec![], vec![]);
        for step in steps {
            match step {
                LedgerStep::ReserveModel { input, output } => {
                    models.extend(ledger.reserve_call(&ReserveRequest {
                        is_turn: true,
                        input: Tokens(input),
                        output: Some(Tokens(output)),
                        price: Some(Arc::clone(&model_price)),
                        ..ReserveRequest::default()
                    }));
                }
                LedgerStep::ReserveTool(price) => {
                    tools.extend(ledger.reserve_tool_call(&ToolReserveRequest {
                        tool: &names[0],
                        price: Nanodollars(price),
                        limits: ToolBudgetLimits::default(),
                    }));
                }
                LedgerStep::ReserveConnection { connection, price, announced } => {
                    open.extend(ledger.reserve_connection_request(&ConnectionReserveRequest {
                        connection: &names[connection],
                        price: Nanodollars(price),
                        announced_bytes: announced,
                        limits: own,
                    }));
                }
                LedgerStep::SettleModel(at) if !models.is_empty() => {
                    let call = models.swap_remove(at % models.len());
                    let granted = call.granted_amount();
                    let (input, output) = (granted.input, granted.output);
                    let _ = call.settle_usage(&TokenUsage { input, output, ..TokenUsage::default() });
                }
                LedgerStep::SettleTool(at) if !tools.is_empty() => {
                    let _ = tools.swap_remove(at % tools.len()).settle_call();
                }
                LedgerStep::PassOut(at, count) if !open.is_empty() => {
                    let at = at % open.len();
                    let _ = open[at].take_bytes(ByteDirection::Out, count);
                }
                LedgerStep::PassIn(at, count) if !open.is_empty() => {
                    let at = at % open.len();
                    let _ = open[at].take_bytes(ByteDirection::In, count);
                }
                LedgerStep::SettleConnection(at) if !open.is_empty() => {
                    let mut request = open.swap_remove(at % open.len());
                    let granted = request.granted_amount();
                    prop_assert_eq!(request.settle_request(), granted);
                    prop_assert!(request.take_bytes(ByteDirection::In, 1).is_err());
                }
                LedgerStep::ReleaseConnection(at) if !open.is_empty() => {
                    open.swap_remove(at % open.len()).release_unspent();
                }
                LedgerStep::DropConnection(at) if !open.is_empty() => {
                    drop(open.swap_remove(at % open.len()));
                }
                _ => {}
            }
            let status = ledger.budget_status();
            prop_assert!(status.spent.cost + status.reserved.cost <= Nanodollars(limit), "{:?}", status);
            for spent in ledger.connection_spending().values() {
                prop_assert!(spent.requests <= requests && spent.cost <= Nanodollars(cost), "{:?}", spent);
                prop_assert!(spent.bytes_out <= bytes_out && spent.bytes_in <= bytes_in, "{:?}", spent);
            }
        }
        drop((models, tools, open));
        let status = ledger.budget_status();
        prop_assert!(status.spent.cost <= Nanodollars(limit));
        prop_assert!(status.reserved.cost.is_zero() && status.open_calls == 0);
    }
}

/// T5: what an earlier process of the run has passed counts, and so do its requests of the last minute.
#[test]
fn a_later_process_goes_on_with_what_is_left() {
    let ledger = Arc::new(BudgetLedger::new(BudgetLimits::default(), PriorUsage::default()));
    let spent =
        ConnectionSpending { requests: 2, bytes_out: 90, bytes_in: 0, cost: Nanodollars(0) };
    ledger.restore_connections([("one".to_owned(), spent)], [("one".to_owned(), 2)]);
    let reserve = |announced_bytes, limits| {
        let connection = Arc::from("one");
        let (connection, price) = (&connection, Nanodollars(0));
        let request = ConnectionReserveRequest { connection, price, announced_bytes, limits };
        ledger.reserve_connection_request(&request).map(ConnectionReservation::release_unspent)
    };
    let code = |error: Result<(), cogni_gateway::llm::budget::ConnectionBudgetError>| {
        error.map_err(|error| error.code())
    };
    let of_requests = |count| ConnectionLimits { requests: Some(count), ..Default::default() };
    assert_eq!(code(reserve(0, of_requests(2))), Err("connection_request_budget_exhausted"));
    let bytes = ConnectionLimits { bytes_out: Some(100), ..Default::default() };
    assert_eq!(code(reserve(11, bytes)), Err("connection_byte_budget_exhausted"));
    let rate = ConnectionLimits { per_minute: std::num::NonZeroU32::new(2), ..Default::default() };
    assert_eq!(code(reserve(0, rate)), Err("rate_limited"));
    assert_eq!(code(reserve(10, of_requests(3))), Ok(()));
}

/// T5: a client that announces an absurd length breaks no sum.
#[test]
fn an_absurd_length_saturates() {
    let ledger = Arc::new(BudgetLedger::new(BudgetLimits::default(), PriorUsage::default()));
    let connection: &Arc<str> = &Arc::from("api");
    let reserve = |announced_bytes| {
        let limits = ConnectionLimits::default();
        let price = Nanodollars::ZERO;
        let request = ConnectionReserveRequest { connection, price, announced_bytes, limits };
        ledger.reserve_connection_request(&request).unwrap()
    };
    let mut small = reserve(5);
    small.take_bytes(ByteDirection::Out, 5).unwrap();
    small.settle_request();
    let _open = reserve(u64::MAX - 2);
    assert_eq!(ledger.connection_spending()["api"].bytes_out, u64::MAX);
}
