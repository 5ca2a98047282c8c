//! Tests of the ledger: no interleaving of calls spends more than the run was granted.

mod connections;
mod price;
mod tool_calls;

use std::sync::Arc;
use std::time::Duration;

use cogni_gateway::llm::budget::{
    BudgetAmount, BudgetError, BudgetLedger, BudgetLimits, BudgetReservation, CallKind, ModelPrice,
    Nanodollars, PriceTable, PriorUsage, RecentUsage, ReserveRequest, SpendingLimit,
    SpendingLimits, TokenUsage, Tokens, UsageSource, price::UnknownPricePolicy,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// One event in the life of a run's budget.
#[derive(Clone, Debug)]
enum BudgetStep {
    Reserve(ReserveRequest),
    /// Settles a call: the call used this percentage of each part of its grant.
    Settle(usize, u8),
    Release(usize),
    /// Drops a reservation without settling it, as a task that crashed does.
    Drop(usize),
}

proptest! {
    /// G9: spent and reserved together stay within each limit whenever a call is granted, and
    /// nothing is held once all calls have ended.
    #[test]
    fn no_interleaving_spends_more_than_the_budget(
        limits in any_limits(),
        spent in any_amount(20),
        steps in vec(any_step(), 0..60),
    ) {
        // An earlier process may have spent all turns, but never more turns than the limit.
        let spent = BudgetAmount { turns: spent.turns.min(limits.max_turns.unwrap_or(u64::MAX)), ..spent };
        let ledger = Arc::new(BudgetLedger::new(limits.clone(), PriorUsage { spent, ..PriorUsage::default() }));
        let mut open: Vec<BudgetReservation> = vec![];
        for step in steps {
            match step {
                BudgetStep::Reserve(ask) => {
                    if let Ok(reservation) = ledger.reserve_call(&ask) {
                        let status = ledger.budget_status();
                        prop_assert!(is_within(&limits, status.spent + status.reserved, open.len()));
                        let answers = ask.output.unwrap_or(Tokens(16_384)).max(Tokens(ask.choices.max(1).into()));
                        prop_assert!(reservation.granted_amount().output <= answers + ask.unlimited_output);
                        prop_assert_eq!(reservation.granted_amount().input, ask.input);
                        open.push(reservation);
                    }
                }
                BudgetStep::Settle(which, percent) if !open.is_empty() => {
                    let reservation = open.swap_remove(which % open.len());
                    let part = |Tokens(granted)| Tokens(granted * u64::from(percent) / 100);
                    let granted = reservation.granted_amount();
                    let (input, output) = (part(granted.input), part(granted.output));
                    let cache_read = part(input);
                    let usage = TokenUsage { input, output, cache_read, ..TokenUsage::default() };
                    let charged = reservation.settle_usage(&usage);
                    prop_assert!(charged.cost <= granted.cost);
                    prop_assert_eq!(charged, BudgetAmount { turns: granted.turns, input, output, cost: charged.cost });
                }
                BudgetStep::Release(which) if !open.is_empty() => {
                    let before = ledger.spent_amount();
                    open.swap_remove(which % open.len()).release_unspent();
                    prop_assert_eq!(ledger.spent_amount(), before);
                }
                BudgetStep::Drop(which) if !open.is_empty() => {
                    let before = ledger.spent_amount();
                    let reservation = open.swap_remove(which % open.len());
                    let granted = reservation.granted_amount();
                    drop(reservation);
                    prop_assert_eq!(ledger.spent_amount(), before + granted);
                }
                _ => {}
            }
            prop_assert_eq!(ledger.budget_status().open_calls as usize, open.len());
        }
        drop(open);
        let status = ledger.budget_status();
        prop_assert_eq!((status.reserved, status.open_calls), (BudgetAmount::default(), 0));
    }
}

/// A call whose input is known only in part before it is made.
#[derive(Clone, Debug)]
struct UncertainCall {
    ask: ReserveRequest,
    /// The used share of what the input can be, and of the granted output, in percent.
    used: (u8, u8),
    /// The number of calls that are admitted or refused between the call's start and its end.
    lasts: usize,
}

proptest! {
    /// G9: An input may have as many tokens as bytes. However many calls are open together, the run spends no more than
    /// its budget and what one of its calls can use beyond its reservation.
    #[test]
    fn the_errors_of_estimates_do_not_add_up(
        limits in any_limits(),
        calls in vec(uncertain_calls(), 1..80),
    ) {
        let ledger = open_ledger(&limits);
        let mut open: Vec<(usize, BudgetReservation, TokenUsage)> = vec![];
        let (mut tokens, mut cost) = (Tokens::ZERO, Nanodollars::ZERO);
        for (now, call) in calls.into_iter().enumerate() {
            for ended in open.extract_if(.., |(end, ..)| *end <= now) {
                let _ = ended.1.settle_usage(&ended.2);
            }
            let Ok(reservation) = ledger.reserve_call(&call.ask) else { continue };
            let granted = reservation.granted_amount();
            let part = |Tokens(most), percent: u8| Tokens(most * u64::from(percent) / 100);
            let price = call.ask.price.as_ref().unwrap();
            let bound = call.ask.input_bound;
            tokens = tokens.max(bound.saturating_sub(granted.input));
            cost = cost.max(price.max_cost(bound, granted.output).saturating_sub(granted.cost));
            let input = part(bound, call.used.0);
            let usage = TokenUsage {
                input,
                output: part(granted.output, call.used.1),
                cache_write: input,
                ..TokenUsage::default()
            };
            open.push((now + call.lasts, reservation, usage));
        }
        for ended in open {
            let _ = ended.1.settle_usage(&ended.2);
        }
        let spent = ledger.spent_amount();
        let is_within = |limit: Option<Tokens>, spent| limit.is_none_or(|limit| spent <= limit + tokens);
        prop_assert!(is_within(limits.max_input_tokens, spent.input), "{spent:?}");
        prop_assert!(is_within(limits.max_total_tokens, spent.total_tokens()), "{spent:?}");
        prop_assert!(limits.max_cost_usd.is_none_or(|limit| spent.cost <= limit + cost), "{spent:?}");
    }

    /// G9: A client that makes one call after another is admitted and granted as if its input was certain.
    #[test]
    fn a_client_without_parallel_calls_does_not_notice_the_uncertainty(
        limits in any_limits(),
        calls in vec(uncertain_calls(), 1..40),
    ) {
        let (uncertain, certain) = (open_ledger(&limits), open_ledger(&limits));
        for UncertainCall { ask, used, .. } in calls {
            let known = ReserveRequest { input_bound: Tokens::ZERO, ..ask.clone() };
            let (one, other) = (uncertain.reserve_call(&ask), certain.reserve_call(&known));
            prop_assert_eq!(one.is_ok(), other.is_ok(), "{:?} {:?}", one, other);
            let (Ok(one), Ok(other)) = (one, other) else { continue };
            prop_assert_eq!(one.granted_amount().output, other.granted_amount().output);
            prop_assert_eq!(one.output_limit(), other.output_limit());
            let input = Tokens(ask.input_bound.0 * u64::from(used.0) / 100);
            let usage = TokenUsage { input, ..TokenUsage::default() };
            prop_assert_eq!(one.settle_usage(&usage), other.settle_usage(&usage));
        }
        prop_assert_eq!(uncertain.spent_amount(), certain.spent_amount());
    }
}

/// G9: A call that fits by its estimate only is admitted alone and holds all that is left. Beside another call it has
/// to wait, and without hope it is refused for good.
#[test]
fn an_uncertain_call_is_admitted_alone() {
    let limits = BudgetLimits { max_input_tokens: Some(Tokens(100)), ..BudgetLimits::default() };
    let ledger = open_ledger(&limits);
    let uncertain = |input| ReserveRequest {
        input: Tokens(input),
        input_bound: Tokens(3 * input),
        ..turn_request(1)
    };
    let small = ledger.reserve_call(&uncertain(10)).unwrap();
    assert_eq!(small.granted_amount().input, Tokens(30));
    let refusal = ledger.reserve_call(&uncertain(50)).unwrap_err();
    assert_eq!(refusal, BudgetError::Reserved { kind: "input" });
    assert!(matches!(
        ledger.reserve_call(&uncertain(101)).unwrap_err(),
        BudgetError::Tokens { needed: 101, .. }
    ));
    let beside = ledger.reserve_call(&uncertain(20)).unwrap();
    let usage = TokenUsage { input: Tokens(10), ..TokenUsage::default() };
    let _ = (small.settle_usage(&usage), beside.settle_usage(&usage));
    let alone = ledger.reserve_call(&uncertain(50)).unwrap();
    assert_eq!(alone.granted_amount().input, Tokens(80), "all that is left");
    let refusal = ledger.reserve_call(&uncertain(1)).unwrap_err();
    assert_eq!(refusal, BudgetError::Reserved { kind: "input" });
    alone.release_unspent();
    ledger.reserve_call(&uncertain(50)).unwrap().release_unspent();
}

/// G9: The minute's tokens hold for calls that are open together, too, and an ended call gives its uncertainty back.
#[test]
fn calls_of_uncertain_input_share_the_tokens_of_the_minute() {
    let limits = BudgetLimits { tokens_per_minute: Some(1000), ..BudgetLimits::default() };
    let ledger = open_ledger(&limits);
    let call = ReserveRequest { input: Tokens(150), input_bound: Tokens(450), ..turn_request(1) };
    let open: Vec<_> = (0..12).filter_map(|_| ledger.reserve_call(&call).ok()).collect();
    assert_eq!(open.len(), 2);
    let refusal = ledger.reserve_call(&call).unwrap_err();
    assert_eq!(refusal, BudgetError::Reserved { kind: "tokens per minute" });
    for reservation in open {
        reservation.release_unspent();
    }
    let larger =
        ReserveRequest { input: Tokens(900), input_bound: Tokens(2700), ..turn_request(1) };
    ledger.reserve_call(&larger).unwrap().release_unspent();
}

/// G9: Usage that the provider reports is charged in full, even if it exceeds the reservation. The next call is refused
/// because the budget is overdrawn.
#[test]
fn an_overrun_is_charged_in_full_and_stops_the_run() {
    let ledger = open_ledger(&BudgetLimits {
        max_output_tokens: Some(Tokens(100)),
        ..BudgetLimits::default()
    });
    let reservation = ledger.reserve_call(&turn_request(100)).unwrap();
    let usage =
        TokenUsage { output: Tokens(130), source: UsageSource::Provider, ..TokenUsage::default() };
    assert_eq!(reservation.settle_usage(&usage).output, Tokens(130));
    let refusal = ledger.reserve_call(&turn_request(1)).unwrap_err();
    assert_eq!(refusal, BudgetError::Tokens { kind: "output", spent: 130, limit: 100, needed: 1 });
}

/// G9: A call whose output limit exceeds the remaining budget is granted the remaining budget.
#[test]
fn a_call_is_granted_at_most_the_remaining_budget() {
    let limits = BudgetLimits { max_total_tokens: Some(Tokens(100)), ..BudgetLimits::default() };
    let ledger = open_ledger(&limits);
    let ask = ReserveRequest { input: Tokens(30), output: None, ..turn_request(0) };
    assert_eq!(ledger.reserve_call(&ask).unwrap().granted_amount().output, Tokens(70));
}

/// G9: Output that the provider may bill beside the answers is reserved for each open call, and leaves each answer at
/// least one token. Otherwise the call is refused.
#[test]
fn output_beside_the_answers_is_reserved_too() {
    let limits = BudgetLimits { max_output_tokens: Some(Tokens(1000)), ..BudgetLimits::default() };
    let ledger = open_ledger(&limits);
    let ask = ReserveRequest { unlimited_output: Tokens(400), ..turn_request(50) };
    let first = ledger.reserve_call(&ask).unwrap();
    assert_eq!(
        (first.granted_amount().output, first.output_limit()),
        (Tokens(450), Some(Tokens(50)))
    );
    let second = ledger.reserve_call(&ReserveRequest { output: None, ..ask.clone() }).unwrap();
    assert_eq!(
        (second.granted_amount().output, second.output_limit()),
        (Tokens(550), Some(Tokens(150)))
    );
    assert_eq!(ledger.reserve_call(&ask).unwrap_err(), BudgetError::Reserved { kind: "output" });
    let large = ReserveRequest { unlimited_output: Tokens(1000), ..turn_request(1) };
    let refusal = ledger.reserve_call(&large).unwrap_err();
    assert_eq!(
        refusal,
        BudgetError::Tokens { kind: "output", spent: 0, limit: 1000, needed: 1001 }
    );
}

/// G9: A call that asks for several answers reserves tokens for each answer, so `n: 50` does not bypass the budget.
#[test]
fn each_answer_without_a_limit_is_reserved_for() {
    let ledger = open_ledger(&BudgetLimits::default());
    let ask = ReserveRequest { input: Tokens(30), output: None, choices: 50, ..turn_request(0) };
    assert_eq!(ledger.reserve_call(&ask).unwrap().granted_amount().output, Tokens(50 * 16_384));
}

/// R5, G9: A refused call that was too large does not exhaust the budget. A budget is not exhausted either while open
/// calls may give back what they hold.
#[test]
fn a_budget_is_exhausted_when_no_call_would_be_let_through() {
    let told = |limits: BudgetLimits, steps: &dyn Fn(&Arc<BudgetLedger>)| {
        let ledger = open_ledger(&limits);
        steps(&ledger);
        (ledger.was_last_call_denied(), ledger.exhausted_token().is_cancelled())
    };
    let use_up = |ledger: &Arc<BudgetLedger>, output: u64| {
        let usage = TokenUsage { output: Tokens(output), ..TokenUsage::default() };
        let _ = ledger.reserve_call(&turn_request(output)).unwrap().settle_usage(&usage);
    };
    let reads = |input: u64| ReserveRequest { input: Tokens(input), ..turn_request(1) };
    let tokens = || BudgetLimits { max_total_tokens: Some(Tokens(100)), ..BudgetLimits::default() };

    let too_large = |ledger: &Arc<BudgetLedger>| {
        use_up(ledger, 50);
        ledger.reserve_call(&reads(50)).unwrap_err();
    };
    assert_eq!(told(tokens(), &too_large), (true, false));
    let smaller = |ledger: &Arc<BudgetLedger>| {
        too_large(ledger);
        ledger.reserve_call(&reads(20)).unwrap().release_unspent();
    };
    assert_eq!(told(tokens(), &smaller), (false, false));
    let spent = |ledger: &Arc<BudgetLedger>| {
        use_up(ledger, 99);
        ledger.reserve_call(&reads(1)).unwrap_err();
    };
    assert_eq!(told(tokens(), &spent), (true, true));

    let turns = || BudgetLimits { max_turns: Some(1), ..BudgetLimits::default() };
    let last = |ledger: &Arc<BudgetLedger>| use_up(ledger, 1);
    assert_eq!(told(turns(), &last), (false, false));
    let open = |ledger: &Arc<BudgetLedger>| {
        let _open = ledger.reserve_call(&turn_request(1)).unwrap();
        ledger.reserve_call(&turn_request(1)).unwrap_err();
    };
    assert_eq!(told(turns(), &open), (true, false));
    let one_more = |ledger: &Arc<BudgetLedger>| {
        last(ledger);
        ledger.reserve_call(&turn_request(1)).unwrap_err();
    };
    assert_eq!(told(turns(), &one_more), (true, true));

    let cost = BudgetLimits { max_cost_usd: Some(Nanodollars(3)), ..BudgetLimits::default() };
    let dear = |ledger: &Arc<BudgetLedger>| {
        ledger
            .reserve_call(&ReserveRequest { price: Some(model_price("dear")), ..turn_request(1) })
            .unwrap_err();
    };
    assert_eq!(told(cost, &dear), (true, true));
}

/// G9: A call that the request rate refuses takes no tokens from the minute.
#[test]
fn a_refused_call_takes_no_tokens_of_the_minute() {
    let limits = BudgetLimits {
        requests_per_minute: Some(1),
        tokens_per_minute: Some(1000),
        ..BudgetLimits::default()
    };
    let both = open_ledger(&limits);
    both.reserve_call(&turn_request(10)).unwrap().release_unspent();
    for _ in 0..10 {
        let refusal = both.reserve_call(&turn_request(500)).unwrap_err();
        assert!(matches!(refusal, BudgetError::Rate { kind: "requests", .. }), "{refusal}");
    }
}

/// G9: Calls that begin at the same time share the minute's tokens, and tokens that a call does not use become free
/// again.
#[test]
fn calls_that_begin_together_share_the_tokens_of_the_minute() {
    let limits = BudgetLimits { tokens_per_minute: Some(1000), ..BudgetLimits::default() };
    let minute = open_ledger(&limits);
    let large = ReserveRequest { input: Tokens(20), ..turn_request(8000) };
    let only = minute.reserve_call(&large).unwrap();
    for _ in 0..200 {
        let refusal = minute.reserve_call(&large).unwrap_err();
        assert!(matches!(refusal, BudgetError::Rate { kind: "tokens", .. }), "{refusal}");
    }
    only.release_unspent();
    let _ = minute
        .reserve_call(&large)
        .unwrap()
        .settle_usage(&TokenUsage { output: Tokens(5000), ..TokenUsage::default() });
    let BudgetError::Rate { retry_after, .. } = minute.reserve_call(&turn_request(1)).unwrap_err()
    else {
        panic!()
    };
    assert!(retry_after > Duration::from_secs(235), "{retry_after:?}");
}

/// G9: Tokens used beyond a reservation are a debt, which later minutes pay, also while calls are refused.
#[test]
fn a_debt_of_tokens_is_kept_until_it_is_paid() {
    let limits = BudgetLimits { tokens_per_minute: Some(1000), ..BudgetLimits::default() };
    let ledger = open_ledger(&limits);
    let overrun = TokenUsage { output: Tokens(810), ..TokenUsage::default() };
    let reads = |input: u64| ReserveRequest { input: Tokens(input), ..turn_request(10) };
    let _ = ledger.reserve_call(&reads(10)).unwrap().settle_usage(&overrun);
    // The minute has 190 tokens left.
    for _ in 0..3 {
        let refusal = ledger.reserve_call(&reads(500)).unwrap_err();
        assert!(matches!(refusal, BudgetError::Rate { kind: "tokens", .. }), "{refusal}");
    }
    ledger.reserve_call(&reads(150)).unwrap().release_unspent();
}

/// G9: The deadline counts from the start of the run, not from the start of the process.
#[test]
fn the_time_before_a_restart_counts() {
    let limits =
        BudgetLimits { deadline: Some(Duration::from_hours(1)), ..BudgetLimits::default() };
    let after = |age| {
        Arc::new(BudgetLedger::new(limits.clone(), PriorUsage { age, ..PriorUsage::default() }))
    };
    after(Duration::from_mins(59)).reserve_call(&turn_request(1)).unwrap().release_unspent();
    let refusal = after(Duration::from_hours(1)).reserve_call(&turn_request(1)).unwrap_err();
    assert_eq!(refusal, BudgetError::Deadline { limit: Duration::from_hours(1) });
}

/// G9: The rates of a run go on counting after a restart.
#[test]
fn the_rates_count_the_calls_before_a_restart() {
    let limits = BudgetLimits {
        requests_per_minute: Some(3),
        tokens_per_minute: Some(100),
        ..BudgetLimits::default()
    };
    let after = |requests, tokens| {
        let recent = RecentUsage { requests, tokens: Tokens(tokens) };
        let past = PriorUsage { recent, ..PriorUsage::default() };
        let ledger = Arc::new(BudgetLedger::new(limits.clone(), past));
        ledger.reserve_call(&turn_request(50)).map(BudgetReservation::release_unspent)
    };
    after(2, 50).unwrap();
    assert!(matches!(after(3, 0), Err(BudgetError::Rate { kind: "requests", .. })));
    let Err(BudgetError::Rate { kind: "tokens", retry_after, .. }) = after(0, 1_000_000) else {
        panic!("the minute is used up")
    };
    assert!(retry_after <= Duration::from_secs(30), "a minute's worth at most: {retry_after:?}");
}

/// G9: A hostile usage count cannot overflow the counters.
#[test]
fn a_hostile_count_saturates() {
    let ledger = open_ledger(&BudgetLimits {
        max_total_tokens: Some(Tokens(10)),
        ..BudgetLimits::default()
    });
    let usage =
        TokenUsage { input: Tokens(u64::MAX), output: Tokens(u64::MAX), ..TokenUsage::default() };
    let _ = ledger.reserve_call(&turn_request(1)).unwrap().settle_usage(&usage);
    assert_eq!(ledger.spent_amount().total_tokens(), Tokens(u64::MAX));
    assert!(ledger.reserve_call(&turn_request(1)).is_err());
}

/// G9: Threads that reserve at the same time are granted exactly as many turns as the limit.
#[test]
fn threads_are_granted_as_many_turns_as_there_are() {
    let ledger = open_ledger(&BudgetLimits { max_turns: Some(100), ..BudgetLimits::default() });
    let granted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let ledger = &ledger;
                scope.spawn(move || (0..50).filter(|_| spend_turn(ledger)).count())
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!((granted, ledger.spent_amount().turns), (100, 100));
}

fn spend_turn(ledger: &Arc<BudgetLedger>) -> bool {
    let reservation = ledger.reserve_call(&turn_request(1));
    reservation.map(|reservation| reservation.settle_usage(&TokenUsage::default())).is_ok()
}

fn open_ledger(limits: &BudgetLimits) -> Arc<BudgetLedger> {
    Arc::new(BudgetLedger::new(limits.clone(), PriorUsage::default()))
}

/// G15: Calls without a charge have a rate, whatever their route. Calls with a charge do not count towards that rate.
#[test]
fn calls_without_a_charge_have_a_rate() {
    let limits = BudgetLimits { free_calls_per_minute: Some(3), ..BudgetLimits::default() };
    let counts = open_ledger(&limits);
    for _ in 0..3 {
        drop(counts.enter_call(CallKind::Free, true).unwrap());
    }
    let refusal = counts.enter_call(CallKind::Free, true).unwrap_err();
    assert!(matches!(refusal, BudgetError::Rate { limit: 3, .. }), "{refusal}");
    drop(counts.enter_call(CallKind::Turn, true).unwrap());

    let turns_limited = BudgetLimits { max_turns: Some(100), ..limits.clone() };
    let free = TokenUsage::default();
    let paid = TokenUsage { input: Tokens(1), ..TokenUsage::default() };
    let embedding = ReserveRequest { is_turn: false, input: Tokens(5), ..turn_request(0) };
    for (limits, ask, usage, is_delivered, is_free) in [
        (&limits, turn_request(1), free, false, true),
        (&limits, turn_request(1), free, true, true),
        (&limits, turn_request(1), paid, true, false),
        (&limits, embedding.clone(), free, true, true),
        (&limits, embedding.clone(), paid, true, false),
        (&turns_limited, turn_request(1), free, false, true),
        (&turns_limited, turn_request(1), free, true, false),
        (&turns_limited, embedding, free, true, true),
    ] {
        let (counts, mut let_in) = (open_ledger(limits), 0);
        while let_in < 50
            && let Ok(reservation) = counts.reserve_call(&ask)
        {
            let_in += 1;
            if is_delivered {
                let _ = reservation.settle_usage(&usage);
            } else {
                reservation.release_unspent();
            }
        }
        let expected = if is_free { 3 } else { 50 };
        assert_eq!(let_in, expected, "{ask:?} {usage:?} delivered: {is_delivered}");
    }
    let default = open_ledger(&BudgetLimits::default());
    let let_in = (0..10_000).filter(|_| default.enter_call(CallKind::Free, true).is_ok()).count();
    assert!((600..610).contains(&let_in), "{let_in}");
}

/// G9: The gateway knows from the head of a call whether the budget is spent, before it reads the body.
#[test]
fn a_spent_budget_is_known_before_the_body_is_read() {
    let refused =
        |limits: BudgetLimits| open_ledger(&limits).enter_call(CallKind::Turn, true).unwrap_err();
    let none = Some(Tokens::ZERO);
    assert!(matches!(
        refused(BudgetLimits { max_turns: Some(0), ..BudgetLimits::default() }),
        BudgetError::Turns { .. }
    ));
    for limits in [
        BudgetLimits { max_total_tokens: none, ..BudgetLimits::default() },
        BudgetLimits { max_input_tokens: none, ..BudgetLimits::default() },
        BudgetLimits { max_output_tokens: none, ..BudgetLimits::default() },
    ] {
        assert!(matches!(refused(limits), BudgetError::Tokens { .. }));
    }
    let broke =
        BudgetLimits { max_cost_usd: Some(Nanodollars::default()), ..BudgetLimits::default() };
    assert!(matches!(refused(broke), BudgetError::Cost { .. }));
    let one = open_ledger(&BudgetLimits { max_concurrent: Some(1), ..BudgetLimits::default() });
    let entry = one.enter_call(CallKind::Turn, true).unwrap();
    assert!(matches!(
        one.enter_call(CallKind::Free, true),
        Err(BudgetError::Concurrency { limit: 1 })
    ));
    let reservation = entry.reserve_budget(&turn_request(1)).unwrap();
    assert_eq!(one.budget_status().open_calls, 1, "the place is taken once");
    reservation.release_unspent();
    assert_eq!(one.budget_status().open_calls, 0);
}

/// A deadline beyond what a clock can represent counts as no deadline and causes no panic.
#[test]
fn a_deadline_may_be_as_far_as_it_can_be_written() {
    let ledger =
        open_ledger(&BudgetLimits { deadline: Some(Duration::MAX), ..BudgetLimits::default() });
    assert_eq!((ledger.deadline(), ledger.budget_status().time_left), (None, None));
    ledger.reserve_call(&turn_request(1)).unwrap().release_unspent();
}

fn turn_request(output: u64) -> ReserveRequest {
    ReserveRequest {
        is_turn: true,
        output: Some(Tokens(output)),
        choices: 1,
        ..ReserveRequest::default()
    }
}

/// Prices of a few nanodollars per token.
fn model_price(model: &str) -> Arc<ModelPrice> {
    let table = r#"
        version = "test"
        [models]
        cheap = { input = "0.0004", output = "0.002" }
        dear = { input = "0.003", output = "0.015", cache_read = "0.0003", cache_write = "0.004", reasoning = "0.02" }
        long = { input = "0.001", output = "0.001", long = { above_input_tokens = 30, input = "0.009", output = "0.03" } }
    "#;
    let prices = PriceTable::parse_table(table, UnknownPricePolicy::Reject).unwrap();
    prices.price_for(model, || true).unwrap().unwrap()
}

fn is_within(limits: &BudgetLimits, held: BudgetAmount, open_before: usize) -> bool {
    let tokens = |limit: Option<Tokens>, held: Tokens| limit.is_none_or(|limit| held <= limit);
    limits.max_turns.is_none_or(|limit| held.turns <= limit)
        && tokens(limits.max_input_tokens, held.input)
        && tokens(limits.max_output_tokens, held.output)
        && tokens(limits.max_total_tokens, held.total_tokens())
        && limits.max_cost_usd.is_none_or(|limit| held.cost <= limit)
        && limits.max_concurrent.is_none_or(|limit| open_before < limit as usize)
}

fn any_limits() -> impl Strategy<Value = BudgetLimits> {
    let tokens = || proptest::option::of((0..300_u64).prop_map(Tokens));
    let turns = proptest::option::of(0..10_u64);
    let concurrent = proptest::option::of(1..5_u32);
    let cost = proptest::option::of((0..2000_u64).prop_map(Nanodollars));
    (turns, tokens(), tokens(), tokens(), cost, concurrent).prop_map(
        |(
            max_turns,
            max_total_tokens,
            max_input_tokens,
            max_output_tokens,
            max_cost_usd,
            max_concurrent,
        )| {
            BudgetLimits {
                max_cost_usd,
                max_turns,
                max_total_tokens,
                max_input_tokens,
                max_output_tokens,
                max_concurrent,
                ..BudgetLimits::default()
            }
        },
    )
}

fn any_amount(most: u64) -> impl Strategy<Value = BudgetAmount> {
    (0..3_u64, 0..most, 0..most, 0..most).prop_map(|(turns, input, output, cost)| BudgetAmount {
        turns,
        input: Tokens(input),
        output: Tokens(output),
        cost: Nanodollars(cost),
    })
}

fn uncertain_calls() -> impl Strategy<Value = UncertainCall> {
    let output = proptest::option::of((0..100_u64).prop_map(Tokens));
    let model = prop_oneof!["cheap", "dear", "long"];
    let used = (0..=100_u8, 0..=100_u8);
    (1..60_u64, 1..=3_u64, output, model, used, 0..12_usize).prop_map(
        |(input, factor, output, model, used, lasts)| {
            let ask = ReserveRequest {
                is_turn: true,
                input: Tokens(input),
                input_bound: Tokens(input * factor),
                output,
                unlimited_output: Tokens::ZERO,
                choices: 1,
                price: Some(model_price(&model)),
            };
            UncertainCall { ask, used, lasts }
        },
    )
}

fn any_step() -> impl Strategy<Value = BudgetStep> {
    let output = proptest::option::of((0..100_u64).prop_map(Tokens));
    let model = prop_oneof!["cheap", "dear", "long"];
    let asks = (any::<bool>(), 0..60_u64, output, 0..30_u64, model).prop_map(
        |(is_turn, input, output, unlimited, model)| ReserveRequest {
            is_turn,
            input: Tokens(input),
            output,
            unlimited_output: Tokens(unlimited),
            choices: 1,
            price: Some(model_price(&model)),
            ..ReserveRequest::default()
        },
    );
    prop_oneof![
        3 => asks.prop_map(BudgetStep::Reserve),
        1 => (any::<usize>(), 0..=100_u8).prop_map(|(which, percent)| BudgetStep::Settle(which, percent)),
        1 => any::<usize>().prop_map(BudgetStep::Release),
        1 => any::<usize>().prop_map(BudgetStep::Drop),
    ]
}

/// T8: While a person is asked, no refusal ends the run; a raise only raises, and the refused call then fits. A refusal
/// without an answer counts as before.
#[test]
fn a_deferred_refusal_counts_at_its_end() {
    let limits = BudgetLimits { max_turns: Some(1), ..BudgetLimits::default() };
    let ledger = open_ledger(&limits);
    ledger.defer_refusals();
    let _ = ledger.reserve_call(&turn_request(1)).unwrap().settle_usage(&TokenUsage::default());
    let refusal = ledger.reserve_call(&turn_request(1)).unwrap_err();
    assert_eq!(refusal.spent_limit(), Some((SpendingLimit::MaxTurns, 1)));
    assert!(ledger.enter_call(CallKind::Turn, true).is_ok(), "a call is judged with its body");
    let told = || (ledger.was_last_call_denied(), ledger.exhausted_token().is_cancelled());
    assert_eq!(told(), (false, false));
    for (raise, turns) in [(0, 1), (2, 2), (1, 2)] {
        let raise = SpendingLimits {
            max_turns: Some(raise),
            max_cost_usd: Some(Nanodollars(1)),
            ..SpendingLimits::default()
        };
        let raised = ledger.raise_limits(&raise);
        assert_eq!((raised.max_turns, raised.max_cost_usd), (Some(turns), None));
    }
    let _ = ledger.reserve_call(&turn_request(1)).unwrap().settle_usage(&TokenUsage::default());
    let refusal = ledger.reserve_call(&turn_request(1)).unwrap_err();
    ledger.refuse_finally(&refusal, None);
    assert_eq!(told(), (true, true));
}
