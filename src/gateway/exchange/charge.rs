//! The one estimate of what a call used, whichever way it ended.
//!
//! A provider's last word is believed, unless it says less than was seen. Without one, an answer
//! that has ended, or that nobody could see, counts as all that was reserved; of a stream that
//! stopped before its end, what was seen counts, and the time in which nothing was.
//!
//! **Invariant:** the output is never less than what was seen at least, never falls when more is
//! seen, and, where nobody reported, is more than was reserved only if more was seen.

use std::time::{Duration, Instant};

use super::Exchange;
use crate::audit::record::Outcome;
use crate::budget::{Amount, Source, Tokens, Usage};
use crate::gateway::policy::OnClientGone;
use crate::protocol::{Protocol, Route};
use crate::stream::{Finish, Observer};
use crate::upstream::Kind;

/// All that is known of a call when it ends.
#[derive(Clone, Copy, Debug)]
struct Account {
    reserved: Amount,
    /// The upstream's status, if it has answered.
    status: Option<u16>,
    /// Its source is [`Source::Estimated`] where it is not the last word.
    reported: Option<Usage>,
    /// What the text that was seen comes to at least.
    at_least: Tokens,
    /// What it is taken for.
    estimate: Tokens,
    /// What may have been written in the time in which no text came.
    unseen: Tokens,
    /// What the text of an error is taken for.
    told: Tokens,
    /// Whether the answer stopped before its end, and all text that was written has been seen, but for `unseen`.
    is_seen: bool,
}

impl Account {
    /// What the call used.
    pub(super) fn usage(&self) -> Usage {
        match self.reported {
            Some(usage) if usage.source != Source::Estimated && usage.output >= self.at_least => {
                usage
            }
            Some(usage) if usage.source != Source::Estimated => {
                Usage { output: self.at_least, source: Source::Estimated, ..usage }
            }
            partial => self.estimate(partial.unwrap_or_default()),
        }
    }

    fn estimate(&self, partial: Usage) -> Usage {
        let input = if partial.input.is_zero() { self.reserved.input } else { partial.input };
        let output = match self.status {
            // The upstream failed, after it may have read the request.
            Some(500..) => self.told,
            Some(400..) => {
                let told = self.told.min(self.reserved.output);
                return Usage { output: partial.output.max(told), ..partial };
            }
            _ if self.is_seen => self.estimate + self.unseen,
            _ => self.reserved.output,
        };
        let output = output.min(self.reserved.output).max(self.at_least).max(partial.output);
        Usage { input, output, source: Source::Estimated, ..partial }
    }
}

impl Exchange {
    pub(super) fn reported(&mut self, observer: &Observer, source: Source) {
        self.has_finished |= self.outcome == Outcome::Completed;
        let is_final = self.has_finished || observer.finish() == Finish::Terminated;
        self.is_whole = is_final && observer.finish() != Finish::Errored;
        self.has_finished |= observer.finish() != Finish::Unfinished;
        self.cost = observer.cost();
        self.at_least = observer.output_at_least();
        self.estimate = observer.output_estimate();
        let whole = observer.usage().map(|usage| {
            let source = if is_final { source } else { Source::Estimated };
            Usage { source, ..usage }
        });
        self.reported = whole.or_else(|| {
            let so_far = observer.usage_so_far()?;
            Some(Usage { source: Source::Estimated, ..so_far })
        });
    }

    /// What the call used by `now`, its end.
    pub(super) fn usage(&self, reserved: Amount, now: Instant) -> Usage {
        let until = if self.has_finished { self.last_frame } else { now };
        let goes_on = !self.has_finished && self.goes_on();
        Account {
            reserved,
            status: self.upstream_status,
            reported: self.reported,
            // What goes over the grant by the cut itself is the documented bound of an estimate.
            at_least: match self.outcome {
                Outcome::CutOff => self.at_least.min(reserved.output),
                _ => self.at_least,
            },
            estimate: self.estimate,
            unseen: self.silence.tokens(until, self.choices),
            told: self.error_tokens,
            is_seen: self.is_stream && !goes_on && !self.is_unreadable && !self.is_whole,
        }
        .usage()
    }

