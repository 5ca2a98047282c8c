//! The ledger: no interleaving of calls spends more than was granted.

use std::sync::Arc;

use cogni_gateway::budget::{
    Amount, Ask, Ledger, Limits, Refusal, Reservation, Source, Tokens, Usage,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// What may happen next to a run's budget.
#[derive(Clone, Debug)]
enum Step {
    Reserve(Ask),
    /// Used so much of each part of what was granted, in percent.
    Settle(usize, u8),
    Release(usize),
    /// Neither: a crash of its task.
    Drop(usize),
}

proptest! {
    /// G9: spent and reserved together stay within each limit whenever a call is granted, and
    /// nothing is held once all calls have ended.
    #[test]
    fn no_interleaving_spends_more_than_the_budget(
        limits in limits(),
        spent in amounts(20),
        steps in vec(steps(), 0..60),
    ) {
        // An earlier process may have spent all, but never more turns than there are.
        let spent = Amount { turns: spent.turns.min(limits.max_turns.unwrap_or(u64::MAX)), ..spent };
        let ledger = Arc::new(Ledger::new(limits.clone(), spent));
        let mut open: Vec<Reservation> = vec![];
        for step in steps {
            match step {
                Step::Reserve(ask) => {
                    if let Ok(reservation) = ledger.reserve(&ask) {
                        let status = ledger.status();
                        prop_assert!(is_within(&limits, status.spent + status.reserved, open.len()));
                        prop_assert!(reservation.granted().output <= ask.output.unwrap_or(Tokens(4096)));
                        prop_assert_eq!(reservation.granted().input, ask.input);
                        open.push(reservation);
                    }
                }
                Step::Settle(which, percent) if !open.is_empty() => {
                    let reservation = open.swap_remove(which % open.len());
                    let part = |Tokens(granted)| Tokens(granted * u64::from(percent) / 100);
                    let Amount { turns, input, output } = reservation.granted();
                    let usage = Usage { input: part(input), output: part(output), ..Usage::default() };
                    let charged = reservation.settle(&usage);
                    prop_assert_eq!(charged, Amount { turns, input: part(input), output: part(output) });
                }
                Step::Release(which) if !open.is_empty() => {
                    let before = ledger.spent();
                    open.swap_remove(which % open.len()).release();
                    prop_assert_eq!(ledger.spent(), before);
                }
                Step::Drop(which) if !open.is_empty() => {
                    let before = ledger.spent();
                    let reservation = open.swap_remove(which % open.len());
                    let granted = reservation.granted();
                    drop(reservation);
                    prop_assert_eq!(ledger.spent(), before + granted);
                }
                _ => {}
            }
            prop_assert_eq!(ledger.status().open_calls as usize, open.len());
        }
        drop(open);
        let status = ledger.status();
        prop_assert_eq!((status.reserved, status.open_calls), (Amount::default(), 0));
    }
}

/// G9: what the provider reports is the truth, also where it is more than was reserved; the next
/// call finds the budget overdrawn and is refused.
#[test]
fn an_overrun_is_charged_in_full_and_stops_the_run() {
    let ledger = ledger(&Limits { max_output_tokens: Some(Tokens(100)), ..Limits::default() });
    let reservation = ledger.reserve(&turn(100)).unwrap();
    let usage = Usage { output: Tokens(130), source: Source::Provider, ..Usage::default() };
    assert_eq!(reservation.settle(&usage).output, Tokens(130));
    let refusal = ledger.reserve(&turn(1)).unwrap_err();
    assert_eq!(refusal, Refusal::Tokens { kind: "output", spent: 130, limit: 100, needed: 1 });
}

/// G9: a call that may write more than is left is granted what is left.
#[test]
fn an_answer_is_granted_what_is_left() {
    let limits = Limits { max_total_tokens: Some(Tokens(100)), ..Limits::default() };
    let ledger = ledger(&limits);
    let ask = Ask { is_turn: true, input: Tokens(30), output: None, choices: 1 };
    assert_eq!(ledger.reserve(&ask).unwrap().granted().output, Tokens(70));
}

/// G9: many answers reserve for each of them, so that `n: 50` is no way round the budget.
#[test]
fn each_answer_without_a_limit_is_reserved_for() {
    let ledger = ledger(&Limits::default());
    let ask = Ask { is_turn: true, input: Tokens(30), output: None, choices: 50 };
    assert_eq!(ledger.reserve(&ask).unwrap().granted().output, Tokens(50 * 4096));
}

/// G9: a call refused for the rate of requests has not used up the minute's tokens.
#[test]
fn a_refused_call_takes_no_tokens_of_the_minute() {
    let limits =
        Limits { requests_per_minute: Some(1), tokens_per_minute: Some(1000), ..Limits::default() };
    let both = ledger(&limits);
    both.reserve(&turn(10)).unwrap().release();
    for _ in 0..10 {
        let refusal = both.reserve(&turn(500)).unwrap_err();
        assert!(matches!(refusal, Refusal::Rate { kind: "requests", .. }), "{refusal}");
    }
}

/// G9: tokens used beyond a reservation are paid off by the calls that follow, also by refused ones.
#[test]
fn a_debt_of_tokens_is_kept_until_it_is_paid() {
    let limits = Limits { tokens_per_minute: Some(1000), ..Limits::default() };
    let ledger = ledger(&limits);
    let overrun = Usage { output: Tokens(810), ..Usage::default() };
    let _ = ledger.reserve(&turn(10)).unwrap().settle(&overrun);
    // 990 are left of the minute and 800 are owed.
    for _ in 0..3 {
        let refusal = ledger.reserve(&turn(500)).unwrap_err();
        assert!(matches!(refusal, Refusal::Rate { kind: "tokens", .. }), "{refusal}");
    }
    ledger.reserve(&turn(150)).unwrap().release();
}

/// G9: the counters cannot be wrapped round by a hostile count.
#[test]
fn a_hostile_count_saturates() {
    let ledger = ledger(&Limits { max_total_tokens: Some(Tokens(10)), ..Limits::default() });
    let usage = Usage { input: Tokens(u64::MAX), output: Tokens(u64::MAX), ..Usage::default() };
    let _ = ledger.reserve(&turn(1)).unwrap().settle(&usage);
    assert_eq!(ledger.spent().total(), Tokens(u64::MAX));
    assert!(ledger.reserve(&turn(1)).is_err());
}

/// G9: threads that all reserve at once are granted as many turns as there are.
#[test]
fn threads_are_granted_as_many_turns_as_there_are() {
    let ledger = ledger(&Limits { max_turns: Some(100), ..Limits::default() });
    let granted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let ledger = &ledger;
                scope.spawn(move || (0..50).filter(|_| spend(ledger)).count())
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!((granted, ledger.spent().turns), (100, 100));
}

fn spend(ledger: &Arc<Ledger>) -> bool {
    let reservation = ledger.reserve(&turn(1));
    reservation.map(|reservation| reservation.settle(&Usage::default())).is_ok()
}

fn ledger(limits: &Limits) -> Arc<Ledger> {
    Arc::new(Ledger::new(limits.clone(), Amount::default()))
}

fn turn(output: u64) -> Ask {
    Ask { is_turn: true, input: Tokens(0), output: Some(Tokens(output)), choices: 1 }
}

fn is_within(limits: &Limits, held: Amount, open_before: usize) -> bool {
    let tokens = |limit: Option<Tokens>, held: Tokens| limit.is_none_or(|limit| held <= limit);
    limits.max_turns.is_none_or(|limit| held.turns <= limit)
        && tokens(limits.max_input_tokens, held.input)
        && tokens(limits.max_output_tokens, held.output)
        && tokens(limits.max_total_tokens, held.total())
        && limits.max_concurrent.is_none_or(|limit| open_before < limit as usize)
}

fn limits() -> impl Strategy<Value = Limits> {
    let tokens = || proptest::option::of((0..300_u64).prop_map(Tokens));
    let turns = proptest::option::of(0..10_u64);
    let concurrent = proptest::option::of(1..5_u32);
    (turns, tokens(), tokens(), tokens(), concurrent).prop_map(
        |(max_turns, max_total_tokens, max_input_tokens, max_output_tokens, max_concurrent)| {
            Limits {
                max_turns,
                max_total_tokens,
                max_input_tokens,
                max_output_tokens,
                max_concurrent,
                ..Limits::default()
            }
        },
    )
}

fn amounts(most: u64) -> impl Strategy<Value = Amount> {
    (0..3_u64, 0..most, 0..most).prop_map(|(turns, input, output)| Amount {
        turns,
        input: Tokens(input),
        output: Tokens(output),
    })
}

fn steps() -> impl Strategy<Value = Step> {
    let output = proptest::option::of((0..100_u64).prop_map(Tokens));
    let asks = (any::<bool>(), 0..60_u64, output).prop_map(|(is_turn, input, output)| Ask {
        is_turn,
        input: Tokens(input),
        output,
        choices: 1,
    });
    prop_oneof![
        3 => asks.prop_map(Step::Reserve),
        1 => (any::<usize>(), 0..=100_u8).prop_map(|(which, percent)| Step::Settle(which, percent)),
        1 => any::<usize>().prop_map(Step::Release),
        1 => any::<usize>().prop_map(Step::Drop),
    ]
}
