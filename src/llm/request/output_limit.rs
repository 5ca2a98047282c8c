//! Lowers the output limit in a request, so that the upstream stops where the budget ends.

use std::ops::Range;

use bytes::Bytes;

use super::change::{FieldChangeKind, FieldChangeReason};
use super::{LlmCall, field};
use crate::base::json::JsonType;
use crate::llm::budget::{MAX_CALL_TOKENS, Tokens};

impl LlmCall {
    /// Limits one answer to `limit` tokens. Fields that set a higher limit are lowered; if no such
    /// field exists, one is added.
    ///
    /// The call stays unchanged if the client requests a limit that is no higher, or if the route
    /// generates nothing. The function may be called again; the lowest limit counts.
    pub fn limit_output(&mut self, limit: Tokens) {
        if self.requested_output.is_some_and(|asked| asked <= limit) {
            return;
        }
        let Some(name) = self.route.and_then(field::output_limit_field) else { return };
        self.requested_output = Some(limit);
        if self.editable.output.iter().all(Option::is_none) {
            let mut digits = itoa::Buffer::new();
            let member = [",\"", name, "\":", digits.format(limit.0)].concat();
            self.draft.add_member(name, member.into());
            self.record_change(name, FieldChangeKind::Forced, FieldChangeReason::Budget);
        } else {
            self.lower_output(limit);
        }
        self.limit_thinking(limit);
    }

    /// Lowers an output limit that is above what a model can write, because the whole limit is reserved and may be
    /// charged.
    pub(super) fn limit_excessive_output(&mut self) {
        let share = MAX_CALL_TOKENS.0 / u64::from(self.generated_texts());
        let limit = Tokens(share.clamp(1, MAX_ANSWER_TOKENS.0));
        if self.requested_output.is_none_or(|asked| asked <= limit) {
            return;
        }
        let before = self.changes.len();
        self.limit_output(limit);
        for change in &mut self.changes[before..] {
            change.why = FieldChangeReason::Excess;
        }
    }

    /// Lowers the fields of the body that limit the output.
    fn lower_output(&mut self, limit: Tokens) {
        let places = self.editable.output.into_iter().flatten();
        let asked = places.map(|(at, name)| {
            (at, name, serde_json::from_slice::<u64>(&self.draft.member_value(at)).ok().map(Tokens))
        });
        let mut asked: Vec<_> = asked.collect();
        // One of two fields may be null, and some providers refuse a request in which both have a
        // value. So a null field is overwritten only if no field has a number.
        if asked.iter().any(|(.., asked)| asked.is_some()) {
            asked.retain(|(.., asked)| asked.is_some_and(|asked| asked > limit));
        } else {
            asked.truncate(1);
        }
        for (at, name, _) in asked {
            self.draft.set_value(at, limit.0.to_string().into());
            self.record_change(name, FieldChangeKind::Clamped, FieldChangeReason::Budget);
        }
    }

    /// Lowers or drops the thinking budget. Anthropic refuses a thinking budget that is not below
    /// the output limit, or that is under 1,024.
    fn limit_thinking(&mut self, limit: Tokens) {
        let Some(at) = self.editable.thinking else { return };
        let (what, edit) = match self.parse_thinking_budget(at) {
            // Three outcomes: keep a budget that already fits, clamp it to one below the limit, or
            // drop `thinking` where no valid budget fits or the budget cannot be read.
            ThinkingBudget::Unlimited => return,
            ThinkingBudget::Budget(_, budget) if budget < limit.0 => return,
            ThinkingBudget::Budget(place, _) if limit.0 > MIN_THINKING_TOKENS => {
                (FieldChangeKind::Clamped, Some((place, Bytes::from((limit.0 - 1).to_string()))))
            }
            ThinkingBudget::Budget(..) | ThinkingBudget::Unreadable => {
                (FieldChangeKind::Dropped, None)
            }
        };
        match edit {
            Some((place, text)) => self.draft.replace_range(place, text),
            None => self.draft.drop_member(at),
        }
        self.record_change("thinking", what, FieldChangeReason::Budget);
    }

    fn parse_thinking_budget(&self, at: usize) -> ThinkingBudget {
        let member = &self.draft.members()[at];
        if member.kind != JsonType::Object {
            return ThinkingBudget::Unlimited;
        }
        let Some(document) = self.draft.parse_object(&member.value) else {
            return ThinkingBudget::Unreadable;
        };
        let Some(budget) = document.find_member("budget_tokens") else {
            return ThinkingBudget::Unlimited;
        };
        // The offsets of `document` count from the object's start; edits need offsets in the body.
        let place = member.value.start + budget.value.start..member.value.start + budget.value.end;
        match serde_json::from_slice(&self.draft.bytes_in(place.clone())) {
            Ok(Some(budget)) => ThinkingBudget::Budget(place, budget),
            Ok(None) => ThinkingBudget::Unlimited,
            Err(_) => ThinkingBudget::Unreadable,
        }
    }
}

/// The thinking budget that a request states.
enum ThinkingBudget {
    Unlimited,
    /// The budget in tokens, and the byte range of its number in the body.
    Budget(Range<u64>, u64),
    /// An object longer than the inspection limit, or a budget that is not a number.
    Unreadable,
}

/// The most output tokens that one answer may ask for. Our choice: several times the longest output of any model, which
/// is 300,000 (Anthropic's beta `output-300k`).
const MAX_ANSWER_TOKENS: Tokens = Tokens(1_000_000);

/// The minimum thinking budget that Anthropic accepts, in tokens.
const MIN_THINKING_TOKENS: u64 = 1024;
