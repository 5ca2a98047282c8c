//! Tests of the queue of runs: its order, its bounds, its places, and the positions that a run receives.

use std::collections::BTreeMap;

use futures_util::FutureExt;
use proptest::prelude::*;

use super::*;

fn limits(places: usize) -> RunQueueLimits {
    RunQueueLimits { places, queued: 1000, queued_per_grant: 1000 }
}

fn open_queue(places: usize) -> RunQueue {
    let queue = RunQueue::new(limits(places));
    queue.open();
    queue
}

fn enqueue(queue: &RunQueue, grant: &str, run: &str) -> QueueEntry {
    queue.enqueue_new((grant, run), GrantRunLimits::default()).unwrap()
}

/// Returns the standing that the queue has just reported to the run, if there is a new one.
fn turn(entry: &mut QueueEntry) -> Option<QueueTurn> {
    entry.next_turn().now_or_never()
}

#[test]
fn a_free_place_goes_to_the_grants_in_turn() {
    let queue = open_queue(1);
    let mut place = {
        let mut first = enqueue(&queue, "a", "a0");
        assert_eq!(turn(&mut first), Some(QueueTurn::Begin));
        first.take_place()
    };
    let names = ["a1", "a2", "a3", "b1", "c1", "b2"];
    let mut waiting: Vec<_> =
        names.iter().map(|name| (*name, enqueue(&queue, &name[..1], name))).collect();
    let mut begun = vec![];
    while !waiting.is_empty() {
        drop(place);
        let index = waiting.iter().position(|(_, entry)| entry.begins_now());
        let (name, entry) = waiting.remove(index.unwrap());
        place = entry.take_place();
        begun.push(name);
    }
    assert_eq!(begun, ["a1", "b1", "c1", "a2", "b2", "a3"]);
}

#[test]
fn a_run_is_told_few_positions() {
    let queue = open_queue(1);
    let mut first = enqueue(&queue, "a", "run-000");
    turn(&mut first);
    let mut place = first.take_place();
    let mut waiting: VecDeque<_> =
        (1..=300).map(|number| enqueue(&queue, "a", &format!("run-{number:03}"))).collect();
    let mut last = waiting.pop_back().unwrap();
    let mut told = vec![];
    while let Some(next) = waiting.pop_front() {
        told.extend(turn(&mut last));
        drop(place);
        place = next.take_place();
    }
    told.extend(turn(&mut last));
    drop(place);
    told.extend(turn(&mut last));
    let waits = |position| QueueTurn::Waiting { position };
    let expected = [300, 150, 75, 37, 18, 9, 4, 2, 1].map(waits);
    assert_eq!(told[..9], expected);
    assert_eq!(told[9..], [QueueTurn::Begin]);
}

#[test]
fn a_full_queue_refuses_a_run_that_would_wait() {
    let queue = RunQueue::new(RunQueueLimits { places: 1, queued: 2, queued_per_grant: 1 });
    queue.open();
    let begun = enqueue(&queue, "a", "a1");
    let _waits = enqueue(&queue, "a", "a2");
    let ask = |grant, run, limits| queue.enqueue_new((grant, run), limits).map(drop);
    assert_eq!(ask("a", "a3", GrantRunLimits::default()), Err(QueueFullError::Grant(1)));
    let none = GrantRunLimits { running: None, queued: Some(0) };
    assert_eq!(ask("b", "b1", none), Err(QueueFullError::Grant(0)));
    let _other = enqueue(&queue, "b", "b1");
    assert_eq!(ask("c", "c1", GrantRunLimits::default()), Err(QueueFullError::Service(2)));
    drop(begun);
    assert_eq!(queue.gauges().queued, 1);
}

#[test]
fn a_grant_at_its_own_bound_holds_up_no_other_grant() {
    let queue = open_queue(3);
    let one = GrantRunLimits { running: Some(1), queued: None };
    let mut a1 = queue.enqueue_new(("a", "a1"), one).unwrap();
    let mut a2 = queue.enqueue_new(("a", "a2"), one).unwrap();
    let mut b1 = enqueue(&queue, "b", "b1");
    assert_eq!(turn(&mut a1), Some(QueueTurn::Begin));
    assert_eq!(turn(&mut a2), Some(QueueTurn::Waiting { position: 1 }));
    assert_eq!(turn(&mut b1), Some(QueueTurn::Begin));
    drop(a1);
    assert_eq!(turn(&mut a2), Some(QueueTurn::Begin));
}

#[test]
fn a_run_that_lent_its_place_comes_before_queued_runs() {
    let queue = open_queue(1);
    let mut lender = enqueue(&queue, "a", "a1").take_place();
    let queued = enqueue(&queue, "b", "b1");
    let mut later = enqueue(&queue, "b", "b2");
    lender.lend();
    let borrower = queued.take_place();
    let mut back = Box::pin(lender.reclaim());
    assert!((&mut back).now_or_never().is_none());
    drop(borrower);
    assert!((&mut back).now_or_never().is_some());
    drop(back);
    assert_eq!(turn(&mut later), Some(QueueTurn::Waiting { position: 1 }));
    // The request of a run that is cancelled returns the place that it was given.
    lender.lend();
    let borrower = later.take_place();
    let mut back = Box::pin(lender.reclaim());
    assert!((&mut back).now_or_never().is_none());
    drop(borrower);
    drop(back);
    assert_eq!(queue.gauges().places_taken, 0);
}

