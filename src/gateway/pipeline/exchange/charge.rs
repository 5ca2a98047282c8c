//! The one estimate of what a call used, however the call ended.
//!
//! - If the provider reported a final usage, the report is believed, unless the report is below the
//!   text that was seen.
//! - Without a final report, a response that ended by itself counts as the whole reservation. So does a
//!   response that could not be read.
//! - Without a final report, a stream that stopped early counts as the text that was seen, plus an
//!   estimate for the time without text.
//!
//! **Invariant:** the output is never less than the lower bound of the text that was seen, and the output
//! never falls when more text is seen. Without a report, the output exceeds the reservation only if the
//! text that was seen exceeds the reservation.

use std::time::Instant;

use super::provider_response::ProviderResponse;
use super::silence_timer::SilenceTimer;
use super::{ExchangeContext, ExchangeState, GatewayExchange, SentCall};
use crate::gateway::pipeline::policy::OnClientGone;
use crate::gateway::upstream::UpstreamKind;
use crate::llm::budget::{BudgetAmount, BudgetReservation, TokenUsage, Tokens, UsageSource};
use crate::llm::protocol::{GatewayRoute, LlmProtocol, is_failure_status};
use crate::llm::response::StreamEnd;
use crate::telemetry::audit::records::CallOutcome;

/// The facts about a call at its end.
#[derive(Clone, Copy, Debug)]
struct ChargeBasis {
    reserved: BudgetAmount,
    /// The estimate of the input, which is at most the reserved input.
    input_estimate: Tokens,
    /// The upstream's status, if the upstream has answered.
    status: Option<u16>,
    /// The usage that the provider reported. The source is [`UsageSource::Estimated`] if the report is
    /// not final.
    reported: Option<TokenUsage>,
    /// The lower bound of the tokens in the text that was seen.
    at_least: Tokens,
    /// The estimate, on the high side, of the tokens in the text that was seen.
    estimate: Tokens,
    /// The tokens that the model may have written during the time in which no text arrived.
    unseen: Tokens,
    /// The estimated tokens in the text of an error.
    error_tokens: Tokens,
    /// True if the answer stopped early and all of its written text was seen, except for the tokens in
    /// `unseen`.
    is_seen: bool,
}

impl ChargeBasis {
    /// Returns the usage that the call is charged.
    pub(super) fn final_usage(&self) -> TokenUsage {
        match self.reported {
            // A final report that agrees with the text that was seen.
            Some(usage)
                if usage.source != UsageSource::Estimated && usage.output >= self.at_least =>
            {
                usage
            }
            // A final report that is too low: the text was written, so at least its lower bound is charged.
            Some(usage) if usage.source != UsageSource::Estimated => {
                TokenUsage { output: self.at_least, source: UsageSource::Estimated, ..usage }
            }
            // No report, or a running total that may still have grown.
            partial => self.estimate_usage(partial.unwrap_or_default()),
        }
    }

    fn estimate_usage(&self, partial: TokenUsage) -> TokenUsage {
        let input = match self.status {
            _ if !partial.input.is_zero() => partial.input,
            // Providers do not bill the calls that they fail, so the estimate is caution enough: during an
            // outage the most that each repetition could have read would soon use up the budget.
            Some(status) if is_failure_status(status) => self.input_estimate,
            _ => self.reserved.input,
        };
        let output = match self.status {
            // The upstream failed, possibly after it had read the request: the input is charged.
            // LiteLLM puts model output into the text of some errors, so that text is charged as
            // output.
            Some(status) if is_failure_status(status) => self.error_tokens,
            // The upstream rejected the request: the input costs nothing unless the provider reported
            // an input.
            Some(400..) => {
                let told = self.error_tokens.min(self.reserved.output);
                return TokenUsage { output: partial.output.max(told), ..partial };
            }
            _ if self.is_seen => self.estimate + self.unseen,
            _ => self.reserved.output,
        };
        // The order of the bounds is the invariant: the reservation caps the estimate, and text that
        // was seen or reported overrides the cap.
        let output = output.min(self.reserved.output).max(self.at_least).max(partial.output);
        TokenUsage { input, output, source: UsageSource::Estimated, ..partial }
    }
}