    /// See [`goes_on`].
    fn goes_on(&self) -> bool {
        let route = self.route.unwrap_or(Route::Models);
        goes_on(self.gateway.upstream.kind(), route, self.is_stream)
    }

    /// Whether the answer is to be read on when its client has left.
    pub(super) fn is_drained(&self) -> bool {
        let has_usage = self.route.is_some_and(Route::spends_tokens);
        has_usage
            && match self.policy.config.on_client_gone {
                OnClientGone::Auto => self.goes_on(),
                OnClientGone::Cancel => false,
                OnClientGone::Drain => true,
            }
    }
}

/// The time in which a call could write, and nothing was seen of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Silence {
    /// When the latest text came; before the first, when the call was sent.
    since: Instant,
    /// The texts that have come.
    texts: u64,
    /// Pauses that have ended.
    pauses: Duration,
}

impl Silence {
    pub(super) fn begin(since: Instant) -> Self {
        Self { since, texts: 0, pauses: Duration::ZERO }
    }

    /// So many texts have come by `now`.
    pub(super) fn heard(&mut self, texts: u64, now: Instant) {
        if texts == self.texts {
            return;
        }
        let pause = now.saturating_duration_since(self.since);
        if pause >= PACE {
            self.pauses += pause;
        }
        (self.texts, self.since) = (texts, now);
    }

    /// What a model may have written in it until `now`, for each of its answers.
    pub(super) fn tokens(&self, now: Instant, choices: u32) -> Tokens {
        let time = self.pauses + now.saturating_duration_since(self.since);
        let written = time.as_millis().saturating_mul(TOKENS_A_SECOND).div_ceil(1000);
        let tokens = u64::try_from(written).unwrap_or(u64::MAX);
        Tokens(tokens.saturating_mul(u64::from(choices.max(1))))
    }
}

/// Whether the upstream writes an answer to its end, although nobody reads it.
///
/// What is not streamed is written, and billed, in full everywhere. LiteLLM stops a stream of chat when
/// its reader leaves, and goes on with one of Responses or Messages (its issues 37140 and 36123).
fn goes_on(kind: Kind, route: Route, is_stream: bool) -> bool {
    !is_stream || (kind == Kind::Litellm && route.protocol() != Protocol::Chat)
}

/// Between two texts of a model that writes without a pause.
const PACE: Duration = Duration::from_secs(1);