#[test]
fn a_denied_grant_has_no_queued_runs() {
    let queue = open_queue(0);
    let mut a1 = enqueue(&queue, "a", "a1");
    let mut b1 = enqueue(&queue, "b", "b1");
    queue.deny_grant("a", &AccessDeniedError::Revoked);
    assert_eq!(turn(&mut a1), Some(QueueTurn::Denied(AccessDeniedError::Revoked)));
    assert_eq!(turn(&mut b1), Some(QueueTurn::Waiting { position: 1 }));
    assert_eq!((queue.waiting_grants(), queue.gauges().queued), (vec!["b".to_owned()], 1));
    assert_eq!(queue.standing_of("b1"), Some(QueueStanding::Waiting(1)));
    assert_eq!(queue.standing_of("a1"), None);
}

#[test]
fn a_run_has_begun_only_while_it_has_its_place() {
    let queue = open_queue(1);
    let first = enqueue(&queue, "a", "a1");
    let cancelled = enqueue(&queue, "a", "a2");
    assert_eq!(queue.standing_of("a1"), None, "its turn has come");
    let place = first.take_place();
    assert_eq!(queue.standing_of("a1"), Some(QueueStanding::Begun));
    assert_eq!(queue.standing_of("a2"), Some(QueueStanding::Waiting(1)));
    drop(cancelled);
    assert_eq!(queue.standing_of("a2"), None);
    assert_eq!(queue.standings(), [("a1".to_owned(), QueueStanding::Begun)].into());
    drop(place);
    assert!(queue.standings().is_empty());
}

/// One step of a service.
#[derive(Clone, Debug)]
enum Step {
    Accept { grant: usize },
    Cancel { run: prop::sample::Index },
    End { run: prop::sample::Index },
    Lend { run: prop::sample::Index },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let any_run = any::<prop::sample::Index>;
    let step = prop_oneof![
        4 => (0..4_usize).prop_map(|grant| Step::Accept { grant }),
        1 => any_run().prop_map(|run| Step::Cancel { run }),
        3 => any_run().prop_map(|run| Step::End { run }),
        1 => any_run().prop_map(|run| Step::Lend { run }),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    /// Whatever is accepted, cancelled, lent and ended: no bound is exceeded, no place stays free while a run may
    /// begin, the runs of a grant begin in their order, and no grant begins twice while another one may begin.
    #[test]
    fn places_are_bounded_used_and_shared_fairly(steps in steps(), places in 1..4_usize, most in 1..4_u32) {
        let queue = open_queue(places);
        // The grant 0 has a bound of its own.
        let limits = |grant| GrantRunLimits { running: (grant == 0).then_some(most), queued: None };
        let mut waiting: BTreeMap<usize, (usize, QueueEntry)> = BTreeMap::new();
        let mut running: Vec<(usize, RunPlace, bool)> = vec![];
        // The number of runs that begin, by grant, since each grant with a waiting run began one last.
        let mut passed: BTreeMap<usize, BTreeMap<usize, u32>> = BTreeMap::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Accept { grant } => {
                    let (name, run) = (grant.to_string(), format!("{number:04}"));
                    let entry = queue.enqueue_new((&name, &run), limits(grant)).unwrap();
                    waiting.insert(number, (grant, entry));
                }
                Step::Cancel { run } if !waiting.is_empty() => {
                    let number = *waiting.keys().nth(run.index(waiting.len())).unwrap();
                    let (grant, _) = waiting.remove(&number).unwrap();
                    if !waiting.values().any(|(other, _)| *other == grant) {
                        passed.remove(&grant);
                    }
                }
                Step::End { run } if !running.is_empty() => {
                    running.remove(run.index(running.len()));
                }
                Step::Lend { run } if !running.is_empty() => {
                    let index = run.index(running.len());
                    running[index].1.lend();
                    running[index].2 = true;
                }
                Step::Cancel { .. } | Step::End { .. } | Step::Lend { .. } => (),
            }
            // The runs that were given a place take it.
            let begun: Vec<_> =
                waiting.iter().filter(|(_, (_, entry))| entry.begins_now()).map(|(number, _)| *number).collect();
            for number in begun {
                let (grant, entry) = waiting.remove(&number).unwrap();
                let is_first = waiting.iter().all(|(other, (of, _))| *of != grant || *other > number);
                prop_assert!(is_first, "an earlier run of the grant waits");
                running.push((grant, entry.take_place(), false));
                passed.remove(&grant);
                for (other, _) in waiting.values().filter(|(other, _)| *other != grant) {
                    passed.entry(*other).or_default().entry(grant).or_insert(0);
                }
                for (other, counts) in &mut passed {
                    if let Some(count) = counts.get_mut(&grant) {
                        *count += 1;
                        // Places that become free together are given in one step, of which the order is not seen here.
                        prop_assert!(*other == 0 || *count <= 1 + u32::try_from(places).unwrap(), "grant {other} is passed over");
                    }
                }
            }
            let holding = running.iter().filter(|(_, _, is_lent)| !is_lent).count();
            let of_first = running.iter().filter(|(grant, ..)| *grant == 0).count();
            prop_assert!(holding <= places && of_first <= most as usize);
            let may_begin = |grant: usize| grant != 0 || of_first < most as usize;
            let is_blocked = waiting.values().all(|(grant, _)| !may_begin(*grant));
            prop_assert!(holding == places || is_blocked, "a place is free, and a run waits");
            let (gauges, standings) = (queue.gauges(), queue.standings());
            prop_assert_eq!((gauges.queued, gauges.places_taken), (waiting.len(), holding));
            let position = |standing| match standing {
                QueueStanding::Waiting(position) => Some(position),
                QueueStanding::Begun => None,
            };
            let mut all: Vec<_> = standings.into_values().filter_map(position).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (1..=waiting.len()).collect::<Vec<_>>());
        }
        drop((waiting, running));
        prop_assert!(queue.lock_state().grants.is_empty() && queue.lock_state().begun.is_empty());
    }
}