impl ExchangeContext {
    /// Returns the usage of a call that the upstream has not answered at `now`, the end of the call.
    pub(super) fn unanswered_usage(
        &self,
        sent: &SentCall,
        reservation: &BudgetReservation,
        now: Instant,
    ) -> TokenUsage {
        ChargeBasis {
            reserved: reservation.granted_amount(),
            input_estimate: reservation.input_estimate(),
            status: None,
            reported: sent.known_usage,
            at_least: Tokens::ZERO,
            estimate: Tokens::ZERO,
            unseen: SilenceTimer::start_at(sent.sent).estimate_tokens(now, sent.choices),
            error_tokens: Tokens::ZERO,
            is_seen: sent.is_stream && !self.upstream_continues(sent.route, sent.is_stream),
        }
        .final_usage()
    }

    /// Returns the usage of a call with a response, by the call's outcome and the time of its end.
    pub(super) fn answered_usage(
        &self,
        (sent, response): (&SentCall, &ProviderResponse),
        reservation: &BudgetReservation,
        (outcome, now): (CallOutcome, Instant),
    ) -> TokenUsage {
        let reserved = reservation.granted_amount();
        let stream_end = response.observer.stream_end();
        // An error event ends the response, but does not make a report final.
        let is_final = response.is_complete() || stream_end == StreamEnd::Terminated;
        let is_whole = is_final && stream_end != StreamEnd::Errored;
        let has_finished = response.is_complete() || stream_end != StreamEnd::Unfinished;
        // After the end of the answers no time counts as silence; without an end the model may have
        // written until now.
        let has_written = has_finished || response.awaits_usage(sent.choices);
        let until = if has_written { response.last_frame } else { now };
        let continues = !has_finished && self.upstream_continues(sent.route, response.is_stream);
        let at_least = response.observer.output_lower_bound();
        let reported = response.reported_usage(is_final);
        // A final report needs no estimate.
        let is_reported = reported.is_some_and(|usage| usage.source != UsageSource::Estimated);
        let unseen = if is_reported {
            Tokens::ZERO
        } else {
            response.silence.estimate_tokens(until, sent.choices)
        };
        ChargeBasis {
            reserved,
            input_estimate: reservation.input_estimate(),
            status: Some(self.status),
            reported,
            // The event that caused the cutoff may exceed the grant. The manual documents this excess
            // as the error of the estimate, and the run is not charged for it.
            at_least: match outcome {
                CallOutcome::CutOff => at_least.min(reserved.output),
                _ => at_least,
            },
            estimate: response.observer.output_estimate(),
            unseen,
            error_tokens: response.error_tokens,
            is_seen: response.is_stream && !continues && !response.is_unreadable && !is_whole,
        }
        .final_usage()
    }

    /// Returns true if the upstream keeps generating; see [`upstream_keeps_generating`].
    fn upstream_continues(&self, route: GatewayRoute, is_stream: bool) -> bool {
        upstream_keeps_generating(self.gateway.upstream.kind(), route, is_stream)
    }
}

impl ProviderResponse {
    /// Returns true if all `choices` answers of a stream have ended, so that only the usage and the end of the stream are
    /// to come.
    fn awaits_usage(&self, choices: u32) -> bool {
        let is_open = self.observer.stream_end() == StreamEnd::Unfinished;
        self.is_stream && is_open && self.observer.finished_answers() >= choices.max(1)
    }

    /// Returns the usage that the provider reported. A report that is not final is an estimate.
    fn reported_usage(&self, is_final: bool) -> Option<TokenUsage> {
        let (usage, source) = match self.observer.reported_usage() {
            Some(usage) if is_final => (usage, self.usage_source),
            Some(usage) => (usage, UsageSource::Estimated),
            None => (self.observer.partial_usage()?, UsageSource::Estimated),
        };
        Some(TokenUsage { source, ..usage })
    }
}

