//! The wait of a call for a larger budget.
//!
//! 1. A spent limit has refused the call, and a person may raise the limit ([`BudgetAsker`](crate::llm::budget::BudgetAsker)).
//! 2. The call waits, and holds its permit in flight, but no turn, no money and no place among the open calls.
//! 3. After a raise, the whole reservation is tried again. Another limit may then refuse the call, and is asked about.
//! 4. Without a raise, the refusal counts as it does for a budget that asks no person.

use super::{GatewayExchange, ReservedCall};
use crate::gateway::pipeline::limits::RequestPermit;
use crate::gateway::pipeline::rejection::CallRejection;
use crate::gateway::upstream::headers::UpstreamRequestHead;
use crate::llm::budget::BudgetError;
use crate::llm::protocol::GatewayRoute;
use crate::llm::request::LlmCall;

/// A call that a spent limit has refused, with everything that the call needs to go on.
pub(in crate::gateway::pipeline) struct UnfundedCall {
    pub(super) route: GatewayRoute,
    pub(super) permit: RequestPermit,
    pub(super) head: UpstreamRequestHead,
    pub(super) call: LlmCall,
    pub(super) refusal: BudgetError,
}

impl GatewayExchange {
    /// Returns true if a person may raise the limit that has refused a call.
    pub(super) fn may_ask_about(&self, refusal: &BudgetError) -> bool {
        refusal.spent_limit().is_some() && self.gateway().run.budget_asker().is_some()
    }

    /// Waits until a person has raised the limit that has refused a call, and reserves the call's budget.
    ///
    /// The server drops this future when the client disconnects. The exchange is then recorded as a refusal, and the
    /// question stays open for the next call.
    pub(in crate::gateway::pipeline) async fn wait_for_budget(
        &mut self,
        call: Box<UnfundedCall>,
    ) -> Result<Box<ReservedCall>, CallRejection> {
        let UnfundedCall { route, permit, head, mut call, mut refusal } = *call;
        // The record of every end below names the model.
        self.context.model.clone_from(&call.model);
        loop {
            let run = &self.context.gateway.run;
            let Some(asker) = run.budget_asker() else { return Err(refusal.into()) };
            let abort = run.control.abort_token();
            let Some(answer) = abort.run_until_cancelled(asker.ask_for_budget(refusal)).await
            else {
                return Err(CallRejection::Aborted);
            };
            if let Err(refusal) = answer {
                self.call_admission().refuse_finally(route, &call, &refusal);
                return Err(refusal.into());
            }
            // The operator may have paused or ended the run while the person was thinking.
            run.control.check_accepting()?;
            match self.call_admission().reserve_again(route, &mut call) {
                Ok(reservation) => {
                    let call = self.hold_reservation(reservation, (route, permit, head), call);
                    return Ok(Box::new(call));
                }
                Err(CallRejection::Budget(next)) if next.spent_limit().is_some() => refusal = next,
                Err(rejection) => return Err(rejection),
            }
        }
    }
}
