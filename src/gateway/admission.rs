//! What is decided about a call between its body and its record: pure but for the ledger, so that
//! `explain` says what is done.

use std::sync::Arc;

use super::policy::Policy;
use super::rejection::Rejection;
use super::rule;
use crate::body::{self, Body, Call};
use crate::budget::{Ask, CallKind, Entry, Ledger, Reservation, Tokens};
use crate::protocol::Route;
use crate::run::Identity;
use crate::upstream::headers::Outgoing;

/// By what a run's calls are judged.
#[derive(Clone, Copy, Debug)]
pub struct Admission<'a> {
    pub policy: &'a Policy,
    pub identity: &'a Identity,
    pub ledger: &'a Arc<Ledger>,
}

impl Admission<'_> {
    /// Lets a call in by its head alone.
    ///
    /// # Errors
    /// The limit that stands in the way, whatever its body says.
    pub fn enter(&self, route: Route) -> Result<Entry, Rejection> {
        Ok(self.ledger.enter(kind_of(route), self.policy.prices.counts_every_model())?)
    }

    /// Judges a body, and makes the changes to it and to its head that have to be made. Also names
    /// the rules that matched.
    ///
    /// # Errors
    /// What the body may not say, or the rule that refuses it.
    pub fn judge(
        &self,
        body: Body,
        head: &mut Outgoing,
    ) -> Result<(Call, Vec<Arc<str>>), Rejection> {
        let (route, bytes) = (body.route(), body.len());
        let Policy { config, rules, .. } = self.policy;
        let mut call = body::admit(&config.body, body)?;
        call.drop_without_beta(&config.headers.anthropic_beta);
        if rules.is_empty() {
            return Ok((call, vec![]));
        }
        let facts = rule::Facts {
            request: rule::Request::of(route, bytes, &call),
            usage: rule::Usage::of(&self.ledger.status()),
            ..rule::Facts::of(self.identity)
        };
        let verdict = rules.judge(&facts)?;
        verdict.apply(&mut call, head);
        Ok((call, verdict.matched))
    }

    /// Reserves for a call, and lets its answer have no more than was reserved.
    ///
    /// # Errors
    /// A model without a price, or the limit that stands in the way.
    pub fn reserve(
        &self,
        entry: Entry,
        route: Route,
        call: &mut Call,
    ) -> Result<Reservation, Rejection> {
        let model = call.model.as_deref().unwrap_or_default();
        let price = if route.spends_tokens() {
            self.policy.prices.price(model, self.ledger.counts_cost())?
        } else {
            None
        };
        let reservation = entry.reserve(&Ask {
            is_turn: route.is_turn(),
            input: if route.spends_tokens() { call.input_estimate } else { Tokens::ZERO },
            output: call.output(),
            choices: call.texts(),
            price,
        })?;
        if let Some(Tokens(limit)) = reservation.output_limit() {
            call.limit_output(Tokens(limit / u64::from(call.texts())));
        }
        Ok(reservation)
    }
}

fn kind_of(route: Route) -> CallKind {
    match (route.is_turn(), route.spends_tokens()) {
        (true, _) => CallKind::Turn,
        (false, true) => CallKind::Tokens,
        (false, false) => CallKind::Free,
    }
}