impl GatewayExchange {
    /// Returns true if the gateway must read the rest of the response after the client has
    /// disconnected.
    pub(super) fn should_drain(&self) -> bool {
        let (route, is_stream, awaits_usage) = match &self.state {
            ExchangeState::Sent(_, sent, Some(response)) => {
                (sent.route, response.is_stream, response.awaits_usage(sent.choices))
            }
            ExchangeState::Sent(_, sent, None) => (sent.route, sent.is_stream, false),
            _ => return false,
        };
        route.spends_tokens()
            && match self.policy().config.on_client_gone {
                OnClientGone::Auto => {
                    awaits_usage || self.context.upstream_continues(route, is_stream)
                }
                OnClientGone::Cancel => false,
                OnClientGone::Drain => true,
            }
    }
}

/// Returns true if the upstream completes an answer although the client no longer reads it.
///
/// An answer that is not streamed is generated and billed in full by every provider. LiteLLM stops a
/// stream of chat when the stream's reader disconnects. LiteLLM continues a stream of Responses or
/// Messages (its issues 37140 and 36123).
fn upstream_keeps_generating(kind: UpstreamKind, route: GatewayRoute, is_stream: bool) -> bool {
    !is_stream || (kind == UpstreamKind::Litellm && route.protocol() != LlmProtocol::Chat)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{ChargeBasis, upstream_keeps_generating};
    use crate::gateway::pipeline::exchange::silence_timer::SilenceTimer;
    use crate::gateway::upstream::UpstreamKind;
    use crate::llm::budget::{BudgetAmount, TokenUsage, Tokens, UsageSource};
    use crate::llm::protocol::GatewayRoute;
    use std::time::{Duration, Instant};

    fn account() -> ChargeBasis {
        ChargeBasis {
            reserved: BudgetAmount {
                input: Tokens(50),
                output: Tokens(1000),
                ..BudgetAmount::default()
            },
            input_estimate: Tokens(20),
            status: Some(200),
            reported: None,
            at_least: Tokens(10),
            estimate: Tokens(40),
            unseen: Tokens(7),
            error_tokens: Tokens::ZERO,
            is_seen: true,
        }
    }

    #[expect(clippy::unnecessary_wraps, reason = "as an account has it")]
    fn report(output: u64, source: UsageSource) -> Option<TokenUsage> {
        Some(TokenUsage {
            input: Tokens(30),
            output: Tokens(output),
            source,
            ..TokenUsage::default()
        })
    }

    /// G9, G15: each way in which a call can end has its charge.
    #[test]
    fn each_end_of_a_call_has_its_charge() {
        use ChargeBasis as Call;
        use UsageSource::{Drained, Estimated, Provider};
        let unread = Call { is_seen: false, ..account() };
        let failed = Call { at_least: Tokens::ZERO, ..unread };
        for (name, account, (input, output, source)) in [
            ("reported", Call { reported: report(60, Provider), ..unread }, (30, 60, Provider)),
            ("drained", Call { reported: report(60, Drained), ..unread }, (30, 60, Drained)),
            (
                "reported above what was reserved",
                Call { reported: report(5000, Provider), ..account() },
                (30, 5000, Provider),
            ),
            (
                "reported below what was seen",
                Call { reported: report(3, Provider), ..account() },
                (30, 10, Estimated),
            ),
            ("seen", account(), (50, 47, Estimated)),
            ("not seen", unread, (50, 1000, Estimated)),
            (
                "seen in part, the input reported",
                Call { reported: report(1, Estimated), ..account() },
                (30, 47, Estimated),
            ),
            (
                "a running count above the text",
                Call { reported: report(90, Estimated), ..account() },
                (30, 90, Estimated),
            ),
            (
                "hidden reasoning",
                Call { estimate: Tokens(u64::MAX), ..account() },
                (50, 1000, Estimated),
            ),
            (
                "more seen than reserved",
                Call { at_least: Tokens(1500), estimate: Tokens(9000), ..account() },
                (50, 1500, Estimated),
            ),
            ("no answer", Call { status: None, ..unread }, (50, 1000, Estimated)),
            ("the upstream failed", Call { status: Some(503), ..failed }, (20, 0, Estimated)),
            (
                "the upstream failed, and tells much",
                Call { status: Some(500), error_tokens: Tokens(70), ..failed },
                (20, 70, Estimated),
            ),
            (
                "the upstream refused, and tells much",
                Call { status: Some(400), error_tokens: Tokens(70), ..unread },
                (0, 70, Estimated),
            ),
            ("a timeout of the upstream", Call { status: Some(408), ..failed }, (20, 0, Estimated)),
            ("the upstream refused", Call { status: Some(429), ..unread }, (0, 0, Estimated)),
        ] {
            let usage = account.final_usage();
            assert_eq!(
                (usage.input.0, usage.output.0, usage.source),
                (input, output, source),
                "{name}"
            );
        }
    }

    /// G8: an upstream continues without a reader, depending on its kind, the protocol and the stream.
    #[test]
    fn what_goes_on_upstream_depends_on_protocol_kind_and_stream() {
        let mut going_on = vec![];
        for kind in [UpstreamKind::Litellm, UpstreamKind::Openai, UpstreamKind::Anthropic] {
            for route in [
                GatewayRoute::ChatCompletions,
                GatewayRoute::Completions,
                GatewayRoute::Responses,
                GatewayRoute::Messages,
            ] {
                assert!(upstream_keeps_generating(kind, route, false), "{kind:?} {route:?}");
                if upstream_keeps_generating(kind, route, true) {
                    going_on.push((kind, route));
                }
            }
        }
        let litellm = [GatewayRoute::Responses, GatewayRoute::Messages]
            .map(|route| (UpstreamKind::Litellm, route));
        assert_eq!(going_on, litellm);
    }

    /// G15: a pause counts once for each answer, the pace of writing not at all.
    #[test]
    fn the_time_without_text_counts() {
        let sent = Instant::now();
        let at = |milliseconds| sent + Duration::from_millis(milliseconds);
        let mut silence = SilenceTimer::start_at(sent);
        assert_eq!(silence.estimate_tokens(at(500), 1), Tokens(100));
        assert_eq!(silence.estimate_tokens(at(500), 3), Tokens(300));
        // Frames without text change nothing.
        silence.record_texts(0, at(4000));
        assert_eq!(silence.estimate_tokens(at(4000), 1), Tokens(800));
        silence.record_texts(1, at(4000));
        for text in 2..100 {
            silence.record_texts(text, at(4000 + 20 * text));
        }
        assert_eq!(silence.estimate_tokens(at(4000 + 20 * 99), 1), Tokens(800));
        assert_eq!(silence.estimate_tokens(at(5000 + 20 * 99), 1), Tokens(1000));
    }

    proptest! {
        /// G15: more seen text never costs less, seen text is never free, and only seen text costs more than the
        /// reservation.
        #[test]
        fn a_charge_is_bounded_and_monotone(
            reserved in 0_u64..2000,
            seen in (0_u64..3000, 0_u64..3000),
            more in (0_u64..1000, 0_u64..1000),
            unseen in 0_u64..1000,
            partial in prop::option::of(0_u64..100),
            is_seen in any::<bool>(),
        ) {
            let account = |at_least: u64, above: u64| ChargeBasis {
                reserved: BudgetAmount { output: Tokens(reserved), ..BudgetAmount::default() },
                reported: partial.and_then(|output| report(output, UsageSource::Estimated)),
                at_least: Tokens(at_least),
                estimate: Tokens(at_least + above),
                unseen: Tokens(unseen),
                is_seen,
                ..account()
            };
            let (less, rest) = (account(seen.0, seen.1), account(seen.0 + more.0, seen.1 + more.1));
            let (less, rest) = (less.final_usage().output.0, rest.final_usage().output.0);
            prop_assert!(less >= seen.0);
            prop_assert!(less <= reserved.max(seen.0).max(partial.unwrap_or(0)));
            prop_assert!(rest >= less);
        }
    }
}
