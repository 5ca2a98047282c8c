//! Decisions about a call between its body and its audit record.
//!
//! The decisions have no side effect except on the ledger, so the `explain` command runs the same code as
//! a real call.

use std::sync::Arc;

use super::policy::GatewayPolicy;
use super::rejection::CallRejection;
use super::rule;
use crate::gateway::run::RunIdentity;
use crate::gateway::upstream::headers::UpstreamRequestHead;
use crate::llm::budget::{
    BudgetError, BudgetLedger, BudgetReservation, CallKind, OpenCallPermit, ReserveRequest, Tokens,
};
use crate::llm::protocol::GatewayRoute;
use crate::llm::request::{self, LlmCall, ScannedBody};

/// The policy, identity and ledger that decide whether a call is admitted.
#[derive(Clone, Copy, Debug)]
pub struct CallAdmission<'a> {
    pub policy: &'a GatewayPolicy,
    pub identity: &'a RunIdentity,
    pub ledger: &'a Arc<BudgetLedger>,
}

impl CallAdmission<'_> {
    /// Admits a call by its head alone.
    ///
    /// # Errors
    /// Returns an error if a limit of the run rejects the call, whatever the call's body says.
    pub fn enter_call(&self, route: GatewayRoute) -> Result<OpenCallPermit, CallRejection> {
        Ok(self.ledger.enter_call(call_kind(route), self.policy.prices.prices_every_model())?)
    }

    /// Checks a body and makes the required changes to the body and to the head.
    ///
    /// Also returns the names of the rules that matched.
    ///
    /// # Errors
    /// Returns an error if the policy forbids a part of the body, or if a rule rejects the call.
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
        // Rules see the call as the client made it, with aliases resolved and the body policy applied.
        // No rule sees another rule's effect.
        let facts = rule::RuleContext {
            request: rule::RuleRequestContext::from_call(route, bytes, &call),
            usage: rule::RuleUsageContext::from_status(&self.ledger.budget_status()),
            ..rule::RuleContext::from_identity(self.identity)
        };
        let verdict = rules.evaluate_rules(&facts)?;
        verdict.apply_to_call(&mut call, head);
        Ok((call, verdict.matched))
    }

    /// Reserves the budget for a call and limits the call's output to the reserved amount.
    ///
    /// # Errors
    /// Returns an error if the run needs the model's price and the price is unknown, or if a limit rejects
    /// the call.
    pub fn reserve_budget(
        &self,
        entry: OpenCallPermit,
        route: GatewayRoute,
        call: &mut LlmCall,
    ) -> Result<BudgetReservation, CallRejection> {
        let request = self.reserve_request(route, call)?;
        Ok(limit_output(entry.reserve_budget(&request)?, call))
    }

    /// Enters a call and reserves its budget again, after a person has raised a limit.
    ///
    /// # Errors
    /// Returns an error as [`reserve_budget`](Self::reserve_budget) does.
    pub fn reserve_again(
        &self,
        route: GatewayRoute,
        call: &mut LlmCall,
    ) -> Result<BudgetReservation, CallRejection> {
        let request = self.reserve_request(route, call)?;
        Ok(limit_output(self.ledger.reserve_call(&request)?, call))
    }

    /// Counts the refusal of a call that no person has funded.
    pub fn refuse_finally(&self, route: GatewayRoute, call: &LlmCall, refusal: &BudgetError) {
        let price = self.reserve_request(route, call).ok().and_then(|request| request.price);
        self.ledger.refuse_finally(refusal, price);
    }

    /// Returns the resources that a call requests.
    fn reserve_request(
        &self,
        route: GatewayRoute,
        call: &LlmCall,
    ) -> Result<ReserveRequest, CallRejection> {
        let model = call.model.as_deref().unwrap_or_default();
        let (price, input, input_bound) = if route.spends_tokens() {
            let price = self.policy.prices.price_for(model, || self.ledger.counts_cost())?;
            (price, call.input_estimate, call.input_bound)
        } else {
            (None, Tokens::ZERO, Tokens::ZERO)
        };
        Ok(ReserveRequest {
            is_turn: route.counts_as_turn(),
            input,
            input_bound,
            output: call.max_output(),
            unlimited_output: call.unlimited_output(),
            choices: call.generated_texts(),
            price,
        })
    }
}

/// Limits a call's output to the reserved amount.
fn limit_output(reservation: BudgetReservation, call: &mut LlmCall) -> BudgetReservation {
    // The reserved output is shared by all texts that the model writes; the provider's limit applies to each of them.
    if let Some(Tokens(limit)) = reservation.output_limit() {
        call.limit_output(Tokens(limit / u64::from(call.generated_texts())));
    }
    reservation
}

fn call_kind(route: GatewayRoute) -> CallKind {
    match (route.counts_as_turn(), route.spends_tokens()) {
        (true, _) => CallKind::Turn,
        (false, true) => CallKind::Tokens,
        (false, false) => CallKind::Free,
    }
}
