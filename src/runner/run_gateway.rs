//! The gateway of a run, served by this process or by a container beside the sandbox.

use std::sync::Arc;
use std::time::Instant;

use super::directory::RunDirectory;
use super::gateway_container::{GatewayContainerConfig, PreparedGatewayContainer};
use super::gateway_signals::{CallSummary, GatewaySignals};
use crate::gateway::config::GatewayConfig;
use crate::gateway::process::{GatewayHost, GatewayProcess, HostedGateway, RunShutdown};
use crate::gateway::run::AgentRun;
use crate::sandbox::spec::OwnerLabels;

/// The process or container that is to serve a run's gateway.
#[derive(Clone, Debug)]
pub enum GatewayServer {
    /// This process, which serves no other run.
    OwnProcess,
    /// This process, which serves the gateways of several runs.
    SharedProcess(GatewayHost),
    Container(GatewayContainerConfig),
}

/// The gateway of a run that is ready to be served.
pub(super) enum RunGatewayBackend {
    /// A gateway in this process. Its socket is bound, and its audit log is open.
    InProcess {
        app: Box<GatewayProcess>,
        run: Arc<AgentRun>,
    },
    /// A gateway in this process, beside the gateways of other runs.
    Hosted(Box<HostedGateway>),
    Container(Box<PreparedGatewayContainer>),
}

impl RunGatewayBackend {
    /// Binds the run's socket and opens its audit log in this process, or writes what the gateway's container needs.
    pub(super) fn open(
        server: GatewayServer,
        mut config: GatewayConfig,
        directory: &RunDirectory,
        labels: &OwnerLabels,
    ) -> anyhow::Result<Self> {
        match server {
            GatewayServer::OwnProcess => {
                let app = GatewayProcess::build_process(config)?;
                let run =
                    app.run_manager().list_runs().pop().expect("an app on a socket has one run");
                Ok(Self::InProcess { app: Box::new(app), run })
            }
            GatewayServer::SharedProcess(host) => {
                Ok(Self::Hosted(Box::new(host.open_gateway(config)?)))
            }
            GatewayServer::Container(settings) => {
                if !config.tools.is_empty() {
                    anyhow::bail!(
                        "tools cannot be served by a gateway in a container yet; take `[tools]` out, or serve the gateway in this process"
                    );
                }
                // That container keeps the user of its image, which is another than the sandbox's.
                config.listen.socket_mode = 0o666;
                let proxy =
                    PreparedGatewayContainer::prepare(settings, &config, directory, labels)?;
                Ok(Self::Container(Box::new(proxy)))
            }
        }
    }

    /// Returns the run, if this process serves the gateway and writes its audit log.
    pub(super) fn run(&self) -> Option<Arc<AgentRun>> {
        match self {
            Self::InProcess { run, .. } => Some(Arc::clone(run)),
            Self::Hosted(hosted) => Some(Arc::clone(hosted.run())),
            Self::Container(_) => None,
        }
    }

    pub(super) fn signals(&self) -> GatewaySignals {
        let mut signals = GatewaySignals::default();
        // A gateway in this process has bound its socket already. A container's `serve` cancels `ready` later.
        if let Some(run) = self.run() {
            signals.exhausted = run.ledger.exhausted_token().clone();
            signals.ready.cancel();
        }
        signals
    }

    /// Returns the time at which the budget ends the run, if the budget has a deadline.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::InProcess { run, .. } => run.ledger.deadline(),
            Self::Hosted(hosted) => hosted.run().ledger.deadline(),
            Self::Container(proxy) => proxy.deadline(),
        }
    }

    /// Serves until `closing` requests the end, lets open calls finish, and returns the summary of all calls. A
    /// container writes the audit log itself, so the container closes the log together with the calls.
    pub(super) async fn serve(
        self,
        signals: &GatewaySignals,
        closing: RunShutdown,
    ) -> (anyhow::Result<()>, CallSummary) {
        // The summary is read after the gateway has ended, when no call can change the counts any more.
        let (quiet, calls) = (closing.calls_ended.clone(), closing.calls.clone());
        let (served, calls) = match self {
            Self::InProcess { app, run } => {
                (Box::pin(app.serve_in_two_steps(closing)).await, call_summary(&run))
            }
            Self::Hosted(hosted) => {
                let run = Arc::clone(hosted.run());
                (Box::pin(hosted.serve_in_two_steps(closing)).await, call_summary(&run))
            }
            Self::Container(proxy) => Box::pin(proxy.serve(signals, calls)).await,
        };
        // The caller waits for `quiet`. A gateway that failed, or that is in a container, has not cancelled `quiet`.
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
