//! Who serves a run's gateway: this process, or a container beside the sandbox.

use std::sync::Arc;
use std::time::Instant;

use tokio_util::sync::CancellationToken;

use super::gateway_container::PreparedGatewayContainer;
use crate::gateway::config::GatewayConfig;
use crate::gateway::process::{GatewayHost, GatewayProcess, HostedGateway, RunShutdown};
use crate::gateway::run::AgentRun;
use crate::llm::budget::BudgetAmount;

pub(super) enum RunGatewayBackend {
    /// Its socket is bound, and its log open.
    Here {
        app: Box<GatewayProcess>,
        run: Arc<AgentRun>,
    },
    /// The same, in a process that has others.
    Seat(Box<HostedGateway>),
    Container(Box<PreparedGatewayContainer>),
}

/// What a gateway tells while it serves.
#[derive(Clone, Debug, Default)]
pub(super) struct GatewaySignals {
    /// Whoever connects is served.
    pub(super) ready: CancellationToken,
    /// No further call of the run will be let through.
    pub(super) exhausted: CancellationToken,
    /// It serves no more.
    pub(super) gone: CancellationToken,
}

/// What became of the run's calls.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CallSummary {
    pub(super) spent: BudgetAmount,
    pub(super) admitted: u64,
    pub(super) refused: u64,
    /// Those of them that did not reach the upstream.
    pub(super) unreached: u64,
    /// The last of them was too large for what was left of the budget.
    pub(super) is_denied: bool,
}

impl RunGatewayBackend {
    /// Binds the run's socket and opens its log, in this process.
    pub(super) fn open(config: GatewayConfig, seats: Option<&GatewayHost>) -> anyhow::Result<Self> {
        if let Some(seats) = seats {
            return Ok(Self::Seat(Box::new(seats.open_gateway(config)?)));
        }
        let app = GatewayProcess::build_process(config)?;
        let run = app.run_manager().list_runs().pop().expect("an app on a socket has one run");
        Ok(Self::Here { app: Box::new(app), run })
    }

    /// The run, where it is here that its log is kept.
    pub(super) fn run(&self) -> Option<Arc<AgentRun>> {
        match self {
            Self::Here { run, .. } => Some(Arc::clone(run)),
            Self::Seat(seat) => Some(Arc::clone(seat.run())),
            Self::Container(_) => None,
        }
    }

    pub(super) fn signals(&self) -> GatewaySignals {
        let mut signals = GatewaySignals::default();
        if let Some(run) = self.run() {
            signals.exhausted = run.ledger.exhausted_token().clone();
            signals.ready.cancel();
        }
        signals
    }

    /// The end of the run by its budget.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Here { run, .. } => run.ledger.deadline(),
            Self::Seat(seat) => seat.run().ledger.deadline(),
            Self::Container(proxy) => proxy.deadline(),
        }
    }

    /// Serves until it is told to close, lets open calls finish, and tells what became of all. A container keeps its own
    /// records, and so closes them with its calls.
    pub(super) async fn serve(
        self,
        signals: &GatewaySignals,
        closing: RunShutdown,
    ) -> (anyhow::Result<()>, CallSummary) {
        let (quiet, calls) = (closing.quiet.clone(), closing.calls.clone());
        let (served, calls) = match self {
            Self::Here { app, run } => {
                (Box::pin(app.serve_in_two_steps(closing)).await, call_summary(&run))
            }
            Self::Seat(seat) => {
                let run = Arc::clone(seat.run());
                (Box::pin(seat.serve_in_two_steps(closing)).await, call_summary(&run))
            }
            Self::Container(proxy) => Box::pin(proxy.serve(signals, calls)).await,
        };
        quiet.cancel();
        signals.gone.cancel();
        (served, calls)
    }
}

fn call_summary(run: &AgentRun) -> CallSummary {
    CallSummary {
        spent: run.ledger.spent_amount(),
        admitted: run.counts.admitted_calls(),
        refused: run.counts.refused_calls(),
        unreached: run.counts.unreached(),
        is_denied: run.ledger.was_last_call_denied(),
    }
}
