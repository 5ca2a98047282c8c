//! Makes the upstream stop where the budget does.

use std::ops::Range;

use bytes::Bytes;

use super::change::{What, Why};
use super::{Call, field};
use crate::base::json::Kind;
use crate::budget::Tokens;

impl Call {
    /// Lets one answer have no more than `limit` tokens: the fields that say so are lowered, and where
    /// there is none it is added. Nothing happens where the client asks for less, or where the route
    /// generates nothing. May be called again; the lowest counts.
    pub fn limit_output(&mut self, limit: Tokens) {
        if self.requested_output.is_some_and(|asked| asked <= limit) {
            return;
        }
        let Some(name) = self.route.and_then(field::output_limit) else { return };
        self.requested_output = Some(limit);
        if self.places.output.iter().all(Option::is_none) {
            let mut digits = itoa::Buffer::new();
            let member = [",\"", name, "\":", digits.format(limit.0)].concat();
            self.draft.add(name, member.into());
            self.note(name, What::Forced, Why::Budget);
        } else {
            self.lower_output(limit);
        }
        self.limit_thinking(limit);
    }

    fn lower_output(&mut self, limit: Tokens) {
        let places = self.places.output.into_iter().flatten();
        let asked = places.map(|(at, name)| {
            (at, name, serde_json::from_slice::<u64>(&self.draft.value(at)).ok().map(Tokens))
        });
        let mut asked: Vec<_> = asked.collect();
        // Of two fields one may be null, and some providers refuse to see both.
        if asked.iter().any(|(.., asked)| asked.is_some()) {
            asked.retain(|(.., asked)| asked.is_some_and(|asked| asked > limit));
        } else {
            asked.truncate(1);
        }
        for (at, name, _) in asked {
            self.draft.set(at, limit.0.to_string().into());
            self.note(name, What::Clamped, Why::Budget);
        }
    }

    /// Anthropic refuses a thinking budget that is not below the output limit, or under 1,024.
    fn limit_thinking(&mut self, limit: Tokens) {
        let Some(at) = self.places.thinking else { return };
        let (what, edit) = match self.thinking_budget(at) {
            Thinking::Unlimited => return,
            Thinking::Budget(_, budget) if budget < limit.0 => return,
            Thinking::Budget(place, _) if limit.0 > LEAST_THINKING => {
                (What::Clamped, Some((place, Bytes::from((limit.0 - 1).to_string()))))
            }
            Thinking::Budget(..) | Thinking::Unreadable => (What::Dropped, None),
        };
        match edit {
            Some((place, text)) => self.draft.replace(place, text),
            None => self.draft.drop_member(at),
        }
        self.note("thinking", what, Why::Budget);
    }

    fn thinking_budget(&self, at: usize) -> Thinking {
        let member = &self.draft.members()[at];
        if member.kind != Kind::Object {
            return Thinking::Unlimited;
        }
        let Some(document) = self.draft.inside(&member.value) else { return Thinking::Unreadable };
        let Some(budget) = document.get("budget_tokens") else { return Thinking::Unlimited };
        let place = member.value.start + budget.value.start..member.value.start + budget.value.end;
        match serde_json::from_slice(&self.draft.text(place.clone())) {
            Ok(Some(budget)) => Thinking::Budget(place, budget),
            Ok(None) => Thinking::Unlimited,
            Err(_) => Thinking::Unreadable,
        }
    }
}

/// What a request says of the tokens that may be thought with.
enum Thinking {
    Unlimited,
    /// So many, and where that stands.
    Budget(Range<u64>, u64),
    /// More than we read, or no number.
    Unreadable,
}

/// The least that Anthropic accepts as a thinking budget.
const LEAST_THINKING: u64 = 1024;
