//! What is decided about a call between its body and its record: pure but for the ledger, so that
//! `explain` says what is done.

use std::sync::Arc;

use super::policy::GatewayPolicy;
use super::rejection::CallRejection;
use super::rule;
use crate::gateway::run::RunIdentity;
use crate::gateway::upstream::headers::UpstreamRequestHead;
use crate::llm::budget::{
    BudgetLedger, BudgetReservation, CallKind, OpenCallPermit, ReserveRequest, Tokens,
};
use crate::llm::protocol::GatewayRoute;
use crate::llm::request::{self, LlmCall, ScannedBody};

/// By what a run's calls are judged.
#[derive(Clone, Copy, Debug)]
pub struct CallAdmission<'a> {
    pub policy: &'a GatewayPolicy,
    pub identity: &'a RunIdentity,
    pub ledger: &'a Arc<BudgetLedger>,
}

impl CallAdmission<'_> {
    /// Lets a call in by its head alone.
    ///
    /// # Errors
    /// The limit that stands in the way, whatever its body says.
    pub fn enter_call(&self, route: GatewayRoute) -> Result<OpenCallPermit, CallRejection> {
        Ok(self.ledger.enter_call(call_kind(route), self.policy.prices.prices_every_model())?)
    }

    /// Judges a body, and makes the changes to it and to its head that have to be made. Also names
    /// the rules that matched.
    ///
    /// # Errors
    /// What the body may not say, or the rule that refuses it.
    pub fn check_body(
        &self,
        body: ScannedBody,
        head: &mut UpstreamRequestHead,
    ) -> Result<(LlmCall, Vec<Arc<str>>), CallRejection> {
        let (route, bytes) = (body.route(), body.len());
        let GatewayPolicy { config, rules, .. } = self.policy;
        let mut call = request::admit_body(&config.body, body)?;
        call.drop_without_beta(&config.headers.anthropic_beta);
        if rules.is_empty() {
            return Ok((call, vec![]));
        }
        let facts = rule::RuleContext {
            request: rule::RuleRequestContext::from_call(route, bytes, &call),
            usage: rule::RuleUsageContext::from_status(&self.ledger.budget_status()),
            ..rule::RuleContext::from_identity(self.identity)
        };
        let verdict = rules.evaluate_rules(&facts)?;
        verdict.apply_to_call(&mut call, head);
        Ok((call, verdict.matched))
    }

    /// Reserves for a call, and lets its answer have no more than was reserved.
    ///
    /// # Errors
    /// A model without a price, or the limit that stands in the way.
    pub fn reserve_budget(
        &self,
        entry: OpenCallPermit,
        route: GatewayRoute,
        call: &mut LlmCall,
    ) -> Result<BudgetReservation, CallRejection> {
        let model = call.model.as_deref().unwrap_or_default();
        let price = if route.spends_tokens() {
            self.policy.prices.price_for(model, self.ledger.counts_cost())?
        } else {
            None
        };
        let reservation = entry.reserve_budget(&ReserveRequest {
            is_turn: route.counts_as_turn(),
            input: if route.spends_tokens() { call.input_estimate } else { Tokens::ZERO },
            output: call.max_output(),
            choices: call.generated_texts(),
            price,
        })?;
        if let Some(Tokens(limit)) = reservation.output_limit() {
            call.limit_output(Tokens(limit / u64::from(call.generated_texts())));
        }
        Ok(reservation)
    }
}

fn call_kind(route: GatewayRoute) -> CallKind {
    match (route.counts_as_turn(), route.spends_tokens()) {
        (true, _) => CallKind::Turn,
        (false, true) => CallKind::Tokens,
        (false, false) => CallKind::Free,
    }
}
