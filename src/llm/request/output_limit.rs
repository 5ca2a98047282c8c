//! Makes the upstream stop where the budget does.

use std::ops::Range;

use bytes::Bytes;

use super::change::{FieldChangeKind, FieldChangeReason};
use super::{LlmCall, field};
use crate::base::json::JsonType;
use crate::llm::budget::Tokens;

impl LlmCall {
    /// Lets one answer have no more than `limit` tokens: the fields that say so are lowered, and where
    /// there is none it is added. Nothing happens where the client asks for less, or where the route
    /// generates nothing. May be called again; the lowest counts.
    pub fn limit_output(&mut self, limit: Tokens) {
        if self.requested_output.is_some_and(|asked| asked <= limit) {
            return;
        }
        let Some(name) = self.route.and_then(field::output_limit_field) else { return };
        self.requested_output = Some(limit);
        if self.places.output.iter().all(Option::is_none) {
            let mut digits = itoa::Buffer::new();
            let member = [",\"", name, "\":", digits.format(limit.0)].concat();
            self.draft.add_member(name, member.into());
            self.record_change(name, FieldChangeKind::Forced, FieldChangeReason::Budget);
        } else {
            self.lower_output(limit);
        }
        self.limit_thinking(limit);
    }

    fn lower_output(&mut self, limit: Tokens) {
        let places = self.places.output.into_iter().flatten();
        let asked = places.map(|(at, name)| {
            (at, name, serde_json::from_slice::<u64>(&self.draft.member_value(at)).ok().map(Tokens))
        });
        let mut asked: Vec<_> = asked.collect();
        // Of two fields one may be null, and some providers refuse to see both.
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

    /// Anthropic refuses a thinking budget that is not below the output limit, or under 1,024.
    fn limit_thinking(&mut self, limit: Tokens) {
        let Some(at) = self.places.thinking else { return };
        let (what, edit) = match self.parse_thinking_budget(at) {
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
        let place = member.value.start + budget.value.start..member.value.start + budget.value.end;
        match serde_json::from_slice(&self.draft.bytes_in(place.clone())) {
            Ok(Some(budget)) => ThinkingBudget::Budget(place, budget),
            Ok(None) => ThinkingBudget::Unlimited,
            Err(_) => ThinkingBudget::Unreadable,
        }
    }
}

/// What a request says of the tokens that may be thought with.
enum ThinkingBudget {
    Unlimited,
    /// So many, and where that stands.
    Budget(Range<u64>, u64),
    /// More than we read, or no number.
    Unreadable,
}

/// The least that Anthropic accepts as a thinking budget.
const MIN_THINKING_TOKENS: u64 = 1024;