/// What a fast model writes in a second; the frontier models of the large providers write 50 to 150.
const TOKENS_A_SECOND: u128 = 200;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Account, Silence, goes_on};
    use crate::budget::{Amount, Source, Tokens, Usage};
    use crate::protocol::Route;
    use crate::upstream::Kind;
    use std::time::{Duration, Instant};

    fn account() -> Account {
        Account {
            reserved: Amount { input: Tokens(50), output: Tokens(1000), ..Amount::default() },
            status: Some(200),
            reported: None,
            at_least: Tokens(10),
            estimate: Tokens(40),
            unseen: Tokens(7),
            told: Tokens::ZERO,
            is_seen: true,
        }
    }

    #[expect(clippy::unnecessary_wraps, reason = "as an account has it")]
    fn report(output: u64, source: Source) -> Option<Usage> {
        Some(Usage { input: Tokens(30), output: Tokens(output), source, ..Usage::default() })
    }

    /// G9, G15: each way out of a call and what it is charged.
    #[test]
    fn each_end_of_a_call_has_its_charge() {
        use Source::{Drained, Estimated, Provider};
        let unread = Account { is_seen: false, ..account() };
        for (name, account, (input, output, source)) in [
            ("reported", Account { reported: report(60, Provider), ..unread }, (30, 60, Provider)),
            ("drained", Account { reported: report(60, Drained), ..unread }, (30, 60, Drained)),
            (
                "reported above what was reserved",
                Account { reported: report(5000, Provider), ..account() },
                (30, 5000, Provider),
            ),
            (
                "reported below what was seen",
                Account { reported: report(3, Provider), ..account() },
                (30, 10, Estimated),
            ),
            ("seen", account(), (50, 47, Estimated)),
            ("not seen", unread, (50, 1000, Estimated)),
            (
                "seen in part, the input reported",
                Account { reported: report(1, Estimated), ..account() },
                (30, 47, Estimated),
            ),
            (
                "a running count above the text",
                Account { reported: report(90, Estimated), ..account() },
                (30, 90, Estimated),
            ),
            (
                "hidden reasoning",
                Account { estimate: Tokens(u64::MAX), ..account() },
                (50, 1000, Estimated),
            ),
            (
                "more seen than reserved",
                Account { at_least: Tokens(1500), estimate: Tokens(9000), ..account() },
                (50, 1500, Estimated),
            ),
            ("no answer", Account { status: None, ..unread }, (50, 1000, Estimated)),
            (
                "the upstream failed",
                Account { status: Some(503), at_least: Tokens::ZERO, ..unread },
                (50, 0, Estimated),
            ),
            (
                "the upstream failed, and tells much",
                Account { status: Some(500), at_least: Tokens::ZERO, told: Tokens(70), ..unread },
                (50, 70, Estimated),
            ),
            (
                "the upstream refused, and tells much",
                Account { status: Some(400), told: Tokens(70), ..unread },
                (0, 70, Estimated),
            ),
            ("the upstream refused", Account { status: Some(429), ..unread }, (0, 0, Estimated)),
        ] {
            let usage = account.usage();
            assert_eq!(
                (usage.input.0, usage.output.0, usage.source),
                (input, output, source),
                "{name}"
            );
        }
    }

    /// G8: which upstream goes on when nobody reads any more.
    #[test]
    fn what_goes_on_upstream_depends_on_protocol_kind_and_stream() {
        let mut going_on = vec![];
        for kind in [Kind::Litellm, Kind::Openai, Kind::Anthropic] {
            for route in
                [Route::ChatCompletions, Route::Completions, Route::Responses, Route::Messages]
            {
                assert!(goes_on(kind, route, false), "{kind:?} {route:?}");
                if goes_on(kind, route, true) {
                    going_on.push((kind, route));
                }
            }
        }
        let litellm = [Route::Responses, Route::Messages].map(|route| (Kind::Litellm, route));
        assert_eq!(going_on, litellm);
    }

    /// G15: a pause counts once for each answer, the pace of writing not at all.
    #[test]
    fn the_time_without_text_counts() {
        let sent = Instant::now();
        let at = |milliseconds| sent + Duration::from_millis(milliseconds);
        let mut silence = Silence::begin(sent);
        assert_eq!(silence.tokens(at(500), 1), Tokens(100));
        assert_eq!(silence.tokens(at(500), 3), Tokens(300));
        // Frames without text change nothing.
        silence.heard(0, at(4000));
        assert_eq!(silence.tokens(at(4000), 1), Tokens(800));
        silence.heard(1, at(4000));
        for text in 2..100 {
            silence.heard(text, at(4000 + 20 * text));
        }
        assert_eq!(silence.tokens(at(4000 + 20 * 99), 1), Tokens(800));
        assert_eq!(silence.tokens(at(5000 + 20 * 99), 1), Tokens(1000));
    }

    proptest! {
        /// G15: more seen never costs less, what was seen is never free, and only what was seen costs
        /// more than was reserved.
        #[test]
        fn a_charge_is_bounded_and_monotone(
            reserved in 0_u64..2000,
            seen in (0_u64..3000, 0_u64..3000),
            more in (0_u64..1000, 0_u64..1000),
            unseen in 0_u64..1000,
            partial in prop::option::of(0_u64..100),
            is_seen in any::<bool>(),
        ) {
            let account = |at_least: u64, above: u64| Account {
                reserved: Amount { output: Tokens(reserved), ..Amount::default() },
                reported: partial.and_then(|output| report(output, Source::Estimated)),
                at_least: Tokens(at_least),
                estimate: Tokens(at_least + above),
                unseen: Tokens(unseen),
                is_seen,
                ..account()
            };
            let (less, rest) = (account(seen.0, seen.1), account(seen.0 + more.0, seen.1 + more.1));
            let (less, rest) = (less.usage().output.0, rest.usage().output.0);
            prop_assert!(less >= seen.0);
            prop_assert!(less <= reserved.max(seen.0).max(partial.unwrap_or(0)));
            prop_assert!(rest >= less);
        }
    }
}
